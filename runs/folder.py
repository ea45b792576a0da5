"""A run's folder: its name, its settings, and whether it is finished."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

from specgym.runs.results import write_json

CONFIG_FILE = "config.json"
NOT_SETTINGS = ("overwrite", "runs", "name")


def open_run(config: Any, name: str, finished_file: str) -> Path:
    """The folder of a run, made if need be, with its settings written down.

    A stopped run of the same settings is opened as it is, to go on. ``config.overwrite`` replaces
    a finished run, and a stopped one of other settings.

    Raises:
        ValueError: If the name is no plain word, or another run of this name is in the way.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"name: must be letters, digits, '.', '_' and '-'; got {name!r}")
    folder = config.runs / name
    if folder.exists() and any(folder.glob("*.py")):
        raise ValueError(f"name: {folder} holds source code; choose another name")
    differing = differing_setting(folder, config)
    if (folder / finished_file).exists() or differing:
        if not config.overwrite:
            raise ValueError(
                f"{differing or f'name: run {name!r} is finished'} ({folder}); choose another "
                f"--name, or replace it with --overwrite"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG_FILE, as_plain(config))
    return folder


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
