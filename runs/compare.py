"""``specgym compare``: controllers head to head on the same requests, interleaved."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specgym.agents.ppo import TABLE_FILE, PPOConfig
from specgym.baselines.specrouter import SpecRouter
from specgym.engine.pool import ModelPool
from specgym.engine.timing import Baseline
from specgym.envs.decode import SpecDecodeEnv, make_clock
from specgym.envs.prompt_room import describe_skipped
from specgym.envs.workloads import Request, Workload
from specgym.runs.configs import CompareConfig, TrainConfig
from specgym.runs.controllers import describe_options, make_controller
from specgym.runs.disk import writing
from specgym.runs.loop import Controller, StepError, run_request
from specgym.runs.lossless import check_lossless
from specgym.runs.making import make_pool, make_workload
from specgym.runs.progress import STATE_FILE, STEPS_FILE, Progressed, write_steps
from specgym.runs.results import (
    SCHEMA,
    chains_table,
    describe_machine,
    request_speedups,
    results_table,
    seconds_per_token,
    speedup,
    summarize,
    write_json,
)
from specgym.runs.run_folder import open_run
from specgym.runs.settings import EnvSettings
from specgym.runs.tensorboard import Board, step_scalars
from specgym.runs.train.live import train_in

RESULTS_FILE = "results.json"
TRAINING_FOLDER = "ppo-training"
FAST = "none (fast)"


class MismatchError(RuntimeError):
    """A controller's text differs from plain decoding's."""


class Comparison:
    """Runs controllers over requests, writes down what happened, and can be stopped.

    Args:
        config: Settings.
        folder: The run's folder.
        pool: The pool all controllers share.
        workload: Where requests come from.
        console: Where progress is shown.
    """

    def __init__(
        self,
        config: CompareConfig,
        folder: Path,
        pool: ModelPool,
        workload: Workload,
        console: Console,
    ):
        self.config = config
        self.folder = folder
        self.pool = pool
        self.workload = workload
        self.console = console
        self.names = tuple(dict.fromkeys(("none", *config.controllers)))
        self.requests = workload.select(config.num_requests + 1, config.seed)
        self.clock = make_clock(config.clock, config.device)
        self.baselines = {True: Baseline(), False: Baseline()}
        self.envs = {name: self.make_env(config.exact) for name in self.names}
        self.controllers = {name: self.make_controller(name) for name in self.names}
        self.envs[FAST] = self.make_env(exact=False)
        self.controllers[FAST] = self.make_controller("none")
        self.done = Progressed({name: [] for name in self.envs})

    def make_env(self, exact: bool) -> SpecDecodeEnv:
        """An environment of its own for a controller; pool, clock and baseline are shared."""
        return SpecDecodeEnv(
            self.pool,
            self.workload,
            max_new_tokens=self.config.max_new_tokens,
            exact=exact,
            clock=self.clock,
            baseline=self.baselines[exact],
        )

    def make_controller(self, name: str) -> Controller:
        """The controller of this name."""
        spec = f"ppo:{self.folder / TRAINING_FOLDER}" if name == "ppo" else name
        env = self.envs["none"]
        features = [feature.name for feature in env.features]
        return make_controller(spec, env.plans, features, self.config.seed, self.pool.name)

    def run(self) -> dict[str, Any]:
        """Warms up, runs what is left of the requests, and returns the results."""
        self.restore()
        self.warm_up(self.requests[0])
        steps_path = self.folder / STEPS_FILE
        with self.bar() as bar, writing(steps_path), steps_path.open("ab") as steps_file:
            total = self.config.num_requests * len(self.envs)
            task = bar.add_task("", total=total, note="")
            for index in range(self.done.num_rounds, self.config.num_requests):
                order = list(self.envs)
                order = order[index % len(order) :] + order[: index % len(order)]
                for position, name in enumerate(order):
                    note = f"request {index + 1}/{self.config.num_requests}: {name}"
                    bar.update(task, completed=index * len(order) + position, note=note)
                    record = run_request(
                        self.envs[name], self.controllers[name], self.requests[index + 1]
                    )
                    self.done.records[name].append(record)
                    write_steps(steps_file, name, index, record)
                self.finish_round(index, steps_file.tell())
            bar.update(task, completed=total, note="done")
        return self.results()

    def warm_up(self, request: Request) -> None:
        """Runs every plan's shapes once on a request that is not compared; nothing is learned."""
        for env in (self.envs["none"], self.envs[FAST]):
            _, info = env.reset(options={"request": request})
            for action in range(len(env.table)):
                if env.state is None or env.state.is_finished:
                    _, info = env.reset(options={"request": request})
                if info["action_mask"][action]:
                    info = env.step(action)[-1]
                if "error" in info:
                    raise StepError(f"warm-up: {info['error']}")
            env.observer.clear()

    def bar(self) -> Progress:
        """The progress bar."""
        return Progress(
            TextColumn("comparing"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} {task.fields[note]}"),
            TimeRemainingColumn(),
            console=self.console,
        )

    def finish_round(self, index: int, steps_size: int) -> None:
        """Writes events, results so far and the state to go on from."""
        none = self.done.records["none"]
        experts = self.pool.model(self.pool.target).experts
        for name, records in self.done.records.items():
            scalars = step_scalars(records[-1].steps, experts)
            scalars["spec/speedup"] = speedup(none, records)
            scalars["spec/slowdown_worst"] = 1.0 / min(request_speedups(none, records))
            self.boards[name].scalars(scalars, self.done.num_tokens)
        self.done.steps_size = steps_size
        self.done.states = {
            name: (controller.state_dict(), self.envs[name].observer.statistics())
            for name, controller in self.controllers.items()
        }
        self.done.baselines = {exact: b.samples for exact, b in self.baselines.items()}
        self.done.save(self.folder)
        if not self.console.is_terminal:
            self.console.print(f"request {index + 1} of {self.config.num_requests} compared")

    def restore(self) -> None:
        """Goes back to the last finished round of a stopped run, if there is one."""
        if (self.folder / STATE_FILE).exists():
            self.done = Progressed.load(self.folder)
            for name, (learned, statistics) in self.done.states.items():
                self.controllers[name].load_state_dict(learned)
                self.envs[name].observer.restore(statistics)
            for exact, samples in self.done.baselines.items():
                self.baselines[exact].restore(samples)
            self.console.print(f"going on after {self.done.num_rounds} compared requests")
        steps_path = self.folder / STEPS_FILE
        steps_path.touch()
        os.truncate(steps_path, self.done.steps_size)
        first = self.done.num_tokens + 1
        self.boards = {name: Board(self.folder / slug(name), first) for name in self.envs}
        for name, board in self.boards.items():
            options = describe_options("none" if name == FAST else name)
            board.hyperparameters(options | dataclasses.asdict(self.config))

    def results(self) -> dict[str, Any]:
        """What ``results.json`` holds, from the rounds finished so far."""
        rounds = self.done.num_rounds
        records = {name: each[:rounds] for name, each in self.done.records.items()}
        none, fast = records["none"], records[FAST]
        return {
            "schema": SCHEMA,
            "pool": self.pool.name,
            "workload": self.config.workload,
            "machine": describe_machine(self.pool.model(self.pool.target).device),
            "num_requests": rounds,
            "skipped_prompts": self.workload.num_skipped,
            "exact": self.config.exact,
            "controllers": {n: summarize(none, fast, records[n]) for n in self.names},
            "calibration": {
                name: controller.calibration()
                for name, controller in self.controllers.items()
                if isinstance(controller, SpecRouter)
            },
            "exact_over_fast": seconds_per_token(none) / seconds_per_token(fast),
            "lossless": check_lossless(
                self.pool,
                self.requests[1:],
                none,
                [records[name] for name in self.names],
                exact=self.config.exact,
            ),
        }

    def close(self) -> None:
        """Finishes the event files."""
        for board in getattr(self, "boards", {}).values():
            board.close()


