"""What stable-baselines3 trained on traces decides as plain arrays as it did before."""

import numpy as np
import pytest

from specgym.agents.policy import load_policy, save_policy
from specgym.agents.policy_controller import LearnedController
from specgym.agents.sb3 import Pauses, export_policy, learn, make_model, prefer_fast_plans
from specgym.agents.sb3_settings import PolicyGradient, QLearning
from specgym.agents.sb3_vector import SB3Vector
from specgym.envs.replay.vector_replay import VectorReplay

SMALL = {"num_steps": 256, "num_envs": 8, "batch_size": 32, "hidden_size": 16}
RECIPES = {
    "ppo": PolicyGradient(rollout_steps=8, **SMALL),
    "maskable-ppo": PolicyGradient(rollout_steps=8, **SMALL),
    "dqn": QLearning(learning_starts=32, **SMALL),
}


@pytest.mark.parametrize("algorithm", RECIPES)
def test_plain_arrays_decide_as_stable_baselines3_does(trace_file, tmp_path, algorithm):
    venv = VectorReplay(trace_file, 8, split="train")
    recipe = RECIPES[algorithm]
    pauses = Pauses(1000, lambda step: None, lambda model: None)
    model = learn(
        algorithm,
        SB3Vector(venv),
        recipe,
        np.ones(len(venv.plans)),
        0,
        tmp_path,
        lambda values, step: None,
        pauses,
    )
    features = [feature.name for feature in venv.features]
    save_policy(tmp_path / "p.npz", export_policy(model, venv.plans, features, 2, {}))
    policy = load_policy(tmp_path / "p.npz")
    controller = LearnedController(venv.plans, features, policy)
    normalized = model.get_vec_normalize_env()
    assert normalized is not None
    rng = np.random.default_rng(0)
    low, high = venv.observation_space.low, venv.observation_space.high
    observations = rng.uniform(low, high, size=(100, len(low))).astype(np.float32)
    masks = np.ones((100, len(venv.plans)), dtype=bool)
    options = {}
    if algorithm == "maskable-ppo":
        masks = rng.random(masks.shape) < 0.5
        masks[:, 0] = True
        options = {"action_masks": masks}
    theirs, _ = model.predict(normalized.normalize_obs(observations), deterministic=True, **options)
    ours = [controller.act(*pair) for pair in zip(observations, masks, strict=True)]
    assert ours == theirs.tolist()
    assert len(set(ours)) > 1 or algorithm == "dqn"


def test_an_untrained_policy_begins_with_the_plan_that_is_fast_throughout(trace_file):
    venv = VectorReplay(trace_file, 8)
    model = make_model("maskable-ppo", SB3Vector(venv), RECIPES["maskable-ppo"], 0)
    seconds = np.linspace(3.0, 1.0, len(venv.plans))
    prefer_fast_plans(model, RECIPES["maskable-ppo"], seconds)
    features = [feature.name for feature in venv.features]
    policy = export_policy(model, venv.plans, features, 2, {})
    scores = policy.scores(np.zeros((1, len(features)), np.float32))[0]
    assert (np.argsort(scores) == np.arange(len(seconds))).all()
    assert scores[-1] - scores[0] == pytest.approx(15.0 * 2.0, rel=0.05)


@pytest.mark.parametrize(
    "wrong", [{"prior": -1.0}, {"rollout_steps": 0}, {"noise": -1.0}, {"learning_rate": 0.0}]
)
def test_settings_that_cannot_learn_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PolicyGradient(**SMALL | {"rollout_steps": 8} | wrong)
