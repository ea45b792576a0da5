"""``specgym train``: an agent learns on the live engine, visibly, and can be stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specgym.agents.ppo import CHECKPOINTS, TABLE_FILE, PPOConfig, num_trained_steps, train_ppo
from specgym.engine.forward.experts import ExpertShape
from specgym.engine.pool import ModelPool
from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.prompt_room import describe_skipped
from specgym.envs.workloads import Workload
from specgym.runs.configs import TrainConfig
from specgym.runs.disk import writing
from specgym.runs.loop import StepError
from specgym.runs.making import make_pool, make_workload
from specgym.runs.run_folder import open_run
from specgym.runs.tensorboard import Board, step_scalars

REPORTED = ("spec/utility", "spec/accepted", "spec/share_k0")


def train(config: TrainConfig, console: Console) -> Path:
    """Trains, or goes on with a stopped training; returns the model's folder.

    Raises:
        ValueError: If a run of this name is finished, or was begun with other settings.
    """
    pool = make_pool(config)
    workload = make_workload(config, pool, config.split)
    with open_run(config, config.name, TABLE_FILE) as folder:
        try:
            train_in(folder, pool, config, workload, console)
        except KeyboardInterrupt:
            console.print(f"stopped; {num_trained_steps(folder)} steps are in {folder}")
            console.print("the same command goes on after them")
            raise
    console.print(f"model: {folder}  (compare it with --controllers none,ppo:{folder})")
    return folder


def train_in(
    folder: Path, pool: ModelPool, config: TrainConfig, workload: Workload, console: Console
) -> None:
    """Trains into a folder that may hold checkpoints of an earlier, stopped training."""

    def make_env() -> SpecDecodeEnv:
        return SpecDecodeEnv(
            pool,
            workload,
            max_new_tokens=config.max_new_tokens,
            num_requests=config.requests_per_episode,
            reward=config.reward,
            exact=config.exact,
            clock=config.clock,
        )

    env = make_env()
    table = {"plans": env.action_names, "features": [f.name for f in env.features]}
    done = num_trained_steps(folder)
    if workload.num_skipped:
        console.print(describe_skipped(workload.num_skipped))
    if done:
        console.print(f"going on after {done} steps")
    board = Board(folder, first_step=done + 1)
    board.hyperparameters(
        dataclasses.asdict(config.ppo)
        | {"reward": config.reward, "skipped_prompts": workload.num_skipped}
    )
    watcher = Watcher(board, config.ppo, done, pool.model(pool.target).experts)
    with watcher.progress(console):
        writes, on_step = board.scalars, watcher.on_step
        with writing(folder / CHECKPOINTS):
            train_ppo(make_env, table, folder, config.ppo, config.seed, writes, on_step)
    board.close()


class Watcher:
    """Shows a training: a progress bar with what the last rollout was like, and TensorBoard."""

    def __init__(
        self, board: Board, config: PPOConfig, done: int, experts: ExpertShape | None = None
    ):
        self.board = board
        self.config = config
        self.experts = experts
        self.done = done
        self.steps: list[Mapping[str, Any]] = []

    def progress(self, console: Console) -> Progress:
        """The bar; it runs while it is entered."""
        self.bar = Progress(
            TextColumn("training ppo"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps {task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.bar.add_task("", total=self.config.num_steps, completed=self.done, note="")
        return self.bar

    def on_step(self, info: Mapping[str, Any], num_steps: int) -> None:
        """Takes a step in; after every rollout's worth it writes the pooled numbers.

        Raises:
            StepError: If the engine failed: nothing can be learned from it.
        """
        if "error" in info:
            raise StepError(info["error"])
        self.steps.append(info)
        self.bar.update(self.task, completed=num_steps)
        if num_steps % self.config.rollout_steps:
            return
        scalars = step_scalars(self.steps, self.experts)
        saved = sum(step["tokens"] * step["baseline_seconds"] for step in self.steps)
        scalars["spec/speedup"] = saved / sum(step["total_seconds"] for step in self.steps)
        self.board.scalars(scalars, num_steps)
        note = ", ".join(f"{tag.removeprefix('spec/')} {scalars[tag]:.2f}" for tag in REPORTED)
        self.bar.update(self.task, note=note)
        if not self.bar.console.is_terminal:
            self.bar.console.print(f"training ppo: {num_steps}/{self.config.num_steps}, {note}")
        self.steps = []
