"""The requests of a training on recorded traces, and what is measured on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from specgym.agents.policy import Policy
from specgym.baselines.references import best_fixed
from specgym.envs.library import TraceLibrary
from specgym.envs.traces import TraceSet, load_traces
from specgym.envs.vector_replay import VectorReplay
from specgym.runs.controllers import POLICY_FILE
from specgym.runs.folder import as_plain
from specgym.runs.yardstick import (
    Yardstick,
    argmax_of,
    fixed_seconds,
    make_yardstick,
    play,
    split_requests,
)


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


@dataclasses.dataclass(frozen=True)
class Trial:
    """What policies are measured on.

    Attributes:
        validation: Training requests that are not fitted on: they choose among policies.
        none_seconds: Seconds of no speculation on them.
        held_out: Requests that choose nothing.
        yardstick: References on these.
    """

    validation: TraceLibrary
    none_seconds: float
    held_out: TraceLibrary
    yardstick: Yardstick

    def measure(self, policy: Policy) -> dict[str, float]:
        """A policy's speed-ups, ratios of sums, and its share of the held-out headroom."""
        choose = argmax_of(policy.scores)
        held_out = play(self.held_out, choose)
        return {
            "validation_speedup": self.none_seconds / float(play(self.validation, choose).sum()),
            "held_out_speedup": self.yardstick.speedup(held_out),
            "held_out_share": self.yardstick.share(held_out),
        }


class ReplayTraining:
    """The requests of a training on traces, and what its policies are measured by.

    Attributes:
        traces: All traces.
        fit: Requests that are fitted on.
        validation: Training requests that choose among policies.
        held_out: Requests that choose nothing.
        plan: The best fixed plan on all training requests.
        fixed: Each plan's seconds throughout the requests that are fitted on, [A].
        plans: (chain, K) of every action.
        features: Names of the observation's entries.
    """

    def __init__(self, config: ReplayConfig):
        self.config = config
        self.traces = load_traces(config.traces)
        fit, validation = split_requests(self.traces.part("train"), config.validate_every)
        self.fit, self.validation = self.library(fit), self.library(validation)
        self.held_out = self.library(self.traces.part("held-out"))
        seconds = [fixed_seconds(library) for library in (self.fit, self.validation)]
        self.plan = best_fixed(np.concatenate(seconds))
        self.fixed = seconds[0].sum(axis=0)
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
        return float(self.fixed[self.plan] / self.fixed[0])

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

    def report(
        self, about: Mapping[str, Any], yardstick: Yardstick, folder: Path, console: Console
    ) -> None:
        """Prints what came of a training, beside the references."""
        plan, fixed = self.fit.table.names[yardstick.plan], yardstick.fixed
        console.print(
            f"held-out requests: {about['held_out_speedup']:.3f}x no speculation, "
            f"{about['held_out_share']:.1%} of the headroom between the best fixed plan {plan} "
            f"({yardstick.speedup(fixed[:, yardstick.plan]):.3f}x) and the oracle "
            f"({yardstick.speedup(yardstick.oracle):.3f}x)"
        )
        console.print(
            f"policy: {folder / POLICY_FILE}  (compare it with --controllers none,learned:{folder})"
        )


def describe(scores: Mapping[str, float]) -> str:
    """A policy's figures in words."""
    named = {
        name.replace("held_out", "held-out").replace("_", " "): v for name, v in scores.items()
    }
    return ", ".join(f"{name} {value:.3f}" for name, value in named.items())
