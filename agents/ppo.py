"""PPO of stable-baselines3: trained on any environment, frozen and in numpy when it decides."""

from __future__ import annotations

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from specgym.agents.normalization import (
    NORMALIZATION_FILE,
    load_normalization,
    read_normalization,
    save_normalization,
)
from specgym.agents.sb3_settings import PPOConfig
from specgym.baselines.plans import Plan, check_plans, check_state, plan_name

MODEL_FILE = "model.zip"
TABLE_FILE = "table.json"
CHECKPOINTS = "checkpoints"


class Scalars(KVWriter):
    """Hands stable-baselines3's log values to a function."""

    def __init__(self, write: Callable[[dict[str, float], int], None]):
        self.write_scalars = write

    def write(
        self,
        key_values: dict[str, Any],
        key_excluded: dict[str, tuple[str, ...]],
        step: int = 0,
    ) -> None:
        """Keeps what is a number."""
        numbers = (int, float, np.number)
        kept = {
            key: float(value)
            for key, value in key_values.items()
            if isinstance(value, numbers) and not key.startswith("time/")  # restarts on resume
        }
        self.write_scalars(kept, step)

    def close(self) -> None:
        """Nothing is open."""


class Checkpoints(BaseCallback):
    """Saves after every update, and hands each step's ``info`` to a function."""

    def __init__(self, folder: Path, on_step: Callable[[Mapping[str, Any], int], None]):
        super().__init__()
        self.folder = folder
        self.report = on_step

    def _on_rollout_start(self) -> None:
        assert isinstance(self.model, PPO)
        save_checkpoint(self.model, self.folder)

    def _on_step(self) -> bool:
        self.report(self.locals["infos"][0], self.num_timesteps)
        return True


def train_ppo(
    make_env: Callable[[], gym.Env],
    table: Mapping[str, Any],
    folder: Path,
    config: PPOConfig,
    seed: int,
    write_scalars: Callable[[dict[str, float], int], None],
    on_step: Callable[[Mapping[str, Any], int], None],
) -> None:
    """Trains until ``config.num_steps``, from the folder's newest checkpoint if it has one.

    Args:
        make_env: Makes the environment to train on.
        table: ``plans`` (names) and ``features`` (names): saved beside the model.
        folder: Gets checkpoints while training and the model at the end.
        config: Settings.
        seed: Seeds weights, actions and the order of requests.
        write_scalars: Takes the learner's log values and the step.
        on_step: Takes each step's ``info`` and the number of steps so far.
    """
    venv = DummyVecEnv([make_env])
    newest = newest_checkpoint(folder)
    if newest is None:
        normalized = VecNormalize(venv, gamma=config.gamma)
        model = new_model(normalized, config, seed)
    else:
        normalized = load_normalization(newest / NORMALIZATION_FILE, venv)
        model = PPO.load(newest / MODEL_FILE, env=normalized, device="cpu")
    normalized.seed(seed + model.num_timesteps)
    model.set_logger(Logger(None, [Scalars(write_scalars)]))
    remaining = config.num_steps - model.num_timesteps
    if remaining > 0:
        callback = Checkpoints(folder, on_step)
        model.learn(remaining, callback, reset_num_timesteps=newest is None)
    save_model(model, table, folder)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def new_model(venv: VecNormalize, config: PPOConfig, seed: int) -> PPO:
    """An untrained model; on CPU, where a small network decides fastest."""
    sizes = [config.hidden_size, config.hidden_size]
    return PPO(
        "MlpPolicy",
        venv,
        learning_rate=config.learning_rate,
        n_steps=config.rollout_steps,
        batch_size=config.batch_size,
        n_epochs=config.num_epochs,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        ent_coef=config.entropy_coefficient,
        policy_kwargs={"net_arch": {"pi": sizes, "vf": sizes}},
        seed=seed,
        device="cpu",
    )


def save_checkpoint(
    model: BaseAlgorithm, folder: Path, also: Callable[[Path], None] | None = None
) -> None:
    """Saves model and normalisation under the number of steps, whole or not at all.

    Args:
        model: The model.
        folder: Of the training.
        also: Writes what else belongs to the checkpoint into a folder.
    """
    home = folder / CHECKPOINTS
    home.mkdir(parents=True, exist_ok=True)
    final = home / f"{model.num_timesteps:09d}"
    if final.exists():
        return
    partial = home / f"{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    write_model(model, partial)
    if also is not None:
        also(partial)
    os.replace(partial, final)
    for old in sorted(home.iterdir())[:-2]:
        shutil.rmtree(old)


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a training folder."""
    home = folder / CHECKPOINTS
    names = sorted(home.iterdir()) if home.is_dir() else []
    whole = [path for path in names if path.name.isdigit()]
    return whole[-1] if whole else None


def num_trained_steps(folder: Path) -> int:
    """Steps that the folder's newest checkpoint has behind it; 0 without one."""
    newest = newest_checkpoint(folder)
    return int(newest.name) if newest else 0


