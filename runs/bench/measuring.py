"""Runs timed in turn, and the rows of a bench's report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console

from specgym.runs.tables import NumberTable

Key = TypeVar("Key", bound=Hashable)
QUANTILES = ("median", "fastest", "slowest")


def row(name: str, values: Sequence[float], unit: str) -> dict[str, Any]:
    """One row of a report; of a rate (``tok/s``) the fastest value is the largest."""
    smallest, largest = min(values), max(values)
    is_rate = unit.endswith("/s")
    return {
        "name": name,
        "unit": unit,
        "median": statistics.median(values),
        "fastest": largest if is_rate else smallest,
        "slowest": smallest if is_rate else largest,
        "values": list(values),
    }


def alternate(runs: Mapping[Key, Callable[[], float]], repeats: int) -> dict[Key, list[float]]:
    """Seconds of several runs, alternated in rotated order so that drift hits all alike.

    Every run goes once before, unmeasured.
    """
    seconds: dict[Key, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    names = list(runs)
    for index in range(repeats):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(runs[name]())
    return seconds


def ratio_of_medians(seconds: Mapping[str, Sequence[float]], over: str, under: str) -> float:
    """Median seconds of one over another's."""
    return statistics.median(seconds[over]) / statistics.median(seconds[under])


def show_rows(report: dict[str, Any]) -> None:
    """Prints rows and ratios."""
    table = NumberTable(None, ("what",), QUANTILES)
    for each in report["rows"]:
        table.add_row(each["name"], *(f"{each[key]:.4g} {each['unit']}" for key in QUANTILES))
    console = Console()
    console.print(table)
    for name, ratio in report["ratios"].items():
        console.print(f"{name}: {ratio:.4f}")
