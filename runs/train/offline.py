"""``specgym train AGENT --env replay``: an agent learns from recorded traces."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from stable_baselines3.common.base_class import BaseAlgorithm

from specgym.agents.policy import Policy, load_policy, save_policy
from specgym.agents.ppo import CHECKPOINTS, newest_checkpoint, num_trained_steps
from specgym.agents.sb3 import Pauses, export_policy, learn
from specgym.agents.sb3_vector import SB3Vector
from specgym.envs.features import FEATURES_VERSION
from specgym.envs.replay.disturbances import Disturbance
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.vector_replay import VectorReplay
from specgym.envs.rewards import paced_utility
from specgym.runs.controllers import POLICY_FILE
from specgym.runs.disk import writing
from specgym.runs.run_folder import open_run
from specgym.runs.tensorboard import Board
from specgym.runs.traces.yardstick import argmax_of, fixed_seconds, play, split_requests
from specgym.runs.train.bandits import judge_bandit, train_bandit
from specgym.runs.train.configs import (
    SETTINGS,
    NetworkConfig,
    PolicyGradientConfig,
    QLearningConfig,
    ReplayConfig,
    find_settings,
)
from specgym.runs.train.imitation import judge_imitation, train_by_imitation
from specgym.runs.train.training_set import ReplayTraining
from specgym.runs.train.watcher import BEST_FILE, ReplayWatcher


def train_network(config: NetworkConfig, console: Console) -> Path:
    """Trains a network, or goes on with a stopped training; returns the run's folder.

    Raises:
        ValueError: If the traces cannot be used, or a run of this name is finished or was begun
            with other settings.
    """
    training = ReplayTraining(config)
    with open_run(config, config.run_name, POLICY_FILE) as folder:
        yardstick = training.yardstick(console)

        def more(policy: Policy) -> dict[str, float]:
            return training.measure(policy, yardstick)

        try:
            train_in(folder, training, config, more, console)
        except KeyboardInterrupt:
            console.print(f"stopped; {num_trained_steps(folder)} steps are in {folder}")
            console.print("the same command goes on after them")
            raise
    training.report(load_policy(folder / POLICY_FILE).about, yardstick, folder, console)
    return folder


def train_in(
    folder: Path,
    training: ReplayTraining,
    config: NetworkConfig,
    more: Callable[[Policy], dict[str, float]],
    console: Console,
) -> None:
    """Trains into a folder that may hold checkpoints of an earlier, stopped training.

    Args:
        folder: The folder.
        training: The requests.
        config: Settings.
        more: Figures of a policy that are shown and saved beside its speed-up on the validation
            requests, which alone chooses.
        console: Where the bar is.
    """
    assert isinstance(config, PolicyGradientConfig | QLearningConfig)
    recipe, newest = config.recipe, newest_checkpoint(folder)
    board = Board(folder, first_step=num_trained_steps(folder) + 1)
    board.hyperparameters(dataclasses.asdict(recipe))

    def export(model: BaseAlgorithm) -> Policy:
        return export_policy(
            model, training.plans, training.features, FEATURES_VERSION, training.about()
        )

    fit, validation = map(
        training.library, split_requests(training.traces.part("train"), config.validate_every)
    )
    measure = measure_by(validation, more)
    watcher = ReplayWatcher(folder, config.agent, recipe.num_steps, measure, export, board, console)
    if newest is not None:
        console.print(f"going on after {int(newest.name)} steps")
        watcher.restore(newest)
    venv = VectorReplay(
        fit,
        recipe.num_envs,
        reward=paced_utility(recipe.pace or training.pace()),
        disturbance=Disturbance(noise=recipe.noise),
        forget_after=recipe.forget_after,
    )
    every = max(recipe.num_steps // config.num_evaluations, 1)
    pauses = Pauses(every, watcher.on_update, watcher.on_pause)
    with watcher.bar, writing(folder / CHECKPOINTS):
        model = learn(
            config.agent,
            SB3Vector(venv),
            recipe,
            training.fixed,
            config.seed,
            folder,
            board.scalars,
            pauses,
        )
        watcher.on_pause(model)
    board.close()
    with writing(folder / POLICY_FILE):
        save_policy(folder / POLICY_FILE, load_policy(folder / BEST_FILE))
    shutil.rmtree(folder / CHECKPOINTS)
    (folder / BEST_FILE).unlink()


def measure_by(
    validation: TraceLibrary, more: Callable[[Policy], dict[str, float]]
) -> Callable[[Policy], dict[str, float]]:
    """What measures a policy: its speed-up on the validation requests, and more figures."""
    none_seconds = float(fixed_seconds(validation)[:, 0].sum())

    def measure(policy: Policy) -> dict[str, float]:
        seconds = float(play(validation, argmax_of(policy.scores)).sum())
        return {"validation_speedup": none_seconds / seconds} | more(policy)

    return measure


def judge_network(training: ReplayTraining) -> np.ndarray:
    """Seconds on each held-out request of a network trained afresh, which leaves nothing behind."""
    config = training.config
    assert isinstance(config, NetworkConfig)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        train_in(folder, training, config, lambda policy: {}, Console(quiet=True))
        return training.judge(load_policy(folder / POLICY_FILE))


@dataclasses.dataclass(frozen=True)
class Agent:
    """What learns from traces.

    Attributes:
        settings: To start from.
        train: Trains into a run's folder and returns it.
        judge: Trains afresh; the seconds on each held-out request.
    """

    settings: ReplayConfig
    train: Callable[[Any, Console], Path]
    judge: Callable[[ReplayTraining], np.ndarray]


NETWORK = (train_network, judge_network)
BANDIT = (train_bandit, judge_bandit)
METHODS: dict[str, tuple[Callable[..., Path], Callable[[ReplayTraining], np.ndarray]]] = {
    "ppo": NETWORK,
    "maskable-ppo": NETWORK,
    "dqn": NETWORK,
    "imitation": (train_by_imitation, judge_imitation),
    "ucb": BANDIT,
    "linucb": BANDIT,
}
AGENTS = {name: Agent(settings, *METHODS[name]) for name, settings in SETTINGS.items()}


def find_agent(name: str) -> Agent:
    """The agent of this name.

    Raises:
        ValueError: If no such agent learns from traces.
    """
    find_settings(name)
    return AGENTS[name]
