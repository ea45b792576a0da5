"""What one sees of a training on traces, and which of its policies is kept."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from stable_baselines3.common.base_class import BaseAlgorithm

from specgym.agents.policy import Policy, save_policy
from specgym.agents.sb3 import save_progress
from specgym.runs.disk import writing
from specgym.runs.pool.build_watcher import make_bar
from specgym.runs.results import write_json
from specgym.runs.tensorboard import Board
from specgym.runs.train.training_set import describe

BEST_FILE = "best.npz"
CURVE_FILE = "curve.json"


class ReplayWatcher:
    """Shows a training, measures its policy at intervals, keeps the best, saves checkpoints.

    The best is the one of largest speed-up on the validation requests.

    Args:
        folder: Of the training.
        algorithm: Its name.
        num_steps: Steps of the whole training.
        measure: A policy's figures, ``validation_speedup`` among them.
        export: Turns a model into a policy.
        board: TensorBoard.
        console: Where the bar is.
    """

    def __init__(
        self,
        folder: Path,
        algorithm: str,
        num_steps: int,
        measure: Callable[[Policy], dict[str, float]],
        export: Callable[[BaseAlgorithm], Policy],
        board: Board,
        console: Console,
    ):
        self.folder, self.algorithm, self.num_steps = folder, algorithm, num_steps
        self.measure, self.export, self.board = measure, export, board
        self.curve: list[dict[str, float]] = []
        self.bar = make_bar(f"training {algorithm}", "steps", console)
        self.task = self.bar.add_task("", total=num_steps, completed=0, note="")

    def restore(self, checkpoint: Path) -> None:
        """Takes the curve and the best policy of a checkpoint over."""
        for name in (BEST_FILE, CURVE_FILE):
            shutil.copy(checkpoint / name, self.folder / name)
        self.curve = json.loads((self.folder / CURVE_FILE).read_text())

    def on_update(self, num_steps: int) -> None:
        """Moves the bar."""
        self.bar.update(self.task, completed=num_steps)

    def on_pause(self, model: BaseAlgorithm) -> None:
        """Measures the policy, keeps it if it is the best so far, and saves a checkpoint."""
        step = model.num_timesteps
        if self.curve and self.curve[-1]["step"] == step:
            return
        policy = self.export(model)
        scores = self.measure(policy)
        best = max((point["validation_speedup"] for point in self.curve), default=-np.inf)
        if scores["validation_speedup"] > best:
            about = dict(policy.about) | {"step": step} | scores
            with writing(self.folder / BEST_FILE):
                save_policy(self.folder / BEST_FILE, dataclasses.replace(policy, about=about))
        self.curve.append({"step": step} | scores)
        write_json(self.folder / CURVE_FILE, self.curve)
        self.board.scalars({f"eval/{name}": value for name, value in scores.items()}, step)
        self.show(step, scores)
        save_progress(model, self.folder, [self.folder / BEST_FILE, self.folder / CURVE_FILE])

    def show(self, step: int, scores: dict[str, float]) -> None:
        """Puts the newest figures beside the bar."""
        note = describe(scores)
        self.bar.update(self.task, completed=step, note=note)
        if not self.bar.console.is_terminal:
            self.bar.console.print(f"training {self.algorithm}: {step}/{self.num_steps}, {note}")
