"""A chain's drafter that reads the target's features: an EAGLE head with its memory.

Legend: B batch, T tokens, F features, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from specgym.engine.cache import MaskedKVCache
from specgym.engine.eagle import EagleCheckpoint
from specgym.engine.kernels import (
    attend_folded,
    fold_mask,
    last_rows,
    linear,
    pack_linears,
    pad_tokens,
    widen,
)
from specgym.engine.timing import SECONDS_PER_PARAMETER


class EagleMemory(MaskedKVCache):
    """An EAGLE head's cache; position t stands for token t + 1 beside the features of token t.

    Attributes:
        source: The target's memory, which holds the features of every committed token.
        guess_BH: The last output of each row, which stands for the next position's features.
    """

    source: MaskedKVCache
    guess_BH: torch.Tensor | None = None

    def num_eaten(self, row: int) -> int:
        """Leading tokens behind what it holds: the first token has no position of its own."""
        return self.num_valid(row) + 1

    def num_known(self, row: int) -> int:
        """Positions whose features the target has computed."""
        return self.source.num_valid(row)

    def drop_guesses(self) -> None:
        """Keeps only what rests on the target's features."""
        rows = range(self.num_sequences)
        self.keep([min(self.num_valid(row), self.num_known(row)) for row in rows])


class EagleMember:
    """An EAGLE head on the pool's target.

    At committed positions its keys and values always come from the target's features; what it
    computed from its own guesses is discarded when it has drafted. So what it proposes depends on
    the committed tokens alone.

    Args:
        name: The member's name in chains.
        checkpoint: The head.
        target: The target, before a ``ModelMember`` takes it over: the head may use its embedding
            and rows of its vocabulary head.
        num_tokens: Token ids the tokenizer knows; None takes the target's whole vocabulary.

    Raises:
        ValueError: If the head was made for a target of other sizes.
    """

    is_neural = True
    can_verify = False
    architecture = "EagleHead"
    loads: tuple[()] = ()  # it has no experts
    setup_seconds = 0.0  # and captures nothing

    def __init__(
        self, name: str, checkpoint: EagleCheckpoint, target: Any, num_tokens: int | None = None
    ):
        config = target.config.get_text_config()
        shape = checkpoint.head.shape
        check_fit(name, checkpoint, config)
        self.name = name
        self.vocab_size: int = num_tokens or config.vocab_size
        self.context_limit: int = getattr(config, "max_position_embeddings", None) or 2**31
        self.num_layers = shape.config.num_hidden_layers
        self.taps = shape.taps or (config.num_hidden_layers,)
        self.columns = torch.arange(shape.num_features)
        self.feature_size = shape.target_hidden_size
        rows = target.get_input_embeddings().weight.detach()
        self.device, self.dtype = rows.device, rows.dtype
        own = None if checkpoint.embedding is None else complete(checkpoint, rows)
        self.embedding = rows if own is None else own.to(self.device, self.dtype)
        self.head = checkpoint.head.to(self.device, self.dtype)
        num_heads = shape.config.num_attention_heads
        self.groups = num_heads // (shape.config.num_key_value_heads or num_heads)
        draft_ids = checkpoint.draft_ids
        if draft_ids is None:
            draft_ids = torch.arange(min(config.vocab_size, shape.num_draft_tokens))
        # Ids that the tokenizer does not know are never proposed.
        is_known = draft_ids < self.vocab_size
        self.draft_ids = draft_ids[is_known].to(self.device)
        rows = checkpoint.lm_head
        if rows is None:
            rows = target.get_output_embeddings().weight.detach()[draft_ids]
        rows = rows[: len(draft_ids)][is_known].to(self.device, self.dtype)
        sizes = [p.numel() for p in self.head.parameters()]
        self.num_parameters = sum(sizes) + rows.numel() + (0 if own is None else own.numel())
        self.num_bytes = self.num_parameters * rows.element_size()
        self.vocab_head = linear(rows)
        if self.device.type == "cpu":
            pack_linears(self.head)

    @property
    def clock_cost(self) -> float:
        """Modelled seconds of a one-row forward, for the counting clock."""
        return self.num_parameters * SECONDS_PER_PARAMETER

    def find_columns(self, target_taps: tuple[int, ...]) -> None:
        """Remembers where its features stand among all that the target keeps."""
        size = self.feature_size
        starts = [target_taps.index(tap) * size for tap in self.taps]
        columns = [torch.arange(start, start + size, device=self.device) for start in starts]
        self.columns = torch.cat(columns)

    def new_memory(
        self, batch_size: int, num_slots: int, kv_length: int | None = None
    ) -> EagleMemory:
        """An empty cache for a batch of requests; its ``source`` is yet to be set."""
        return EagleMemory(
            self.num_layers,
            batch_size,
            num_slots,
            self.device,
            self.dtype,
            kv_length=kv_length,
            name=self.name,
        )

    @torch.inference_mode()
    def forward(
        self,
        memory: MaskedKVCache,
        fed: Sequence[Sequence[int]],
        num_rows: int | None = None,
        *,
        need_logits: bool = True,
        last_only: bool = True,
    ) -> torch.Tensor | None:
        """Feeds each row its tokens, beside the target's features or else its own last output.

        Args:
            memory: The rows' cache, an ``EagleMemory``.
            fed: Tokens of each row; where the features of a token's predecessor are unknown, it
                must be the row's only one.
            num_rows: Rows of the token dimension, pads included; None takes the longest row.
            need_logits: False spares the vocabulary head.
            last_only: It never reads more than each row's last token.

        Returns:
            Logits [B, 1, vocab] of what follows each row's last token; None when not needed.
        """
        assert isinstance(memory, EagleMemory)
        counts = [len(tokens) for tokens in fed]
        width = num_rows or max(counts)
        memory.make_room(width)
        tokens_BT = pad_tokens(fed, width, self.device)
        positions_BT = memory.positions(width).clamp_max(self.context_limit - 1)
        folded_mask = fold_mask(memory.mask(counts, width), self.groups)

        def attend(
            index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            held = memory.update(keys.transpose(1, 2), values.transpose(1, 2), index)
            return attend_folded(queries, *held, folded_mask)

        embeds = F.embedding(tokens_BT, self.embedding)
        taken = self.taken(memory, counts, width)
        hidden_BTH = self.head(embeds, taken, positions_BT, attend)
        memory.advance(counts, width)
        memory.guess_BH = hidden_BTH[last_rows(counts, self.device)]
        if not need_logits:
            return None
        logits = self.vocab_head(self.head.before_head(memory.guess_BH))
        return widen(logits, self.draft_ids, self.vocab_size)[:, None]

    def taken(self, memory: EagleMemory, counts: list[int], width: int) -> torch.Tensor:
        """What stands for features at each position of a window, [B, T, hidden]."""
        source = memory.source
        features = source.features_BSF
        assert features is not None, f"{self.name}: the target has kept no features"
        firsts = [memory.num_valid(row) for row in range(len(counts))]
        slots = [
            (source.row_slots[row][first : first + count] + [0] * width)[:width]
            for row, (first, count) in enumerate(zip(firsts, counts, strict=True))
        ]
        slots_BT = torch.tensor(slots, device=self.device)
        rows_B1 = torch.arange(len(counts), device=self.device)[:, None]
        taken = self.head.take_in(features[rows_B1, slots_BT][..., self.columns])
        guessing = [
            row
            for row, first in enumerate(firsts)
            if first >= memory.num_known(row) and counts[row]
        ]
        if guessing:
            assert memory.guess_BH is not None
            assert all(counts[row] == 1 for row in guessing)
            taken[guessing, 0] = memory.guess_BH[guessing]
        return taken


def complete(checkpoint: EagleCheckpoint, target_rows: torch.Tensor) -> torch.Tensor:
    """A head's own embedding; tokens that the target got later have the target's rows."""
    own = checkpoint.embedding
    assert own is not None
    added = target_rows[len(own) :]
    return own if not len(added) else torch.cat([own, added.to(own)])


def check_fit(name: str, checkpoint: EagleCheckpoint, config: Any) -> None:
    """Refuses a head that was made for a target of other sizes.

    Raises:
        ValueError: If widths or vocabularies do not fit the target's.
    """
    shape = checkpoint.head.shape
    size = config.hidden_size
    ids = checkpoint.draft_ids
    if shape.target_hidden_size != size or (
        checkpoint.embedding is None and shape.config.hidden_size != size
    ):
        raise ValueError(
            f"member {name!r}: its features are {shape.target_hidden_size} wide, the target's "
            f"{size}; use a head that was trained on this target"
        )
    own = checkpoint.embedding
    if own is not None and len(own) < config.vocab_size and own.shape[1] != size:
        raise ValueError(
            f"member {name!r}: its embedding has {len(own)} rows, the target's vocabulary "
            f"{config.vocab_size}; use a head that was trained on this target"
        )
    if ids is not None and int(ids.max()) >= config.vocab_size:
        raise ValueError(
            f"member {name!r}: its vocabulary goes up to id {int(ids.max())}, the target's has "
            f"{config.vocab_size}; use a head that was trained on this target"
        )
    if shape.taps and not 0 <= min(shape.taps) <= max(shape.taps) <= config.num_hidden_layers:
        raise ValueError(
            f"member {name!r}: it reads layers {shape.taps}, the target has "
            f"{config.num_hidden_layers}; use a head that was trained on this target"
        )
