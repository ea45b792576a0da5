"""TensorBoard: the same tags for every controller, and a layout that puts them in one chart."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from specgym.engine.forward.experts import ExpertShape
from specgym.runs.disk import writing

LAYOUT = {
    "controllers": {
        "utility": ["Multiline", ["spec/utility"]],
        "speed-up so far": ["Multiline", ["spec/speedup"]],
        "worst slowdown of a request so far": ["Multiline", ["spec/slowdown_worst"]],
        "share of K = 0": ["Multiline", ["spec/share_k0"]],
    },
    "where the time goes": {
        "draft and verify, ms per iteration": ["Multiline", ["time/draft_ms", "time/verify_ms"]],
        "controller, ms per iteration": ["Multiline", ["time/controller_ms"]],
    },
    "mixture of experts": {
        "unique experts per layer, real and of independent tokens": [
            "Multiline",
            ["moe/unique_experts", "moe/expected_unique"],
        ],
    },
}


class Board:
    """One run's event file.

    Args:
        folder: Where the events go; TensorBoard names the run after it.
        first_step: Events of an earlier, killed process from this step on are purged, so that a
            resumed run shows one clean curve.
    """

    def __init__(self, folder: Path, first_step: int | None = None):
        wait_for_later_name(folder)
        self.events = folder / "events.out.tfevents.*"
        with writing(self.events):
            self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Shows settings as a table, and lays the charts out."""
        rows = "\n".join(f"| {name} | {value} |" for name, value in values.items())
        with writing(self.events):
            self.writer.add_text("hyperparameters", f"| name | value |\n| --- | --- |\n{rows}")
            self.writer.add_custom_scalars(LAYOUT)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Writes tagged numbers at a step."""
        with writing(self.events):
            for tag, value in values.items():
                self.writer.add_scalar(tag, value, step)
            self.writer.flush()

    def close(self) -> None:
        """Finishes the file."""
        with writing(self.events):
            self.writer.close()


def wait_for_later_name(folder: Path) -> None:
    """Waits until a new event file's name sorts behind those there are: at most a second.

    TensorBoard reads a run's files in the order of their names, which begin with the second they
    were made in; a file of a resumed run must not come before the one it continues.
    """
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    while seconds and max(seconds) >= int(time.time()):
        time.sleep(0.05)


def step_scalars(
    steps: Sequence[Mapping[str, Any]], experts: ExpertShape | None = None
) -> dict[str, float]:
    """The ``spec``, ``time`` and ``moe`` tags of some iterations, pooled: ratios of sums.

    ``spec/chain`` is the number of verifiers of the chain that ran most: 0 is no speculation.

    Args:
        steps: The iterations' ``info``.
        experts: The target's experts; without them there are no ``moe`` tags.
    """
    tokens = sum(step["tokens"] for step in steps)
    seconds = sum(step["total_seconds"] for step in steps)
    chains = Counter(step["chain"] for step in steps)
    count = len(steps)
    return {
        **({} if experts is None else expert_scalars(steps, experts)),
        "spec/utility": tokens / sum(s["iter_seconds"] / s["baseline_seconds"] for s in steps),
        "spec/k": sum(step["k"] for step in steps) / count,
        "spec/chain": chains.most_common(1)[0][0].count(">"),
        "spec/accepted": sum(step["accepted"] for step in steps) / count,
        "spec/share_k0": sum(step["executed_action"] == 0 for step in steps) / count,
        "spec/tokens_per_second": tokens / seconds,
        "time/draft_ms": 1e3 * sum(step["draft_seconds"] for step in steps) / count,
        "time/verify_ms": 1e3 * sum(step["verify_seconds"] for step in steps) / count,
        "time/controller_ms": 1e3 * sum(step["controller_seconds"] for step in steps) / count,
    }


def expert_scalars(steps: Sequence[Mapping[str, Any]], experts: ExpertShape) -> dict[str, float]:
    """Unique experts per layer in the target's forwards, and what independent tokens would visit.

    Tokens that follow each other tend to the same experts: that is the difference of the two.
    """
    fed = [1 + sum(step["proposed_per_level"][-1:]) for step in steps]
    ratios = [step["unique_experts"] for step in steps]
    return {
        "moe/unique_experts": experts.experts_per_token * sum(ratios) / len(steps),
        "moe/expected_unique": sum(map(experts.expected_unique, fed)) / len(steps),
    }