def compare(config: CompareConfig, console: Console) -> dict[str, Any]:
    """Compares, or goes on with a stopped comparison; prints the table and writes the results.

    Raises:
        ValueError: If settings are refused.
        StepError: If the engine failed in some step.
        MismatchError: If a text differs from plain decoding's by more than a near-tie.
    """
    name = config.name or time.strftime("compare-%Y%m%d-%H%M%S")
    pool = make_pool(config)
    workload = make_workload(config, pool, config.split)
    training = make_training(config, pool) if "ppo" in config.controllers else None
    check_controllers(config, pool, workload)
    with open_run(config, name, RESULTS_FILE) as folder:
        if training is not None:
            train_first(*training, folder / TRAINING_FOLDER, pool, console)
        results = run_comparison(Comparison(config, folder, pool, workload, console), name)
        write_json(folder / RESULTS_FILE, results)
    output = Console()
    output.print(results_table(results))
    if len(pool.chains) > 1:
        output.print(chains_table(results, pool.chains))
    output.print(describe(results, folder))
    if results["lossless"]["mismatches"]:
        raise MismatchError(
            f"{results['lossless']['mismatches']} texts differ from plain decoding's by more than "
            f"a near-tie; see {folder / RESULTS_FILE}"
        )
    if config.exact and results["lossless"]["near_ties"]:
        raise MismatchError(
            f"{results['lossless']['near_ties']} texts differ from plain decoding's in a near-tie, "
            f"which exact mode rules out; see {folder / RESULTS_FILE}"
        )
    return results


