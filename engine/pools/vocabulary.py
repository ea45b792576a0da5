"""Vocabularies of a pool's members: which token ids mean the same, and which a drafter lacks.

The target's tokenizer makes all ids, so a drafter need not know all of them. It must never read an
id as another token than the target does, and never propose an id that the target does not know.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.members.model import ModelMember

logger = logging.getLogger(__name__)


def count_tokens(tokenizer: Any, num_rows: int) -> int:
    """Token ids a tokenizer uses, counted to the last one, as far as a model has rows for them."""
    return min(max(tokenizer.get_vocab().values()) + 1, num_rows)


def check_tokenizers(name: str, drafter: Any, target: Any) -> None:
    """Refuses a drafter whose ids mean other tokens than the target's.

    A token or an id that only one of the two knows is no difference.

    Raises:
        ValueError: If a token that both know has two ids, or an id that both know has two tokens,
            with the first of them; if they share no token.
    """
    ours, theirs = drafter.get_vocab(), target.get_vocab()
    tokens = {index: token for token, index in theirs.items()}
    differing = sorted(
        token
        for token, index in ours.items()
        if theirs.get(token, index) != index or tokens.get(index, token) != token
    )
    if differing:
        token = differing[0]
        there = f"id {theirs[token]}" if token in theirs else f"{tokens[ours[token]]!r}"
        raise ValueError(
            f"member {name!r}: its tokenizer differs from the target's in {len(differing)} tokens, "
            f"first {token!r}: id {ours[token]} against {there}; "
            f"use a drafter of the same model family"
        )
    if not ours.keys() & theirs.keys():
        raise ValueError(
            f"member {name!r}: its tokenizer must share tokens with the target's; got none; "
            f"use a drafter of the same model family"
        )


def find_unknown(
    name: str, drafter: Any, target: Any, num_tokens: int, num_rows: int
) -> tuple[int, ...]:
    """Token ids of the pool that one of the two tokenizers lacks, or the drafter has no row for.

    Args:
        name: The drafter's name.
        drafter: Its tokenizer.
        target: The target's tokenizer.
        num_tokens: Token ids of the pool.
        num_rows: Rows of the drafter's embedding.
    """
    known = set(drafter.get_vocab().values()) & set(target.get_vocab().values())
    unknown = tuple(i for i in range(num_tokens) if i not in known or i >= num_rows)
    lacking = set(target.get_vocab().values()) & set(unknown)
    if lacking:
        logger.warning(
            "member %r lacks %d of the target's %d tokens: it never proposes them",
            name,
            len(lacking),
            num_tokens,
        )
    return unknown


class PartialMember(ModelMember):
    """A model that lacks some of the pool's token ids: they have no mass in what it says.

    It reads the lowest id it knows in their place (our choice: the published rule is to refuse such
    a pair). That costs acceptance; the target's law is never touched.

    Args:
        name: The member's name in chains.
        model: As in ``ModelMember``.
        num_tokens: Token ids of the pool.
        unknown: Those it lacks, ascending; at least one id must be left.
        lean: As in ``ModelMember``.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        num_tokens: int,
        unknown: Sequence[int],
        lean: bool = True,
    ):
        num_rows = model.config.get_text_config().vocab_size
        super().__init__(name, model, min(num_tokens, num_rows), lean)
        self.num_missing_rows = num_tokens - self.vocab_size
        self.vocab_size = num_tokens
        self.unknown = frozenset(unknown)
        self.unknown_ids = torch.tensor(sorted(self.unknown), device=self.device)
        self.stand_in = next(i for i in range(num_tokens) if i not in self.unknown)

    def forward(
        self,
        memory: MaskedKVCache,
        fed: Sequence[Sequence[int]],
        num_rows: int | None = None,
        *,
        need_logits: bool = True,
        last_only: bool = False,
        drawn_B: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """As in ``ModelMember``; logits of unknown ids are minus infinity."""
        read = [[self.stand_in if i in self.unknown else i for i in tokens] for tokens in fed]
        logits = super().forward(
            memory, read, num_rows, need_logits=need_logits, last_only=last_only, drawn_B=drawn_B
        )
        if logits is None:
            return None
        widened = F.pad(logits, (0, self.num_missing_rows), value=-torch.inf)
        return widened.index_fill(-1, self.unknown_ids, -torch.inf)


def make_member(
    name: str, model: PreTrainedModel, num_tokens: int | None, tokenizer: Any, target: Any
) -> ModelMember:
    """A model as a member; one that lacks tokens of the target where its tokenizer does.

    Args:
        name: The member's name in chains.
        model: The model.
        num_tokens: Token ids of the pool; None where the target has no tokenizer.
        tokenizer: The model's; None where it has none.
        target: The target's tokenizer; the same object for the target itself.
    """
    if num_tokens is None or tokenizer is None or tokenizer is target:
        return ModelMember(name, model, num_tokens)
    num_rows = model.config.get_text_config().vocab_size
    unknown = find_unknown(name, tokenizer, target, num_tokens, num_rows)
    if not unknown:
        return ModelMember(name, model, num_tokens)
    return PartialMember(name, model, num_tokens, unknown)
