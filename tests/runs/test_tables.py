"""Tables of numbers: whole at any width."""

import ast
import re
from pathlib import Path

import pytest
from rich.console import Console

from specgym.runs import replay, results, tables
from specgym.runs.tables import NumberTable

LONG = "ucb:state=runs/a-folder-with-a-long-name/of-a-user/ucb-moe/state.npz:scope=request"
ENTRY = {
    "speedup": 3.125,
    "ci95": [2.11, 12.75],
    "headroom_share": 0.87,
    "regret": {"per_step": 0.123},
    "subject_minus_this": {"difference": -1.5, "ci95": [-10.25, -0.75]},
    "request_speedup": {"median": 1.25, "worst": 0.75},
    "controller_seconds": 0.5,
    "iterations": 1000,
    "speedup_vs_fast": 2.875,
    "share_k0": {"executed": 0.45},
    "mean_accepted": 1.5,
    "share_chains": {"target": 0.25, "small>mid>target": 0.75},
}
REPLAYED = {"pool": "p", "split": "held-out", "requests": [], "subject": "oracle"}
COMPARED = {"pool": "p", "workload": "w"}


def printed(table, width):
    console = Console(width=width, force_terminal=False, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def made(kind):
    """A table with a long name, and the texts of its numbers."""
    entries = {LONG: ENTRY, "oracle": ENTRY, "none": ENTRY}
    if kind == "replay":
        table = replay.table_of(REPLAYED | {"entries": entries})
        return table, ("3.125", "2.11-12.75", "87%", "0.123", "-1.50", "-10.25", "-0.75")
    if kind == "chains":
        chains = [("small", "mid", "target"), ("ngram", "target")]
        table = results.chains_table({"controllers": entries}, chains)
        return table, ("25%", "75%", "0%")
    table = results.results_table(COMPARED | {"controllers": entries})
    return table, ("3.125", "2.11-12.75", "1.25", "0.75", "2.875", "45%", "1.50", "0.50")


@pytest.mark.parametrize("kind", ["replay", "compare", "chains"])
@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 100, 200])
def test_numbers_are_whole_and_names_fold(kind, width):
    table, numbers = made(kind)
    text = printed(table, width)
    assert "\u2026" not in text
    for number in numbers:
        assert len(re.findall(rf"(?<![\d.]){re.escape(number)}(?![\d%])", text)) >= 2
    assert max(map(len, text.splitlines())) <= width
    folded = re.sub(r"\s", "", "".join(line[:24] for line in text.splitlines()))
    assert LONG[:10] in folded
    assert LONG[-4:] in re.sub(r"\s", "", text)


def test_at_80_columns_a_long_name_folds_beside_its_numbers():
    lines = printed(made("replay")[0], 80).splitlines()
    row = next(line for line in lines if "ucb:state" in line)
    assert "3.125" in row
    assert "2.11-12.75" in row


def test_a_table_that_fits_looks_as_ever():
    table = NumberTable("title", ("name",), ("total", "share"))
    table.add_row("none", "1.000", "0%")
    lines = [line.rstrip() for line in printed(table, 80).splitlines()]
    assert lines[0] == "title"
    assert lines[2].split() == ["name", "total", "share"]
    assert lines[4].split() == ["none", "1.000", "0%"]


def test_every_table_of_the_commands_is_one_of_these():
    home = Path(tables.__file__).parent
    for path in home.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "rich.table":
                assert path.name == "tables.py", f"{path.name}: use NumberTable"
