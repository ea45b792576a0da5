"""EAGLE heads: a one-layer drafter on the target's features, in the published layouts.

Position t of a head eats the target's features of token t beside the embedding of token t + 1, and
predicts token t + 2. Where the target has not been yet, the head's own output stands in for the
features.

Two layouts are read. ``EAGLE``: one feature (the head's input), joined with the embedding by
``fc``. ``EAGLE-3``: the inputs of several target layers, joined by ``fc`` into one feature, which a
layer of double input width takes beside the embedding; a vocabulary of its own, mapped by ``d2t``.

Legend: B batch, T tokens, H query heads, G key/value heads, D head size, F features, V vocabulary.

Source: Li et al. 2024, EAGLE (arXiv 2401.15077); Li et al. 2025, EAGLE-3 (arXiv 2503.01840).
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specgym.engine.forward.lean_llama import rotate, rotation
from specgym.engine.pools.hub import WEIGHT_FILES

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class EagleShape:
    """How an EAGLE head is built.

    Attributes:
        config: Sizes of its layers, as transformers writes a Llama's.
        taps: Target layers whose inputs are its features; empty for EAGLE's one, the input of the
            target's head.
        has_bias: Whether ``fc`` has a bias.
        num_draft_tokens: Size of its own vocabulary.
        target_hidden_size: Width of one of the target's features.
    """

    config: LlamaConfig
    taps: tuple[int, ...]
    has_bias: bool
    num_draft_tokens: int
    target_hidden_size: int

    @property
    def is_wide(self) -> bool:
        """Whether it has EAGLE-3's layout."""
        return bool(self.taps)

    @property
    def num_features(self) -> int:
        """Width of the features of one token."""
        return max(len(self.taps), 1) * self.target_hidden_size


class EagleAttention(nn.Module):
    """Projections of an attention block; who attends to what is the caller's business."""

    def __init__(self, config: LlamaConfig, width: int):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads or self.num_heads
        self.head_dim: int = config.head_dim  # type: ignore[assignment]
        size = config.hidden_size
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, config.attention_bias)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, size, bias=config.attention_bias)

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        index: int,
    ) -> torch.Tensor:
        """The block's output, [B, T, hidden]."""
        B, T, _ = x.shape
        queries = self.q_proj(x).view(B, T, self.num_heads, self.head_dim)
        keys = self.k_proj(x).view(B, T, self.num_kv_heads, self.head_dim)
        values = self.v_proj(x).view(B, T, self.num_kv_heads, self.head_dim)
        mixed = attend(index, rotate(queries, *rotation), rotate(keys, *rotation), values)
        return self.o_proj(mixed.reshape(B, T, self.num_heads * self.head_dim))


class EagleMLP(nn.Module):
    """A gated feed-forward block."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(size, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, size, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, [B, T, hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """A Llama layer; EAGLE-3's takes the embedding beside its input, EAGLE's first has no norm."""

    def __init__(self, config: LlamaConfig, *, wide: bool, normed: bool):
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.self_attn = EagleAttention(config, 2 * size if wide else size)
        self.mlp = EagleMLP(config)
        self.hidden_norm = nn.RMSNorm(size, eps=eps) if wide else None
        self.input_layernorm = nn.RMSNorm(size, eps=eps) if normed else None
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        index: int,
    ) -> torch.Tensor:
        """The layer's output, [B, T, hidden]."""
        if self.hidden_norm is not None:
            assert self.input_layernorm is not None
            x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        else:
            x = hidden if self.input_layernorm is None else self.input_layernorm(hidden)
        hidden = hidden + self.self_attn(x, rotation, attend, index)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class SteadyRotary(LlamaRotaryEmbedding):
    """A rotary embedding whose frequencies stay float32 when its owner is cast.

    Rounded to bf16 they would be off by a radian after some hundred positions.
    """

    def _apply(self, fn: Callable, recurse: bool = True) -> SteadyRotary:
        kept = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            place = self.get_buffer(name).device
            self.register_buffer(name, buffer.to(place), persistent=False)
        return self


