"""A chain's drafter that reads the target's features: an EAGLE head with its memory.

Legend: B batch, T tokens, F features, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from specgym.engine.compiled.eagle import CompiledEagle
from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.forward.eagle import EagleCheckpoint
from specgym.engine.forward.lean_eagle import LeanEagle
from specgym.engine.forward.lean_llama import fold_mask, last_rows, pad_tokens, widen
from specgym.engine.forward.linears import linear
from specgym.engine.members.eagle_memory import EagleMemory
from specgym.engine.members.traits import HEAD
from specgym.engine.timing import SECONDS_PER_PARAMETER


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
        compiled: Use the compiled forward on a CPU.

    Raises:
        ValueError: If the head was made for a target of other sizes.
    """

    traits = HEAD
    takes_drawn = False
    architecture = "EagleHead"
    loads: tuple[()] = ()  # it has no experts
    setup_seconds = 0.0  # and captures nothing

    def __init__(
        self,
        name: str,
        checkpoint: EagleCheckpoint,
        target: Any,
        num_tokens: int | None = None,
        compiled: bool = True,
    ):
        config = target.config.get_text_config()
        shape = checkpoint.head.shape
        check_fit(name, checkpoint, config)
        self.name = name
        self.vocab_size: int = num_tokens or config.vocab_size
        self.context_limit: int = getattr(config, "max_position_embeddings", None) or 2**31
        self.num_layers = shape.config.num_hidden_layers
        self.taps = shape.taps or (config.num_hidden_layers,)
        self.columns: slice | torch.Tensor = slice(0, shape.num_features)
        self.feature_size = shape.target_hidden_size
        rows = target.get_input_embeddings().weight.detach()
        self.device, self.dtype = rows.device, rows.dtype
        own = None if checkpoint.embedding is None else complete(checkpoint, rows)
        self.embedding = rows if own is None else own.to(self.device, self.dtype)
        head = checkpoint.head.to(self.device, self.dtype)
        num_heads = shape.config.num_attention_heads
        self.groups = num_heads // (shape.config.num_key_value_heads or num_heads)
        draft_ids = checkpoint.draft_ids
        if draft_ids is None:
            draft_ids = torch.arange(min(config.vocab_size, shape.num_draft_tokens))
        # Ids that the tokenizer does not know are never proposed.
        is_known = draft_ids < self.vocab_size
        own_ids = draft_ids[is_known].to(self.device)
        self.draft_ids: torch.Tensor | None = own_ids
        rows = checkpoint.lm_head
        if rows is None:
            rows = target.get_output_embeddings().weight.detach()[draft_ids]
        rows = rows[: len(draft_ids)][is_known].to(self.device, self.dtype)
        self.token_ids: list[int] = own_ids.tolist()
        sizes = [p.numel() for p in checkpoint.head.parameters()]
        self.num_read_parameters = sum(sizes) + rows.numel()  # of an embedding it reads one row
        self.num_parameters = self.num_read_parameters + (0 if own is None else own.numel())
        self.num_bytes = self.num_parameters * rows.element_size()
        self.compiled: CompiledEagle | None = None
        if compiled and self.device.type == "cpu":
            self.compiled = CompiledEagle(head, self.embedding, rows)
        else:
            self.lean = LeanEagle(head)
            self.vocab_head = linear(rows)

    @property
    def is_exact(self) -> bool:
        """Whether a token's bits never depend on what else a forward computes."""
        return self.compiled is not None

    @property
    def clock_cost(self) -> float:
        """Modelled seconds of a one-row forward, for the counting clock."""
        return self.num_parameters * SECONDS_PER_PARAMETER

    def find_columns(self, target_taps: tuple[int, ...]) -> None:
        """Remembers where its features stand among all that the target keeps."""
        size = self.feature_size
        firsts = [target_taps.index(tap) for tap in self.taps]
        if self.compiled is not None:
            self.compiled.set_columns([first * size for first in firsts], len(target_taps) * size)
        if firsts == list(range(firsts[0], firsts[0] + len(firsts))):
            self.columns = slice(firsts[0] * size, (firsts[-1] + 1) * size)
            return
        columns = [torch.arange(size, device=self.device) + first * size for first in firsts]
        self.columns = torch.cat(columns)

    def token_of(self, row: int) -> int:
        """Token id of a row of its vocabulary head."""
        return self.token_ids[row]

    def new_memory(
        self,
        batch_size: int,
        num_slots: int,
        kv_length: int | None = None,
        *,
        aligned: bool = False,
    ) -> EagleMemory:
        """Return an empty cache for a batch of requests; ``attach`` it to the target's."""
        memory = EagleMemory(
            self.num_layers,
            batch_size,
            num_slots,
            self.device,
            self.dtype,
            kv_length=kv_length,
            name=self.name,
            aligned=aligned,
        )
        if self.compiled is None:
            like = self.embedding.new_empty(0)
            memory.factors = self.lean.factors(num_slots, self.context_limit, like)
        return memory

    def attach(self, memory: EagleMemory, target_memory: MaskedKVCache) -> None:
        """Have a new cache read the features that the target's cache holds."""
        memory.source = target_memory

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
        """Feeds each row its tokens, beside the target's features or else its own last output.

        Args:
            memory: The rows' cache, an ``EagleMemory``.
            fed: Tokens of each row; where the features of a token's predecessor are unknown, it
                must be the row's only one.
            num_rows: As ``ModelMember.forward`` takes it.
            need_logits: False spares the vocabulary head.
            last_only: Leaves the logits as its vocabulary head gives them.
            drawn_B: Always None: the host has to read what it drafts.

        Returns:
            Logits [B, 1, vocab] of what follows each row's last token, or with ``last_only`` those
            of the rows of its head (``token_of`` names them); None when not needed.
        """
        assert isinstance(memory, EagleMemory)
        assert drawn_B is None
        counts = [len(tokens) for tokens in fed]
        if self.compiled is not None:
            logits = self.forward_compiled(memory, fed, counts, need_logits=need_logits)
        else:
            logits = self.forward_torch(memory, fed, counts, num_rows, need_logits=need_logits)
        if logits is None or last_only:
            return logits
        return widen(logits, self.draft_ids, self.vocab_size)

    @torch.inference_mode()
    def forward_torch(
        self,
        memory: EagleMemory,
        fed: Sequence[Sequence[int]],
        counts: list[int],
        num_rows: int | None,
        *,
        need_logits: bool,
    ) -> torch.Tensor | None:
        """As ``forward``, by torch's operations: logits [B, 1, rows of its head]."""
        width = num_rows or max(counts)
        memory.make_room(width)
        mask = memory.bias(counts, num_rows or width)
        folded_mask = None if mask is None else fold_mask(mask, self.groups)
        tokens_BT = pad_tokens(fed, width, self.device)
        embeds = F.embedding(tokens_BT, self.embedding)
        taken = self.taken(memory, counts, width)
        rotation = memory.rotation(width)
        hidden_BTH = self.lean(embeds, taken, rotation, folded_mask, memory)
        memory.advance(counts, width)
        if len(counts) == 1:
            memory.guess_B1H = hidden_BTH[:, counts[0] - 1 : counts[0]]
        else:
            memory.guess_B1H = hidden_BTH[last_rows(counts, self.device)][:, None]
        return self.vocab_head(self.lean.before_head(memory.guess_B1H)) if need_logits else None

    def forward_compiled(
        self,
        memory: EagleMemory,
        fed: Sequence[Sequence[int]],
        counts: list[int],
        *,
        need_logits: bool,
    ) -> torch.Tensor | None:
        """As ``forward``, in one compiled call: logits [B, 1, rows of its head]."""
        assert self.compiled is not None
        features = memory.source.features_BSF
        assert features is not None, f"{self.name}: the target has kept no features"
        memory.make_room(max(counts))
        sources = []
        for row, count in enumerate(counts):
            first = memory.num_valid(row)
            known = memory.source.row_slots[row][first : first + count]
            assert not count or known or count == 1
            sources.append(known or [-1] * count)
        make = torch.empty if min(counts) else torch.zeros  # rows that are not fed are finite
        out = make(len(fed), 1, self.compiled.num_outputs) if need_logits else None
        memory.guesses = self.compiled.forward(memory, fed, sources, features, memory.guesses, out)
        memory.advance(counts, max(counts))
        return out

    def taken(self, memory: EagleMemory, counts: list[int], width: int) -> torch.Tensor:
        """What stands for features at each position of a window, [B, T, hidden]."""
        guessing = [
            row
            for row, count in enumerate(counts)
            if count and memory.num_valid(row) >= memory.num_known(row)
        ]
        guess_B1H = memory.guess_B1H
        assert not guessing or guess_B1H is not None
        assert all(counts[row] == 1 for row in guessing)
        if guess_B1H is not None and len(guessing) == sum(map(bool, counts)):
            return F.pad(guess_B1H, (0, 0, 0, width - 1)) if width > 1 else guess_B1H
        taken = self.lean.take_in(self.read(memory, counts, width))
        if guess_B1H is not None and guessing:
            taken[guessing, 0] = guess_B1H[guessing, 0]
        return taken

    def read(self, memory: EagleMemory, counts: list[int], width: int) -> torch.Tensor:
        """The target's features at each position of a window, [B, T, F]; pads hold anything."""
        source = memory.source
        features = source.features_BSF
        assert features is not None, f"{self.name}: the target has kept no features"
        firsts = [memory.num_valid(row) for row in range(len(counts))]
        if len(counts) == 1:  # no holes: the target's slots are its positions
            held = features[:, firsts[0] : firsts[0] + counts[0], self.columns]
            return F.pad(held, (0, 0, 0, width - counts[0])) if width > counts[0] else held
        slots = [
            (source.row_slots[row][first : first + count] + [0] * width)[:width]
            for row, (first, count) in enumerate(zip(firsts, counts, strict=True))
        ]
        slots_BT = torch.tensor(slots, device=self.device)
        rows_B1 = torch.arange(len(counts), device=self.device)[:, None]
        return features[rows_B1, slots_BT][..., self.columns]


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
