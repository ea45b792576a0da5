"""The lean forward of Llama-shaped models: speed only, never semantics.

Legend: B batch, T tokens, H query heads, G key/value heads, D head size, S attended slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from specgym.engine.forward.linears import linear
from specgym.engine.forward.transfer import to_device


class KeyValues(Protocol):
    """Where a layer puts its keys and values, and what it attends to (``MaskedKVCache`` is one)."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a window's states [B, G, T, D]; returns keys and values, [B, G, S, D]."""
        ...


class LeanLlama:
    """The forward of a Llama, one function per layer, with fused q/k/v and gate/up linears.

    Models of Llama's shape differ in two functions of their layers, given when it is made.

    Same numbers as transformers' forward up to rounding (tested), in about two thirds of its time
    at one token: what is saved is Python and small operations. The query heads that share a
    key/value head are folded into the token dimension, so keys and values are never repeated.

    Args:
        model: The transformers model; its linears are replaced, so it must not be used after.
        feed_forward: Makes a layer's feed-forward block, [..., hidden] -> [..., hidden], from
            transformers' one; None is the dense one.
        project: Makes a layer's projection to queries, keys and values in front of the rotation,
            [..., hidden] -> [..., (H + 2G) D], from transformers' attention; None is the plain one.

    Raises:
        ValueError: If another member has taken the model over.
    """

    def __init__(
        self,
        model: Any,
        feed_forward: Callable[[Any], Callable] | None = None,
        project: Callable[[Any], Callable] | None = None,
    ):
        config = model.config
        if len(model.model.layers) != config.num_hidden_layers:
            raise ValueError(
                "model: its layers were taken over by another member; load a model for each"
            )
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        self.hidden_size = config.hidden_size
        self.layer_types: Sequence[str] = getattr(config, "layer_types", None) or ()
        self.embedding = model.model.embed_tokens.weight
        self.rotary = model.model.rotary_emb
        self.final_norm = Norm(model.model.norm.weight, config.rms_norm_eps)
        make, project = feed_forward or FeedForward, project or fuse_qkv
        self.layers = [
            LeanLayer(layer, project(layer.self_attn), make(layer.mlp), config.rms_norm_eps)
            for layer in model.model.layers
        ]
        self.head = linear(model.lm_head.weight, model.lm_head.bias)
        if model.lm_head.weight is not self.embedding:  # an unpacked copy that nobody reads
            model.lm_head = nn.Identity()
        model.model.layers = nn.ModuleList()

    def __call__(
        self,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        mask_B1TS: torch.Tensor | Mapping[str, torch.Tensor],
        cache: KeyValues,
        *,
        need_logits: bool,
    ) -> torch.Tensor | None:
        """Logits [B, T, vocab] of a window, or None when nobody needs them."""
        states = self.states(tokens_BT, positions_BT, mask_B1TS, cache)[-1]
        return self.head(states) if need_logits else None

    def states(
        self,
        tokens_BT: torch.Tensor,
        positions_BT: torch.Tensor,
        mask_B1TS: torch.Tensor | Mapping[str, torch.Tensor],
        cache: KeyValues,
        taps: tuple[int, ...] = (),
    ) -> list[torch.Tensor]:
        """Hidden states [B, T, hidden] in front of the tapped layers, then those of the head.

        The mask is additive; one per layer type where a model mixes them. It may have more rows
        than there are tokens, see ``attend_folded``.
        """
        x = F.embedding(tokens_BT, self.embedding)
        cos, sin = (half[:, :, None, :] for half in self.rotary(x, positions_BT))
        turn = rotation(cos, sin)
        masks = self.fold(mask_B1TS)
        tapped = []
        for index, layer in enumerate(self.layers):
            if index in taps:
                tapped.append(x)
            x = x + self.attend(layer, x, turn, masks[index], cache, index)
            x = x + layer.feed_forward(layer.mlp_norm(x))
        return [*tapped, self.final_norm(x)]

    def fold(self, mask: torch.Tensor | Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The mask of each layer, as ``attend_folded`` takes it; alike layers share it."""
        groups = self.num_heads // self.num_kv_heads
        if isinstance(mask, torch.Tensor):
            return [fold_mask(mask, groups)] * len(self.layers)
        folded = {kind: fold_mask(each, groups) for kind, each in mask.items()}
        return [folded[kind] for kind in self.layer_types]

    def attend(
        self,
        layer: LeanLayer,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        folded_mask: torch.Tensor,
        cache: KeyValues,
        index: int,
    ) -> torch.Tensor:
        """The attention block's output, [B, T, hidden]."""
        B, T, _ = x.shape
        G, D = self.num_kv_heads, self.head_dim
        states = layer.qkv(layer.attention_norm(x))
        states = states.view(B, T, self.num_heads + 2 * G, D)
        rotated = rotate(states[:, :, : self.num_heads + G], *turn)
        keys, values = cache.update(
            rotated[:, :, self.num_heads :].transpose(1, 2),
            states[:, :, self.num_heads + G :].transpose(1, 2),
            index,
        )
        queries = rotated[:, :, : self.num_heads]
        mixed = attend_folded(queries, keys, values, folded_mask)
        return layer.output(mixed.reshape(B, T, self.num_heads * D))


class LeanLayer:
    """One decoder layer's weights, fused and packed; the original linears are let go."""

    def __init__(self, layer: Any, qkv: Callable, feed_forward: Callable, eps: float):
        self.attention_norm = Norm(layer.input_layernorm.weight, eps)
        self.mlp_norm = Norm(layer.post_attention_layernorm.weight, eps)
        self.qkv = qkv
        self.output = fuse(layer.self_attn.o_proj)
        self.feed_forward = feed_forward


class Norm:
    """An RMS norm over the last dimension.

    Args:
        weight: Factor of each entry, [n].
        eps: Added to the mean square.
    """

    def __init__(self, weight: torch.Tensor, eps: float):
        self.weight, self.eps, self.size = weight.detach(), eps, len(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The normed states, [..., n]."""
        return F.rms_norm(x, (self.size,), self.weight, self.eps)


class FeedForward:
    """A Llama's MLP with gate and up fused."""

    def __init__(self, mlp: Any):
        self.gate_up = fuse(mlp.gate_proj, mlp.up_proj)
        self.down = fuse(mlp.down_proj)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, [B, T, hidden]."""
        return self.down(gated(self.gate_up(x)))


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """Gate and up side by side, [..., 2 n], become one, [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def fuse(*linears: nn.Linear) -> Callable:
    """One linear that computes several side by side; either all have a bias or none has."""
    weight = torch.cat([each.weight.detach() for each in linears])
    has_bias = linears[0].bias is not None
    return linear(weight, torch.cat([each.bias for each in linears]) if has_bias else None)


def fuse_qkv(attention: Any) -> Callable:
    """A layer's projection to queries, keys and values in one linear, [..., (H + 2G) D]."""
    return fuse(attention.q_proj, attention.k_proj, attention.v_proj)


def widen(logits: torch.Tensor, draft_ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Logits over the whole vocabulary, [..., V]: minus infinity where a trimmed head has no row.

    Args:
        logits: Of the head's rows, [..., rows].
        draft_ids: Token id of each row; None where rows are token ids (padded ones are cut off).
        vocab_size: V.
    """
    if draft_ids is None:
        return logits[..., :vocab_size]
    full = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return full.index_copy_(-1, draft_ids, logits)


def pad_tokens(fed: Sequence[Sequence[int]], width: int, device: torch.device) -> torch.Tensor:
    """Token ids of a window, [B, width]: each row's tokens, then zeros."""
    rows = [[*tokens, *[0] * (width - len(tokens))] for tokens in fed]
    return to_device(rows, device)


def last_rows(counts: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each row's last real token stands in a window: rows and columns, [B] each."""
    columns = [max(count - 1, 0) for count in counts]
    return torch.arange(len(counts), device=device), to_device(columns, device)


def fold_mask(mask_B1TS: torch.Tensor, groups: int) -> torch.Tensor:
    """A mask for ``attend_folded``: once for each query head of a key/value head."""
    return mask_B1TS.repeat(1, 1, groups, 1)


def attend_folded(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    folded_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Mixed values [B, T, H, D] of queries [B, T, H, D] over keys and values [B, G, S, D].

    The query heads that share a key/value head are folded into the token dimension. Where the mask
    has rows for more queries than there are, zeros are put in their place: in exact mode its shape
    is fixed.
    """
    B, T, H, D = queries.shape
    G = keys.shape[1]
    N = T if folded_mask is None else folded_mask.shape[2] // (H // G)
    if N > T:
        queries = F.pad(queries, (0, 0, 0, 0, 0, N - T))
    folded = queries.reshape(B, N, G, H // G, D).permute(0, 2, 3, 1, 4).reshape(B, G, -1, D)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=folded_mask)
    return mixed.view(B, G, H // G, N, D)[:, :, :, :T].permute(0, 3, 1, 2, 4).reshape(B, T, H, D)


def rotation(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary factors [..., D] as ``rotate`` takes them: the sine's first half has its sign."""
    left, right = sin.chunk(2, dim=-1)
    return cos, torch.cat((-left, right), dim=-1)


def rotate(states: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of states [B, T, heads, D] with factors [B, T, 1, D]."""
    swapped = states.roll(states.shape[-1] // 2, dims=-1)
    return torch.addcmul(states * cos, swapped, signed_sin)
