"""A mixture of experts out of a dense model: the same function at a mixture's memory traffic."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

from specgym.engine.compiled.packing import make_slab

PREFIX = "upcycled"
MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN = 16, 4
ROUTER_SEED = 0
SHARED_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


@dataclasses.dataclass(frozen=True)
class Upcycling:
    """How a dense model becomes a mixture.

    Attributes:
        num_experts: Copies of each layer's MLP, E.
        experts_per_token: Copies every token visits, K.
        base: Source of the dense model.
    """

    num_experts: int
    experts_per_token: int
    base: str

    def __post_init__(self) -> None:
        most = min(MAX_EXPERTS_PER_TOKEN, self.num_experts)
        if not 2 <= self.num_experts <= MAX_EXPERTS:
            raise ValueError(f"experts: must be in 2..{MAX_EXPERTS}; got {self.num_experts}")
        if not 1 <= self.experts_per_token <= most:
            raise ValueError(
                f"top-k: must be in 1..{most} with {self.num_experts} experts; "
                f"got {self.experts_per_token}"
            )

    @property
    def source(self) -> str:
        """This as a source of weights: ``upcycled:8:2:smollm2-135m``."""
        return f"{PREFIX}:{self.num_experts}:{self.experts_per_token}:{self.base}"

    @property
    def label(self) -> str:
        """What the result is, for tables."""
        return f"upcycled: {self.num_experts} experts, top-{self.experts_per_token}"


def parse_upcycling(source: str) -> Upcycling | None:
    """The recipe behind ``upcycled:EXPERTS:TOP_K:SOURCE``; None for any other source.

    Raises:
        ValueError: If the numbers are missing or out of range.
    """
    prefix, _, rest = source.partition(":")
    if prefix != PREFIX:
        return None
    num_experts, _, rest = rest.partition(":")
    per_token, _, base = rest.partition(":")
    if not (num_experts.isdecimal() and per_token.isdecimal() and base):
        raise ValueError(f"source: must be {PREFIX}:EXPERTS:TOP_K:SOURCE; got {source!r}")
    return Upcycling(int(num_experts), int(per_token), base)


@torch.no_grad()
def upcycle(dense: LlamaForCausalLM, recipe: Upcycling) -> MixtralForCausalLM:
    """A Mixtral whose experts are all physical copies of the dense MLP, with a random router.

    Its top-k weights sum to 1, so it computes the dense model's function, whatever is routed
    where; what it reads from memory is a real mixture's. The dense model lends all other weights.

    Args:
        dense: A Llama without biases, on the CPU.
        recipe: Numbers of experts.

    Raises:
        ValueError: If the model is no such Llama.

    Source: Komatsuzaki et al. 2022 (arXiv 2212.05055), sparse upcycling; a router of unit-scale
        logits is ours.
    """
    if type(dense) is not LlamaForCausalLM or any(n.endswith("bias") for n in dense.state_dict()):
        raise ValueError(
            f"source: only a Llama without biases can be upcycled; {recipe.base} is a "
            f"{type(dense).__name__}"
        )
    config = MixtralConfig(
        num_local_experts=recipe.num_experts,
        num_experts_per_tok=recipe.experts_per_token,
        sliding_window=None,
        output_router_logits=False,
        **{name: getattr(dense.config, name) for name in SHARED_SETTINGS},
    )
    config.upcycled = recipe.label
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    model.model.rotary_emb = MixtralRotaryEmbedding(config)
    model.load_state_dict(mixture_weights(dense, recipe), assign=True)
    model.tie_weights()
    model.generation_config = dense.generation_config
    return model.eval().requires_grad_(False)


def mixture_weights(dense: LlamaForCausalLM, recipe: Upcycling) -> dict[str, Any]:
    """The mixture's state dict: the dense one's, with experts and router in each MLP's place."""
    weights = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    generator = torch.Generator().manual_seed(ROUTER_SEED)
    for index, layer in enumerate(dense.model.layers):
        prefix, mlp = f"model.layers.{index}.mlp.", layer.mlp
        gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        router = torch.randn(recipe.num_experts, gate_up.shape[1], generator=generator)
        weights[prefix + "gate.weight"] = (router * gate_up.shape[1] ** -0.5).to(gate_up.dtype)
        weights[prefix + "experts.gate_up_proj"] = copies(gate_up, recipe.num_experts)
        down = mlp.down_proj.weight
        weights[prefix + "experts.down_proj"] = copies(down, recipe.num_experts)
    return weights


def copies(weight: torch.Tensor, count: int) -> torch.Tensor:
    """So many copies of a weight, in huge pages where the system has them: that saves seconds."""
    memory = torch.from_numpy(make_slab(count * weight.numel() * weight.element_size()))
    return memory.view(weight.dtype).view(count, *weight.shape).copy_(weight)
