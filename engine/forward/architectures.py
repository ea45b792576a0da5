"""Which architectures a masked cache can drive, and what must be frozen in them first."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

ATTENTION_LAYERS = ("full_attention", "sliding_attention")  # the masks a window comes with
STATEFUL_LAYERS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")


def refuse_unmaskable(name: str, model: PreTrainedModel) -> None:
    """Raises for an architecture that a masked cache with holes cannot drive.

    Raises:
        ValueError: If the model keeps a recurrent state or no cache, attends in a pattern that is
            neither full nor sliding, or knows where a token stands by its slot instead of its
            position id.
    """
    config = model.config.get_text_config()
    takes = inspect.signature(model.forward).parameters
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - set(ATTENTION_LAYERS))
    states = [kind for kind in kinds if kind in STATEFUL_LAYERS]
    if states or getattr(model, "_is_stateful", False):
        reason = (
            f"has layers whose memory cannot be rolled back when drafted tokens are rejected "
            f"({', '.join(states) or 'recurrent state'}); use a model with full or sliding "
            f"attention in every layer"
        )
    elif kinds:
        reason = (
            f"attends in a pattern for which the cache has no mask ({', '.join(kinds)}); use a "
            f"model with full or sliding attention in every layer"
        )
    elif not takes.keys() & {"cache", "past_key_values"}:
        reason = "keeps no keys and values, so each token costs the whole text; use one that does"
    elif "position_ids" not in takes or getattr(config, "alibi", False):
        reason = (
            "counts positions by cache slot (ALiBi, or no position_ids), which rejected tokens "
            "would shift; use a model that takes position_ids"
        )
    elif "local" in (getattr(config, "attention_layers", None) or ()):
        reason = (
            "counts the windows of its local layers by cache slot, which rejected tokens would "
            "shift; use a model whose windows go by the mask"
        )
    else:
        return
    raise ValueError(f"member {name!r}: {type(model).__name__} {reason}")


class FrozenRotary(nn.Module):
    """A rotary embedding whose factors depend on the whole request, not on the window at hand.

    LongRoPE changes its factors where the largest position of a forward passes a border. Windows
    that reach past it sooner or later would then make the output depend on the plans; so every
    forward of a request is given the request's last slot as its largest position.
    """

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary
        self.num_positions = 0

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [B, T, D] of positions [B, T]."""
        last_B1 = position_ids.new_full((len(position_ids), 1), self.num_positions - 1)
        widened_BT = torch.cat([position_ids, last_B1], dim=1)
        kind = () if layer_type is None else (layer_type,)
        cos, sin = self.rotary(x, widened_BT, *kind)
        return cos[:, :-1], sin[:, :-1]


def freeze_rotaries(name: str, model: PreTrainedModel) -> list[FrozenRotary]:
    """The model's LongRoPE embeddings, each put behind a ``FrozenRotary``.

    Raises:
        ValueError: If an embedding rescales as the text grows, so that rows computed earlier would
            have to be computed again.
    """
    frozen = []
    for parent in list(model.modules()):
        for attribute, child in list(parent.named_children()):
            kinds = getattr(child, "rope_type", None) or ()
            kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
            if "dynamic" in kinds:
                raise ValueError(
                    f"member {name!r}: rotary embeddings of type 'dynamic' change with the length "
                    f"of the text, which a cache cannot follow; set another rope_type"
                )
            if "longrope" in kinds:
                frozen.append(FrozenRotary(child))
                setattr(parent, attribute, frozen[-1])
    return frozen


def refuse_unlike_llama(what: str, model: object) -> None:
    """Raises for a model whose layers a drafter cannot be made from.

    Raises:
        ValueError: If it is no plain Llama.
    """
    if type(model) is not LlamaForCausalLM:
        raise ValueError(
            f"target: {what} is made from the layers of a LlamaForCausalLM; got a "
            f"{type(model).__name__}; take a target of Llama's architecture, or a drafter that "
            f"exists for this one"
        )
