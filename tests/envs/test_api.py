"""What users of Gymnasium and stable-baselines3 expect of an environment."""

import copy
import json
import os
import pickle
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from sb3_contrib import MaskablePPO
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_checker import check_env as check_env_sb3
from stable_baselines3.common.vec_env import DummyVecEnv

from specgym.envs import SpecDecodeEnv

ID = "specgym/SpecDecode-v0"


@pytest.fixture
def arguments(pool, make_env):
    """Constructor arguments of a small deterministic environment."""
    env = make_env()
    return {
        "pool": pool,
        "workload": env.workload,
        "clock": "counting",
        "max_new_tokens": 12,
        "num_requests": 2,
    }


# Checkers


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("exact", [True, False])
def test_gymnasium_checks_the_bare_environment(arguments, exact):
    env = SpecDecodeEnv(**arguments, exact=exact)
    check_env(env, skip_render_check=True)  # without a spec it cannot make other render modes


@pytest.mark.filterwarnings("error")
def test_gymnasium_checks_the_registered_environment(arguments):
    check_env(gym.make(ID, **arguments).unwrapped)


@pytest.mark.filterwarnings("error")
def test_gymnasium_checks_determinism_where_the_clock_is_deterministic(arguments):
    spec = EnvSpec(
        "Counting-v0", "specgym.envs.decode:SpecDecodeEnv", nondeterministic=False, kwargs=arguments
    )
    check_env(gym.make(spec, render_mode="ansi").unwrapped)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("registered", [False, True])
def test_stable_baselines3_checks_the_environment(arguments, registered):
    check_env_sb3(gym.make(ID, **arguments) if registered else SpecDecodeEnv(**arguments))


@pytest.mark.filterwarnings("error")
def test_every_step_passes_gymnasiums_passive_checker(arguments, play, by_chance):
    env = gym.make(ID, **arguments)
    episode = play(env, lambda env: by_chance(0)(env.unwrapped), seed=0)
    assert len(episode.infos) > 2


# Registration


def test_the_registered_environment_is_nondeterministic():
    spec = gym.spec(ID)
    assert spec.nondeterministic  # wall-clock rewards
    assert spec.max_episode_steps is None  # the token budget truncates


def test_a_wrapped_environment_keeps_its_spec_and_makes_another_on_the_same_pool(arguments):
    env = gym.wrappers.TimeLimit(gym.make(ID, **arguments), 5)
    assert env.spec is not None
    again = env.spec.make().unwrapped
    assert again.pool is arguments["pool"]
    assert again.max_new_tokens == 12


STREAM = """
import json
import gymnasium as gym
from specgym.engine.testing import tiny_pool, tiny_tokenizer

pool = tiny_pool(tokenizer=tiny_tokenizer(), max_position_embeddings=4096)
env = gym.make(
    "specgym.envs:specgym/SpecDecode-v0",
    pool=pool,
    workload="code+chat",
    clock="counting",
    max_new_tokens=1,
)
ids = []
for seed in (5, None, None, None, None, None):
    ids.append(env.reset(seed=seed)[1]["request_id"])
    env.step(0)
"""


def test_a_seeded_stream_goes_on_alike_in_another_process():
    """Also: the id works where nothing of specgym was imported before."""
    run = subprocess.run(
        [sys.executable, "-c", STREAM + "print(json.dumps(ids))"],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = {}
    exec(STREAM, here)
    assert json.loads(run.stdout) == here["ids"]
    assert len(set(here["ids"])) == 6


# Copies and vectors


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_is_an_environment_of_the_same_arguments(arguments, play, by_chance, used, how):
    env = SpecDecodeEnv(**arguments)
    if used:
        env.reset(seed=1)
        env.step(1)
    twin = pickle.loads(pickle.dumps(env)) if how == "pickle" else copy.deepcopy(env)
    with pytest.raises(ValueError, match="call reset"):
        twin.step(0)
    episodes = [play(each, by_chance(0), seed=3) for each in (env, twin)]
    assert episodes[0].rewards == episodes[1].rewards
    assert episodes[0].infos[-1]["output"] == episodes[1].infos[-1]["output"]


def test_a_copy_of_a_pool_is_the_pool_for_packed_weights_cannot_be_copied(pool):
    assert copy.deepcopy(pool) is pool


def test_make_vec_steps_environments_that_share_a_pool(arguments):
    envs = gym.make_vec(ID, num_envs=2, vectorization_mode="sync", **arguments)
    assert all(env.unwrapped.pool is arguments["pool"] for env in envs.envs)
    observations, infos = envs.reset(seed=3)
    assert observations.shape == (2, *envs.single_observation_space.shape)
    assert infos["action_mask"].shape == (2, envs.single_action_space.n)
    num_ends = 0
    for step in range(60):
        actions = np.array([step % 31, 0])
        observations, rewards, terminated, truncated, infos = envs.step(actions)
        assert observations in envs.observation_space
        assert np.isfinite(rewards).all()
        num_ends += (terminated | truncated).sum()
        assert set(np.flatnonzero(rewards[1:])) == set()  # the second never speculates
    assert num_ends >= 3


def test_dummy_vec_env_resets_by_itself_and_reports_the_time_limit(arguments):
    envs = DummyVecEnv([lambda: SpecDecodeEnv(**arguments)] * 2)
    envs.seed(0)
    observations = envs.reset()
    ends = []
    for _ in range(60):
        observations, _, dones, infos = envs.step(np.array([0, 5]))
        assert np.isfinite(observations).all()
        ends += [info for done, info in zip(dones, infos, strict=True) if done]
    assert len(ends) >= 4
    assert all(info["TimeLimit.truncated"] for info in ends)  # a budget, so values bootstrap


class Reasons(BaseCallback):
    """Gathers every step's reason."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _on_step(self):
        self.seen += [info["reason"] for info in self.locals["infos"]]
        return True


@pytest.mark.parametrize("wrapped", [False, True])
def test_maskable_ppo_finds_the_masks_and_never_asks_for_a_masked_plan(arguments, wrapped):
    arguments |= {"max_new_tokens": 4}  # most plans are masked most of the time
    env = gym.make(ID, **arguments) if wrapped else SpecDecodeEnv(**arguments)
    model = MaskablePPO("MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=1, seed=0)
    reasons = Reasons()
    model.learn(64, callback=reasons)
    assert len(reasons.seen) == 64
    assert "masked" not in reasons.seen
    observation, info = env.reset(seed=0)
    action, _ = model.predict(observation, action_masks=info["action_mask"], deterministic=True)
    assert info["action_mask"][action]
    env.step(action)


def test_ppo_learns_without_masks(arguments):
    env = SpecDecodeEnv(**arguments | {"max_new_tokens": 4})
    model = PPO("MlpPolicy", env, n_steps=32, batch_size=16, n_epochs=1, seed=0)
    reasons = Reasons()
    before = [weights.detach().clone() for weights in model.policy.parameters()]
    model.learn(64, callback=reasons)
    assert "masked" in reasons.seen  # asked for, turned down, and learned from
    changes = [
        float((new.detach() - old).abs().max())
        for new, old in zip(model.policy.parameters(), before, strict=True)
    ]
    assert all(np.isfinite(changes))
    assert max(changes) > 0.0
    action, _ = model.predict(env.reset(seed=0)[0])
    env.step(action)
