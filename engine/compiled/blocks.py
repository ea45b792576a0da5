"""Weights put in blocks: rows of 16 outputs become columns, word by word."""

from __future__ import annotations

import numpy as np

from specgym.engine.compiled.team import compiled_function
from specgym.engine.compiled.vectors import LANES, load_i32, store_i32

WORDS_AT_ONCE = 16  # of a row: a cache line


def write_blocks(source, row_bytes, num_rows, num_words, target, stride):
    """Write rows of 32-bit words [O, W] as blocks [W, 16], each so many bytes behind the last."""
    for first in range(0, num_rows, LANES):
        lanes = min(LANES, num_rows - first)
        for start in range(0, num_words, WORDS_AT_ONCE):
            count = min(WORDS_AT_ONCE, num_words - start)
            for lane in range(lanes):
                read = source + row_bytes * (first + lane) + 4 * start
                write = target + 4 * (LANES * start + lane)
                for index in range(count):
                    store_i32(write + 4 * LANES * index, load_i32(read + 4 * index))
        target += stride


def fill_blocks(blocks: np.ndarray, rows: np.ndarray) -> None:
    """Fill blocks, int32 [O over 16, W, 16] of zeros, with rows, int32 [O, W]."""
    assert blocks.strides[1:] == (4 * LANES, 4)
    assert rows.strides[1] == 4
    write = compiled_function(write_blocks, "void(int64, int64, int64, int64, int64, int64)")
    write(rows.ctypes.data, rows.strides[0], *rows.shape, blocks.ctypes.data, blocks.strides[0])
