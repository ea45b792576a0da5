"""Drafters that were trained for one target: the shipped ones, and those of ``pool build``."""

from __future__ import annotations

from pathlib import Path

import torch

from specgym.engine.forward.eagle import holds_eagle, load_eagle
from specgym.engine.members.eagle import EagleMember
from specgym.engine.members.model import ModelMember
from specgym.engine.pools.checkpoints import hash_weights
from specgym.engine.pools.data_wheel import hash_file
from specgym.engine.pools.hub import WEIGHT_FILES
from specgym.engine.pools.sources import LoadedModel
from specgym.engine.pools.student_files import holds_student
from specgym.engine.pools.students import load_student

PREFIX = "shipped:"
SHIPPED = Path(__file__).parents[1] / "shipped"


def drafter_folder(source: str) -> Path | None:
    """The folder of ``shipped:TARGET/NAME``, or a local one that holds a drafter; None otherwise.

    Raises:
        ValueError: If there is no such shipped drafter.
    """
    if not source.startswith(PREFIX):
        folder = Path(source).expanduser()
        return folder if holds_eagle(source) or holds_student(source) else None
    folder = SHIPPED / source.removeprefix(PREFIX)
    if not (folder / "config.json").is_file():
        known = sorted(str(p.parent.relative_to(SHIPPED)) for p in SHIPPED.glob("*/*/config.json"))
        raise ValueError(
            f"source: no drafter {source!r} is shipped; there are "
            f"{', '.join(PREFIX + name for name in known) or 'none'}"
        )
    return folder


def load_drafter(
    name: str, folder: Path, target: LoadedModel, bound: str, num_tokens: int | None
) -> EagleMember | ModelMember:
    """The member in a drafter's folder, on a target that no member has taken over yet.

    A mixture that was upcycled takes the drafters of the dense model: both compute one function.

    Args:
        name: The member's name in chains.
        folder: From ``drafter_folder``.
        target: The target it drafts for.
        bound: The target's ``binding``.
        num_tokens: Token ids the tokenizer knows.

    Raises:
        ValueError: If it was trained for other weights, or its files are incomplete.
    """
    dtype = target.model.dtype
    if holds_student(str(folder)):
        base = target.dense or target
        student = load_student(folder, base.model, dtype)
        check_binding(name, folder, student.target_fingerprint, bound, target)
        # The embedding in memory is the target's own, wherever that is.
        student.model.set_input_embeddings(target.model.get_input_embeddings())
        model = student.model.to(target.model.device)
        return ModelMember(name, model, num_tokens, draft_ids=student.draft_ids)
    num_layers = target.model.config.get_text_config().num_hidden_layers
    checkpoint = load_eagle(folder, num_layers, dtype)
    check_binding(name, folder, checkpoint.target_fingerprint, bound, target)
    return EagleMember(name, checkpoint, target.model, num_tokens)


def check_binding(
    name: str, folder: Path, wanted: str | None, bound: str, target: LoadedModel
) -> None:
    """Refuses a drafter that was trained for other weights; public heads do not say.

    Raises:
        ValueError: If the fingerprints differ.
    """
    if wanted is None or wanted == bound:
        return
    dtype = target.model.dtype
    rounded = dtype not in (torch.bfloat16, torch.float32)
    hint = f" (weights in {dtype} cannot be recognised: take bfloat16 or float32)"
    raise ValueError(
        f"member {name!r}: {folder} was trained for the target with weights {wanted}, this "
        f"target ({target.origin}) has {bound}{hint if rounded else ''}; "
        f"train drafters for it: specgym pool build"
    )


def binding(target: LoadedModel) -> str:
    """What drafters are bound to: the hash of the dense target's weights in bfloat16."""
    base = target.dense or target
    if base.model.dtype == torch.bfloat16:
        return base.fingerprint
    return hash_weights(base.model, torch.bfloat16)


def hash_drafter(folder: Path) -> str:
    """SHA-256 (hex) of a drafter's file of weights."""
    return hash_file(next(folder / name for name in WEIGHT_FILES if (folder / name).is_file()))
