"""Imitation on recorded traces: a policy is fitted to what every action costs, round by round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from specgym.agents.imitation import Choose, Table, train_imitation
from specgym.agents.policy import Policy, save_policy
from specgym.baselines.hindsight.visits import Visits
from specgym.envs.features import FEATURES_VERSION
from specgym.runs.controllers import POLICY_FILE
from specgym.runs.disk import writing
from specgym.runs.pool.build_watcher import make_bar
from specgym.runs.run_folder import open_run
from specgym.runs.tensorboard import Board
from specgym.runs.traces.collect_visits import collect_visits
from specgym.runs.traces.yardstick import Yardstick
from specgym.runs.train.configs import ImitationTraining
from specgym.runs.train.training_set import ReplayTraining, describe


def train_by_imitation(config: ImitationTraining, console: Console) -> Path:
    """Fits round by round and saves the last policy; the run's folder.

    Raises:
        ValueError: If the traces cannot be used, or a run of this name is finished.
    """
    training = ReplayTraining(config)
    with open_run(config, config.run_name, POLICY_FILE, goes_on=False) as folder:
        yardstick = training.yardstick(console)
        about = fit_in(folder, training, yardstick, console)
    training.report(about, yardstick, folder, console)
    return folder


def fit_in(
    folder: Path, training: ReplayTraining, yardstick: Yardstick, console: Console
) -> dict[str, Any]:
    """Fits round by round and saves the last policy into a folder; what is said about it."""
    config = training.config
    assert isinstance(config, ImitationTraining)
    recipe = config.recipe
    board = Board(folder, first_step=1)
    board.hyperparameters(dataclasses.asdict(recipe))
    bar = make_bar("training imitation", "rounds", console)
    task = bar.add_task("", total=recipe.num_rounds, note="")
    scores: dict[str, float] = {}

    def on_round(number: int, policy: Policy) -> None:
        scores.update(training.measure(policy, yardstick))
        board.scalars({f"eval/{name}": value for name, value in scores.items()}, number + 1)
        bar.update(task, completed=number + 1, note=describe(scores))
        if not console.is_terminal:
            console.print(f"training imitation: round {number + 1}, {describe(scores)}")

    with bar:
        policy = fit(training, on_round)
    board.close()
    about = training.about() | {"step": recipe.num_rounds} | scores
    with writing(folder / POLICY_FILE):
        save_policy(folder / POLICY_FILE, dataclasses.replace(policy, about=about))
    return about


def judge_imitation(training: ReplayTraining) -> np.ndarray:
    """Seconds on each held-out request of a policy that was fitted to the others."""
    return training.judge(fit(training, lambda number, policy: None))


def fit(training: ReplayTraining, on_round: Callable[[int, Policy], None]) -> Policy:
    """The policy fitted to all training requests; ``on_round`` is told each round's."""
    config = training.config
    assert isinstance(config, ImitationTraining)
    table = Table(training.plans, training.features, FEATURES_VERSION)

    def collect(choose: Choose, number: int) -> Visits:
        seed = 1000 * config.seed + number
        rows, steps = config.num_rows, config.num_steps
        return collect_visits(training.train, choose, rows, steps, config.exploration, seed)

    return train_imitation(collect, table, config.recipe, config.seed, on_round)
