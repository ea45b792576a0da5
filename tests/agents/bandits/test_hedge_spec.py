"""NormalHedge: weights by hand and regret within the theorem; and what HedgeSpec does with them."""

import math

import numpy as np
import pytest

from specgym.agents.bandits.hedge_spec import HedgeSpec, normal_hedge

CHAINS = (("small", "target"), ("eagle", "target"))
PLANS = [(("target",), 0), *((chain, k) for chain in CHAINS for k in (1, 2, 4))]
ALL = np.ones(len(PLANS), dtype=bool)
OBSERVATION = np.zeros(1)


def constant(regrets, weights):
    """Returns c, as it follows from the weights of two experts of positive regret."""
    positive = np.maximum(regrets, 0.0)
    a, b = np.flatnonzero(positive)[:2]
    ratio = math.log(weights[a] / weights[b] * positive[b] / positive[a])
    return (positive[a] ** 2 - positive[b] ** 2) / (2.0 * ratio)


def test_one_positive_regret_takes_all():
    assert normal_hedge([3.0, -1.0]) == [1.0, 0.0]


def test_without_a_positive_regret_all_are_equal():
    assert normal_hedge([0.0, -2.0, -1.0]) == pytest.approx([1 / 3] * 3)


def test_equal_regrets_have_equal_weights():
    assert normal_hedge([2.0, 2.0]) == [0.5, 0.5]


@pytest.mark.parametrize("seed", range(20))
def test_weights_solve_the_equation(seed):
    rng = np.random.default_rng(seed)
    regrets = rng.normal(size=rng.integers(3, 40)) * rng.choice([0.01, 1.0, 100.0]) + 0.1
    if (regrets > 0.0).sum() < 2:
        pytest.skip("one takes all")
    weights = normal_hedge(regrets)
    c = constant(regrets, weights)
    mean = np.exp(np.maximum(regrets, 0.0) ** 2 / (2.0 * c)).mean()
    assert mean == pytest.approx(math.e, rel=1e-6)
    assert sum(weights) == pytest.approx(1.0)


def test_the_constant_of_two_experts_by_hand():
    """R = (r, r / 1e6): almost (r, -1), for which c = r^2 / (2 ln(2 e - 1)) = .33560 r^2."""
    assert 1.0 / (2.0 * math.log(2.0 * math.e - 1.0)) == pytest.approx(0.3356, abs=5e-5)
    regrets = np.array([2.0, 2e-6])
    assert constant(regrets, normal_hedge(regrets)) == pytest.approx(0.3356 * 4.0, rel=1e-3)


@pytest.mark.parametrize("kind", ["random", "switching", "one good"])
def test_regret_is_within_the_theorem(kind):
    """Below sqrt(3 T (1 + ln A)) and a term that does not matter at this T."""
    horizon, experts = 4000, 12
    rng = np.random.default_rng(0)
    rewards = rng.random((horizon, experts))
    if kind == "switching":
        rewards = np.zeros((horizon, experts))
        rewards[np.arange(horizon), np.arange(horizon) // 100 % experts] = 1.0
    if kind == "one good":
        rewards[:, 3] = 0.4 + 0.6 * rewards[:, 3]
    regrets = np.zeros(experts)
    for reward in rewards:
        regrets += reward - np.array(normal_hedge(regrets)) @ reward
    assert regrets.max() <= math.sqrt(3.0 * horizon * (1.0 + math.log(experts)))


def run(controller, make_info, rates, cost, num_steps):
    """Plays chains of these acceptance rates; the actions."""
    rng, actions = np.random.default_rng(0), []
    for _ in range(num_steps):
        actions.append(controller.act(OBSERVATION, ALL))
        chain, k = PLANS[actions[-1]]
        accepted = int((rng.random(k) < rates[chain[0]]).cumprod().sum()) if k else 0
        info = make_info(actions[-1], accepted, cost=1.0 + cost * k)
        controller.observe(actions[-1], 0.0, info)
    return actions


@pytest.mark.parametrize("good", ["small", "eagle"])
def test_the_better_chain_is_drawn(make_info, good):
    rates = {"small": 0.2, "eagle": 0.2} | {good: 0.9}
    actions = run(HedgeSpec(PLANS), make_info, rates, 0.1, 1500)
    assert sum(PLANS[action][0][0] == good for action in actions[500:]) > 900


def test_cost_counts_only_in_the_utility(make_info):
    rates = {"small": 0.5, "eagle": 0.55}
    lengths = run(HedgeSpec(PLANS, reward="length"), make_info, rates, 2.0, 600)
    assert {PLANS[action][1] for action in lengths} == {4}  # the largest K, whatever it costs
    utilities = run(HedgeSpec(PLANS), make_info, rates, 2.0, 600)
    assert utilities[300:].count(0) > 250


def test_every_expert_is_played_first(make_info):
    actions = run(HedgeSpec(PLANS), make_info, {"small": 0.5, "eagle": 0.5}, 0.1, len(PLANS))
    assert actions == list(range(len(PLANS)))


@pytest.mark.parametrize(("field", "value"), [("reward", "tokens"), ("window", 0), ("seed", -1)])
def test_bad_values_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        HedgeSpec(PLANS, **{field: value})
