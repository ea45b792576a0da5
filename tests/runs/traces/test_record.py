"""``specgym record``: a file from a pool on disk; stopped, resumed, checked, refused."""

import json

import numpy as np
import pytest

from specgym.envs.replay.traces import load_traces
from specgym.runs.cli import main
from specgym.runs.traces import record as module


@pytest.fixture
def command(tiny_spec, short_prompts, tmp_path):
    """Runs ``specgym record`` on a tiny pool; more options can be given."""

    def run(*more, out=None):
        return main(
            [
                "record", "--pool", tiny_spec, "--prompts", str(short_prompts), "--workload", "all",
                "--num-requests", "6", "--max-new-tokens", "12", "--cost-steps", "40",
                "--clock", "counting", "--out", str(out or tmp_path / "t.npz"), *more,
            ]
        )  # fmt: skip

    return run


def test_a_file_is_recorded_and_holds_against_the_engine(command, tmp_path, capsys):
    assert command() == 0
    traces = load_traces(tmp_path / "t.npz")
    assert [t.split for t in traces.traces].count("held-out") == 2
    assert len({t.request_id for t in traces.traces}) == 6
    assert traces.costs is not None
    assert not (tmp_path / "t.npz.parts").exists()
    assert "6 requests" in capsys.readouterr().err
    assert command("--check", "--json", str(tmp_path / "check.json")) == 0
    figures = json.loads((tmp_path / "check.json").read_text())
    assert figures["different"] == 0
    assert figures["iterations"] > 20
    assert figures["worst_plan_error"] < 0.05
    assert "counts equal in" in capsys.readouterr().out


def test_a_stopped_recording_goes_on_and_ends_the_same(command, tmp_path, monkeypatch):
    whole = tmp_path / "whole.npz"
    assert command(out=whole) == 0
    recorded = []
    original = module.Recorder.record

    def stopping(self, request, *rest):
        recorded.append(request.id)
        if len(recorded) == 4:
            raise KeyboardInterrupt
        return original(self, request, *rest)

    monkeypatch.setattr(module.Recorder, "record", stopping)
    assert command() == 130
    assert not (tmp_path / "t.npz").exists()
    assert command() == 0
    assert len(recorded) == 4 + 3
    with np.load(whole) as first, np.load(tmp_path / "t.npz") as second:
        assert set(first.files) == set(second.files)
        for name in set(first.files) - {"header"}:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_a_stopped_recording_of_other_settings_is_refused(command, monkeypatch, capsys, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module.Recorder, "record", stop)
        assert command() == 130
    assert command("--max-new-tokens", "14") == 2
    assert "max_new_tokens: the stopped recording" in capsys.readouterr().err
    assert command("--max-new-tokens", "14", "--overwrite") == 0
    assert max(map(len, load_traces(tmp_path / "t.npz").traces)) == 14


def test_a_file_that_is_there_is_kept(command, capsys, tmp_path):
    assert command() == 0
    before = (tmp_path / "t.npz").read_bytes()
    assert command() == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "t.npz").read_bytes() == before


def test_costs_are_measured_again(command, tmp_path):
    assert command() == 0
    before = load_traces(tmp_path / "t.npz")
    assert command("--costs", "--seed", "5") == 0
    after = load_traces(tmp_path / "t.npz")
    np.testing.assert_array_equal(before.traces[3].matches, after.traces[3].matches)
    assert after.costs.seconds == pytest.approx(before.costs.seconds, rel=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-requests", "0"], "num_requests: must be >= 1"),
        (["--num-requests", "99"], "num_requests: the workload has"),
        (["--costs", "--check"], "choose one"),
        (["--out", "t.txt"], "must end in .npz"),
        (["--check", "--out", "none.npz"], "there is no file"),
    ],
)
def test_wrong_settings_are_refused(command, capsys, options, message):
    assert command(*options) == 2
    assert message in capsys.readouterr().err


def test_another_pool_workload_or_budget_is_refused(command, capsys, tmp_path):
    assert command() == 0
    for options, message in (
        (["--k-values", "1,2"], "traces: they were recorded with"),
        (["--max-new-tokens", "13"], "max_new_tokens: the file was recorded with 12"),
        (["--no-exact"], "exact: the file was recorded with True"),
    ):
        assert command("--check", *options) == 2
        assert message in capsys.readouterr().err


def test_a_table_that_is_wrong_is_found_out(command, tmp_path, capsys):
    """The negative control: one count off by one fails the check."""
    assert command() == 0
    path = tmp_path / "t.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["matches"] = np.where(arrays["matches"] > 0, arrays["matches"] - 1, 0).astype(np.uint8)
    np.savez(path, **arrays)
    assert command("--check") == 1
    assert "counts differ" in capsys.readouterr().err
