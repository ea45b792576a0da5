"""Thompson sampling: beliefs by hand, and what they come to with many counts."""

import numpy as np
import pytest

from specgym.agents.bandits.beta_thompson import BetaThompson
from specgym.agents.bandits.gaussian_thompson import GaussianThompson
from specgym.agents.bandits.lints import LinTS
from specgym.agents.bandits.linucb import LinUCB
from specgym.agents.bandits.log_costs import LogCosts
from specgym.agents.bandits.thompson import Thompson
from specgym.baselines.goodput import best_length

PLANS = [(("target",), 0), *((("small", "target"), k) for k in (1, 2, 3, 4))]
ALL = np.ones(len(PLANS), dtype=bool)
OBSERVATION = np.zeros(1)


def test_belief_after_two_of_four_by_hand(make_info):
    controller = Thompson(PLANS)
    controller.observe(4, 0.0, make_info(4, 2))
    a, b = controller._successes[0], controller._failures[0]
    assert a.tolist() == [2, 2, 1, 1]
    assert b.tolist() == [1, 1, 2, 1]
    assert (a / (a + b)).tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 2])


@pytest.mark.parametrize(
    ("alpha", "c"), [(0.8, 0.1), (0.6, 0.1), (0.5, 0.3), (0.8, 0.5), (0.2, 0.3)]
)
def test_with_many_counts_it_is_the_argmax(alpha, c):
    controller = Thompson(PLANS)
    n = 1e6
    reached = [n * alpha**i for i in range(4)]
    positions = {"rounds": [], "reached": reached, "accepted": [alpha * each for each in reached]}
    costs = {"count": [n] * 5, "mean": np.log1p(c * np.arange(5)).tolist(), "squares": [0.0] * 5}
    state = controller.state_dict()
    state |= {"positions": {"small>target": positions}, "cost_model": costs}
    controller.load_state_dict(state)
    best = best_length(alpha, [1.0 + c * k for k in range(5)])
    assert {controller.act(OBSERVATION, ALL) for _ in range(30)} == {best}


def test_log_costs_believe_what_they_saw():
    costs, rng = LogCosts(2), np.random.default_rng(0)
    for cost in np.exp(rng.normal(0.5, 0.1, 5000)):
        costs.add(1, float(cost))
    costs.add(1, 0.0)  # catch-up took all of it: left out
    draws = np.array([costs.draw(rng) for _ in range(2000)])
    assert draws[:, 1].mean() == pytest.approx(np.exp(0.5 + 0.1**2 / 2), rel=5e-3)
    assert draws[:, 1].std() < 0.02
    assert np.log(draws[:, 0]).std() > 0.05  # nothing known


def test_log_costs_state_round_trip():
    costs, other = LogCosts(3), LogCosts(3)
    for plan, cost in ((0, 1.2), (2, 0.7), (2, 0.9)):
        costs.add(plan, cost)
    other.load_state_dict(costs.state_dict())
    draws = [each.draw(np.random.default_rng(1)).tolist() for each in (costs, other)]
    assert draws[0] == draws[1]


@pytest.mark.parametrize("kind", [Thompson, GaussianThompson, BetaThompson])
def test_finds_the_best_arm(make_info, kind):
    controller, rng = kind(PLANS), np.random.default_rng(0)
    costs, actions = [1.0, 1.6, 1.2, 2.4, 2.6], []
    for _ in range(3000):
        actions.append(controller.act(OBSERVATION, ALL))
        k = PLANS[actions[-1]][1]
        accepted = int((rng.random(k) < 0.85).cumprod().sum()) if k else 0
        info = make_info(actions[-1], accepted, cost=costs[actions[-1]])
        controller.observe(actions[-1], 0.0, info)
    assert actions[-1000:].count(2) > 900  # 2.57 tokens at 1.2


@pytest.mark.parametrize("kind", [Thompson, GaussianThompson, BetaThompson, LinTS])
def test_a_seed_is_a_run(make_info, kind):
    def run(seed):
        controller, actions = kind(PLANS, seed=seed), []
        for _ in range(120):
            actions.append(controller.act(OBSERVATION, ALL))
            controller.observe(actions[-1], 0.0, make_info(actions[-1], min(actions[-1], 1)))
        return actions

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_beta_counts_tokens_and_time_by_hand(make_info):
    controller = BetaThompson(PLANS)
    controller.observe(3, 0.0, make_info(3, 2, cost=1.5))
    state = controller.state_dict()
    assert state["successes"][3] == pytest.approx(3 / 6)  # K_max + 2 = 6
    assert state["failures"][3] == pytest.approx(1.5 - 3 / 6)


def test_beta_rate_is_a_ratio_of_sums(make_info):
    controller = BetaThompson(PLANS)
    for accepted, cost in ((3, 1.0), (0, 3.0)):
        controller.observe(3, 0.0, make_info(3, accepted, cost=cost))
    state = controller.state_dict()
    s, f = state["successes"][3], state["failures"][3]
    assert s / (s + f) == pytest.approx(5 / 4.0 / 6)


def test_gaussian_is_greedy_in_the_end(make_info):
    controller = GaussianThompson(PLANS[:2])
    for _ in range(20_000):
        controller.observe(0, 0.0, make_info(0, 0))
        controller.observe(1, 0.0, make_info(1, 1, cost=1.9))
    assert {controller.act(OBSERVATION, ALL[:2]) for _ in range(200)} == {1}


def test_lints_without_draws_is_linucb_without_width(make_info):
    rng = np.random.default_rng(0)
    pair = [LinTS(PLANS, exploration=0.0), LinUCB(PLANS, exploration=0.0)]
    for _ in range(300):
        seen = rng.normal(size=3)
        actions = [controller.act(seen, ALL) for controller in pair]
        assert actions[0] == actions[1]
        accepted = float(rng.integers(0, PLANS[actions[0]][1] + 1))
        for controller in pair:
            controller.observe(actions[0], 0.0, make_info(actions[0], accepted, cost=1.3))


def test_lints_draws_are_as_wide_as_the_posterior():
    controller = LinTS(PLANS, exploration=0.5, seed=3)
    widths = np.array([0.1, 1.0, 2.0, 0.0, 4.0])
    draws = np.array([controller._bonus(widths) for _ in range(20_000)])
    assert draws.mean(axis=0) == pytest.approx(np.zeros(5), abs=0.05)
    assert draws.std(axis=0) == pytest.approx(0.5 * widths, rel=0.03)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (Thompson, "window", -1),
        (GaussianThompson, "prior", -1.0),
        (BetaThompson, "weight", 0.0),
        (LinTS, "seed", -1),
    ],
)
def test_bad_values_are_refused(kind, field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        kind(PLANS, **{field: value})
