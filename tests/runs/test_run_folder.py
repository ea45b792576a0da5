"""A run's folder has one writer, and says what to do where the disk is full."""

import os
import signal
import subprocess
import sys

import pytest

from specgym.runs.cli import main
from specgym.runs.run_folder import LOCK_FILE, one_writer

HOLD = """
import sys, time
from pathlib import Path
from specgym.runs.run_folder import one_writer
with one_writer(Path(sys.argv[1]), Path(sys.argv[2]), "", option="--name"):
    print("held", flush=True)
    time.sleep(600)
"""


def write(output, lock=None):
    return one_writer(output, lock or output / LOCK_FILE, "go on", option="--name")


@pytest.fixture
def commands(tiny_spec, short_prompts, trace_file, tmp_path):
    """For every command that writes a folder: its arguments, what it writes, and the lock."""
    live = ("--pool", tiny_spec, "--prompts", str(short_prompts), "--workload", "all")
    live = (*live, "--clock", "counting", "--dtype", "float32", "--max-new-tokens", "8")
    here, traces = ("--runs", str(tmp_path), "--name", "run"), ("--traces", str(trace_file))
    run, file = tmp_path / "run", tmp_path / "t.npz"
    once = ("--controllers", "none", "--split", "all", "--num-requests", "1")
    few = ("--num-requests", "6", "--cost-steps", "9")
    learns = {name: ("train", name, "--env", "replay", *traces, *here) for name in ("dqn", "ucb")}
    return {
        "compare": (("compare", *live, *once, *here), run, run / LOCK_FILE),
        "train": (("train", "ppo", *live, *here), run, run / LOCK_FILE),
        "replayed network": (learns["dqn"], run, run / LOCK_FILE),
        "replayed bandit": (learns["ucb"], run, run / LOCK_FILE),
        "imitation": (("train", "imitation", *learns["dqn"][2:]), run, run / LOCK_FILE),
        "record": (("record", *live, *few, "--out", str(file)), file, tmp_path / "t.npz.lock"),
    }


@pytest.mark.parametrize(
    "name", ["compare", "train", "replayed network", "replayed bandit", "imitation", "record"]
)
def test_a_second_writer_is_refused_with_the_first_ones_process(commands, capsys, name):
    arguments, output, lock = commands[name]
    with write(output, lock):
        before = sorted(output.parent.rglob("*"))
        assert main(list(arguments)) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"is being written by process {os.getpid()}" in said
        assert "choose another --" in said
        assert sorted(output.parent.rglob("*")) == before


def test_the_lock_of_a_killed_process_is_taken_over(commands, tmp_path, capsys):
    arguments, output, lock = commands["compare"]
    holder = [sys.executable, "-c", HOLD, str(output), str(lock)]
    with subprocess.Popen(holder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert main(list(arguments)) == 2
        assert f"process {process.pid}" in " ".join(capsys.readouterr().err.split())
        process.send_signal(signal.SIGKILL)
    assert lock.read_text() == f"{process.pid}\n"
    assert main(list(arguments)) == 0
    assert not lock.exists()
    lines = (output / "steps.jsonl").read_text().splitlines()
    assert len(set(lines)) == len(lines)


def test_a_lock_is_gone_with_its_writer_and_free_for_the_next(tmp_path):
    for _ in range(2):
        with write(tmp_path / "run"):
            assert (tmp_path / "run" / LOCK_FILE).read_text() == f"{os.getpid()}\n"
        assert list((tmp_path / "run").iterdir()) == []
    with pytest.raises(KeyboardInterrupt), write(tmp_path / "run"):
        raise KeyboardInterrupt
    assert list((tmp_path / "run").iterdir()) == []


def test_overwriting_keeps_the_lock(commands, tmp_path, capsys):
    arguments, output, lock = commands["compare"]
    assert main(list(arguments)) == 0
    with write(output, lock):
        assert main([*arguments, "--overwrite"]) == 2
        assert (output / "results.json").exists()
    assert main([*arguments, "--overwrite"]) == 0
