"""``specgym bench replay``: what replays and a learned controller take on one core.

Steps a second of the replays, one and many at once, and milliseconds of a learned decision.

Seconds are those that the process had of a core, so that a busy machine changes little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console

from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.replay_env import ReplayEnv
from specgym.envs.replay.synthetic import synthetic_traces
from specgym.envs.replay.vector_replay import VectorReplay
from specgym.runs.bench.command import Bench
from specgym.runs.bench.configs import ReplayBench
from specgym.runs.bench.decision_latency import time_decisions
from specgym.runs.results import describe_machine

NUM_REQUESTS, NUM_TOKENS = 96, 128  # of synthetic traces


def bench_replay(config: ReplayBench, console: Console) -> dict[str, Any]:
    """Seconds to tabulate the traces, and steps a second: every repeat and the medians."""
    started = time.process_time()
    library = TraceLibrary(config.traces or synthetic_traces(NUM_REQUESTS, NUM_TOKENS, config.seed))
    tabulated = time.process_time() - started
    console.print(f"{len(library)} traces tabulated in {tabulated:.1f} s")
    rows = []
    runs: dict[str, Callable[[], float]] = {
        "single": lambda: single_rate(library, config),
        "vector": lambda: vector_rate(library, config),
    }
    for name, run in runs.items():
        run()  # unmeasured
        rates = [run() for _ in range(config.repeats)]
        rows.append({"name": name, "median": statistics.median(rates), "values": rates})
        console.print(f"{name}: {rows[-1]['median']:,.0f} steps/s")
    decision = time_decisions(library, config.policy, config.repeats)
    return {
        "machine": describe_machine(torch.device("cpu")),
        "num_traces": len(library),
        "num_actions": len(library.table),
        "num_envs": config.num_envs,
        "tabulate_seconds": tabulated,
        "rows": rows,
        "ratios": {f"{row['name']}_steps_per_second": row["median"] for row in rows}
        | {f"learned_{name}_milliseconds": value for name, value in decision.items()},
    }


def single_rate(library: TraceLibrary, config: ReplayBench) -> float:
    """Steps a second of the single environment, resets and the choice of actions included."""
    env = ReplayEnv(library)
    draws = np.random.default_rng(config.seed).random(config.single_steps)
    _, info = env.reset(seed=config.seed)
    started = time.process_time()
    for draw in draws:
        allowed = np.flatnonzero(info["action_mask"])
        _, _, terminated, truncated, info = env.step(allowed[int(draw * len(allowed))])
        if terminated or truncated:
            _, info = env.reset()
    return config.single_steps / (time.process_time() - started)


def vector_rate(library: TraceLibrary, config: ReplayBench) -> float:
    """Steps a second of all rows, masks and resets included; the choice of actions is not."""
    envs = VectorReplay(library, config.num_envs)
    envs.reset(config.seed)
    rng, seconds = np.random.default_rng(config.seed), 0.0
    masks = envs.action_masks()
    for _ in range(config.vector_steps):
        actions = (rng.random(masks.shape) * masks).argmax(axis=1)
        started = time.process_time()
        envs.step(actions)
        masks = envs.action_masks()
        seconds += time.process_time() - started
    return config.num_envs * config.vector_steps / seconds


def show_replay(report: dict[str, Any]) -> None:
    """Prints what the bench came to."""
    print(
        f"{report['num_traces']} traces, {report['num_actions']} actions, "
        f"{report['num_envs']} environments at once"
    )
    for name, value in report["ratios"].items():
        print(f"{name}: {value:.3f}" if value < 100 else f"{name}: {value:,.0f}")


BENCH = Bench(ReplayBench, bench_replay, show_replay)
