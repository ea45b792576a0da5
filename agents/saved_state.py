"""What a controller has learned, in one file that numpy alone can read."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = "specgym-state"
SCHEMA_VERSION = 1
ARRAY = "array:"  # marks where in the tree an array belongs


def save_state(path: Path, controller: str, state: Mapping[str, Any]) -> None:
    """Writes a controller's ``state_dict`` into a ``.npz`` file, whole or not at all.

    Args:
        path: The file.
        controller: The controller's name.
        state: Mappings and lists of JSON values and arrays.
    """
    arrays: dict[str, np.ndarray] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays[f"{ARRAY}{len(arrays)}"] = value
            return f"{ARRAY}{len(arrays) - 1}"
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Mapping):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    header = {"schema": SCHEMA, "version": SCHEMA_VERSION, "controller": controller}
    text = np.array(json.dumps(header | {"state": plain(state)}))
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, header=text, **arrays)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_state(path: Path, controller: str, way_out: str = "") -> dict[str, Any]:
    """The state of a file, for the controller of this name.

    Args:
        path: The file.
        controller: The name it was saved under.
        way_out: What to do where the file cannot be used; by default, to train the controller.

    Raises:
        ValueError: If there is no such file, it cannot be read, or is another controller's.
    """
    way_out = way_out or f"make it with specgym train {controller}"
    if not path.is_file():
        raise ValueError(f"state: there is no file {path}; {way_out}")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(str(arrays.pop("header")))
        schema, version, owner = header["schema"], header["version"], header["controller"]
        if (schema, version, owner) != (SCHEMA, SCHEMA_VERSION, controller):
            raise ValueError(f"it holds {schema} {version} of {owner}, not of {controller}")
        return restore(header["state"], arrays)
    except (zipfile.BadZipFile, EOFError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"state: {path} cannot be used: {error}; {way_out}") from error


def restore(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """The tree with its arrays where they belong."""
    if isinstance(value, str) and value in arrays:
        return arrays[value]
    if isinstance(value, dict):
        return {key: restore(each, arrays) for key, each in value.items()}
    return [restore(each, arrays) for each in value] if isinstance(value, list) else value
