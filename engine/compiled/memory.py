"""What threads of a forward share: words, atomic counters and barriers."""

from __future__ import annotations

import sys

from llvmlite import ir
from numba import njit, types

from specgym.engine.compiled.vectors import I64, emit_pointer, load_i64, make_operation

PAUSES = 2000  # looks at a barrier before the processor is offered to others: some 20 microseconds


def _fetch_add(builder: ir.IRBuilder, address: ir.Value, amount: ir.Value) -> ir.Value:
    return builder.atomic_rmw("add", emit_pointer(builder, address, I64), amount, "acq_rel")


def _read(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load_atomic(emit_pointer(builder, address, I64), "acquire", 8)


def _write(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    builder.store_atomic(value, emit_pointer(builder, address, I64), "release", 8)


fetch_add = make_operation(types.int64, [types.int64, types.int64], _fetch_add)
read_shared = make_operation(types.int64, [types.int64], _read)
write_shared = make_operation(types.void, [types.int64, types.int64], _write)

if sys.platform == "win32":

    @njit
    def offer_processor():
        """Do nothing: there is no such call."""

else:
    sched_yield = types.ExternalFunction("sched_yield", types.int32())

    @njit
    def offer_processor():
        """Let another thread run that waits for this processor."""
        sched_yield()


@njit
def word(table, index):
    """Return a word of a table of them."""
    return load_i64(table + 8 * index)


@njit
def wait_while(address, value):
    """Wait until a shared word is another: soon by looking, then by giving way."""
    looks = 0
    while read_shared(address) == value:
        looks += 1
        if looks > PAUSES:
            offer_processor()


@njit
def barrier(team, num_threads):
    """Wait for all threads; ``team`` is the address of how many have come, and of the round."""
    if num_threads == 1:
        return
    current = read_shared(team + 64)
    if fetch_add(team, 1) == num_threads - 1:
        write_shared(team, 0)
        write_shared(team + 64, current + 1)
    else:
        wait_while(team + 64, current)


