import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from specgym.agents.normalization import load_normalization
from specgym.agents.ppo import PPOConfig, PPOController, newest_checkpoint
from specgym.engine.pools.loading import load_pool
from specgym.envs import SpecDecodeEnv
from specgym.runs.cli import main
from specgym.runs.loop import run_request


@pytest.fixture
def command(tiny_spec, short_prompts, tmp_path):
    """The arguments of a short training on the counting clock."""

    def build(name, steps):
        return [
            *("train", "ppo", "--pool", tiny_spec, "--prompts", str(short_prompts)),
            *("--workload", "all", "--clock", "counting", "--dtype", "float32"),
            *("--max-new-tokens", "24", "--ppo.num-steps", str(steps)),
            *("--ppo.rollout-steps", "64", "--runs", str(tmp_path), "--name", name),
        ]

    return build


@pytest.fixture
def env(tiny_spec, short_prompts):
    """An environment of the tiny pool."""
    return SpecDecodeEnv(
        load_pool(tiny_spec), "all", prompts=short_prompts, max_new_tokens=24, clock="counting"
    )


def controller(env, folder):
    return PPOController(env.plans, [f.name for f in env.features], folder)


def test_trained_policy_decides_as_stable_baselines3_does(command, tmp_path, env):
    assert main(command("once", 128)) == 0
    folder = tmp_path / "once"
    policy = controller(env, folder)
    model = PPO.load(folder / "model.zip", device="cpu")
    normalized = load_normalization(folder / "normalization.npz", DummyVecEnv([lambda: env]))
    normalized.training = False
    rng = np.random.default_rng(0)
    everything = np.ones(len(env.table), dtype=bool)
    for _ in range(50):
        low, high = env.observation_space.low, env.observation_space.high
        observation = rng.uniform(low, high).astype(np.float32)
        theirs, _ = model.predict(normalized.normalize_obs(observation), deterministic=True)
        assert policy.act(observation, everything) == int(theirs)


def test_being_compared_leaves_the_normalisation_alone(command, tmp_path, env):
    assert main(command("frozen", 64)) == 0
    policy = controller(env, tmp_path / "frozen")
    before = policy._mean.copy(), policy._deviation.copy()
    run_request(env, policy, env.workload.requests[0])
    assert np.array_equal(before[0], policy._mean)
    assert np.array_equal(before[1], policy._deviation)


def test_masked_actions_are_never_chosen(command, tmp_path, env):
    assert main(command("masked", 64)) == 0
    policy = controller(env, tmp_path / "masked")
    mask = np.zeros(len(env.table), dtype=bool)
    mask[0] = True
    observation, _ = env.reset(seed=0)
    assert policy.act(observation, mask) == 0


def test_a_model_of_other_plans_is_refused(command, tmp_path, env, tiny_spec):
    assert main(command("plans", 64)) == 0
    other_pool = load_pool(tiny_spec, k_values=(1, 2))
    other = SpecDecodeEnv(other_pool, clock="counting", skip_too_long=True)
    with pytest.raises(ValueError, match="plans"):
        controller(other, tmp_path / "plans")


def test_killed_training_goes_on_with_one_clean_curve(command, tmp_path):
    folder = tmp_path / "killed"
    arguments = [sys.executable, "-m", "specgym.runs.cli", *command("killed", 6400)]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, env=alone)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        newest = newest_checkpoint(folder)
        if newest is not None and int(newest.name) >= 128:
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    newest = newest_checkpoint(folder)
    assert newest is not None
    done = int(newest.name)
    config = json.loads((folder / "config.json").read_text())
    config["ppo"]["num_steps"] = done + 128
    (folder / "config.json").write_text(json.dumps(config))
    assert main(command("killed", done + 128)) == 0
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    steps = [event.step for event in accumulator.Scalars("spec/utility")]
    assert steps == list(range(64, done + 129, 64))
    assert (folder / "model.zip").exists()
    assert not (folder / "checkpoints").exists()


def test_every_flag_reaches_the_training(command, tmp_path):
    flags = {
        "base": (),
        "seed": ("--seed", "1"),
        "tokens": ("--max-new-tokens", "12"),
        "reward": ("--reward", "utility"),
        "rate": ("--ppo.learning-rate", "0.1"),
        "gamma": ("--ppo.gamma", "0.5"),
    }
    weights = {}
    for name, more in flags.items():
        assert main([*command(name, 64), *more]) == 0
        policy = PPO.load(tmp_path / name / "model.zip", device="cpu").policy
        weights[name] = policy.action_net.bias.detach().numpy()
    assert all(not np.array_equal(weights["base"], weights[n]) for n in flags if n != "base")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 1}, "batch_size"),
        ({"rollout_steps": 129}, "divide"),
        ({"num_steps": 0}, "num_steps"),
        ({"gamma": 1.5}, "gamma"),
    ],
)
def test_settings_that_cannot_learn_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)
