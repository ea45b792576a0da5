"""A run's folder: its name, its settings, its one writer, and whether it is finished."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from specgym.runs.disk import DiskFullError, quiet_threads, writing
from specgym.runs.results import write_json

CONFIG_FILE = "config.json"
LOCK_FILE = "writer.lock"
NOT_SETTINGS = ("overwrite", "runs", "name")


@contextlib.contextmanager
def open_run(config: Any, name: str, finished_file: str, *, goes_on: bool = True) -> Iterator[Path]:
    """The folder of a run, made if need be, with its settings written down; this process writes it.

    A stopped run of the same settings is opened as it is, to go on. ``config.overwrite`` replaces
    a finished run, and a stopped one of other settings.

    Args:
        config: Settings.
        name: Of the folder, under ``config.runs``.
        finished_file: The file whose presence means that the run is finished.
        goes_on: Whether a stopped run goes on; some begin anew.

    Raises:
        ValueError: If the name is no plain word, another run of this name is in the way, or another
            process is writing it.
        DiskFullError: If the disk is full.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"name: must be letters, digits, '.', '_' and '-'; got {name!r}")
    folder = config.runs / name
    if folder.exists() and any(folder.glob("*.py")):
        raise ValueError(f"name: {folder} holds source code; choose another name")
    way_out = f"make room, and the same command with --name {name} begins anew"
    if goes_on:
        way_out = kept_in(folder, f" with --name {name}")
    with one_writer(folder, folder / LOCK_FILE, way_out, option="--name"):
        differing = differing_setting(folder, config)
        if (folder / finished_file).exists() or differing:
            if not config.overwrite:
                raise ValueError(
                    f"{differing or f'name: run {name!r} is finished'} ({folder}); choose another "
                    f"--name, or replace it with --overwrite"
                )
            clear(folder)
        write_json(folder / CONFIG_FILE, as_plain(config))
        yield folder


@contextlib.contextmanager
def one_writer(output: Path, lock: Path, way_out: str, *, option: str) -> Iterator[None]:
    """Keeps other processes from writing the same output; a killed one's lock is free at once.

    Args:
        output: What is written: a folder, or a file.
        lock: A file that is there while somebody writes, and holds the process's id.
        way_out: What is kept where the disk is full, and how to go on.
        option: The option that names the output.

    Raises:
        ValueError: If another process is writing.
        DiskFullError: If the disk is full.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with acquire(lock, output, option) as file:
        try:
            with writing(output), quiet_threads():
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
                yield
        except DiskFullError as error:
            raise DiskFullError(f"{error}; {way_out}") from error
        finally:
            lock.unlink(missing_ok=True)  # still held: who opened it meanwhile sees that it is gone


def kept_in(folder: Path, options: str = "") -> str:
    """What is kept where the disk is full, and how to go on."""
    return (
        f"what was finished before is kept in {folder}; make room, and the same command{options} "
        f"goes on"
    )


def acquire(lock: Path, output: Path, option: str) -> TextIO:
    """The lock's file, held by this process until it is closed.

    Raises:
        ValueError: If another process holds it.
    """
    while True:
        file = lock.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                file.seek(0)
                owner = file.read().strip() or "another"
            raise ValueError(
                f"{option.removeprefix('--')}: {output} is being written by process {owner}; wait "
                f"for it or stop it, or choose another {option}"
            ) from None
        if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            return file
        file.close()  # its holder removed it while it was opened here


def clear(folder: Path) -> None:
    """Removes what a run's folder holds, all but its lock."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()


def differing_setting(folder: Path, config: Any) -> str:
    """What a stopped run in this folder was begun with instead; empty if there is no such thing."""
    path = folder / CONFIG_FILE
    if not path.exists():
        return ""
    settings, before = as_plain(config), json.loads(path.read_text())
    for key in sorted(settings.keys() | before.keys()):
        ours, theirs = settings.get(key), before.get(key)
        if key not in NOT_SETTINGS and ours != theirs:
            return f"{key}: the stopped run was begun with {theirs!r}, this one asks for {ours!r}"
    return ""


def as_plain(config: Any) -> dict[str, Any]:
    """A configuration as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))
