"""Rows of a numpy environment in the hands of stable-baselines3."""

import numpy as np
import pytest
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from specgym.agents.sb3_vector import SB3Vector
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.synthetic import synthetic_traces
from specgym.envs.replay.vector_replay import VectorReplay


@pytest.fixture(scope="module")
def mixture():
    return TraceLibrary(synthetic_traces(8, 30, experts_per_token=2))


def test_seeds_and_steps_are_those_of_the_rows(mixture):
    rows, envs = VectorReplay(mixture, 4), SB3Vector(VectorReplay(mixture, 4))
    envs.seed(5)
    assert envs.reset().tolist() == rows.reset(5).tolist()
    for _ in range(40):
        here, there = envs.step(np.full(4, 6)), rows.step(np.full(4, 6))
        assert [each.tolist() for each in here[:3]] == [each.tolist() for each in there[:3]]
    assert envs.reset().tolist() == rows.reset().tolist()  # the streams go on


def test_maskable_ppo_finds_the_masks(mixture):
    envs = SB3Vector(VectorReplay(mixture, 8))
    assert is_masking_supported(envs)
    envs.reset()
    assert get_action_masks(envs).tolist() == envs.action_masks().tolist()
    assert get_action_masks(VecMonitor(envs)).tolist() == envs.action_masks().tolist()
    model = MaskablePPO("MlpPolicy", envs, n_steps=32, batch_size=64, n_epochs=1, seed=0)
    model.learn(512)
    assert len(model.ep_info_buffer) > 4


@pytest.mark.parametrize("agent", [PPO, DQN])
def test_others_learn_without_masks_through_wrappers(mixture, agent):
    envs = VecNormalize(VecMonitor(SB3Vector(VectorReplay(mixture, 4))))
    settings = {"n_steps": 32, "batch_size": 32} if agent is PPO else {"learning_starts": 50}
    model = agent("MlpPolicy", envs, seed=0, **settings)
    model.learn(400)
    assert len(model.ep_info_buffer) > 4


def test_rows_have_attributes_and_no_methods_but_masks(mixture):
    envs = SB3Vector(VectorReplay(mixture, 3))
    envs.reset()
    assert envs.get_attr("num_requests", [0, 2]) == [1, 1]
    envs.set_attr("num_requests", 2)
    assert envs.rows.num_requests == 2
    assert envs.get_attr("render_mode") == [None] * 3
    assert [len(mask) for mask in envs.env_method("action_masks", indices=1)] == [36]
    assert envs.env_is_wrapped(VecMonitor) == [False] * 3
    assert envs.get_attr("plans")[2][1] == (("ngram", "target"), 1)
    with pytest.raises(ValueError, match="rows share 'num_requests'"):
        envs.set_attr("num_requests", 2, [0])
    with pytest.raises(ValueError, match="rows have no 'colour'"):
        envs.set_attr("colour", 2)
    with pytest.raises(ValueError, match=r"rows have action_masks\(\) alone; got 'dance'"):
        envs.env_method("dance")
    envs.close()
