"""EXP3: weights and rates by hand, unbiased losses, and regret against an adversary."""

import math

import numpy as np
import pytest

from specgym.agents.bandits.exp3_spec import EXP3Spec, learning_rate, weights

PLANS = [(("target",), 0), *((("small", "target"), k) for k in (1, 2, 4))]
ALL = np.ones(len(PLANS), dtype=bool)
OBSERVATION = np.zeros(1)


def test_learning_rate_by_hand():
    assert learning_rate(100, 4) == pytest.approx(0.05887, abs=5e-6)


@pytest.mark.parametrize("mix", [0.0, 0.1])
def test_losses_are_unbiased(mix):
    losses = np.array([0.3, 1.2, 0.7, 2.0])
    p = weights(losses, 0.4, mix)
    assert p.sum() == pytest.approx(1.0)
    for arm, loss in enumerate((0.2, 0.9, 0.5, 0.1)):
        estimates = [loss / p[arm] if drawn == arm else 0.0 for drawn in range(4)]
        assert p @ estimates == pytest.approx(loss, abs=1e-15)


def test_large_losses_do_not_overflow():
    losses = np.array([1e4, 1e4 + 3.0, 1e4 + 1.0])
    assert weights(losses, 0.5, 0.0) == pytest.approx(weights(losses - 1e4, 0.5, 0.0))
    assert np.isfinite(weights(np.array([0.0, 1e12]), 1.0, 0.0)).all()


def test_equal_losses_from_afresh_never_favor_the_arm_just_played(make_info):
    for seed in range(20):
        controller = EXP3Spec(PLANS, seed=seed)
        arm = controller.act(OBSERVATION, ALL)
        controller.observe(arm, 0.0, make_info(arm, 1, tokens=2))
        p = weights(np.array(controller.state_dict()["losses"]), learning_rate(2, 4), 0.0)
        assert p[arm] <= 0.25


@pytest.mark.parametrize(
    ("loss", "accepted", "cost", "expected"),
    [
        ("tokens", 0, 1.0, 1.0),
        ("tokens", 4, 3.0, 0.0),
        ("tokens", 1, 9.0, 0.75),
        ("cost", 0, 1.0, 0.8),
        ("cost", 4, 1.0, 0.0),
        ("cost", 4, 2.0, 0.5),
    ],
)
def test_losses_by_hand(make_info, loss, accepted, cost, expected):
    controller = EXP3Spec(PLANS, loss=loss)
    arm = controller.act(OBSERVATION, ALL)
    controller.observe(arm, 0.0, make_info(arm, accepted, cost=cost))
    assert controller.state_dict()["losses"][arm] == pytest.approx(4.0 * expected)  # p was 1/4


def test_draws_have_the_weights(make_info):
    controller = EXP3Spec(PLANS)
    controller.load_state_dict(controller.state_dict() | {"losses": [0, 1, 2, 3], "num_rounds": 8})
    counts = np.bincount([controller.act(OBSERVATION, ALL) for _ in range(20_000)], minlength=4)
    p = weights(np.arange(4.0), learning_rate(9, 4), 0.0)
    assert counts / 20_000 == pytest.approx(p, abs=0.015)


def test_an_arm_that_was_not_drawn_teaches_nothing(make_info):
    controller = EXP3Spec(PLANS)
    arm = controller.act(OBSERVATION, ALL)
    other = (arm + 1) % 4
    controller.observe(other, 0.0, make_info(other, 0))
    assert controller.state_dict()["losses"] == [0.0] * 4


@pytest.mark.parametrize("adversary", ["fixed", "switching"])
def test_regret_is_within_the_theorem(make_info, adversary):
    """At most 2 sqrt(T A ln A) in expectation against the best arm, whatever the losses."""
    horizon, arms, regrets = 3000, 4, []
    for seed in range(5):
        controller, total = EXP3Spec(PLANS, seed=seed), 0.0
        table = np.ones((horizon, arms))
        good = 2 if adversary == "fixed" else None
        for t in range(horizon):
            table[t, (1 + t // 1000) % arms if good is None else good] = 0.0
            action = controller.act(OBSERVATION, ALL)
            total += table[t, action]
            accepted = 4 * (1 - table[t, action])
            controller.observe(action, 0.0, make_info(action, accepted))
        regrets.append(total - table.sum(axis=0).min())
    assert np.mean(regrets) <= 2.0 * math.sqrt(horizon * arms * math.log(arms))


@pytest.mark.parametrize(("field", "value"), [("loss", "time"), ("mix", 1.5), ("seed", -1)])
def test_bad_values_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        EXP3Spec(PLANS, **{field: value})
