"""Algorithms of stable-baselines3 and sb3-contrib on vectorised environments.

They are made from a recipe, learn visibly, go on from checkpoints, and become plain arrays.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from specgym.agents.normalization import NORMALIZATION_FILE, load_normalization
from specgym.agents.policy import Policy
from specgym.agents.ppo import (
    MODEL_FILE,
    Scalars,
    newest_checkpoint,
    save_checkpoint,
)
from specgym.agents.sb3_settings import PolicyGradient, QLearning, Recipe
from specgym.baselines.plans import Plan

ALGORITHMS: dict[str, type[BaseAlgorithm]] = {
    "ppo": PPO,
    "maskable-ppo": MaskablePPO,
    "dqn": DQN,
}
BUFFER_FILE = "buffer.npz"
REMEMBERED = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
END_RATE = 0.1  # of the learning rate
CLIP = 10.0  # of normalised observations


class FallingRate:
    """A learning rate that falls linearly to ``END_RATE`` of itself."""

    def __init__(self, start: float):
        self.start = start

    def __call__(self, remaining: float) -> float:
        """The rate where this share of the training remains."""
        return self.start * (END_RATE + (1.0 - END_RATE) * remaining)


def make_model(algorithm: str, venv: VecEnv, recipe: Recipe, seed: int) -> BaseAlgorithm:
    """An untrained model over a normalised environment; on CPU, where small networks learn fastest.

    Args:
        algorithm: One of ``ALGORITHMS``.
        venv: The environment.
        recipe: A ``PolicyGradient`` or, for ``dqn``, a ``QLearning``.
        seed: Of weights, actions and the order of requests.
    """
    normalized = VecNormalize(venv, clip_obs=CLIP, gamma=recipe.gamma)
    sizes = [recipe.hidden_size, recipe.hidden_size]
    shared: dict[str, Any] = {
        "learning_rate": FallingRate(recipe.learning_rate),
        "gamma": recipe.gamma,
        "batch_size": recipe.batch_size,
        "seed": seed,
        "device": "cpu",
    }
    if isinstance(recipe, QLearning):
        return DQN(
            "MlpPolicy",
            normalized,
            buffer_size=recipe.buffer_size,
            learning_starts=recipe.learning_starts,
            train_freq=recipe.train_every,
            gradient_steps=recipe.gradient_steps,
            target_update_interval=recipe.target_update,
            exploration_fraction=recipe.exploration_share,
            exploration_final_eps=recipe.exploration_end,
            policy_kwargs={"net_arch": sizes},
            **shared,
        )
    assert isinstance(recipe, PolicyGradient)
    kind = MaskablePPO if algorithm == "maskable-ppo" else PPO
    return kind(
        "MlpPolicy",
        normalized,
        n_steps=recipe.rollout_steps,
        n_epochs=recipe.num_epochs,
        gae_lambda=recipe.gae_lambda,
        ent_coef=recipe.entropy_coefficient,
        clip_range=recipe.clip_range,
        policy_kwargs={"net_arch": {"pi": sizes, "vf": sizes}},
        **shared,
    )


def prefer_fast_plans(model: BaseAlgorithm, recipe: Recipe, seconds: np.ndarray) -> None:
    """Has an untrained policy begin with the plans that are fast throughout, as the recipe says.

    Args:
        model: The untrained model; only policy gradients begin so.
        recipe: Its settings.
        seconds: Each plan's on the training requests, [A].
    """
    if isinstance(recipe, PolicyGradient):
        bias: Any = model.policy.action_net.bias  # type: ignore[union-attr]
        logits = -recipe.prior * (seconds / seconds.min() - 1.0)
        with torch.no_grad():
            bias.copy_(torch.as_tensor(logits, dtype=bias.dtype))


def restore_model(algorithm: str, venv: VecEnv, checkpoint: Path) -> BaseAlgorithm:
    """The model of a checkpoint, its normalisation and what it remembers."""
    normalized = load_normalization(checkpoint / NORMALIZATION_FILE, venv)
    model = ALGORITHMS[algorithm].load(checkpoint / MODEL_FILE, env=normalized, device="cpu")
    if isinstance(model, DQN):
        restore_buffer(checkpoint / BUFFER_FILE, model.replay_buffer)
    return model


class Pauses(BaseCallback):
    """Calls a function between updates, and does so after every so many steps.

    Args:
        every: Steps between two pauses.
        on_update: Is told the number of steps between updates.
        on_pause: Is given the model at the start and after every ``every`` steps.
    """

    def __init__(
        self,
        every: int,
        on_update: Callable[[int], None],
        on_pause: Callable[[BaseAlgorithm], None],
    ):
        super().__init__()
        self.every, self.on_update, self.on_pause = every, on_update, on_pause
        self.due: int | None = None

    def _on_rollout_start(self) -> None:
        self.on_update(self.num_timesteps)
        if self.due is None:
            self.due = self.num_timesteps // self.every * self.every + self.every
        if self.num_timesteps >= self.due:
            self.due += self.every
            self.on_pause(self.model)

    def _on_step(self) -> bool:
        return True


def learn(
    algorithm: str,
    venv: VecEnv,
    recipe: Recipe,
    seconds: np.ndarray,
    seed: int,
    folder: Path,
    write_scalars: Callable[[dict[str, float], int], None],
    pauses: Pauses,
) -> BaseAlgorithm:
    """A model trained for ``recipe.num_steps``, from the folder's newest checkpoint if it has one.

    Rounded up to whole rollouts. A stopped training goes on with the order of requests of its step
    and its learning rate; rows begin anew.

    Args:
        algorithm: One of ``ALGORITHMS``.
        venv: The environment.
        recipe: Settings.
        seconds: Each plan's throughout the training requests, [A]; see ``prefer_fast_plans``.
        seed: Of weights, actions and the order of requests.
        folder: Where checkpoints are.
        write_scalars: Takes the learner's log values and the step.
        pauses: What happens between updates.
    """
    newest = newest_checkpoint(folder)
    if newest is None:
        model = make_model(algorithm, venv, recipe, seed)
        prefer_fast_plans(model, recipe, seconds)
    else:
        model = restore_model(algorithm, venv, newest)
    normalized = model.get_vec_normalize_env()
    assert normalized is not None
    normalized.seed(seed + model.num_timesteps)
    model.set_logger(Logger(None, [Scalars(write_scalars)]))
    remaining = recipe.num_steps - model.num_timesteps
    if remaining > 0:
        model.learn(remaining, pauses, reset_num_timesteps=newest is None, log_interval=10)
    return model


def save_progress(model: BaseAlgorithm, folder: Path, others: Sequence[Path]) -> None:
    """Saves a checkpoint with all that going on needs, and copies of other files."""

    def write(home: Path) -> None:
        if isinstance(model, DQN):
            save_buffer(home / BUFFER_FILE, model.replay_buffer)
        for path in others:
            shutil.copy(path, home / path.name)

    save_checkpoint(model, folder, write)


def save_buffer(path: Path, buffer: ReplayBuffer | None) -> None:
    """Writes the iterations that a model remembers, and where the next one goes."""
    assert buffer is not None
    count = buffer.buffer_size if buffer.full else buffer.pos
    arrays = {name: getattr(buffer, name)[:count] for name in REMEMBERED}
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, position=np.array(buffer.pos), **arrays)


def restore_buffer(path: Path, buffer: ReplayBuffer | None) -> None:
    """Takes what was remembered into an empty buffer of the same size."""
    assert buffer is not None
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in REMEMBERED}
        buffer.pos = int(file["position"])
    count = len(arrays["rewards"])
    buffer.full = count == buffer.buffer_size
    for name, array in arrays.items():
        getattr(buffer, name)[:count] = array


def export_policy(
    model: BaseAlgorithm,
    plans: Sequence[Plan],
    features: Sequence[str],
    features_version: int,
    about: Mapping[str, Any],
) -> Policy:
    """The model's policy as plain arrays, with its normalisation of observations."""
    normalized = model.get_vec_normalize_env()
    assert normalized is not None
    statistics = normalized.obs_rms
    assert isinstance(statistics, RunningMeanStd)
    modules = network(model)
    is_relu = any(isinstance(module, torch.nn.ReLU) for module in modules)
    layers = [module for module in modules if isinstance(module, torch.nn.Linear)]
    return Policy(
        plans=tuple(plans),
        features=tuple(features),
        features_version=features_version,
        mean=statistics.mean,
        scale=np.sqrt(statistics.var + normalized.epsilon),
        clip=normalized.clip_obs,
        layers=tuple(
            (layer.weight.detach().numpy().copy(), layer.bias.detach().numpy().copy())
            for layer in layers
        ),
        activation="relu" if is_relu else "tanh",
        about=about,
    )


def network(model: BaseAlgorithm) -> list[torch.nn.Module]:
    """The modules from the observation to the scores, in order."""
    if isinstance(model, DQN):
        return list(model.q_net.q_net)
    policy: Any = model.policy
    return [*policy.mlp_extractor.policy_net, policy.action_net]
