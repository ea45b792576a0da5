"""Products of a few rows with blocks of weights: what a compiled forward spends its time in.

A weight [outputs, inputs] lies in *blocks* of 16 outputs, and in a block two inputs at a time: for
bfloat16 the 32-bit word of a lane holds inputs 2i (low half) and 2i + 1 (high half), so that a
shift and a mask make them float32; for float32 they are two vectors. Weights are read once, in the
order in which they lie.

An output is ``fma(w[n-1], x[n-1], ... fma(w[0], x[0], 0))``: one accumulator, inputs ascending. So
its bits depend on its own row and its own weights alone, however many rows and blocks a kernel
takes at a time; those numbers only decide how well registers are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types

from specgym.engine.compiled.processor import has_wide_registers
from specgym.engine.compiled.vectors import (
    F32,
    I64,
    LANES,
    UPPER_HALF,
    VECTOR,
    VECTOR_I32,
    emit_fma,
    emit_pointer,
    emit_prefetch,
    emit_splat,
    make_operation,
    splat_constant,
)

BFLOAT16, FLOAT32 = 0, 1  # types of weights, as programs name them
MAX_ROWS = 6  # of a kernel: 6 rows x 16 outputs fill the 16 registers of AVX2
MAX_BLOCKS = 4
PREFETCH = 2048  # bytes ahead where blocks are multiplied several times
LINE = 64  # bytes of 16 words: a pair of bfloat16 inputs, or one of float32
BLOCKS_AT_ONCE = (4, 4, 4, 4, 4, 4) if has_wide_registers() else (4, 2, 1, 1, 1, 1)  # by rows - 1


def make_kernel(num_rows: int, num_blocks: int, kind: int) -> Any:
    """Make the kernel of some rows and blocks.

    Its arguments: the first block's address, the bytes from block to block, the address of the
    rows' addresses, their even length, the address of float32 [rows, MAX_BLOCKS * 16] that it
    writes, and how many bytes ahead it prefetches. Weights that few rows meet are not wanted again
    before the next forward: they leave the last level of the cache to the rest of the program.
    """
    line = LINE if kind == BFLOAT16 else 2 * LINE

    def emit(b: ir.IRBuilder, *arguments: ir.Value) -> None:
        weights, stride, rows, inputs, out, ahead = arguments
        x = [read_address(b, rows, row) for row in range(num_rows)]
        w = [b.add(weights, b.mul(stride, word(block))) for block in range(num_blocks)]
        entry, loop, done = b.block, b.append_basic_block("loop"), b.append_basic_block("done")
        b.branch(loop)
        b.position_at_end(loop)
        pair = b.phi(I64)
        pair.add_incoming(word(0), entry)
        cells = [(row, block) for row in range(num_rows) for block in range(num_blocks)]
        phis = {cell: b.phi(VECTOR) for cell in cells}
        sums: dict[tuple[int, int], ir.Value] = dict(phis)
        lines = [b.add(each, b.mul(pair, word(line))) for each in w]
        for each in lines:
            for part in range(0, line, LINE):
                place = b.add(b.add(each, ahead), word(part))
                emit_prefetch(b, place, is_once=num_rows < MAX_ROWS)
        for parity in range(2):
            factors = [emit_weights(b, each, kind, parity) for each in lines]
            for row in range(num_rows):
                place = b.add(x[row], b.add(b.shl(pair, word(3)), word(4 * parity)))
                value = emit_splat(b, b.load(emit_pointer(b, place, F32), align=4))
                for block in range(num_blocks):
                    cell = (row, block)
                    sums[cell] = emit_fma(b, factors[block], value, sums[cell])
        following = b.add(pair, word(1))
        pair.add_incoming(following, loop)
        for cell in cells:
            phis[cell].add_incoming(splat_constant(0.0), entry)
            phis[cell].add_incoming(sums[cell], loop)
        b.cbranch(b.icmp_unsigned("<", following, b.lshr(inputs, word(1))), loop, done)
        b.position_at_end(done)
        for row, block in cells:
            place = b.add(out, word(4 * LANES * (row * MAX_BLOCKS + block)))
            b.store(sums[row, block], emit_pointer(b, place, VECTOR), align=4)

    return make_operation(types.void, [types.int64] * 6, emit)


def word(value: int) -> ir.Constant:
    """Return a 64-bit constant."""
    return ir.Constant(I64, value)


def read_address(builder: ir.IRBuilder, table: ir.Value, index: int) -> ir.Value:
    """Emit the load of an address from a table of them."""
    place = builder.add(table, word(8 * index))
    return builder.load(emit_pointer(builder, place, I64), align=8)


def emit_weights(builder: ir.IRBuilder, line: ir.Value, kind: int, parity: int) -> ir.Value:
    """Emit the weights of a pair's even or odd input, as float32."""
    if kind == FLOAT32:
        place = builder.add(line, word(LINE * parity))
        return builder.load(emit_pointer(builder, place, VECTOR), align=LINE)
    words = builder.load(emit_pointer(builder, line, VECTOR_I32), align=LINE)
    if parity:
        bits = builder.and_(words, splat_constant(UPPER_HALF, VECTOR_I32))
    else:
        bits = builder.shl(words, splat_constant(16, VECTOR_I32))
    return builder.bitcast(bits, VECTOR)


