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


def open_run(runs: Path, name: str, finished_file: str, overwrite: bool) -> Path:
    """The folder of a run, made if need be.

    Raises:
        ValueError: If the name is no plain word, or a finished run of this name is in the way.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError(f"name: must be letters, digits, '.', '_' and '-'; got {name!r}")
    folder = runs / name
    if folder.exists() and any(folder.glob("*.py")):
        raise ValueError(f"name: {folder} holds source code; choose another name")
    if (folder / finished_file).exists():
        if not overwrite:
            raise ValueError(
                f"name: run {name!r} is finished ({folder / finished_file}); choose another "
                f"--name, or replace it with --overwrite"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_same_config(folder: Path, config: Any) -> None:
    """Writes the settings down, or checks that a stopped run was begun with the same.

    Raises:
        ValueError: If a setting differs; the message names it.
    """
    settings = as_plain(config)
    path = folder / CONFIG_FILE
    if not path.exists():
        write_json(path, settings)
        return
    before = json.loads(path.read_text())
    for key in settings.keys() | before.keys():
        if key not in NOT_SETTINGS and settings.get(key) != before.get(key):
            raise ValueError(
                f"{key}: the stopped run in {folder} was begun with {before.get(key)!r}, this "
                f"one asks for {settings.get(key)!r}; give the same settings to go on with it, "
                f"or choose another --name"
            )


def as_plain(config: Any) -> dict[str, Any]:
    """A configuration as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))
