"""What ``specgym bench moe`` measured, as tables and as a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def show_moe(report: dict[str, Any]) -> None:
    """Prints the tables and ratios of a report."""
    console = Console()
    timed = [r for r in report["rows"] if "tokens" in r]
    counts = list(dict.fromkeys(str(r["tokens"]) for r in timed))
    table = Table("tokens", *counts, title="ms per forward")
    for name in dict.fromkeys(r["name"].rsplit(",", 1)[0] for r in timed):
        mine = [r for r in timed if r["name"].rsplit(",", 1)[0] == name]
        table.add_row(name, *(f"{r['median']:.1f}" for r in mine))
        for key in ("unique_experts", "expected_unique"):
            if key in mine[0]:
                label = f"{name}: {key.replace('_', ' ')}"
                table.add_row(label, *(f"{r[key]:.1f}" for r in mine))
    console.print(table)
    static = [r for r in report["rows"] if "k" in r]
    table = Table("static K", *dict.fromkeys(str(r["k"]) for r in static), title="utility")
    for group in dict.fromkeys((r["target"], r["workload"], r["drafter"]) for r in static):
        mine = [r for r in static if (r["target"], r["workload"], r["drafter"]) == group]
        table.add_row(", ".join(group), *(f"{r['utility']:.2f}" for r in mine))
    console.print(table)
    for name, ratio in report["ratios"].items():
        console.print(f"{name}: {ratio:.4f}")


def plot_moe(report: dict[str, Any], path: Path) -> None:
    """Draws a report: cost of verifying on the left, utility of static K on the right."""
    from matplotlib.figure import Figure

    static = [r for r in report["rows"] if "k" in r]
    workloads = list(dict.fromkeys(r["workload"] for r in static))
    figure = Figure(figsize=(4 * (1 + math.ceil(len(workloads) / 2)), 7), layout="constrained")
    axes = figure.subplots(2, 1 + math.ceil(len(workloads) / 2), squeeze=False)
    plot_forwards(axes[0, 0], axes[1, 0], [r for r in report["rows"] if "tokens" in r])
    for place, workload in zip(axes[:, 1:].T.flat, workloads, strict=False):
        for key in dict.fromkeys((r["target"], r["drafter"]) for r in static):
            mine = [
                r for r in static if (r["target"], r["drafter"], r["workload"]) == (*key, workload)
            ]
            place.plot(
                [r["k"] for r in mine], [r["utility"] for r in mine], ".-", label=", ".join(key)
            )
        place.axhline(1.0, color="grey", linewidth=0.8)
        place.set(title=workload, xlabel="static K", ylabel="utility")
        place.legend()
    figure.suptitle(f"{report['pools']['dense']} and {report['pools']['moe']}")
    figure.savefig(path)


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
