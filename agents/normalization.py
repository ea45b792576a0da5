"""The normalisation that stable-baselines3 learns on, in a file that numpy alone can read."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

NORMALIZATION_FILE = "normalization.npz"
SETTINGS = ("clip_obs", "clip_reward", "gamma", "epsilon")
STATISTICS = ("mean", "var", "count")


def save_normalization(path: Path, normalized: VecNormalize) -> None:
    """Writes settings and running statistics of observations and returns."""
    arrays = {name: np.array(getattr(normalized, name), np.float64) for name in SETTINGS}
    for owner in ("obs_rms", "ret_rms"):
        statistics = getattr(normalized, owner)
        assert isinstance(statistics, RunningMeanStd)
        arrays |= {
            f"{owner}.{name}": np.array(getattr(statistics, name), np.float64)
            for name in STATISTICS
        }
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def read_normalization(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file: settings, and ``obs_rms`` and ``ret_rms`` with mean, var and count.

    Raises:
        ValueError: If there is no such file, or it holds something else.
    """
    names = [*SETTINGS, *(f"{owner}.{n}" for owner in ("obs_rms", "ret_rms") for n in STATISTICS)]
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in names}
    except (zipfile.BadZipFile, EOFError, OSError, KeyError, ValueError) as error:
        raise ValueError(
            f"normalization: {path} cannot be used: {error}; train the model again with specgym "
            f"train"
        ) from error


def load_normalization(path: Path, venv: VecEnv) -> VecNormalize:
    """An environment normalised as a file says, which goes on learning from there.

    Raises:
        ValueError: If there is no such file, or it holds something else.
    """
    arrays = read_normalization(path)
    normalized = VecNormalize(venv)
    for name in SETTINGS:
        setattr(normalized, name, float(arrays[name]))
    for owner in ("obs_rms", "ret_rms"):
        statistics = getattr(normalized, owner)
        statistics.mean = arrays[f"{owner}.mean"]
        statistics.var = arrays[f"{owner}.var"]
        statistics.count = float(arrays[f"{owner}.count"])
    return normalized
