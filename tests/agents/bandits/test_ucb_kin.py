"""UCB's kin: radii and discounts by hand, regret as the theorems say, changes followed."""

import math
import random

import numpy as np
import pytest

from specgym.agents.bandits.discounted_ucb import DiscountedUCB
from specgym.agents.bandits.sliding_ucb import SlidingUCB
from specgym.agents.bandits.ucb import UCB
from specgym.agents.bandits.ucb_spec import UCBSpec, radius
from specgym.agents.bandits.ucb_tuned import UCBTuned, tuned_variance

PLANS = [(("target",), 0), *((("small", "target"), k) for k in (1, 2, 4))]
ALL = np.ones(len(PLANS), dtype=bool)
OBSERVATION = np.zeros(1)


def play(controller, make_info, rates, num_steps, seed=0):
    """Plays arms whose iterations emit 0 or 6 tokens at cost 1 with these rates; the actions."""
    rng, actions = random.Random(seed), []
    for _ in range(num_steps):
        actions.append(controller.act(OBSERVATION, ALL))
        tokens = 6 * (rng.random() < rates[actions[-1]])  # K_max + 2 = 6: utilities 0..1
        controller.observe(actions[-1], 0.0, make_info(actions[-1], tokens - 1))
    return actions


def test_radius_by_hand():
    assert radius(longest=8, num_arms=13, n=50, t=600, delta=0.1) == pytest.approx(3.6248, abs=5e-5)


def test_ucb_spec_index_by_hand(make_info):
    controller = UCBSpec(PLANS[:3])
    for action, accepted in [(0, 0), (1, 1), (2, 1), (2, 2), (2, 0)]:
        controller.observe(action, 0.0, make_info(action, accepted))
    means, plays = [1.0, 2.0, 2.0], [1, 1, 3]
    indices = [m + radius(2, 3, n, 5, 0.1) for m, n in zip(means, plays, strict=True)]
    assert controller.act(OBSERVATION, ALL[:3]) == indices.index(max(indices)) == 1


def test_ucb_spec_counts_time_when_asked_to(make_info):
    for reward, best in (("tokens", 2), ("utility", 1)):
        controller = UCBSpec(PLANS[:3], reward=reward)
        for _ in range(100):
            for action, accepted, cost in [(0, 0, 1.0), (1, 1, 1.0), (2, 2, 4.0)]:
                controller.observe(action, 0.0, make_info(action, accepted, cost=cost))
        assert controller.act(OBSERVATION, ALL[:3]) == best


def test_within_a_request_ucb_spec_is_round_robin(make_info):
    controller, actions = UCBSpec(PLANS), []
    for _ in range(60):
        actions.append(controller.act(OBSERVATION, ALL))
        controller.observe(actions[-1], 0.0, make_info(actions[-1], 0.5 * actions[-1]))
    assert min(actions.count(arm) for arm in range(4)) >= 9


def test_ucb_spec_forgets_each_request(make_info):
    controller = UCBSpec(PLANS)
    play(controller, make_info, [0.5] * 4, 20)
    controller.begin({})
    assert controller.act(OBSERVATION, ALL) == 0


def test_discounted_count_of_one_arm_by_hand(make_info):
    controller = DiscountedUCB(PLANS, gamma=0.99)
    for _ in range(100):
        controller.observe(2, 0.0, make_info(2, 1))
    assert controller.state_dict()["num_plays"][2] == pytest.approx(63.397, abs=5e-4)


def test_the_radius_of_ucb1_by_hand():
    assert math.sqrt(2.0 * math.log(100) / 10) == pytest.approx(0.9597, abs=5e-5)


@pytest.mark.parametrize("kin", [DiscountedUCB(PLANS, gamma=1.0), SlidingUCB(PLANS, window=10_000)])
def test_without_forgetting_they_are_ucb(make_info, kin):
    rates = [0.3, 0.5, 0.4, 0.45]
    assert play(kin, make_info, rates, 800) == play(UCB(PLANS), make_info, rates, 800)


