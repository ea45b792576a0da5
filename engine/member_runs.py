"""Running one member: timed forwards, prefill, catching up with the text, and reading logits.

A member's cache holds a prefix of each row's committed text. Before a forward counts as a draft or
a verification, the cache must be there (``ensure_prefilled``) and must lack so few committed tokens
that they fit into the same forward (``catch_up``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch

from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.forward.experts import count_unique
from specgym.engine.members.protocol import NeuralMember, reads_target
from specgym.engine.state import DecodeState
from specgym.engine.timing import Clock
from specgym.engine.types import EngineFault, ForwardCost, Proposal

PREFILL_CHUNK = 512  # tokens of a prefill forward at most
HALVES = (torch.bfloat16, torch.float16)
FAULTY = -1  # stands for a token whose logits are not finite


class Meter:
    """Runs forwards and records what each cost."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.records: list[tuple[tuple[str, str, int, int, int], Any, Any, Sequence]] = []

    @property
    def costs(self) -> tuple[ForwardCost, ...]:
        """What the forwards cost, in order; read it when the device has finished them."""
        between = self.clock.between
        return tuple(
            ForwardCost(*what, between(started, ended), count_unique(loads) if loads else ())
            for what, started, ended, loads in self.records
        )

    def forward(
        self,
        member: NeuralMember,
        memory: MaskedKVCache,
        fed: Sequence[Sequence[int]],
        role: str,
        num_rows: int | None = None,
        num_catchup: int = 0,
        drawn_B: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run a member's forward and time it; catch-up forwards return no logits.

        Raises:
            EngineFault: If the device has no memory for it.
        """
        before, started = member.setup_seconds, self.clock.stamp()
        need_logits = role != "catchup"
        width = num_rows or max(map(len, fed))
        options: dict[str, Any] = {"need_logits": need_logits, "last_only": role == "draft"}
        if drawn_B is not None:
            options["drawn_B"] = drawn_B
        try:
            logits = member.forward(memory, fed, num_rows, **options)
        except torch.OutOfMemoryError as error:
            raise EngineFault(
                f"member {member.name!r}: out of memory in a {role} forward of {len(fed)} x "
                f"{width} tokens; lower max_new_tokens, K or the batch ({error})"
            ) from error
        self.clock.charge(member.clock_cost, width)
        if (after := member.setup_seconds) != before:
            self.clock.skip(after - before)
        num_tokens, ended = sum(map(len, fed)), self.clock.stamp()
        what = (member.name, role, num_tokens, width, num_catchup)
        self.records.append((what, started, ended, member.loads))
        return logits


def ensure_prefilled(state: DecodeState, member: NeuralMember, meter: Meter) -> MaskedKVCache:
    """Return the member's cache, with every row's prompt in it.

    On first use the cache is made. Rows that it has not seen yet are prefilled.
    """
    memory = state.memories.get(member.name)
    if memory is None:
        kv_length = state.num_slots if state.exact else None
        memory = member.new_memory(
            state.batch_size, state.num_slots, kv_length, aligned=state.exact
        )
        if reads_target(member):
            target = state.pool.model(state.pool.target)
            member.attach(memory, ensure_prefilled(state, target, meter))
        state.memories[member.name] = memory
    for row in state.active_rows:
        prefill(state, member, memory, row, meter)
    return memory


def prefill(
    state: DecodeState, member: NeuralMember, memory: MaskedKVCache, row: int, meter: Meter
) -> None:
    """Feed a row's prompt but its last token, without the other rows, unless that was done before.

    The shapes depend on the prompt alone. So what a member remembers depends neither on when it
    was first used nor on the other rows.
    """
    prompt = state.requests[row].prompt
    while fed := prompt[memory.num_eaten(row) : -1][:PREFILL_CHUNK]:
        with memory.alone(row) as view:
            meter.forward(member, view, [fed], "catchup", None, len(fed))


def catch_up(
    state: DecodeState, member: NeuralMember, memory: MaskedKVCache, extra: list[int], meter: Meter
) -> tuple[list[list[int]], int]:
    """Run catch-up forwards until what a member lacks fits into its next forward.

    That forward is as wide as the pool's window and also takes ``extra`` tokens per row. Catch-up
    forwards are as wide as the window, or, without exact mode, as the cache has slots left.

    Returns:
        The committed tokens that each row's cache still lacks (none for a row that has ended), and
        how many of them are catch-up: more than the one token that is always fed.
    """
    window = state.pool.window
    while True:
        missing = [
            tokens[memory.num_eaten(row) :] if state.is_active(row) else []
            for row, tokens in enumerate(state.tokens)
        ]
        late = [
            row
            for row, tokens in enumerate(missing)
            if len(tokens) > 1 and len(tokens) + extra[row] > window
        ]
        if not late:
            return missing, sum(max(len(tokens) - 1, 0) for tokens in missing)
        room = memory.num_slots - max(map(len, memory.row_slots))
        size = window if state.exact else min(PREFILL_CHUNK, room)
        fed = [tokens[:-1][:size] if row in late else [] for row, tokens in enumerate(missing)]
        width = window if state.exact else None
        meter.forward(member, memory, fed, "catchup", width, sum(map(len, fed)))


def score(
    state: DecodeState, name: str, proposals: Sequence[Proposal], meter: Meter
) -> tuple[torch.Tensor, list[int]]:
    """Feed a verifier what it lacks of the text, then the proposals.

    Returns:
        Logits [B, T, V], and per row the entry of T that judges the first proposed token.

    Raises:
        EngineFault: If the device has no memory for it.
    """
    member = state.pool.model(name)
    memory = ensure_prefilled(state, member, meter)
    extra = [len(proposal.tokens) for proposal in proposals]
    missing, num_catchup = catch_up(state, member, memory, extra, meter)
    fed = [[*row, *proposal.tokens] for row, proposal in zip(missing, proposals, strict=True)]
    width = state.pool.window if state.exact else None
    logits_BTV = meter.forward(member, memory, fed, "verify", width, num_catchup)
    assert logits_BTV is not None
    return logits_BTV, [max(len(row) - 1, 0) for row in missing]


def best_tokens(logits: torch.Tensor, name: str, memory: MaskedKVCache | None = None) -> list:
    """Return the argmax over the vocabulary as nested lists, the first of equal ones.

    Args:
        logits: A member's logits [..., V].
        name: The member.
        memory: Its cache after that forward, to say in which layer a fault began.

    Raises:
        EngineFault: If a position's logits are not finite.
    """
    if not logits.is_cpu:
        best: list = mark_faults(logits).tolist()  # the one place where the host waits for tokens
        is_faulty = FAULTY in best or any(isinstance(row, list) and FAULTY in row for row in best)
    else:  # numpy's argmax takes a tenth of torch's time
        scores = (logits.float() if logits.dtype in HALVES else logits).numpy()
        indices = scores.argmax(axis=-1)  # of the first NaN where there is one
        best = indices.tolist()
        starts = range(0, scores.size, scores.shape[-1])
        places = map(operator.add, starts, indices.ravel().tolist())
        is_faulty = not all(map(math.isfinite, map(scores.item, places)))
    if is_faulty:
        where = (~logits.max(dim=-1).values.isfinite()).nonzero()[0].tolist()
        raise EngineFault(
            f"member {name!r}: logits are not finite (first at batch row and position {where})"
            f"{origin_of_fault(memory)}; check its weights and dtype"
        )
    return best


def mark_faults(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax over the vocabulary, [...]; ``FAULTY`` where logits are not finite."""
    values, indices = logits.max(dim=-1)
    return indices.masked_fill_(~values.isfinite(), FAULTY)


def origin_of_fault(memory: MaskedKVCache | None) -> str:
    """Say where logits that are not finite come from, as the end of a sentence."""
    if memory is None:
        return ""
    fault = memory.first_fault()
    if fault is None:
        return ", and every layer's input is finite: it is the last layer or the head"
    layer, row, position = fault
    return f", from the input of layer {layer} on (batch row {row}, token {position} of the text)"
