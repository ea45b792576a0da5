"""What a student's folder holds, read and checked against the target it is loaded for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

KIND = "student"
WEIGHT_FILE, CONFIG_FILE = "model.safetensors", "config.json"


def holds_student(source: str) -> bool:
    """Whether a source is a folder with a student's file."""
    path = Path(source).expanduser() / CONFIG_FILE
    if not path.is_file():
        return False
    try:
        values = json.loads(path.read_text())
    except ValueError:
        return False
    return isinstance(values, dict) and values.get("kind") == KIND


def read_config(folder: Path) -> dict[str, Any]:
    """The checked configuration of a student's folder.

    Raises:
        ValueError: If it is missing, of another kind, or incomplete.
    """
    for name in (CONFIG_FILE, WEIGHT_FILE):
        if not (folder / name).is_file():
            raise ValueError(
                f"student: {folder} must hold {CONFIG_FILE} and {WEIGHT_FILE}, it lacks {name}; "
                f"`specgym pool build` writes both"
            )
    if not holds_student(str(folder)):
        raise ValueError(
            f"student: {folder / CONFIG_FILE} must say kind {KIND!r}; give a folder that "
            f"`specgym pool build` wrote"
        )
    values: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    kinds: dict[str, Any] = {
        "layers": list, "rank": (int, type(None)), "draft_vocab_size": int,
        "target_fingerprint": str, "target_origin": str, "training": dict,
    }  # fmt: skip
    for name, kind in kinds.items():
        if not isinstance(values.get(name, ...), kind):
            raise ValueError(
                f"student: {name!r} in {folder / CONFIG_FILE} is missing or no such thing as it "
                f"should be; got {values.get(name)!r}; build the student again"
            )
    return values


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a student's file.

    Raises:
        ValueError: If it cannot be read, or lacks its vocabulary.
    """
    try:
        weights = load_file(folder / WEIGHT_FILE)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"student: {folder / WEIGHT_FILE} cannot be read: {error}; build the student again"
        ) from error
    if "draft_ids" not in weights:
        raise ValueError(
            f"student: {folder / WEIGHT_FILE} must hold 'draft_ids', it has "
            f"{sorted(weights)[:3]}; build the student again"
        )
    return weights


def read_draft_ids(
    folder: Path, draft_ids: torch.Tensor, base_model: Any, values: Mapping[str, Any]
) -> torch.Tensor:
    """The student's vocabulary, [V], checked against the target's.

    Raises:
        ValueError: If it is not as large as the file says, not ascending, or exceeds the target's.
    """
    ids, vocab_size = draft_ids.long(), base_model.config.vocab_size
    wanted, rising = values["draft_vocab_size"], bool((ids.diff() > 0).all())
    if ids.shape != (wanted,) or not wanted or not rising:
        raise ValueError(
            f"student: draft_ids in {folder} must be {wanted} ascending token ids; got "
            f"{list(ids.shape)}; build the student again"
        )
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(
            f"student: its vocabulary goes up to id {int(ids[-1])}, the target's has {vocab_size}; "
            f"use a student that was trained on this target"
        )
    return ids


def full_state(
    folder: Path,
    weights: dict[str, torch.Tensor],
    base_model: Any,
    layers: Sequence[int],
    rank: int | None,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Weights of all the student's layers and its norm, deltas merged in float32.

    Raises:
        ValueError: If a weight is missing, unknown, or of another shape than the target's.
    """
    places = {"norm.weight": base_model.model.norm.weight}
    for place, index in enumerate(layers):
        for name, weight in base_model.model.layers[index].state_dict().items():
            places[f"layers.{place}.{name}"] = weight
    state, wanted = {}, {}
    for name, theirs in places.items():
        if rank is not None and theirs.ndim == 2:
            stem = name.removesuffix(".weight")
            wanted[f"{stem}.up"] = (theirs.shape[0], rank)
            wanted[f"{stem}.down"] = (rank, theirs.shape[1])
        elif rank is None or not name.endswith(".bias"):
            wanted[name] = tuple(theirs.shape)
    check_weights(folder, weights, wanted)
    for name, theirs in places.items():
        stem = name.removesuffix(".weight")
        merged = weights.get(name, theirs.detach())
        if f"{stem}.up" in weights:
            delta = weights[f"{stem}.up"].float() @ weights[f"{stem}.down"].float()
            merged = theirs.detach().float() + delta.to(theirs.device)
        state[name] = merged.to(theirs.device, dtype)
    return state


def check_weights(
    folder: Path, weights: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuses a file that holds other weights than the student needs.

    Raises:
        ValueError: If one is missing, unknown, or of another shape.
    """
    missing, foreign = sorted(wanted.keys() - weights), sorted(weights.keys() - wanted)
    if missing or foreign:
        raise ValueError(
            f"student: {folder / WEIGHT_FILE} must hold the weights its config.json describes and "
            f"no others; missing {missing[:3]}, unknown {foreign[:3]}; build the student again"
        )
    for name, shape in wanted.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"student: {name!r} in {folder} must have shape {list(shape)} on this target; got "
                f"{list(weights[name].shape)}; use a student that was trained on this target"
            )
