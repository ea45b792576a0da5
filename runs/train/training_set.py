"""The requests of a training on recorded traces, and what is measured on the way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from specgym.agents.policy import Policy
from specgym.baselines.hindsight.references import best_fixed
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.traces import TraceSet, load_traces
from specgym.envs.replay.vector_replay import VectorReplay
from specgym.runs.controllers import POLICY_FILE
from specgym.runs.run_folder import as_plain
from specgym.runs.traces.yardstick import (
    Yardstick,
    argmax_of,
    fixed_seconds,
    make_yardstick,
    play,
)
from specgym.runs.train.configs import ReplayConfig


class ReplayTraining:
    """The requests of a training on traces, and what its policies are measured by.

    Args:
        config: Settings.
        traces: All traces; None takes those of the settings' file.

    Attributes:
        traces: All traces.
        train: Training requests.
        held_out: Requests that choose nothing.
        fixed: Each plan's seconds throughout the training requests, [A].
        plan: The best fixed plan on them.
        plans: (chain, K) of every action.
        features: Names of the observation's entries.
    """

    def __init__(self, config: ReplayConfig, traces: TraceSet | None = None):
        self.config = config
        self.traces = load_traces(config.traces) if traces is None else traces
        self.train = self.library(self.traces.part("train"))
        self.held_out = self.library(self.traces.part("held-out"))
        seconds = fixed_seconds(self.train)
        self.fixed, self.plan = seconds.sum(axis=0), best_fixed(seconds)
        self.features = [feature.name for feature in VectorReplay(self.train, 1).features]
        self.plans = self.train.table.arrays()

    def library(self, traces: TraceSet) -> TraceLibrary:
        """The tables of some traces."""
        return TraceLibrary(traces, k_values=self.config.k_values or None)

    def yardstick(self, console: Console) -> Yardstick:
        """References on the held-out requests; the fixed plan is the training requests' best."""
        with console.status("references") as status:
            return make_yardstick(self.traces, self.held_out, self.plan, status.update)

    def measure(self, policy: Policy, yardstick: Yardstick) -> dict[str, float]:
        """A policy's speed-up on the held-out requests, and its share of their headroom."""
        seconds = self.judge(policy)
        return {
            "held_out_speedup": yardstick.speedup(seconds),
            "held_out_share": yardstick.share(seconds),
        }

    def none_seconds(self) -> np.ndarray:
        """No speculation's seconds on each held-out request."""
        return fixed_seconds(self.held_out)[:, 0]

    def judge(self, policy: Policy) -> np.ndarray:
        """A policy's seconds on each held-out request."""
        return play(self.held_out, argmax_of(policy.scores))

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
            "num_requests": len(self.train),
        }

    def report(
        self, about: Mapping[str, Any], yardstick: Yardstick, folder: Path, console: Console
    ) -> None:
        """Prints what came of a training, beside the references."""
        plan, fixed = self.train.table.names[yardstick.plan], yardstick.fixed
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
