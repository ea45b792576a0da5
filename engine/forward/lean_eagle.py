"""The fast forward of an EAGLE head: one function per layer, with fused and packed linears.

``EagleHead`` is the module that is trained and loaded; this computes the same from its weights.

Legend: B batch, T tokens, H query heads, G key/value heads, D head size, F features, S slots.
"""

from __future__ import annotations

import torch

from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.forward.eagle import EagleHead, EagleLayer
from specgym.engine.forward.lean_llama import (
    FeedForward,
    Norm,
    attend_folded,
    fuse,
    fuse_qkv,
    rotate,
    rotation,
)

Rotation = tuple[torch.Tensor, torch.Tensor]


class LeanEagle:
    """An EAGLE head's forward, up to rounding; its weights are copied, the head stays as it is.

    Args:
        head: The head, on its device and in its type.
    """

    def __init__(self, head: EagleHead):
        self.is_wide = head.shape.is_wide
        eps = head.shape.config.rms_norm_eps
        self.rotary = head.rotary
        self.join = fuse(head.fc)
        first = [head.midlayer] if self.is_wide else []
        self.layers = [
            LeanEagleLayer(layer, eps)
            for layer in (*first, *head.layers.values())
            if isinstance(layer, EagleLayer)
        ]
        self.final_norm = Norm(head.norm.weight, eps) if self.is_wide else None

    def factors(self, num_positions: int, limit: int, like: torch.Tensor) -> Rotation:
        """Rotary factors [S, 1, D] of positions from 0 on; those past ``limit`` have the last's."""
        positions = torch.arange(num_positions, device=like.device).clamp_max(limit - 1)
        cos, sin = self.rotary(like, positions[None])
        return rotation(cos[0, :, None], sin[0, :, None])

    def take_in(self, features: torch.Tensor) -> torch.Tensor:
        """What stands for a token's features inside the head, [B, T, F] -> [B, T, hidden]."""
        return self.join(features) if self.is_wide else features

    def __call__(
        self,
        embeds: torch.Tensor,
        taken: torch.Tensor,
        turn: Rotation,
        folded_mask: torch.Tensor | None,
        memory: MaskedKVCache,
    ) -> torch.Tensor:
        """The output at each position, [B, T, hidden]; it stands for the next position's features.

        Args:
            embeds: Embeddings of the tokens one ahead, [B, T, hidden].
            taken: ``take_in`` of the target's features, or an earlier output.
            turn: Factors of the positions, [B or 1, T, 1, D].
            folded_mask: What each query sees, as ``attend_folded`` takes it; None is every slot up
                to the window's end.
            memory: Gets the window's keys and values.
        """
        hidden = taken if self.is_wide else self.join(torch.cat((embeds, taken), dim=-1))
        for index, layer in enumerate(self.layers):
            hidden = layer(embeds, hidden, turn, folded_mask, memory, index)
        return hidden

    def before_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the vocabulary head reads of an output."""
        return hidden if self.final_norm is None else self.final_norm(hidden)


class LeanEagleLayer:
    """One layer of a head in one function.

    Args:
        layer: The layer of the module.
        eps: Of its norms.
    """

    def __init__(self, layer: EagleLayer, eps: float):
        attention = layer.self_attn
        self.num_heads, self.num_kv_heads = attention.num_heads, attention.num_kv_heads
        self.head_dim = attention.head_dim
        self.is_wide = layer.hidden_norm is not None
        norms = [layer.input_layernorm, layer.hidden_norm]
        self.input_norms = [Norm(norm.weight, eps) for norm in norms if norm is not None]
        self.mlp_norm = Norm(layer.post_attention_layernorm.weight, eps)
        self.qkv = fuse_qkv(attention)
        self.output = fuse(attention.o_proj)
        self.feed_forward = FeedForward(layer.mlp)

    def __call__(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        turn: Rotation,
        folded_mask: torch.Tensor | None,
        memory: MaskedKVCache,
        index: int,
    ) -> torch.Tensor:
        """The layer's output, [B, T, hidden]."""
        B, T, _ = hidden.shape
        H, G = self.num_heads, self.num_kv_heads
        states = self.qkv(self.normed(embeds, hidden)).view(B, T, H + 2 * G, self.head_dim)
        rotated = rotate(states[:, :, : H + G], *turn).to(memory.dtype)
        values = states[:, :, H + G :].to(memory.dtype)
        keys, values = memory.buffers[index].update(
            rotated[:, :, H:].transpose(1, 2), values.transpose(1, 2)
        )
        if folded_mask is None:
            stop = memory.num_used + T
            keys, values = keys[:, :, :stop], values[:, :, :stop]
        mixed = attend_folded(rotated[:, :, :H], keys, values, folded_mask).to(hidden.dtype)
        hidden = hidden + self.output(mixed.reshape(B, T, H * self.head_dim))
        return hidden + self.feed_forward(self.mlp_norm(hidden))

    def normed(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the projections read: EAGLE-3's first layer takes both, [B, T, 2 hidden]."""
        read = (embeds, hidden) if self.is_wide else (hidden,)
        normed = [norm(states) for norm, states in zip(self.input_norms, read, strict=False)]
        return torch.cat(normed, dim=-1) if normed else hidden