def run_comparison(comparison: Comparison, name: str) -> dict[str, Any]:
    """Runs a comparison to its end; a stopped one says what it has, and how it goes on."""
    console = comparison.console
    try:
        return comparison.run()
    except KeyboardInterrupt:
        console.print(f"stopped; {comparison.done.num_rounds} requests are in {comparison.folder}")
        console.print(f"the same command with --name {name} goes on after them")
        if comparison.done.num_rounds:
            console.print(results_table(comparison.results()))
        raise
    finally:
        comparison.close()


def check_controllers(config: CompareConfig, pool: ModelPool, workload: Workload) -> None:
    """Refuses names and options before anything is written or trained.

    Raises:
        ValueError: If a controller is refused.
    """
    env = SpecDecodeEnv(pool, workload)
    features = [feature.name for feature in env.features]
    for name in config.controllers:
        if name != "ppo":
            make_controller(name, env.plans, features, config.seed, pool.name)


def make_training(config: CompareConfig, pool: ModelPool) -> tuple[TrainConfig, Workload]:
    """Settings of the plain ``ppo``'s training, and the other part of the requests."""
    shared = {f.name: getattr(config, f.name) for f in dataclasses.fields(EnvSettings)}
    other: Literal["train", "held-out"] = "held-out" if config.split == "train" else "train"
    settings = TrainConfig(**shared, split=other, ppo=PPOConfig(num_steps=config.train_steps))
    return settings, make_workload(settings, pool, other)


def train_first(
    settings: TrainConfig, workload: Workload, folder: Path, pool: ModelPool, console: Console
) -> None:
    """Trains the plain ``ppo``, unless that is done."""
    if (folder / TABLE_FILE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    train_in(folder, pool, settings, workload, console)


def describe(results: dict[str, Any], folder: Path) -> str:
    """The lines under the table."""
    lossless = results["lossless"]
    skipped = results["skipped_prompts"]
    return (
        (f"{describe_skipped(skipped)}\n" if skipped else "")
        + f"lossless: {lossless['identical']} of {lossless['checked']} texts identical, "
        f"{lossless['near_ties']} near-ties, {lossless['mismatches']} mismatches; "
        f"exact mode costs {results['exact_over_fast']:.2f}x the fast one\n"
        f"written to {folder}  (tensorboard --logdir {folder})"
    )


def slug(name: str) -> str:
    """A controller's name as a folder's: runs of other characters become one hyphen."""
    return re.sub(r"[^A-Za-z0-9_.@=]+", "-", name).strip("-")
