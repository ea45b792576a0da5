"""``specgym bench batch`` on tiny models: every row, ratio and file it promises."""

import json

import pytest

from specgym.runs.bench.configs import BatchBench
from specgym.runs.cli import main


@pytest.fixture
def options(tiny_spec, short_prompts):
    settings = {"pool": tiny_spec, "dtype": "float32", "repeats": 1, "new-tokens": 6}
    settings |= {
        "request-tokens": 4,
        "prompt-tokens": 40,
        "sizes": "1,3",
        "workload": "left+right",
        "prompts": short_prompts,
    }
    return [text for key, value in settings.items() for text in (f"--{key}", str(value))]


def test_rows_ratios_and_plot(options, tmp_path, capsys):
    path, plot = tmp_path / "batch.json", tmp_path / "batch.png"
    assert main(["bench", "batch", *options, "--json", str(path), "--plot", str(plot)]) == 0
    printed = capsys.readouterr()
    assert "batch3_over_1" in printed.out
    assert "run 16 of 16: " in printed.err
    assert plot.read_bytes()[1:4] == b"PNG"
    report = json.loads(path.read_text())
    rows = {(row["batch"], row["mode"]): row for row in report["rows"]}
    modes = ("plain", "two-level", "three-level", "scheduled")
    assert rows.keys() == {(size, mode) for size in (1, 3) for mode in modes}
    assert rows[1, "plain"]["speedup"] == rows[3, "plain"]["speedup"] == 1.0
    assert rows[3, "three-level"]["controller"] == "static:ngram>draft@3"
    assert all(row["median"] > 0 for row in rows.values())
    plain = rows[3, "plain"]["median"] / rows[1, "plain"]["median"]
    assert report["ratios"]["batch3_over_1"] == pytest.approx(plain)
    assert report["ratios"]["scheduled_speedup_at_3"] == rows[3, "scheduled"]["speedup"]


def test_plans_of_other_levels_are_refused(options, capsys):
    assert main(["bench", "batch", *options, "--three-level", "draft@3"]) == 2
    assert "must have 3 levels" in capsys.readouterr().err
    assert main(["bench", "batch", *options, "--two-level", "none"]) == 2


def test_counts_below_one_are_refused():
    with pytest.raises(ValueError, match="must be >= 1"):
        BatchBench(sizes=(0,))
    with pytest.raises(ValueError, match="must be >= 1"):
        BatchBench(sizes=())


def test_prompts_that_are_too_long_are_left_out(options, capsys):
    assert main(["bench", "batch", *options, "--prompt-tokens", "2"]) == 2
    assert "no prompt of 'left+right' has 2 tokens or fewer" in capsys.readouterr().err
