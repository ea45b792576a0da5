"""What threads of a forward share: words, atomic counters and barriers.

A thread that waits looks for some microseconds, then sleeps: so two processes that share
processors take turns. (Threads that spun on slowed each other 10 to 80 times.)
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import njit
from numba import types as numba_types

from specgym.engine.compiled.vectors import I64, emit_pointer, load_i64, make_operation

types: Any = numba_types  # what it calls is overloaded beyond what its stubs say
LOOKS = 100_000  # at a word before a thread sleeps until it changes: some 100 microseconds
LINE = 64  # bytes of a cache line
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # private to the process
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
EVERYBODY = 1 << 30


def _fetch_add(builder: ir.IRBuilder, address: ir.Value, amount: ir.Value) -> ir.Value:
    return builder.atomic_rmw("add", emit_pointer(builder, address, I64), amount, "seq_cst")


def _read(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load_atomic(emit_pointer(builder, address, I64), "acquire", 8)


def _write(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    builder.store_atomic(value, emit_pointer(builder, address, I64), "release", 8)


def _exchange(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> ir.Value:
    return builder.atomic_rmw("xchg", emit_pointer(builder, address, I64), value, "seq_cst")


fetch_add = make_operation(types.int64, [types.int64, types.int64], _fetch_add)
read_shared = make_operation(types.int64, [types.int64], _read)
write_shared = make_operation(types.void, [types.int64, types.int64], _write)

exchange = make_operation(types.int64, [types.int64, types.int64], _exchange)

if FUTEX:
    syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 5))

    @njit
    def sleep_while(address, value):
        """Sleep until a shared word is woken; at once back where it is another already."""
        syscall(FUTEX, address, FUTEX_WAIT, value & 0xFFFFFFFF, 0)

    @njit
    def wake(address):
        """Wake all that sleep on a word."""
        syscall(FUTEX, address, FUTEX_WAKE, EVERYBODY, 0)

else:
    usleep = types.ExternalFunction("usleep", types.int32(types.uint32))

    @njit
    def sleep_while(address, value):
        """Sleep a little."""
        usleep(types.uint32(20))

    @njit
    def wake(address):
        """Do nothing: sleepers wake by themselves."""


@njit
def word(table, index):
    """Return a word of a table of them."""
    return load_i64(table + 8 * index)


@njit
def wait_while(address, value, looks):
    """Wait while a shared word holds a value: look, then sleep; the line behind counts sleepers."""
    for _ in range(looks):
        if read_shared(address) != value:
            return
    fetch_add(address + LINE, 1)
    while read_shared(address) == value:
        sleep_while(address, value)
    fetch_add(address + LINE, -1)


@njit
def announce(address, value):
    """Set a shared word, and wake those that sleep on it."""
    exchange(address, value)
    if read_shared(address + LINE) > 0:
        wake(address)


@njit
def barrier(team, num_threads):
    """Wait for all threads; ``team`` is the address of how many have come, then of the round."""
    if num_threads == 1:
        return
    current = read_shared(team + LINE)
    if fetch_add(team, 1) == num_threads - 1:
        write_shared(team, 0)
        announce(team + LINE, current + 1)
    else:
        wait_while(team + LINE, current, LOOKS)


@njit
def take(counters, thread, num_threads, count, size):
    """Take some items of an operation: a thread's own share in order, then others'.

    Returns the first and the end of what is taken; the end is 0 when nothing is left. Shares are
    whole pairs.
    """
    pairs = (count + 1) // 2
    for step in range(num_threads):
        owner = (thread + step) % num_threads
        start, stop = pairs * owner // num_threads, pairs * (owner + 1) // num_threads
        first = 2 * start + fetch_add(counters + LINE * owner, size)
        if first < min(2 * stop, count):
            return first, min(first + size, 2 * stop, count)
    return 0, 0
