"""What ``specgym bench peers`` measured, for the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from specgym.runs.bench.measuring import QUANTILES
from specgym.runs.tables import NumberTable


def show_peers(report: dict[str, Any]) -> None:
    """Prints tables, byte floor, ratios beside their aims, and who was not to be had."""
    console = Console(highlight=False)
    for pool in dict.fromkeys(row["pool"] for row in report["rows"]):
        console.print(pool_table(pool, report))
    if not all(row["same_precision"] for row in report["rows"]):
        console.print("* other precision: fewer bytes to read, and another text")
    floor = report["byte_floor"]
    console.print(
        f"byte floor: {floor['bytes'] / 1e6:.0f} MB at {floor['bytes_per_second'] / 1e9:.1f} GB/s "
        f"= {1e3 * floor['seconds']:.2f} ms; "
        f"our iteration: {1e3 * floor['iteration_seconds']:.2f} ms"
    )
    for name, ratio in report["ratios"].items():
        aim = report["aims"].get(name)
        console.print(f"{name}: {ratio:.4f}" + (f" (aim {aim})" if aim else ""), markup=False)
    for name, reason in report["absent"].items():
        console.print(f"{name}: not to be had: {reason}", markup=False, soft_wrap=True)


def pool_table(pool: str, report: dict[str, Any]) -> NumberTable:
    """Tokens per second on one pool, a line per contestant, within 80 columns."""
    title = f"{pool}: tokens per second, prompt included; share of tokens equal to ours"
    table = NumberTable(title, ("who",), (*QUANTILES, "equal", "weights"))
    for row in report["rows"]:
        if row["pool"] != pool:
            continue
        is_same = row["same_precision"]
        table.add_row(
            row["name"],
            *(f"{row['num_tokens'] / row[key]:.1f}" for key in QUANTILES),
            f"{row['equal_tokens']:.0%}" if is_same else "-",
            row["precision"] if is_same else f"{row['precision']} *",
        )
    return table
