"""``specgym bench``: timings as ratios, measured side by side in one run."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from specgym.runs.bench.configs import SETTINGS


@dataclasses.dataclass(frozen=True)
class Bench:
    """What a bench is made of.

    Attributes:
        settings: Its options, a dataclass with ``json``, and ``plot`` where it draws.
        measure: The report from settings and a console that shows progress. Of the report,
            ``failed`` names checks that do not hold, ``stopped`` is true where the user stopped it.
        show: Prints a report.
        plot: Draws a report into a file.
    """

    settings: type
    measure: Callable[[Any, Console], dict[str, Any]]
    show: Callable[[dict[str, Any]], None]
    plot: Callable[[dict[str, Any], Path], None] | None = None


@dataclasses.dataclass(frozen=True)
class Entry:
    """A bench that may be run.

    Attributes:
        help: What it measures, in a line.
        module: The module whose ``BENCH`` it is; only what runs is imported.
    """

    help: str
    module: str

    def load(self) -> Bench:
        """The bench."""
        bench: Bench = importlib.import_module(f"specgym.runs.{self.module}").BENCH
        return bench


BENCHES = {
    "batch": Entry(
        "what batching gains, and what speculation adds at every batch size", "bench.batch"
    ),
    "decode": Entry(
        "plain decoding against transformers and the byte floor, and what the environment adds",
        "bench.decode",
    ),
    "drafters": Entry(
        "how often each drafter's first token is the target's, and its cost", "bench.drafters"
    ),
    "footprint": Entry(
        "memory, seconds of loading, and what two processes cost each other", "bench.footprint"
    ),
    "gpu": Entry(
        "captured forwards on a GPU: the eager results, every chain lossless, and the time",
        "bench.gpu",
    ),
    "moe": Entry("what verifying costs a mixture of experts, and which static K pays", "bench.moe"),
    "peers": Entry(
        "plain and speculative decoding against transformers, vLLM and llama.cpp", "peers.bench"
    ),
    "replay": Entry(
        "steps a second of recorded traces, one environment and thousands at once", "bench.replay"
    ),
    "soak": Entry(
        "thousands of requests through one engine: does memory grow, does anything fail",
        "bench.soak",
    ),
}
USAGE = f"usage: specgym bench {' | '.join(BENCHES)} [options]"


def run_bench(arguments: list[str], parse: Callable[..., Any], console: Console) -> None:
    """Runs a bench, prints its report, and writes and draws it where that is asked for.

    Raises:
        ValueError: If there is no such bench.
        RuntimeError: If what it checks does not hold.
        KeyboardInterrupt: If it was stopped, after the report of what it had measured.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE + "\n")
        for name, entry in BENCHES.items():
            print(f"  {name:<10} {entry.help}")
        return
    if not arguments or arguments[0] not in BENCHES:
        raise ValueError(f"bench: no bench {arguments[0] if arguments else ''!r}\n{USAGE}")
    name, rest = arguments[0], arguments[1:]
    config = parse(f"bench {name}", rest, SETTINGS[name])
    from specgym.runs.results import write_json  # loads torch, as the bench does

    bench = BENCHES[name].load()
    report = bench.measure(config, console)
    bench.show(report)
    if config.json is not None:
        write_json(config.json, report)
    if failed := report.get("failed"):
        raise RuntimeError(f"bench {name}: failed: {'; '.join(failed)}")
    if report.get("stopped"):
        raise KeyboardInterrupt
    if bench.plot is not None and config.plot is not None:
        bench.plot(report, config.plot)
