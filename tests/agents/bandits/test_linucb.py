"""LinUCB against its closed form, and on bandits whose best arm the observation tells."""

import json
import math

import numpy as np
import pytest

from specgym.agents import LinUCB

PLANS = [(("target",), 0), *((("ngram", "target"), k) for k in (1, 2))]
ALL = np.ones(3, dtype=bool)


def outcome(action, tokens, seconds, **changes):
    """What LinUCB reads of an info, at a baseline of two seconds."""
    info = {
        "tokens": tokens,
        "iter_seconds": seconds,
        "baseline_seconds": 2.0,
        "executed_action": action,
        "reason": "",
    }
    return {**info, **changes}


def play(controller, rng, num_steps, scope_begins=False):
    """Arm 1 brings four tokens where the first entry is positive, arm 2 where it is negative."""
    actions = []
    for _ in range(num_steps):
        x = rng.normal(size=3).astype(np.float32)
        action = controller.act(x, ALL)
        good = (action == 1 and x[0] > 0) or (action == 2 and x[0] < 0)
        controller.observe(action, 0.0, outcome(action, 4 if good else 1, 2.0 if not action else 3))
        actions.append(good)
    return actions


def test_takes_the_arms_in_turn_first():
    controller = LinUCB(PLANS, num_warm_up=5)
    actions = []
    for step in range(5):
        actions.append(controller.act(np.ones(2) * step, ALL))
        controller.observe(actions[-1], 0.0, outcome(actions[-1], 1, 2.0))
    assert actions == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_scores_against_the_formula(seed):
    rng = np.random.default_rng(seed)
    controller = LinUCB(PLANS, exploration=0.4, ridge=2.0, num_warm_up=6)
    history = []
    for _ in range(40):
        x = rng.normal(size=3)
        action = controller.act(x, ALL)
        tokens, seconds = int(rng.integers(1, 4)), float(rng.uniform(2.0, 5.0))
        controller.observe(action, 0.0, outcome(action, tokens, seconds))
        history.append((x, action, tokens, seconds / 2.0))
    first = np.array([x for x, *_ in history[:6]])
    rate = sum(h[2] for h in history) / sum(h[3] for h in history)

    def standardised(x):
        return np.append(((x - first.mean(0)) / first.std(0)).clip(-5, 5), 1.0)

    for _ in range(20):
        seen = rng.normal(size=3)
        scores = []
        for arm in range(3):
            rows = [h for h in history if h[1] == arm]
            x = np.array([standardised(h[0]) for h in rows]).reshape(-1, 4)
            gain = np.array([h[2] - rate * h[3] for h in rows])
            inverse = np.linalg.inv(2.0 * np.eye(4) + x.T @ x)
            now = standardised(seen)
            scores.append(now @ inverse @ x.T @ gain + 0.4 * math.sqrt(now @ inverse @ now))
        assert controller.act(seen, ALL) == int(np.argmax(scores))


def test_finds_what_the_observation_tells():
    controller = LinUCB(PLANS, num_warm_up=30, ridge=1.0)
    assert np.mean(play(controller, np.random.default_rng(0), 1500)[-300:]) > 0.9


@pytest.mark.parametrize("num_steps", [3, 200])
def test_masks_are_obeyed(num_steps):
    controller = LinUCB(PLANS, num_warm_up=20)
    play(controller, np.random.default_rng(0), num_steps)
    assert controller.act(np.ones(3), np.array([True, False, False])) == 0
    assert controller.act(np.ones(3), np.array([True, False, True])) in (0, 2)


@pytest.mark.parametrize("num_steps", [0, 3, 200])
def test_restored_controller_acts_alike(num_steps):
    controllers = [LinUCB(PLANS, num_warm_up=20), LinUCB(PLANS, num_warm_up=20)]
    play(controllers[0], np.random.default_rng(0), num_steps)
    controllers[1].load_state_dict(json.loads(json.dumps(controllers[0].state_dict())))
    runs = [play(each, np.random.default_rng(1), 100) for each in controllers]
    assert runs[0] == runs[1]
    assert controllers[0].state_dict() == controllers[1].state_dict()


@pytest.mark.parametrize(("scope", "forgets"), [("stream", False), ("request", True)])
def test_scope(scope, forgets):
    controller = LinUCB(PLANS, num_warm_up=20, scope=scope)
    play(controller, np.random.default_rng(0), 50)
    controller.begin({"request_id": "next", "num_prompt": 3, "max_new_tokens": 9})
    assert (controller.state_dict()["sums"] == [0.0, 0.0]) == forgets


@pytest.mark.parametrize(("reason", "arm"), [("masked", 0), ("no_proposal", 2)])
def test_whose_outcome_it_is(reason, arm):
    controller = LinUCB(PLANS, num_warm_up=20)
    controller.act(np.ones(3), ALL)
    controller.observe(2, 0.0, outcome(0, 1, 2.0, reason=reason))
    assert controller.state_dict()["samples"][0][1] == arm


def test_fault_teaches_nothing():
    controller = LinUCB(PLANS)
    before = controller.state_dict()
    controller.observe(0, 0.0, {"error": "out of memory"})
    assert controller.state_dict() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [("exploration", -0.1), ("ridge", 0.0), ("num_warm_up", 1), ("scope", "episode")],
)
def test_bad_values_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        LinUCB(PLANS, **{field: value})
