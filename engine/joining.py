"""Continuous batching: a new request takes over the row of one that has ended."""

from __future__ import annotations

import torch

from specgym.engine.decoding import check_stop
from specgym.engine.member_runs import Meter, ensure_prefilled
from specgym.engine.pool import ModelPool
from specgym.engine.state import DecodeState
from specgym.engine.timing import Clock
from specgym.engine.types import DecodeRequest


def join(
    pool: ModelPool, state: DecodeState, row: int, request: DecodeRequest, clock: Clock
) -> None:
    """Gives a row that has ended to a new request, with the target's prefill done.

    Every member forgets the row; drafters prefill the new prompt when they are next used. The
    other rows take no part: the row is prefilled by itself.

    Args:
        pool: The members.
        state: The batch.
        row: A row that has ended.
        request: What it decodes from now on.
        clock: Times the prefill.

    Raises:
        ValueError: If the row still decodes or there is none such, or the request does not fit:
            its prompt and budget a row's slots, its prompt the target's context, its stop
            strings a pool without tokenizer. Nothing is touched then.
    """
    check_row(state, row)
    check_stop(pool, request)
    budget = pool.budget(request)
    state.check_room(len(request.prompt) + budget)
    for memory in state.memories.values():
        memory.forget(row)
    for name, indices in state.indices.items():
        indices[row] = pool.lookup(name).new_memory()
    state.requests[row] = request
    state.tokens[row] = list(request.prompt)
    state.budgets[row] = budget
    state.generators[row] = torch.Generator().manual_seed(request.sampling.seed)
    state.finish_reasons[row] = None if budget else state.limit_reason(row)
    try:
        if budget:
            ensure_prefilled(state, pool.model(pool.target), Meter(clock))
    except BaseException:
        state.finish_reasons[row] = "error"  # the row stays free
        for memory in state.memories.values():
            memory.forget(row)
        raise


def check_row(state: DecodeState, row: int) -> None:
    """Refuses a row that cannot be taken over.

    Raises:
        ValueError: If it still decodes, or there is none such.
    """
    if not 0 <= row < state.batch_size:
        raise ValueError(f"row: must be in 0..{state.batch_size - 1}; got {row}")
    if state.is_active(row):
        raise ValueError(
            f"row: {row} still decodes ({state.num_remaining(row)} tokens to go); join a row that "
            f"has ended: {[r for r in range(state.batch_size) if not state.is_active(r)]}"
        )
