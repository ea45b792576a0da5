"""The requests of a training on recorded traces, and what is measured on the way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from specgym.baselines.references import best_fixed
from specgym.envs.library import TraceLibrary
from specgym.envs.traces import TraceSet, load_traces
from specgym.envs.vector_replay import VectorReplay
from specgym.runs.folder import as_plain
from specgym.runs.replay_watch import Trial
from specgym.runs.yardstick import Yardstick, fixed_seconds, make_yardstick, split_requests


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Trains an agent on recorded traces.

    Attributes:
        agent: What learns.
        env: ``replay``: recorded traces.
        traces: File of ``specgym record``; its held-out requests are measured on, never fitted on.
        k_values: Numbers of drafted tokens that plans may ask for; all recorded ones by default.
        validate_every: Every n-th training request is not fitted on but chooses the best policy.
        seed: Of weights, actions and the order of requests.
        name: Name of the run, a folder under ``runs``; a stopped run of this name goes on. By
            default the agent and the traces.
        runs: Folder of all runs.
        overwrite: Replace a finished run of this name.
    """

    agent: str = "maskable-ppo"
    env: Literal["replay"] = "replay"
    traces: Path = Path("traces/smollm2-moe.npz")
    k_values: tuple[int, ...] = ()
    validate_every: int = 5
    seed: int = 0
    name: str = ""
    runs: Path = Path("runs")
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.validate_every < 2:
            raise ValueError(f"validate_every: must be >= 2; got {self.validate_every}")

    @property
    def run_name(self) -> str:
        """Name of the run."""
        return self.name or f"{self.agent}-{self.traces.stem}"


class ReplayTraining:
    """The requests of a training on traces, and what its policies are measured by.

    Attributes:
        traces: All traces.
        fit: Requests that are fitted on.
        validation: Training requests that choose among policies.
        held_out: Requests that choose nothing.
    """

    def __init__(self, config: ReplayConfig):
        self.config = config
        self.traces = load_traces(config.traces)
        fit, validation = split_requests(self.traces.part("train"), config.validate_every)
        self.fit, self.validation = self.library(fit), self.library(validation)
        self.held_out = self.library(self.traces.part("held-out"))
        seconds = [fixed_seconds(library) for library in (self.fit, self.validation)]
        self.plan = best_fixed(np.concatenate(seconds))
        self.features = [feature.name for feature in VectorReplay(self.fit, 1).features]
        self.plans = self.fit.table.arrays()

    def library(self, traces: TraceSet) -> TraceLibrary:
        """The tables of some traces."""
        return TraceLibrary(traces, k_values=self.config.k_values or None)

    def yardstick(self, console: Console) -> Yardstick:
        """References on the held-out requests; the fixed plan is the training requests' best."""
        with console.status("references") as status:
            return make_yardstick(self.traces, self.held_out, self.plan, status.update)

    def trial(self, yardstick: Yardstick) -> Trial:
        """What policies are measured on."""
        none_seconds = float(fixed_seconds(self.validation)[:, 0].sum())
        return Trial(self.validation, none_seconds, self.held_out, yardstick)

    def pace(self) -> float:
        """What a token costs under the best fixed plan, in units of no speculation's."""
        seconds = fixed_seconds(self.fit).sum(axis=0)
        return float(seconds[self.plan] / seconds[0])

    def about(self) -> dict[str, Any]:
        """Where a policy comes from."""
        known = self.traces.about
        return {
            "algorithm": self.config.agent,
            "settings": as_plain(self.config),
            "seed": self.config.seed,
            "pool": known.get("pool", ""),
            "fingerprints": known.get("fingerprints", {}),
            "machine": known.get("machine", {}),
            "num_requests": len(self.fit),
        }