class EagleHead(nn.Module):
    """An EAGLE head's layers; embedding and vocabulary head are the target's or its own.

    Args:
        shape: How it is built.
    """

    def __init__(self, shape: EagleShape):
        super().__init__()
        config = shape.config
        self.shape = shape
        self.rotary = SteadyRotary(config)
        if shape.is_wide:
            width = shape.num_features
            self.fc = nn.Linear(width, config.hidden_size, bias=shape.has_bias)
            self.midlayer = EagleLayer(config, wide=True, normed=True)
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        else:
            width = config.hidden_size + shape.num_features
            self.fc = nn.Linear(width, config.hidden_size, bias=shape.has_bias)
        first = 1 if shape.is_wide else 0
        self.layers = nn.ModuleDict(
            {
                str(index): EagleLayer(config, wide=False, normed=index > 0)
                for index in range(first, config.num_hidden_layers)
            }
        )

    def take_in(self, features: torch.Tensor) -> torch.Tensor:
        """What stands for a token's features inside the head, [B, T, F] -> [B, T, hidden]."""
        return self.fc(features) if self.shape.is_wide else features

    def forward(
        self, embeds: torch.Tensor, taken: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The output at each position, [B, T, hidden]; it stands for the next position's features.

        Args:
            embeds: Embeddings of the tokens one ahead, [B, T, hidden].
            taken: ``take_in`` of the target's features, or an earlier output.
            positions: Position ids [B, T].
            attend: Mixes values: (layer, queries [B, T, H, D], keys and values [B, T, G, D]).
        """
        factors = rotation(*(half[:, :, None, :] for half in self.rotary(embeds, positions)))
        if self.shape.is_wide:
            hidden = self.midlayer(embeds, taken, factors, attend, 0)
        else:
            hidden = self.fc(torch.cat([embeds, taken], dim=-1))
        for name, layer in self.layers.items():
            hidden = layer(embeds, hidden, factors, attend, int(name))
        return hidden

    def before_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the vocabulary head reads of an output."""
        return self.norm(hidden) if self.shape.is_wide else hidden


@dataclasses.dataclass
class EagleCheckpoint:
    """A head with what its file says of the vocabulary.

    Attributes:
        head: The layers.
        draft_ids: Target token id of each entry of its vocabulary; None where that is the target's.
        lm_head: Its own vocabulary head; None takes the target's (its rows of ``draft_ids``).
        embedding: Its own embedding; None takes the target's.
        target_fingerprint: Hash of the weights, in bf16, of the target it was trained on; None
            where the file does not say (public heads).
    """

    head: EagleHead
    draft_ids: torch.Tensor | None
    lm_head: torch.Tensor | None
    embedding: torch.Tensor | None
    target_fingerprint: str | None = None


def holds_eagle(source: str) -> bool:
    """Whether a source is a folder with the weights of an EAGLE head."""
    folder = Path(source).expanduser()
    safe, pickled = (folder / name for name in WEIGHT_FILES)
    if safe.is_file():
        try:
            with safe_open(safe, framework="pt") as file:
                return "fc.weight" in file.keys()  # noqa: SIM118 (not a dictionary)
        except SafetensorError:  # whoever loads it as a model says what is wrong
            return False
    # The format from before torch 1.6 is no zip file; no head was published in it.
    if pickled.is_file() and zipfile.is_zipfile(pickled):
        return "fc.weight" in torch.load(pickled, mmap=True, weights_only=True)
    return False


def load_eagle(folder: Path, num_target_layers: int, dtype: torch.dtype) -> EagleCheckpoint:
    """The head of a folder in the layout in which EAGLE and EAGLE-3 heads are published.

    EAGLE-3's file does not say which layers it reads: it reads the inputs of layers 2, n/2 and
    n - 3 of the target's n, unless ``config.json`` names others (``eagle_taps``, ours).

    Args:
        folder: Holds config.json and model.safetensors or pytorch_model.bin.
        num_target_layers: Layers of the target.
        dtype: Type of the weights.

    Raises:
        ValueError: If files or weights are missing, or some have no place in the head.
    """
    file = next((folder / name for name in WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None or not (folder / "config.json").is_file():
        raise ValueError(
            f"eagle: {folder} must hold config.json and one of {', '.join(WEIGHT_FILES)}"
        )
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if file.suffix == ".bin":
        weights = torch.load(file, map_location="cpu", weights_only=True)
    else:
        weights = load_file(file)
    shape = read_shape(values, weights, num_target_layers)
    own = {name: weights.pop(name, None) for name in ("embed_tokens.weight", "lm_head.weight")}
    offsets = weights.pop("d2t", None)
    weights.pop("t2d", None)
    head = EagleHead(shape)
    missing, foreign = head.load_state_dict(weights, strict=False)
    if missing or foreign:
        raise ValueError(
            f"eagle: {file} must hold the weights of an EAGLE or EAGLE-3 head and no others; "
            f"missing {missing[:3]}, unknown {foreign[:3]}"
        )
    draft_ids = None if offsets is None else offsets + torch.arange(len(offsets))
    lm_head, embedding = own["lm_head.weight"], own["embed_tokens.weight"]
    return EagleCheckpoint(
        head.to(dtype).eval().requires_grad_(False),
        draft_ids,
        None if lm_head is None else lm_head.to(dtype),
        None if embedding is None else embedding.to(dtype),
        values.get("target_fingerprint"),
    )


def read_shape(
    values: dict[str, Any], weights: dict[str, torch.Tensor], num_target_layers: int
) -> EagleShape:
    """The shape that a published head's configuration and weights describe.

    Raises:
        ValueError: If the weights are of neither layout.
    """
    if "fc.weight" not in weights:
        raise ValueError(f"eagle: no weight 'fc.weight' among {sorted(weights)[:5]}")
    known = {key: value for key, value in values.items() if key != "model_type"}
    config = LlamaConfig(**known)
    is_wide = "midlayer.self_attn.q_proj.weight" in weights
    n = num_target_layers
    taps = tuple(values.get("eagle_taps", (2, n // 2, n - 3))) if is_wide else ()
    width = weights["fc.weight"].shape[1]
    target_size = width // len(taps) if is_wide else width - config.hidden_size
    offsets = weights.get("d2t")
    return EagleShape(
        config=config,
        taps=taps,
        has_bias="fc.bias" in weights,
        num_draft_tokens=config.vocab_size if offsets is None else len(offsets),
        target_hidden_size=target_size,
    )


def save_eagle(
    folder: Path,
    head: EagleHead,
    draft_ids: torch.Tensor,
    target_fingerprint: str | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Writes a head in EAGLE-3's layout, bf16, without the rows it takes from the target.

    Args:
        folder: Gets config.json and model.safetensors.
        head: The head.
        draft_ids: Token ids of its vocabulary.
        target_fingerprint: Hash of the target's weights in bf16.
        facts: More entries of config.json, for whoever reads it.
    """
    shape = head.shape
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().to(torch.bfloat16) for name, w in head.state_dict().items()}
    weights["d2t"] = (draft_ids - torch.arange(len(draft_ids))).to(torch.int32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = shape.config.to_diff_dict() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(draft_ids),
        "eagle_taps": list(shape.taps),
        **(facts or {}),
    }
    if target_fingerprint is not None:
        values["target_fingerprint"] = target_fingerprint
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
