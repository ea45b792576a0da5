"""What a member is to the decoder: a protocol for each way of drafting.

A new kind of drafter is a class that follows ``NeuralMember`` (it runs forwards over a cache) or
``LookupMember`` (it looks something up in the text), in a file beside this one, and a line in
``specgym.engine.pools.loading``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard

import torch

from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.members.traits import MemberTraits


class Member(Protocol):
    """What every member has.

    Attributes:
        name: Its name in chains.
        traits: How it behaves.
        architecture: What it is, in a word or two.
        context_limit: The longest text that it takes, in tokens.
        num_parameters: Its own parameters.
        num_bytes: Their size in memory.
    """

    name: str
    traits: MemberTraits
    architecture: str
    context_limit: int
    num_parameters: int
    num_bytes: int


class NeuralMember(Member, Protocol):
    """A member that runs forwards over a masked KV cache.

    Attributes:
        vocab_size: Token ids that its logits cover.
        draft_ids: Token id of each row of its vocabulary head; None if rows are token ids.
        setup_seconds: Seconds spent on setting up forwards so far; no iteration is charged for
            them.
        takes_drawn: Its forward takes ``drawn_B``.
    """

    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    draft_ids: torch.Tensor | None
    setup_seconds: float
    takes_drawn: bool

    @property
    def clock_cost(self) -> float:
        """Modelled seconds of a forward of one token, for the counting clock."""

    @property
    def num_read_parameters(self) -> int:
        """Parameters that a forward of one token reads."""

    @property
    def loads(self) -> Sequence[Any]:
        """Tokens per expert in the last forward, for each mixture layer; empty if dense."""

    def token_of(self, row: int) -> int:
        """Return the token id of a row of its vocabulary head."""

    def new_memory(
        self,
        batch_size: int,
        num_slots: int,
        kv_length: int | None = None,
        *,
        aligned: bool = False,
    ) -> MaskedKVCache:
        """Return an empty cache for a batch of requests."""

    def forward(
        self,
        memory: Any,
        fed: Sequence[Sequence[int]],
        num_rows: int | None = None,
        *,
        need_logits: bool = True,
        last_only: bool = False,
        drawn_B: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Feed each row its tokens and keep them in the cache.

        Args:
            memory: The cache, as ``new_memory`` made it.
            fed: Tokens of each row; rows may differ in length, and may be empty.
            num_rows: Width of the forward, pads included, so that a token's bits do not depend on
                how many are fed; None takes the longest row.
            need_logits: False spares the vocabulary head.
            last_only: Return logits of each row's last token only, over the rows of the vocabulary
                head (``token_of`` names them).
            drawn_B: Tokens that stand for each row's first one, which the host has not read;
                only where ``takes_drawn``.

        Returns:
            Logits [B, T, V], or [B, 1, R] with ``last_only``; None if not needed.
        """


class HeadMember(NeuralMember, Protocol):
    """A neural member that reads the target's features.

    Attributes:
        taps: Layers of the target whose inputs are its features.
    """

    taps: tuple[int, ...]

    def find_columns(self, target_taps: tuple[int, ...]) -> None:
        """Note where its features are among all that the target keeps."""

    def attach(self, memory: Any, target_memory: MaskedKVCache) -> None:
        """Have a new cache read the features that the target's cache holds."""


class LookupMember(Member, Protocol):
    """A member that proposes from the committed text alone."""

    def new_memory(self) -> Any:
        """Return an empty memory for one row."""

    def propose(self, memory: Any, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        """Return up to ``k`` tokens that may follow the text.

        Args:
            memory: The row's memory. It has seen a prefix of these tokens, and sees the rest now.
            tokens: The row's committed tokens, prompt included.
            k: Tokens wanted.
        """


def has_kv(member: Member) -> TypeGuard[NeuralMember]:
    """Return whether a member runs forwards over a cache."""
    return member.traits.has_kv


def reads_target(member: Member) -> TypeGuard[HeadMember]:
    """Return whether a member reads the target's features."""
    return member.traits.reads_target


def looks_up(member: Member) -> TypeGuard[LookupMember]:
    """Return whether a member proposes from the text alone."""
    return not member.traits.has_kv
