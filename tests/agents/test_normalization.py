"""The file of a normalisation, and that of what a model remembers."""

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from specgym.agents.normalization import load_normalization, save_normalization
from specgym.agents.sb3 import restore_buffer, save_buffer


def make_venv():
    return DummyVecEnv([lambda: gym.make("CartPole-v1")] * 3)


def drive(normalized, num_steps):
    """Observations and rewards of some steps under fixed actions."""
    seen = []
    for step in range(num_steps):
        observations, rewards, _, _ = normalized.step(np.array([step % 2, 1, 0]))
        seen.append((observations.copy(), rewards.copy()))
    return seen


def test_a_restored_normalisation_goes_on_bit_for_bit(tmp_path):
    first = VecNormalize(make_venv(), clip_obs=5.0, gamma=0.9)
    first.reset()
    drive(first, 30)
    save_normalization(tmp_path / "n.npz", first)
    second = load_normalization(tmp_path / "n.npz", make_venv())
    assert (second.clip_obs, second.gamma) == (5.0, 0.9)
    for each in (first, second):
        each.seed(7)
        each.reset()
    pairs = zip(drive(first, 50), drive(second, 50), strict=True)
    assert all(
        np.array_equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True)
    )


def test_a_file_that_holds_something_else_is_refused(tmp_path):
    for content in (b"", b"\x80\x04K\x01."):
        (tmp_path / "n.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"cannot be used.*train the model again"):
            load_normalization(tmp_path / "n.npz", make_venv())


@pytest.mark.parametrize("num_added", [0, 3, 10, 14])
def test_a_restored_buffer_goes_on_where_it_was(tmp_path, num_added):
    spaces = gym.spaces.Box(-1.0, 1.0, (2,), np.float32), gym.spaces.Discrete(4)
    rng = np.random.default_rng(0)
    first, second = (ReplayBuffer(20, *spaces, n_envs=2) for _ in range(2))

    def add(buffers):
        ends, infos = rng.random(2) < 0.3, [{"TimeLimit.truncated": True}, {}]
        entry = (rng.random((2, 2)), rng.random((2, 2)), rng.integers(4, size=2), rng.random(2))
        for buffer in buffers:
            buffer.add(*entry, ends, infos)

    for _ in range(num_added):
        add([first])
    save_buffer(tmp_path / "b.npz", first)
    restore_buffer(tmp_path / "b.npz", second)
    for _ in range(3):
        add([first, second])
    assert (first.pos, first.full) == (second.pos, second.full)
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
