import json

import pytest

from specgym.envs.synthetic import synthetic_traces
from specgym.envs.traces import save_traces
from specgym.runs.cli import main

SMALL = ("--num-envs", "16", "--single-steps", "50", "--vector-steps", "5", "--repeats", "2")


def test_it_reports_steps_a_second_of_both(tmp_path, capsys):
    save_traces(tmp_path / "some.npz", synthetic_traces(4, 12))
    path = tmp_path / "replay.json"
    arguments = ["--traces", str(tmp_path / "some.npz"), *SMALL, "--json", str(path)]
    assert main(["bench", "replay", *arguments]) == 0
    report = json.loads(path.read_text())
    assert set(report["ratios"]) == {"single_steps_per_second", "vector_steps_per_second"}
    for row in report["rows"]:
        assert len(row["values"]) == 2
        assert min(row["values"]) > 0
        assert report["ratios"][f"{row['name']}_steps_per_second"] == row["median"]
    assert (report["num_traces"], report["num_actions"], report["num_envs"]) == (4, 36, 16)
    printed = capsys.readouterr().out
    assert "single_steps_per_second: " in printed
    assert "vector_steps_per_second: " in printed


@pytest.mark.parametrize("name", ["num-envs", "single-steps", "vector-steps", "repeats"])
def test_settings_below_one_are_refused(name, capsys):
    assert main(["bench", "replay", f"--{name}", "0"]) == 2
    assert f"{name.replace('-', '_')}: must be >= 1; got 0" in capsys.readouterr().err