def make_sweep(kernels: Sequence[Any], blocks_at_once: int) -> Any:
    """Make what runs a kernel over up to ``MAX_BLOCKS`` blocks, with single ones for the rest."""
    several, single = kernels
    step = blocks_at_once * 4 * LANES

    @njit
    def sweep(weights, stride, num_blocks, rows, inputs, out, ahead):
        block = 0
        while block + blocks_at_once <= num_blocks:
            several(weights, stride, rows, inputs, out, ahead)
            weights += stride * blocks_at_once
            out += step
            block += blocks_at_once
        while block < num_blocks:
            single(weights, stride, rows, inputs, out, ahead)
            weights += stride
            out += 4 * LANES
            block += 1

    return sweep


def make_product(kind: int) -> Any:
    """Make the product of 1 to ``MAX_ROWS`` rows with 1 to ``MAX_BLOCKS`` blocks of a type."""
    one, two, three, four, five, six = (
        make_sweep((make_kernel(rows, count, kind), make_kernel(rows, 1, kind)), count)
        for rows, count in enumerate(BLOCKS_AT_ONCE, 1)
    )

    @njit
    def product(weights, stride, num_blocks, rows, num_rows, inputs, out, ahead):
        if num_rows == 1:
            one(weights, stride, num_blocks, rows, inputs, out, ahead)
        elif num_rows == 2:
            two(weights, stride, num_blocks, rows, inputs, out, ahead)
        elif num_rows == 3:
            three(weights, stride, num_blocks, rows, inputs, out, ahead)
        elif num_rows == 4:
            four(weights, stride, num_blocks, rows, inputs, out, ahead)
        elif num_rows == 5:
            five(weights, stride, num_blocks, rows, inputs, out, ahead)
        else:
            six(weights, stride, num_blocks, rows, inputs, out, ahead)

    return product


product_bf16, product_f32 = make_product(BFLOAT16), make_product(FLOAT32)


@njit
def product(kind, weights, stride, num_blocks, rows, num_rows, inputs, out, num_tiles):
    """Multiply rows with blocks: float32 [num_rows, MAX_BLOCKS * 16] at ``out``.

    Blocks that meet one tile of rows leave time to fetch those that follow.
    """
    ahead = num_blocks * stride if num_tiles == 1 else PREFETCH
    if kind == BFLOAT16:
        product_bf16(weights, stride, num_blocks, rows, num_rows, inputs, out, ahead)
    else:
        product_f32(weights, stride, num_blocks, rows, num_rows, inputs, out, ahead)


@njit
def tiles_of(count):
    """Return in how many tiles some rows are multiplied."""
    return -(-count // MAX_ROWS)
