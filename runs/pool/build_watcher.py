"""What one sees of a ``pool build``: progress bars, TensorBoard, and the learning curve's file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specgym.engine.training.corpus import Corpus
from specgym.engine.training.fitting import FitConfig, Trainee, measure
from specgym.runs.results import write_json
from specgym.runs.tensorboard import Board

CURVE_FILE = "curve.json"
SPEED_SECONDS = 300.0  # over which the time that is left is estimated


def make_bar(what: str, unit: str, console: Console) -> Progress:
    """A bar with numbers, a note and the time that is left; it runs while it is entered."""
    return Progress(
        TextColumn(what),
        BarColumn(),
        TextColumn(f"{{task.completed}}/{{task.total}} {unit} {{task.fields[note]}}"),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=SPEED_SECONDS,
    )


class TextWatcher:
    """Shows the writing of texts.

    Args:
        wanted: Tokens to train on.
        num_held: Files of texts that come after them.
        console: Where to.
    """

    def __init__(self, wanted: int, num_held: int, console: Console):
        self.wanted, self.num_held = wanted, num_held
        self.num_tokens = self.num_shards = self.num_held_done = 0
        self.begun = self.num_written = 0
        self.started = time.perf_counter()
        self.bar = make_bar("writing texts", "tokens", console)
        self.task = self.bar.add_task("", total=wanted, note="")

    def on_text(self, num_tokens: int) -> None:
        """Takes a text of the file at hand in."""
        self.begun += num_tokens
        self.num_written += num_tokens
        rate = self.num_written / max(time.perf_counter() - self.started, 1e-9)
        self.show(f"{rate:.0f} tokens/s")

    def on_shard(self, num_tokens: int, is_held: bool) -> None:
        """Takes a whole file in, written now or before."""
        was_written, self.begun = self.begun > 0, 0
        self.num_tokens += num_tokens
        self.num_shards += 1
        self.num_held_done += is_held
        self.show()
        if was_written and not self.bar.console.is_terminal:
            task = self.bar.tasks[0]
            self.bar.console.print(
                f"writing texts: {task.completed:.0f}/{task.total:.0f} tokens, "
                f"{task.fields['note']}"
            )

    def show(self, note: str | None = None) -> None:
        """Moves the bar; the files that are held out are counted as the others are large."""
        done = self.num_tokens + self.begun
        mean = done / max(self.num_shards + (self.begun > 0), 1)
        left = (self.num_held - self.num_held_done) * mean
        total = max(self.wanted + left, done + left) if left else done
        fields = {} if note is None else {"note": note}
        self.bar.update(self.task, completed=done, total=round(total), **fields)  # type: ignore[arg-type]


class Watcher:
    """Shows a drafter's training, and keeps its learning curve.

    Args:
        name: Of the drafter.
        folder: Gets the curve; a killed training's is taken up.
        trainee: What is trained.
        held: Texts to measure on.
        config: How it is trained.
        done: Steps behind the checkpoint.
        board: Gets the numbers.
        console: Where to.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        trainee: Trainee,
        held: Corpus,
        config: FitConfig,
        done: int,
        board: Board,
        console: Console,
    ):
        self.name, self.trainee, self.held, self.board = name, trainee, held, board
        self.path, self.num_steps = folder / CURVE_FILE, config.num_steps
        self.curve = [point for point in read_curve(self.path) if point["step"] <= done]
        self.losses: list[float] = []  # since the last point
        self.last_loss: float | None = None
        self.seconds = self.curve[-1]["seconds"] if self.curve else 0.0
        self.since = time.perf_counter()
        self.bar = make_bar(f"training {name}", "steps", console)
        self.task = self.bar.add_task("", total=config.num_steps, completed=done, note="")

    @property
    def note(self) -> str:
        """The newest numbers."""
        loss = "" if self.last_loss is None else f"loss {self.last_loss:.3f}, "
        if not self.curve:
            return loss
        means = mean_acceptance(self.curve[-1])
        return f"{loss}held-out acceptance {', '.join(f'{mean:.3f}' for mean in means)}"

    def report(self, step: int, numbers: dict[str, float]) -> None:
        """Takes a step's numbers in."""
        self.last_loss = numbers["loss"]
        self.losses.append(self.last_loss)
        self.board.scalars({f"train/{key}": value for key, value in numbers.items()}, step + 1)
        self.bar.update(self.task, completed=step + 1, note=self.note)

    def on_checkpoint(self, step: int) -> None:
        """Measures on the held-out texts and writes the curve, unless it has this point."""
        if self.curve and self.curve[-1]["step"] == step:
            return
        measured = measure(self.trainee, self.held)
        now = time.perf_counter()
        self.seconds, self.since = self.seconds + now - self.since, now
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        acceptance = {topic: list(depths.values()) for topic, depths in measured.items()}
        point = {"step": step, "loss": loss, "seconds": self.seconds, "acceptance": acceptance}
        scalars = {
            f"held_out_{depth}/{topic}": value
            for topic, depths in measured.items()
            for depth, value in depths.items()
        }
        means = enumerate(mean_acceptance(point))
        self.board.scalars(scalars | {f"held_out_{d}/mean": mean for d, mean in means}, step)
        self.curve.append(point)
        self.losses = []
        write_json(self.path, self.curve)
        self.bar.update(self.task, note=self.note)
        if not self.bar.console.is_terminal:
            self.bar.console.print(
                f"training {self.name}: {step}/{self.num_steps} steps, {self.note}"
            )


def read_curve(path: Path) -> list[dict[str, Any]]:
    """The points of a learning curve so far."""
    return json.loads(path.read_text()) if path.is_file() else []


def mean_acceptance(point: dict[str, Any]) -> list[float]:
    """Per depth, the mean over categories."""
    columns = zip(*point["acceptance"].values(), strict=True)
    return [sum(column) / len(column) for column in columns]
