"""Which models the lean forward computes, and what their layers have that a plain Llama's lack.

A layer's projection and feed-forward block are chosen when the model is taken over: a plain Llama
runs nothing of this file. Legend: H query heads, G key/value heads, D head size, N rows (batch
times tokens of a window), E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    OlmoeForCausalLM,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from specgym.engine.forward.experts import dispatch_experts
from specgym.engine.forward.lean_llama import FeedForward, LeanLlama, Norm, fuse_qkv
from specgym.engine.forward.linears import is_plain_linear, linear


class NormedHeads:
    """Queries, keys and values of a Qwen3: each head of the first two has an RMS norm.

    Args:
        attention: transformers' module.
    """

    def __init__(self, attention: Any):
        self.linear = fuse_qkv(attention)
        self.head_dim = attention.head_dim
        self.eps = attention.q_norm.variance_epsilon
        norms = ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm))
        weights = [
            norm.weight.detach().expand(proj.out_features // self.head_dim, -1)
            for proj, norm in norms
        ]
        # The key heads' rows follow the query heads'.
        self.weights_HD = torch.cat(weights)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The states in front of the rotation, [..., (H + 2G) D]."""
        states = self.linear(x)
        heads = states.view(*states.shape[:-1], -1, self.head_dim)
        normed = heads[..., : len(self.weights_HD), :]
        normed.copy_(F.rms_norm(normed, (self.head_dim,), None, self.eps) * self.weights_HD)
        return states


class NormedProjections:
    """Queries, keys and values of an OLMoE: one RMS norm over all query heads, one over all keys.

    Args:
        attention: transformers' module.
    """

    def __init__(self, attention: Any):
        self.linear = fuse_qkv(attention)
        eps = attention.q_norm.variance_epsilon
        self.query_norm = Norm(attention.q_norm.weight, eps)
        self.key_norm = Norm(attention.k_norm.weight, eps)
        sizes = self.query_norm.size, self.key_norm.size
        self.sizes = [*sizes, attention.v_proj.out_features]
        self.clip = attention.config.clip_qkv

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The states in front of the rotation, [..., (H + 2G) D]."""
        queries, keys, values = self.linear(x).split(self.sizes, dim=-1)
        states = torch.cat((self.query_norm(queries), self.key_norm(keys), values), dim=-1)
        return states if self.clip is None else states.clamp_(-self.clip, self.clip)


FAMILIES: dict[type, Callable[[Any], Callable]] = {  # how each projects to queries, keys, values
    LlamaForCausalLM: fuse_qkv,
    MistralForCausalLM: fuse_qkv,
    Qwen2ForCausalLM: fuse_qkv,
    Qwen3ForCausalLM: NormedHeads,
    MixtralForCausalLM: fuse_qkv,
    OlmoeForCausalLM: NormedProjections,
    Qwen2MoeForCausalLM: fuse_qkv,
    Qwen3MoeForCausalLM: NormedHeads,
}


class LeanMixture:
    """A mixture of experts for the lean forward: router and experts in one function.

    Args:
        block: transformers' block; its router is packed.
    """

    def __init__(self, block: Any):
        self.router = linear(block.gate.weight)
        self.per_token = block.gate.top_k
        self.is_normalised = getattr(block.gate, "norm_topk_prob", True)  # Mixtral's always are
        self.experts = block.experts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, [B, T, hidden]."""
        rows_NH = x.view(-1, x.shape[-1])
        return self.route(rows_NH, self.router(rows_NH)).view_as(x)

    def route(self, rows_NH: torch.Tensor, logits_NE: torch.Tensor) -> torch.Tensor:
        """The routed experts' share of the output, [N, hidden].

        An expert counts its probability, among the chosen ones where they are normalised.
        """
        logits_NE, order_NE = logits_NE.float().sort(descending=True, stable=True)
        if self.is_normalised:
            weights_NK = logits_NE[:, : self.per_token].softmax(dim=-1)
        else:
            weights_NK = logits_NE.softmax(dim=-1)[:, : self.per_token]
        return dispatch_experts(self.experts, rows_NH, order_NE[:, : self.per_token], weights_NK)


class SharedMixture(LeanMixture):
    """A Qwen2-MoE block: beside the routed experts one that all tokens visit, behind a gate.

    Args:
        block: transformers' block; the shared expert's gate is the router's last row.
    """

    def __init__(self, block: Any):
        super().__init__(block)
        self.router = linear(torch.cat([block.gate.weight, block.shared_expert_gate.weight]))
        self.shared = FeedForward(block.shared_expert)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output, [B, T, hidden]."""
        rows_NH = x.view(-1, x.shape[-1])
        logits = self.router(rows_NH)
        routed_NH = self.route(rows_NH, logits[:, :-1])
        return (routed_NH + logits[:, -1:].sigmoid() * self.shared(rows_NH)).view_as(x)


def feed_forward(block: Any) -> Callable:
    """The lean form of a layer's feed-forward block, a dense one or a mixture."""
    if not hasattr(block, "experts"):
        return FeedForward(block)
    return SharedMixture(block) if hasattr(block, "shared_expert") else LeanMixture(block)


def is_lean(model: Any) -> bool:
    """Whether the lean forward computes this model: of a known family, with SiLU, unquantised."""
    if type(model) not in FAMILIES or model.config.hidden_act != "silu":
        return False
    # Quantised and adapted linears are of other classes: they keep transformers' own forward.
    names = ("_proj", "lm_head", "shared_expert_gate")
    projections = [module for name, module in model.named_modules() if name.endswith(names)]
    return all(map(is_plain_linear, projections))


def make_lean(model: Any) -> LeanLlama | None:
    """The lean forward of a model, which it takes over; None where there is none for it."""
    if not is_lean(model):
        return None
    return LeanLlama(model, feed_forward, FAMILIES[type(model)])
