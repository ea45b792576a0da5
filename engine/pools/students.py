"""Distilled students: layers taken from a target, with a trimmed head; and their files.

A file holds only what was trained: whole layers (``small``), or low-rank deltas that are merged
into copies of the target's own layers (``mid``). Embedding and vocabulary head are the target's
own, the head's rows trimmed to a draft vocabulary, and are never stored.

Legend: V draft vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specgym.engine.forward.architectures import refuse_unlike_llama
from specgym.engine.pools.student_files import (
    CONFIG_FILE,
    KIND,
    WEIGHT_FILE,
    full_state,
    read_config,
    read_draft_ids,
    read_weights,
)

__all__ = [
    "StudentCheckpoint",
    "check_layers",
    "load_student",
    "save_student",
    "spread",
    "take_layers",
]


@dataclasses.dataclass(frozen=True)
class StudentCheckpoint:
    """A student ready to stand in a chain.

    Attributes:
        model: A Llama of its own layers; the embedding is the target's, the head has V rows.
        draft_ids: Target token id of each entry of its vocabulary, [V], ascending.
        layers: Which of the target's layers it was made from.
        rank: Of its deltas; None where whole layers were trained.
        target_fingerprint: Hash of the weights, in bf16, of the target it was trained on.
        target_origin: Where that target came from.
        training: How it was trained, as the file says it.
    """

    model: LlamaForCausalLM
    draft_ids: torch.Tensor
    layers: tuple[int, ...]
    rank: int | None
    target_fingerprint: str
    target_origin: str
    training: Mapping[str, Any]


def spread(num_layers: int, num_taken: int) -> list[int]:
    """Layers to take: the first, the last, and evenly spread ones between."""
    if num_taken == 1:
        return [num_layers - 1]
    return [round(i * (num_layers - 1) / (num_taken - 1)) for i in range(num_taken)]


def take_layers(model: Any, layers: Sequence[int], dtype: torch.dtype = torch.float32) -> Any:
    """A copy of a Llama that has only these layers, in this order; nothing of it is trained.

    Raises:
        ValueError: If the model is no Llama, or has no such layers.
    """
    refuse_unlike_llama("a student", model)
    check_layers(layers, model.config.num_hidden_layers)
    everything = model.model.layers
    model.model.layers = nn.ModuleList(everything[index] for index in layers)
    try:
        student = copy.deepcopy(model)
    finally:
        model.model.layers = everything
    student.config.num_hidden_layers = len(layers)
    kinds = getattr(student.config, "layer_types", None)
    if kinds:
        student.config.layer_types = [kinds[index] for index in layers]
    for index, layer in enumerate(student.model.layers):
        layer.self_attn.layer_idx = index
        layer.self_attn.attention_dropout = 0.0  # a resumed training must not depend on chance
    student.to(dtype).requires_grad_(False)
    student.model.rotary_emb = LlamaRotaryEmbedding(student.config).to(student.device)
    return student


def check_layers(layers: Sequence[int], num_layers: int, field: str = "layers") -> None:
    """Refuses layers that the target does not have, or an order that is not its own.

    Raises:
        ValueError: If they are none, not ascending, or out of range.
    """
    ascending = list(layers) == sorted(set(layers))
    if not layers or not ascending or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ValueError(
            f"{field}: must be ascending and among the target's 0..{num_layers - 1}; "
            f"got {list(layers)}"
        )


def save_student(
    folder: Path,
    student: Any,
    draft_ids: torch.Tensor,
    layers: Sequence[int],
    *,
    target_fingerprint: str,
    target_origin: str,
    rank: int | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Writes what was trained of a student, bf16, and what it was trained on.

    Args:
        folder: Gets config.json and model.safetensors.
        student: From ``make_small`` or ``make_mid``.
        draft_ids: Token ids of its vocabulary, [V].
        layers: Of the target, that it was made from.
        target_fingerprint: Hash of the target's weights in bf16.
        target_origin: Where the target came from.
        rank: Of the deltas; None for whole layers.
        training: Facts for whoever reads the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trained = {name: p for name, p in student.model.named_parameters() if p.requires_grad}
    weights = {
        name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in trained.items()
    }
    weights["draft_ids"] = draft_ids.to(torch.int32).contiguous()
    save_file(weights, folder / WEIGHT_FILE, metadata={"format": "pt"})
    values = {
        "kind": KIND,
        "layers": list(layers),
        "rank": rank,
        "draft_vocab_size": len(draft_ids),
        "target_fingerprint": target_fingerprint,
        "target_origin": target_origin,
        "training": dict(training or {}),
    }
    (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def load_student(folder: Path, base_model: Any, dtype: torch.dtype) -> StudentCheckpoint:
    """The student of a folder on its target, which gives embedding, head and, for deltas, layers.

    Args:
        folder: From ``save_student``.
        base_model: The target, before a ``ModelMember`` takes it over; it is not changed. Where
            ``dtype`` is the target's own, its embedding is shared with the student.
        dtype: Type of the student's weights; deltas are merged in float32.

    Raises:
        ValueError: If files or entries are missing, or were made for a target of other sizes.
    """
    refuse_unlike_llama("a student", base_model)
    values = read_config(folder)
    layers, rank = tuple(values["layers"]), values["rank"]
    check_layers(layers, base_model.config.num_hidden_layers)
    if len(base_model.model.layers) != base_model.config.num_hidden_layers:
        raise ValueError(
            "base_model: its layers were taken over by a member; load students before that"
        )
    weights = read_weights(folder)
    draft_ids = read_draft_ids(folder, weights.pop("draft_ids"), base_model, values)
    state = full_state(folder, weights, base_model, layers, rank, dtype)
    model = assemble(base_model, layers, state, draft_ids, dtype)
    return StudentCheckpoint(
        model,
        draft_ids,
        layers,
        rank,
        values["target_fingerprint"],
        values["target_origin"],
        values["training"],
    )


def assemble(
    base_model: Any,
    layers: Sequence[int],
    state: Mapping[str, torch.Tensor],
    draft_ids: torch.Tensor,
    dtype: torch.dtype,
) -> LlamaForCausalLM:
    """The model of these weights; of the target it has the embedding and rows of the head."""
    config = copy.deepcopy(base_model.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in layers]
    config.tie_word_embeddings = False
    device = base_model.device
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for name, weight in state.items():
        parent, _, leaf = name.rpartition(".")
        value = nn.Parameter(weight.to(device, dtype), requires_grad=False)
        setattr(model.model.get_submodule(parent), leaf, value)
    embedding = base_model.get_input_embeddings().weight
    if embedding.dtype != dtype:
        embedding = nn.Parameter(embedding.detach().to(dtype), requires_grad=False)
    model.model.embed_tokens.weight = embedding
    rows = base_model.get_output_embeddings().weight.detach()[draft_ids.to(device)].to(dtype)
    model.lm_head = nn.Linear(rows.shape[1], len(rows), bias=False, device="meta")
    model.lm_head.weight = nn.Parameter(rows, requires_grad=False)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    model.generation_config = copy.deepcopy(base_model.generation_config)
    return model.eval()
