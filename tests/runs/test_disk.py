"""A full disk is told as one sentence: the file, what is kept, and how to go on."""

import errno
import json
import os
import subprocess
import threading

import pytest
import torch
from safetensors.torch import save_file

from specgym.runs import progress, results
from specgym.runs.cli import main
from specgym.runs.disk import DiskFullError, quiet_threads, writing

NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a write's: it names no file


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of so many kilobytes, and resizes it."""
    home = tmp_path / "disk"
    home.mkdir()

    def mount(kilobytes):
        again = "remount," if home.is_mount() else ""
        options = f"{again}size={kilobytes}k"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(home)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no file system can be mounted here")
        return home

    yield mount
    if home.is_mount():
        subprocess.run(["umount", "-l", str(home)], check=True)


@pytest.fixture
def command(tiny_spec, short_prompts, tmp_path):
    """The arguments of a small comparison, and those of another command on the same models."""
    live = ("--pool", tiny_spec, "--prompts", str(short_prompts), "--workload", "all")
    live = (*live, "--clock", "counting", "--dtype", "float32", "--max-new-tokens", "24")

    def build(*arguments, runs=tmp_path):
        if arguments:
            return [*arguments[:1], *live, *arguments[1:]]
        more = ("--split", "all", "--num-requests", "4", "--controllers", "none,ucb")
        return ["compare", *live, *more, "--runs", str(runs), "--name", "run"]

    return build


def said(capsys):
    return " ".join(capsys.readouterr().err.split())


def raises(*_, **__):
    raise NO_ROOM


@pytest.mark.parametrize(
    ("module", "name", "file"),
    [
        (progress, "save_state", "state.npz"),
        (progress.json, "dumps", "steps.jsonl"),
        (results.os, "replace", "config.json"),
    ],
)
def test_the_file_is_named_and_how_to_go_on(command, capsys, monkeypatch, module, name, file):
    with monkeypatch.context() as patch:
        if name == "dumps":  # the events' own text is made by it too
            patch.setattr(progress, "json", type("Full", (), {"dumps": raises}))
        else:
            patch.setattr(module, name, raises)
        assert main(command()) == 1
    told = said(capsys)
    assert f"run/{file}: cannot be written, for the disk is full" in told
    assert "is kept in" in told
    assert "make room, and the same command with --name run goes on" in told
    assert main(command()) == 0


def test_a_result_outside_of_a_run_is_named_too(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(results.os, "replace", raises)
        with pytest.raises(DiskFullError, match=r"figures\.json: cannot be written"):
            results.write_json(tmp_path / "figures.json", {})
    assert list(tmp_path.iterdir()) == []


def test_other_errors_stay_what_they_are(tmp_path):
    for error in (OSError(errno.EACCES, "no"), RuntimeError("a fault"), KeyError("k")):
        with pytest.raises(type(error)) as caught, writing(tmp_path / "x"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize("kilobytes", [16, 24, 48, 64])
def test_a_comparison_on_a_small_disk_goes_on_once_there_is_room(
    command, capsys, tmp_path, small_disk, kilobytes
):
    assert main(command()) == 0
    disk = small_disk(kilobytes)
    capsys.readouterr()
    assert main(command(runs=disk)) == 1
    told = said(capsys)
    assert f"{disk / 'run'}" in told
    assert "cannot be written, for the disk is full" in told
    assert "Traceback" not in told
    small_disk(10_000)
    assert main(command(runs=disk)) == 0
    results = [json.loads((home / "run/results.json").read_text()) for home in (tmp_path, disk)]
    tokens = [{n: e["tokens"] for n, e in each["controllers"].items()} for each in results]
    assert tokens[0] == tokens[1]
    lines = [sorted((home / "run/steps.jsonl").open()) for home in (tmp_path, disk)]
    assert len(lines[0]) == len(lines[1])


def test_other_commands_on_a_small_disk_say_the_same(command, capsys, small_disk):
    disk = small_disk(200)
    training = command("train", "--ppo.num-steps", "256", "--runs", str(disk))
    recording = ("record", "--num-requests", "12", "--cost-steps", "9", "--out")
    for arguments, kilobytes in ((training, 200), (command(*recording, f"{disk}/t.npz"), 32)):
        small_disk(kilobytes)
        assert main(arguments) == 1
        told = said(capsys)
        assert "cannot be written, for the disk is full" in told
        assert f"is kept in {disk}" in told
        small_disk(10_000)
        assert main(arguments) == 0
        subprocess.run(["find", str(disk), "-mindepth", "1", "-delete"], check=True)


def test_libraries_that_hide_the_system_are_understood(small_disk):
    disk, tensor = small_disk(64), torch.zeros(100_000)
    with pytest.raises(DiskFullError, match=r"a\.safetensors"), writing(disk / "a.safetensors"):
        save_file({"x": tensor}, disk / "a.safetensors")
    with pytest.raises(DiskFullError, match=r"a\.pt"), writing(disk / "a.pt"):
        torch.save(tensor, disk / "a.pt")


def test_a_thread_that_finds_the_disk_full_shows_no_traceback(capsys):
    for error, is_shown in ((NO_ROOM, False), (ValueError("other"), True)):

        def fail(error=error):
            raise error

        before = threading.excepthook
        threading.excepthook = threading.__excepthook__
        try:
            with quiet_threads():
                thread = threading.Thread(target=fail)
                thread.start()
                thread.join()
        finally:
            threading.excepthook = before
        assert ("Traceback" in capsys.readouterr().err) == is_shown