def save_model(model: PPO, table: Mapping[str, Any], folder: Path) -> None:
    """Saves what a decision needs; the table comes last, so that it marks a whole model."""
    write_model(model, folder)
    temporary = folder / f"{TABLE_FILE}.tmp"
    temporary.write_text(json.dumps(dict(table), indent=2) + "\n")
    os.replace(temporary, folder / TABLE_FILE)


def write_model(model: BaseAlgorithm, folder: Path) -> None:
    """Writes the model and its normalisation into a folder."""
    normalized = model.get_vec_normalize_env()
    assert normalized is not None
    model.save(folder / MODEL_FILE)
    save_normalization(folder / NORMALIZATION_FILE, normalized)


class PPOController:
    """A trained policy that decides by its likeliest allowed action, its normalisation frozen.

    The network is evaluated in numpy: some 20 microseconds, where a stable-baselines3 call takes
    half a millisecond.

    Args:
        plans: Plan table, indexed by action.
        features: Names of the observation's entries.
        folder: What ``train_ppo`` left.

    Raises:
        ValueError: If the folder holds no whole model, or one for other plans or features.
    """

    needs_divergence = False

    def __init__(self, plans: Sequence[Plan], features: Sequence[str], folder: Path):
        table_file = folder / TABLE_FILE
        if not table_file.is_file():
            raise ValueError(
                f"ppo: {folder} holds no finished model ({TABLE_FILE} is missing); "
                f"train one with `specgym train ppo`, or let a stopped training go on"
            )
        table = json.loads(table_file.read_text())
        self._plans = check_plans(plans)
        check_state(table, self._plans)
        if list(table["features"]) != list(features):
            raise ValueError(
                f"ppo: {folder} was trained on {len(table['features'])} features, this "
                f"environment has {len(features)} others; train on this pool"
            )
        arrays = read_normalization(folder / NORMALIZATION_FILE)
        self._mean: np.ndarray = arrays["obs_rms.mean"]
        self._deviation: np.ndarray = np.sqrt(arrays["obs_rms.var"] + arrays["epsilon"])
        self._clip = float(arrays["clip_obs"])
        self._layers = read_layers(folder / MODEL_FILE)

    def begin(self, request: Mapping[str, Any]) -> None:
        """Takes note of a new request: nothing to do."""

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """The allowed action of largest logit."""
        return int(np.where(mask, self.logits(observation), -np.inf).argmax())

    def logits(self, observation: np.ndarray) -> np.ndarray:
        """The policy's logits, [num_actions]."""
        x = (observation - self._mean) / self._deviation
        x = x.clip(-self._clip, self._clip)
        for weight, bias in self._layers[:-1]:
            x = np.tanh(weight @ x + bias)
        weight, bias = self._layers[-1]
        return weight @ x + bias

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Takes note of a step: a compared policy learns nothing."""

    def state_dict(self) -> dict[str, Any]:
        """The plan table's names: the rest lies in the model's folder."""
        return {"plans": [plan_name(plan) for plan in self._plans]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that the state is of the same plan table."""
        check_state(state, self._plans)


def read_layers(path: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Weights and biases from the observation to the logits of a saved model, in float64.

    Of stable-baselines3's zip the policy's tensors alone are read; nothing is unpickled.

    Raises:
        ValueError: If there is no such file, or it holds something else.
    """
    try:
        with zipfile.ZipFile(path) as file:
            weights = torch.load(io.BytesIO(file.read("policy.pth")), weights_only=True)
        names = [n for n in weights if n.startswith("mlp_extractor.policy_net") and "weight" in n]
        return [
            (
                weights[name].numpy().astype(np.float64),
                weights[name.replace("weight", "bias")].numpy().astype(np.float64),
            )
            for name in (*names, "action_net.weight")
        ]
    except Exception as error:  # whatever a broken zip or torch's reader of tensors raises
        raise ValueError(
            f"ppo: {path} cannot be used: {error}; train it again with specgym train ppo"
        ) from error
