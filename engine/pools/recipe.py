"""What a recipe for a pool is, and what its members weigh before anything is downloaded.

A member is written down as its published configuration. Parameters and bytes follow from building
that configuration on the meta device, which takes no memory; nothing here looks at the network.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specgym.engine.forward.eagle import EagleHead, EagleShape

BYTES_PER_PARAMETER = 2  # bfloat16, in memory and in most files


@dataclasses.dataclass(frozen=True)
class MemberSize:
    """What a member weighs.

    Attributes:
        num_parameters: Parameters; a tied vocabulary head counts once.
        num_active: Those a single token uses: of the routed experts, only as many as it visits.
        num_download_bytes: Its weights' file.
        num_memory_bytes: Its weights in memory, in bfloat16; caches come on top.
    """

    num_parameters: int
    num_active: int
    num_download_bytes: int
    num_memory_bytes: int


@dataclasses.dataclass(frozen=True)
class RecipeMember:
    """A published model or EAGLE head.

    Attributes:
        source: Its hub id.
        config_class: Class of its configuration in transformers.
        sizes: The published configuration's entries that shape it.
        licence: The licence, as its page names it.
        kind: ``model``, or ``eagle`` for a head on the pool's target (EAGLE's first layout).
        is_gated: Whether the hub asks for an account that has accepted the licence.
        bytes_stored: Bytes of a parameter in its file.
        stores_tied_head: Whether its file holds the tied vocabulary head a second time.
    """

    source: str
    config_class: type[PreTrainedConfig]
    sizes: Mapping[str, Any]
    licence: str
    kind: Literal["model", "eagle"] = "model"
    is_gated: bool = False
    bytes_stored: int = BYTES_PER_PARAMETER
    stores_tied_head: bool = False

    @property
    def architecture(self) -> str:
        """The architecture's name."""
        return "EagleHead" if self.kind == "eagle" else self.config_class.__name__[: -len("Config")]

    def config(self, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
        """Its configuration.

        Args:
            changes: Entries to take in place of its own, to shrink it.
        """
        return self.config_class(**{**self.sizes, **(changes or {})})

    def size(self) -> MemberSize:
        """What it weighs, from its configuration alone."""
        config = self.config()
        return size_of_head(config) if self.kind == "eagle" else self.size_of_model(config)

    def size_of_model(self, config: Any) -> MemberSize:
        """What a model of its configuration weighs."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        total = sum(p.numel() for p in model.parameters())
        routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
        idle = routed - routed * getattr(config, "num_experts_per_tok", 0) // num_experts(config)
        stored = total
        if config.tie_word_embeddings and self.stores_tied_head:
            stored += model.get_output_embeddings().weight.numel()
        return MemberSize(
            total, total - idle, stored * self.bytes_stored, total * BYTES_PER_PARAMETER
        )


@dataclasses.dataclass(frozen=True)
class PoolRecipe:
    """A pool of published models.

    Attributes:
        name: What ``--pool`` calls it.
        members: Its members by name, cheapest first; prompt lookup (``ngram``) is always there.
        chains: Its legal chains.
        paper: Where it comes from.
    """

    name: str
    members: Mapping[str, RecipeMember]
    chains: tuple[tuple[str, ...], ...]
    paper: str

    def sources(self, changes: str = "") -> dict[str, str]:
        """Its members' sources: hub ids, or what takes their place.

        Args:
            changes: Local sources, like ``target=PATH,eagle=PATH``.

        Raises:
            ValueError: If a change names no member or gives no source.
        """
        sources = {name: member.source for name, member in self.members.items()}
        for part in filter(None, changes.split(",")):
            name, _, source = (piece.strip() for piece in part.partition("="))
            if name not in sources or not source:
                raise ValueError(
                    f"pool: {self.name} takes {', '.join(f'{each}=PATH' for each in sources)}, "
                    f'like "{self.name}:target=PATH"; got {part!r}'
                )
            sources[name] = source
        return sources


def num_experts(config: Any) -> int:
    """Routed experts of a layer; 1 for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    return next((getattr(config, name) for name in names if hasattr(config, name)), 1)


def size_of_head(config: Any) -> MemberSize:
    """What an EAGLE head of a configuration weighs: its file holds an embedding of its own.

    In memory it also packs the rows of the target's vocabulary head.
    """
    with torch.device("meta"):
        head = EagleHead(EagleShape(config, (), True, config.vocab_size, config.hidden_size))
    total = sum(p.numel() for p in head.parameters())
    rows = config.vocab_size * config.hidden_size
    return MemberSize(
        total, total, (total + rows) * BYTES_PER_PARAMETER, (total + 2 * rows) * BYTES_PER_PARAMETER
    )
