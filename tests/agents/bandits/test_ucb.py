"""UCB on bandits whose utilities are stated."""

import math
import random

import numpy as np
import pytest

from specgym.agents import UCB

PLANS = [(("target",), 0), *((("ngram", "target"), k) for k in (1, 2, 3, 4, 6))]
OBSERVATION = np.zeros(1, dtype=np.float32)
ALL = np.ones(len(PLANS), dtype=bool)


def outcome(action, tokens, seconds, **changes):
    """Returns what UCB reads of an info, at a baseline of two seconds."""
    info = {
        "tokens": tokens,
        "iter_seconds": seconds,
        "baseline_seconds": 2.0,
        "executed_action": action,
        "reason": "",
    }
    return {**info, **changes}


def test_every_arm_once_first():
    controller = UCB(PLANS)
    actions = []
    for _ in PLANS:
        actions.append(controller.act(OBSERVATION, ALL))
        controller.observe(actions[-1], 0.0, outcome(actions[-1], 1, 2.0))
    assert actions == [0, 1, 2, 3, 4, 5]


def test_index_by_hand():
    controller = UCB(PLANS[:3], exploration=0.1)
    for action, tokens, seconds in [(0, 1, 2.0), (1, 2, 2.5), (1, 1, 2.5), (2, 3, 4.0)]:
        controller.observe(action, 0.0, outcome(action, tokens, seconds))
    # U is 1, 3 / 2.5 = 1.2 and 1.5; K_max + 2 = 4; the radius of one play 0.1 sqrt(2 ln 4) = 0.167:
    # 0.25 + 0.167, 0.3 + 0.118, 0.375 + 0.167.
    assert controller.act(OBSERVATION, ALL[:3]) == 2
    assert controller.act(OBSERVATION, np.array([True, True, False])) == 1


@pytest.mark.parametrize("seed", range(20))
def test_index_against_the_formula(seed):
    rng = random.Random(seed)
    c, num_steps = rng.choice([0.01, 0.1, 1.0]), 40
    controller = UCB(PLANS, exploration=c)
    plays = [(step % 6 if step < 6 else rng.randrange(6)) for step in range(num_steps)]
    outcomes = [(action, rng.randint(1, 5), 2.0 + rng.random()) for action in plays]
    for action, tokens, seconds in outcomes:
        controller.observe(action, 0.0, outcome(action, tokens, seconds))
    indices = []
    for arm in range(6):
        mine = [(tokens, seconds) for action, tokens, seconds in outcomes if action == arm]
        utility = sum(t for t, _ in mine) * 2.0 / sum(s for _, s in mine)
        indices.append(utility / 8 + c * math.sqrt(2 * math.log(num_steps) / len(mine)))
    assert controller.act(OBSERVATION, ALL) == indices.index(max(indices))


def test_utility_is_a_ratio_of_sums():
    controller = UCB(PLANS[:2], exploration=0.0)
    # Arm 1: U of the iterations 4 and 0.5, mean 2.25; ratio of sums 6 / 9 = 0.67.
    for action, tokens, seconds in [(0, 1, 2.0), (1, 4, 2.0), (1, 2, 8.0), (1, 0, 8.0)]:
        controller.observe(action, 0.0, outcome(action, tokens, seconds))
    assert controller.act(OBSERVATION, ALL[:2]) == 0


@pytest.mark.parametrize("best", range(len(PLANS)))
def test_finds_the_best_arm(best):
    rng = random.Random(best)
    controller = UCB(PLANS)
    means = [1.5] * len(PLANS)
    means[best] = 2.5
    actions = []
    for _ in range(2000):
        action = controller.act(OBSERVATION, ALL)
        tokens = rng.choice([1, 2, 3]) / 2.0 * means[action]
        controller.observe(action, 0.0, outcome(action, tokens, 2.0))
        actions.append(action)
    assert actions[-500:].count(best) > 400


@pytest.mark.parametrize(
    ("reason", "arm"), [("masked", 0), ("budget", 0), ("context", 0), ("no_proposal", 3)]
)
def test_whose_outcome_it_is(reason, arm):
    controller = UCB(PLANS)
    controller.observe(3, 0.0, outcome(0, 1, 2.0, reason=reason))
    assert controller.state_dict()["num_plays"][arm] == 1


@pytest.mark.parametrize(("scope", "first"), [("stream", 5), ("request", 0)])
def test_scope(scope, first):
    controller = UCB(PLANS, scope=scope)
    for action in range(5):
        controller.observe(action, 0.0, outcome(action, 1, 2.0))
    controller.begin({"request_id": "next", "num_prompt": 3, "max_new_tokens": 9})
    assert controller.act(OBSERVATION, ALL) == first


@pytest.mark.parametrize(
    ("field", "value"), [("exploration", -0.1), ("exploration", math.nan), ("scope", "episode")]
)
def test_bad_values_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        UCB(PLANS, **{field: value})
