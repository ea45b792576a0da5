"""``specgym bench``: timings as ratios, measured side by side in one run."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from rich.console import Console

from specgym.runs.bench_configs import BENCHES

USAGE = f"usage: specgym bench {' | '.join(BENCHES)} [options]"
SHOWN_BY = {"moe": "bench_plot", "peers": "peer_table"}  # the others show what they measured


def run_bench(arguments: list[str], parse: Callable[..., Any], console: Console) -> None:
    """Runs a bench and prints its table.

    Raises:
        ValueError: If there is no such bench.
        RuntimeError: If what it checks does not hold.
    """
    if not arguments or arguments[0] not in BENCHES:
        asked = arguments[0] if arguments else ""
        if asked in ("-h", "--help"):
            print(USAGE + "\n")
            for name, kind in BENCHES.items():
                print(f"  {name:<10} {(kind.__doc__ or '').splitlines()[0]}")
            return
        raise ValueError(f"bench: no bench {asked!r}\n{USAGE}")
    name, rest = arguments[0], arguments[1:]
    config = parse(f"bench {name}", rest, BENCHES[name])
    if name == "decode":
        find("bench", "run_decode")(config, console)
        return
    report = find(f"bench_{name}", f"bench_{name}")(config, console)
    find(SHOWN_BY.get(name, f"bench_{name}"), f"show_{name}")(report)
    if config.json is not None:
        find("results", "write_json")(config.json, report)
    if failed := report.get("failed"):
        raise RuntimeError(f"bench {name}: failed: {'; '.join(failed)}")
    if name in ("batch", "moe") and config.plot is not None:
        find("bench_plot" if name == "moe" else "bench_batch", f"plot_{name}")(report, config.plot)


def find(module: str, name: str) -> Callable[..., Any]:
    """A function of a bench, whose module is imported now."""
    return getattr(importlib.import_module(f"specgym.runs.{module}"), name)
