"""``specgym bench decode`` on tiny models, and what all benches share."""

import json
import subprocess
import sys

import pytest

from specgym.runs.bench import decode as bench_decode
from specgym.runs.bench.command import BENCHES
from specgym.runs.bench.measuring import alternate, row
from specgym.runs.cli import main

RATIOS = {
    "plain_over_transformers",
    "exact_over_fast",
    "over_byte_floor",
    "k0_over_bare",
    "bookkeeping_share",
}


@pytest.fixture
def options(tiny_spec):
    settings = {"pool": tiny_spec, "dtype": "float32", "new-tokens": 8, "repeats": 2, "pairs": 2}
    settings |= {"pair-tokens": 8}
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def test_rows_and_ratios(options, tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert main(["bench", "decode", *options, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["ratios"].keys() == RATIOS
    assert all(ratio > 0 for ratio in report["ratios"].values())
    rows = {row["name"]: row for row in report["rows"]}
    timed = {"transformers", "fast", "exact", "plain iteration, fast", "memory, read"}
    assert rows.keys() > timed
    assert rows["memory, read"]["unit"] == "GB/s"
    for name in ("transformers", "fast", "exact"):
        assert rows[name]["unit"] == "tok/s"
        assert rows[name]["fastest"] >= rows[name]["median"] >= rows[name]["slowest"]
    assert report["machine"]["torch"]
    assert "over_byte_floor: " in capsys.readouterr().out


def test_a_stopped_one_leaves_what_it_has_measured(options, tmp_path, monkeypatch, capsys):
    def stop(*others):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_decode, "bench_bookkeeping", stop)
    path = tmp_path / "bench.json"
    assert main(["bench", "decode", *options, "--json", str(path)]) == 130
    report = json.loads(path.read_text())
    assert report["ratios"].keys() == RATIOS - {"bookkeeping_share"}
    assert report["stopped"]
    assert "k0_over_bare: " in capsys.readouterr().out


def test_the_fastest_is_the_largest_rate_and_the_least_time():
    rate, time = row("a", [1.0, 3.0, 2.0], "tok/s"), row("b", [1.0, 3.0, 2.0], "ms/tok")
    assert (rate["fastest"], rate["median"], rate["slowest"]) == (3.0, 2.0, 1.0)
    assert (time["fastest"], time["median"], time["slowest"]) == (1.0, 2.0, 3.0)


def test_runs_alternate_in_rotated_order_after_one_that_is_not_measured():
    order = []
    runs = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    seconds = alternate(runs, 2)
    assert "".join(order) == "abc" + "abc" + "bca"
    assert seconds == {"a": [4, 9], "b": [5, 7], "c": [6, 8]}


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_is_there(name):
    bench = BENCHES[name].load()
    assert bench.settings().json is None
    assert (bench.plot is None) == (not hasattr(bench.settings, "plot"))
    assert callable(bench.measure)
    assert callable(bench.show)


def test_help_lists_all_and_imports_none(capsys):
    assert main(["bench", "--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name:<10} {entry.help}" in listed for name, entry in BENCHES.items())
    code = (
        "import sys; from specgym.runs.cli import main; main(['bench', '--help'])\n"
        "assert not {'torch', 'transformers', 'numba', 'matplotlib'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
