"""``specgym bench footprint`` on a tiny pool: every row and ratio it promises."""

import json

import pytest

from specgym.runs.bench.footprint import FootprintBench, label, pool_ratios
from specgym.runs.cli import main


@pytest.fixture
def options(tiny_spec):
    settings = {"pools": tiny_spec, "dtype": "float32", "loads": 2, "tokens": 4, "repeats": 1}
    settings |= {"seconds": 0.1}
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def test_rows_and_ratios(options, tiny_spec, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPECGYM_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "footprint.json"
    options[1] = f"target={tiny_spec.partition('target=')[2]}"  # a comma would part two pools
    assert main(["bench", "footprint", *options, "--json", str(path)]) == 0
    assert "two_processes_over_one: " in capsys.readouterr().out
    report = json.loads(path.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    pool = options[1]
    stages = [f"{pool}: resident after {stage}" for stage in ("imports", "loading", "a request")]
    loads = [f"{pool}: {what}" for what in ("imports", "first load", "later loads")]
    assert list(rows) == [*loads, *stages, "one process", "two processes"]
    resident = [rows[stage]["median"] for stage in stages]
    assert 0 < resident[0] <= resident[1] <= resident[2]
    assert all(row["median"] > 0 for row in rows.values())
    names = ("first_load_seconds", "load_seconds", "resident_mb", "resident_over_bf16")
    ratios = {f"{label(pool)}_{name}" for name in names} | {"two_processes_over_one"}
    assert report["ratios"].keys() == ratios
    assert report["ratios"]["two_processes_over_one"] > 0


def test_memory_is_compared_without_imports_and_later_loads_are_told_apart():
    answers = [
        {"load_seconds": 9.0, "bytes": 50e6, "import_bytes": 10e6, "num_parameters": 10e6},
        {"load_seconds": 2.0, "bytes": 50e6, "import_bytes": 10e6, "num_parameters": 10e6},
    ]
    assert pool_ratios("x", answers) == {
        "x_first_load_seconds": 9.0,
        "x_load_seconds": 2.0,
        "x_resident_mb": 50.0,
        "x_resident_over_bf16": 2.0,
    }


def test_names_of_pools_go_into_names_of_ratios():
    assert label("smollm2-moe:experts=16") == "smollm2_moe_experts_16"


def test_settings_that_cannot_work_are_refused(options, capsys):
    with pytest.raises(ValueError, match="pools: must name a pool"):
        FootprintBench(pools=())
    for name, value in (("loads", "1"), ("tokens", "0"), ("repeats", "0"), ("seconds", "0")):
        assert main(["bench", "footprint", *options, f"--{name}", value]) == 2
        assert f"{name}: must be >" in capsys.readouterr().err
    assert main(["bench", "footprint", "--pools", "nothing"]) == 2
    assert "pool: 'nothing' is neither" in capsys.readouterr().err
