"""``specgym bench footprint``: memory, seconds of loading, and two processes beside each other.

Each pool is loaded by processes of its own. What is loaded from is in the machine's memory already
where something has read it before; the first load of each pool is told apart from later ones.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console

from specgym.engine.cache_folder import cache_folder
from specgym.engine.pools.loading import parse_pool
from specgym.runs.bench.command import Bench
from specgym.runs.bench.configs import FootprintBench
from specgym.runs.bench.measuring import alternate, ratio_of_medians, row, show_rows
from specgym.runs.peers.byte_floor import NUMBER_BYTES
from specgym.runs.peers.process import WorkerProcess
from specgym.runs.results import describe_machine

WORKER = "specgym.runs.bench.footprint_worker"
ENDLESS = 1e9  # seconds
MOST_TOKENS = 1024  # of a text that is decoded for some seconds


def bench_footprint(config: FootprintBench, console: Console) -> dict[str, Any]:
    """Rows and ratios of ``specgym bench footprint``.

    Raises:
        ValueError: If a pool cannot be read.
        PeerError: If a process fails.
    """
    for pool in config.pools:
        parse_pool(pool)  # refuse it before the first one is loaded
    report: dict[str, Any] = {"rows": [], "ratios": {}}
    report["machine"] = describe_machine(torch.device("cpu"))
    for pool in config.pools:
        console.print(f"{pool}: {config.loads} processes, one after the other")
        rows, ratios = measure_pool(config, pool)
        report["rows"] += rows
        report["ratios"] |= ratios
    console.print(f"{config.pools[0]}: one process decoding, and two, {config.repeats} repeats")
    rows, ratios = measure_contention(config)
    report["rows"] += rows
    report["ratios"] |= ratios
    return report


def measure_pool(
    config: FootprintBench, pool: str
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Seconds of imports and loading, and resident memory at each stage, of fresh processes."""
    answers = []
    for _ in range(config.loads):
        with started_worker(config, pool) as worker:
            worker.ask({"tokens": config.tokens, "seconds": ENDLESS})
            answers.append(worker.greeting | worker.answer())
    loads = [answer["load_seconds"] for answer in answers]
    stages = {"imports": "import_bytes", "loading": "load_bytes", "a request": "bytes"}
    rows = [
        row(f"{pool}: imports", [answer["import_seconds"] for answer in answers], "s"),
        row(f"{pool}: first load", loads[:1], "s"),
        row(f"{pool}: later loads", loads[1:], "s"),
        *(
            row(f"{pool}: resident after {stage}", [each[key] / 1e6 for each in answers], "MB")
            for stage, key in stages.items()
        ),
    ]
    return [entry | {"pool": pool} for entry in rows], pool_ratios(label(pool), answers)


def pool_ratios(name: str, answers: Sequence[dict[str, float]]) -> dict[str, float]:
    """Seconds of loading, and memory in MB and over the pool's numbers in bf16.

    Memory is resident after a request; for the ratio without what the imports take.
    """
    loads = [answer["load_seconds"] for answer in answers]
    resident = statistics.median(answer["bytes"] for answer in answers)
    own = statistics.median(answer["bytes"] - answer["import_bytes"] for answer in answers)
    return {
        f"{name}_first_load_seconds": loads[0],
        f"{name}_load_seconds": statistics.median(loads[1:]),
        f"{name}_resident_mb": resident / 1e6,
        f"{name}_resident_over_bf16": own / (NUMBER_BYTES * answers[0]["num_parameters"]),
    }


def measure_contention(config: FootprintBench) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Seconds per token of a process that decodes alone, and of two that do at once."""
    with contextlib.ExitStack() as stack:
        pair = [
            stack.enter_context(started_worker(config, config.pools[0], index)) for index in (0, 1)
        ]
        runs = {
            "one process": lambda: seconds_per_token(config, pair[:1]),
            "two processes": lambda: seconds_per_token(config, pair),
        }
        seconds = alternate(runs, config.repeats)
    rows = [
        row(name, [1e3 * each for each in values], "ms/tok") for name, values in seconds.items()
    ]
    ratio = ratio_of_medians(seconds, "two processes", "one process")
    return rows, {"two_processes_over_one": ratio}


def seconds_per_token(config: FootprintBench, workers: Sequence[WorkerProcess]) -> float:
    """Mean over the processes of the seconds a token takes while all of them decode."""
    for worker in workers:
        worker.ask({"tokens": MOST_TOKENS, "seconds": config.seconds})
    answers = [worker.answer() for worker in workers]
    return statistics.mean(answer["seconds"] / answer["tokens"] for answer in answers)


@contextlib.contextmanager
def started_worker(config: FootprintBench, pool: str, index: int = 0) -> Iterator[WorkerProcess]:
    """A process that has loaded a pool; it ends with the block.

    Raises:
        PeerError: If it does not start.
    """
    command = [sys.executable, "-m", WORKER, pool, "--dtype", config.dtype]
    command += ["--exact"] if config.exact else []
    logs = cache_folder() / "footprint"  # they outlive the bench
    logs.mkdir(parents=True, exist_ok=True)
    worker = WorkerProcess(command, logs / f"{index}.log", {})
    try:
        yield worker
    finally:
        worker.close()


def label(pool: str) -> str:
    """A pool's name as part of a ratio's."""
    return re.sub(r"\W+", "_", pool)


BENCH = Bench(FootprintBench, bench_footprint, show_rows)
