"""Models of realistic shape with random weights, made on the device that runs them."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool

NOISE = 0.02  # of the middle drafter's weights, relative
MIXTURE_SHARE = 3  # the mixture may take this part of the memory that is free
MAX_MIXTURE_LAYERS = 4
DTYPE = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model of Llama's form.

    Attributes:
        vocab: Tokens.
        hidden: Width.
        inner: Width of a feed-forward block, or of one expert.
        layers: Layers.
        heads: Query heads.
        kv_heads: Key/value heads.
        experts: Experts of a layer, two of which run; 0 is a dense model.
    """

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    experts: int = 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's feed-forward weights in bfloat16."""
        return 2 * 3 * self.hidden * self.inner * max(self.experts, 1)

    def config(self, layers: int, max_positions: int) -> Any:
        """transformers' configuration with so many layers."""
        sizes: dict[str, Any] = {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": max_positions,
        }
        if self.experts:
            return MixtralConfig(**sizes, num_local_experts=self.experts, num_experts_per_tok=2)
        return LlamaConfig(**sizes, tie_word_embeddings=True)


DENSE = Shape(128_256, 2048, 8192, 16, 32, 8)  # Llama 3.2 1B
MIXTURE = Shape(32_000, 4096, 14_336, MAX_MIXTURE_LAYERS, 32, 8, experts=8)  # Mixtral's layers
TINY_DENSE = Shape(97, 32, 48, 4, 4, 2)
TINY_MIXTURE = Shape(97, 32, 48, 2, 4, 2, experts=4)


def fit(shape: Shape, device: torch.device) -> Shape:
    """The shape with as many layers as a part of the device's free memory holds, at least two."""
    if device.type != "cuda":
        return shape
    room = torch.cuda.mem_get_info(device)[0] // MIXTURE_SHARE
    layers = min(shape.layers, max(room // shape.layer_bytes, 2))
    return dataclasses.replace(shape, layers=int(layers))


def make_model(shape: Shape, layers: int, max_positions: int, device: torch.device) -> Any:
    """A random model of this shape, every matrix drawn from the global random stream."""
    kind = MixtralForCausalLM if shape.experts else LlamaForCausalLM
    with torch.device(device):
        model = kind._from_config(shape.config(layers, max_positions), dtype=DTYPE)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model.eval().requires_grad_(False)


def make_pool(shape: Shape, max_positions: int, device: torch.device, seed: int) -> ModelPool:
    """Prompt lookup, ``draft`` (the target's first half) and ``mid`` (noisy weights), the target.

    A mixture has ``draft`` alone: a second copy of its experts is left out.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        target = make_model(shape, shape.layers, max_positions, device)
        models = {"draft": first_half(target, shape, max_positions, device)}
        if not shape.experts:
            models["mid"] = with_noise(target)
    members = [ModelMember(name, model, compiled=False) for name, model in models.items()]
    name = "mixture" if shape.experts else "dense"
    members.append(ModelMember("target", target, compiled=False))  # a dry run is of the fused one
    return ModelPool([NGramMember(), *members], name=name)


def first_half(target: Any, shape: Shape, max_positions: int, device: torch.device) -> Any:
    """A model of the target's first layers, with its embedding and head."""
    student = make_model(shape, shape.layers // 2, max_positions, device)
    weights = target.state_dict()
    student.load_state_dict({name: weights[name] for name in student.state_dict()})
    return student


def with_noise(target: Any) -> Any:
    """A copy whose matrices are off by a little."""
    twin = copy.deepcopy(target)
    for parameter in twin.parameters():
        if parameter.dim() > 1:
            parameter.add_(torch.randn_like(parameter), alpha=NOISE * parameter.shape[-1] ** -0.5)
    return twin
