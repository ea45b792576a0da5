"""The controller of a learned policy."""

import subprocess
import sys

import numpy as np
import pytest

from specgym.agents.policy import save_policy
from specgym.agents.policy_controller import LearnedController


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_allowed_plan_of_largest_score_runs(make_policy, tmp_path, activation):
    policy = make_policy(activation=activation)
    save_policy(tmp_path / "p.npz", policy)
    controller = LearnedController(policy.plans, policy.features, tmp_path / "p.npz", 2)
    rng = np.random.default_rng(2)
    controller.begin({"request_id": "r", "num_prompt": 1, "max_new_tokens": 1})
    for _ in range(200):
        observation = rng.normal(size=5).astype(np.float32)
        mask = rng.random(len(policy.plans)) < 0.5
        mask[0] = True
        before = observation.copy(), mask.copy()
        action = controller.act(observation, mask)
        controller.observe(action, 0.0, {})
        assert action == np.where(mask, policy.scores(observation), -np.inf).argmax()
        assert np.array_equal(observation, before[0])
        assert np.array_equal(mask, before[1])


def test_a_linear_policy_runs(make_policy):
    policy = make_policy(layers=((np.eye(7, 5), np.zeros(7)),))
    controller = LearnedController(policy.plans, policy.features, policy)
    observation = np.ones(5, np.float32)
    expected = policy.scores(observation).argmax()
    assert controller.act(observation, np.ones(7, bool)) == expected


def test_its_state_is_checked(make_policy):
    policy = make_policy()
    controller = LearnedController(policy.plans, policy.features, policy)
    controller.load_state_dict(controller.state_dict())
    with pytest.raises(ValueError, match="state must come"):
        controller.load_state_dict({"plans": ["none"]})


def test_a_decision_needs_neither_torch_nor_stable_baselines3():
    code = (
        "import sys, specgym.agents.policy_controller; "
        "print([m for m in ('torch', 'stable_baselines3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