def test_what_left_the_window_changes_nothing(make_info):
    one, other = SlidingUCB(PLANS, window=50), SlidingUCB(PLANS, window=50)
    one.observe(1, 0.0, make_info(1, 4, cost=0.125))
    for controller in (one, other):
        for step in range(50):
            controller.observe(step % 4, 0.0, make_info(step % 4, step % 3, cost=1.25))
    assert one.state_dict() == other.state_dict()


@pytest.mark.parametrize(
    "controller", [DiscountedUCB(PLANS, gamma=0.98), SlidingUCB(PLANS, window=100)]
)
def test_a_change_is_followed(make_info, controller):
    play(controller, make_info, [0.1, 0.9, 0.2, 0.2], 2000)
    after = play(controller, make_info, [0.1, 0.2, 0.2, 0.9], 400, seed=1)
    plain = UCB(PLANS)
    play(plain, make_info, [0.1, 0.9, 0.2, 0.2], 2000)
    assert after[100:].count(3) > 0.75 * 300
    assert after.count(3) > play(plain, make_info, [0.1, 0.2, 0.2, 0.9], 400, seed=1).count(3)


@pytest.mark.parametrize(
    ("share", "variance"), [(0.001, math.sqrt(0.002)), (0.02, 0.2), (0.1, 0.25), (3.0, 0.25)]
)
def test_tuned_variance_of_a_constant_reward(share, variance):
    assert tuned_variance(0.0, share) == pytest.approx(variance)
    assert tuned_variance(0.5, share) == 0.25


def test_tuned_index_by_hand(make_info):
    controller = UCBTuned(PLANS[:2])
    for _ in range(50):
        controller.observe(0, 0.0, make_info(0, 0))
        controller.observe(1, 0.0, make_info(1, 1, cost=2.1))
    controller.act(OBSERVATION, ALL[:2])
    share = math.log(100) / 50
    expected = 1 / 3 + math.sqrt(share * min(0.25, math.sqrt(2 * share)))
    assert controller._index(0) == pytest.approx(expected)
    assert controller.act(OBSERVATION, ALL[:2]) == 0


def test_variance_is_that_of_a_mean_where_costs_are_equal(make_info):
    controller, rng = UCBTuned(PLANS), random.Random(0)
    drawn = [rng.randint(0, 4) for _ in range(30)]
    for accepted in drawn:
        controller.observe(3, 0.0, make_info(3, accepted, cost=1.0))
    assert controller._variance(3) == pytest.approx(np.var(drawn) / 36.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "make", [lambda: UCB(PLANS, exploration=1.0), lambda: UCBTuned(PLANS)], ids=["ucb", "tuned"]
)
def test_regret_grows_no_faster_than_the_theorem_says(make_info, make, seed):
    """UCB1: 8 sum ln t / gap + (1 + pi^2 / 3) sum gap, for rewards in 0..1; Tuned is below it."""
    rates = [0.2, 0.5, 0.8, 0.4]
    gaps = [0.8 - rate for rate in rates if rate < 0.8]
    actions = play(make(), make_info, rates, 4000, seed)
    regret = np.cumsum([0.8 - rates[action] for action in actions])
    for t in (100, 1000, 4000):
        bound = sum(8 * math.log(t) / gap + (1 + math.pi**2 / 3) * gap for gap in gaps)
        assert regret[t - 1] <= bound
    assert regret[3999] < 0.15 * 4000 * sum(gaps) / 4  # of what playing all alike loses


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (DiscountedUCB, "gamma", 0.0),
        (SlidingUCB, "window", 0),
        (UCBTuned, "exploration", -1.0),
        (UCBSpec, "reward", "speed"),
        (UCBSpec, "delta", 0.0),
    ],
)
def test_bad_values_are_refused(kind, field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        kind(PLANS, **{field: value})
