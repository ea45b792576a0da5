"""What ``specgym bench moe`` measured, as tables and as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from specgym.runs.tables import NumberTable


def show_moe(report: dict[str, Any]) -> None:
    """Prints the tables and ratios of a report."""
    console = Console()
    console.print(forward_table([r for r in report["rows"] if "tokens" in r]))
    console.print(utility_table([r for r in report["rows"] if "k" in r]))
    for name, ratio in report["ratios"].items():
        console.print(f"{name}: {ratio:.4f}")


def forward_table(rows: Sequence[dict[str, Any]]) -> NumberTable:
    """Milliseconds and unique experts, a line per number of tokens."""
    targets = list(dict.fromkeys(r["target"] for r in rows))
    numbers = (*(f"{target} ms" for target in targets), "unique experts", "if independent")
    title = "tokens verified: ms per forward, unique experts per layer"
    table = NumberTable(title, ("tokens",), numbers)
    for count in dict.fromkeys(r["tokens"] for r in rows):
        mine = {r["target"]: r for r in rows if r["tokens"] == count}
        experts = next(r for r in mine.values() if "unique_experts" in r)
        table.add_row(
            str(count),
            *(f"{mine[target]['median']:.1f}" for target in targets),
            f"{experts['unique_experts']:.2f}",
            f"{experts['expected_unique']:.2f}",
        )
    return table


def utility_table(rows: Sequence[dict[str, Any]]) -> NumberTable:
    """Utility of every static K, a line per target, workload and drafter.

    Green where the interval over requests lies above 1, red where it lies below.
    """
    title = (
        "utility of static K: tokens per second over those of K = 0\n"
        "(* where the 95 % interval over requests excludes 1)"
    )
    drafted = [r for r in rows if r["k"]]  # K = 0 is 1 by definition
    numbers = [f"K={k}" for k in dict.fromkeys(r["k"] for r in drafted)]
    table = NumberTable(title, ("target", "workload", "drafter"), numbers)
    for group in dict.fromkeys((r["target"], r["workload"], r["drafter"]) for r in rows):
        mine = [r for r in drafted if (r["target"], r["workload"], r["drafter"]) == group]
        table.add_row(*group, *map(utility_cell, mine))
    return table


def utility_cell(row: dict[str, Any]) -> str:
    """A utility, with a star and a colour where it is not 1 for certain."""
    text = f"{row['utility']:.2f}"
    if row["low"] <= 1.0 <= row["high"]:
        return text + " "
    return f"[{'green' if row['low'] > 1.0 else 'red'}]{text}*"


def plot_moe(report: dict[str, Any], path: Path) -> None:
    """Draws a report: cost of verifying on the left, utility of static K on the right."""
    from matplotlib.figure import Figure

    static = [r for r in report["rows"] if "k" in r]
    workloads = list(dict.fromkeys(r["workload"] for r in static))
    num_columns = 1 + math.ceil(len(workloads) / 2)
    figure = Figure(figsize=(4 * num_columns, 7), layout="constrained")
    axes = figure.subplots(2, num_columns, squeeze=False)
    plot_forwards(axes[0, 0], axes[1, 0], [r for r in report["rows"] if "tokens" in r])
    places = list(axes[:, 1:].T.flat)
    for place, workload in zip(places, workloads, strict=False):
        plot_utility(place, workload, [r for r in static if r["workload"] == workload])
    for place in places[len(workloads) :]:
        place.set_axis_off()
    figure.suptitle(f"{report['pools']['dense']} and {report['pools']['moe']}")
    figure.savefig(path)


def plot_utility(place: Any, workload: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draws a workload's utility of static K, a line per target and drafter."""
    for group in dict.fromkeys((r["target"], r["drafter"]) for r in rows):
        mine = [r for r in rows if (r["target"], r["drafter"]) == group]
        ks, values = [r["k"] for r in mine], [r["utility"] for r in mine]
        place.plot(ks, values, ".-", label=", ".join(group))
    place.axhline(1.0, color="grey", linewidth=0.8)
    place.set(title=workload, xlabel="static K", ylabel="utility", ylim=(0, None))
    place.legend()


def plot_forwards(top: Any, bottom: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draws milliseconds above, unique experts below, against tokens verified."""
    for target in ("dense", "moe"):
        mine = [r for r in rows if r["target"] == target]
        top.plot([r["tokens"] for r in mine], [r["median"] for r in mine], ".-", label=target)
    top.set(xlabel="tokens verified", ylabel="ms per forward", ylim=(0, None))
    top.legend()
    mixture = [r for r in rows if "unique_experts" in r]
    for key, label in (("unique_experts", "measured"), ("expected_unique", "independent tokens")):
        bottom.plot([r["tokens"] for r in mixture], [r[key] for r in mixture], ".-", label=label)
    bottom.set(xlabel="tokens verified", ylabel="unique experts per layer", ylim=(0, None))
    bottom.legend()
