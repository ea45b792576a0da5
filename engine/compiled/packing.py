"""Weights in the order in which compiled forwards read them.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from specgym.engine.compiled.blocks import fill_blocks
from specgym.engine.compiled.tiles import BFLOAT16, FLOAT32
from specgym.engine.compiled.vectors import LANES

SLAB = 1 << 21  # bytes that are asked of the system at a time, at least, once there are many
LINE = 64
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight in blocks of 16 outputs (``tiles`` says how they lie).

    Attributes:
        address: Of the first block.
        stride: Bytes from block to block.
        num_blocks: Blocks; outputs behind the last are zero.
        kind: Type of the numbers.
        inputs: I, even.
        outputs: O.
    """

    address: int
    stride: int
    num_blocks: int
    kind: int
    inputs: int
    outputs: int


@dataclasses.dataclass(frozen=True)
class Move:
    """Memory that lies elsewhere than it did: addresses in it are to be shifted."""

    old: int
    num_bytes: int
    new: int


def moved(address: int, moves: Sequence[Move]) -> int:
    """An address after some moves; any other number as it is."""
    for move in moves:
        if 0 <= address - move.old < move.num_bytes:
            return address - move.old + move.new
    return address


def make_slab(num_bytes: int) -> np.ndarray:
    """Zeros, uint8 [num_bytes], in huge pages where the system has them."""
    region = mmap.mmap(-1, num_bytes, **PRIVATE)  # only private memory lies in huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, dtype=np.uint8)


class Arena:
    """Memory for weights, in huge pages where the system has them; freed as a whole.

    Attributes:
        num_bytes: Bytes handed out.
        moves: From where each slab came, in a copy or behind a pickle.
    """

    moves: list[Move]

    def __init__(self) -> None:
        self.slabs: list[np.ndarray] = []
        self.moves = []
        self.num_used = 0
        self.num_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        slabs = [(slab.ctypes.data, slab.tobytes()) for slab in self.slabs]
        return {"slabs": slabs, "num_used": self.num_used, "num_bytes": self.num_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.num_used, self.num_bytes = state["num_used"], state["num_bytes"]
        self.slabs, self.moves = [], []
        for address, content in state["slabs"]:
            slab = make_slab(len(content))
            slab[:] = np.frombuffer(content, dtype=np.uint8)
            self.slabs.append(slab)
            self.moves.append(Move(address, len(slab), slab.ctypes.data))

    def reserve(self, num_bytes: int) -> None:
        """Have what is taken next, so many bytes in all, lie in one piece."""
        if not self.slabs or self.num_used + num_bytes > len(self.slabs[-1]):
            size = max(num_bytes, min(SLAB, self.num_bytes))  # small for a single small linear
            self.slabs.append(make_slab(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE))
            self.num_used = 0

    def take(self, num_bytes: int) -> np.ndarray:
        """Uninitialized memory, uint8 [num_bytes], from the start of a cache line on."""
        self.reserve(num_bytes)
        first = self.num_used
        self.num_used = -(-(first + num_bytes) // LINE) * LINE
        self.num_bytes += num_bytes
        return self.slabs[-1][first : first + num_bytes]

    def keep(self, values: torch.Tensor) -> int:
        """Copy a tensor; returns its address."""
        flat = values.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        place = self.take(len(flat))
        place[:] = flat
        return place.ctypes.data

    def view(self, address: int, size: int) -> np.ndarray:
        """Numbers that are kept here, float32 [size]; writing to them changes them."""
        for slab in self.slabs:
            first = address - slab.ctypes.data
            if 0 <= first < len(slab):
                return slab[first : first + 4 * size].view(np.float32)
        raise AssertionError("the address is not in this arena")

    def keep_vector(self, values: torch.Tensor | None, pad: float = 0.0) -> int:
        """Copy a vector as float32, padded to whole lanes; returns its address, 0 for None."""
        if values is None:
            return 0
        return self.keep(F.pad(values.detach().float(), (0, -len(values) % LANES), value=pad))


def kind_of(dtype: torch.dtype) -> int:
    """How numbers of a type are kept: bfloat16 as it is, others as float32."""
    return BFLOAT16 if dtype == torch.bfloat16 else FLOAT32


def pack(arena: Arena, weights: Sequence[torch.Tensor], *, alternate: bool = False) -> Packed:
    """Pack several weights [O, I] as one whose outputs stand one behind the other.

    Args:
        arena: Gets the blocks.
        weights: Of the same type and inputs, I even; all but the last of whole blocks.
        alternate: Two weights whose blocks take turns (gate and up).
    """
    kind, inputs = kind_of(weights[0].dtype), weights[0].shape[1]
    assert inputs % 2 == 0, f"inputs: must be even; got {inputs}"
    outputs = sum(len(weight) for weight in weights)
    counts = [-(-len(weight) // LANES) for weight in weights]
    stride = inputs * LANES * (2 if kind == BFLOAT16 else 4)
    place = arena.take(stride * sum(counts))
    blocks = place.view(np.int32).reshape(sum(counts), -1, LANES)
    first = 0
    for index, (weight, count) in enumerate(zip(weights, counts, strict=True)):
        part = blocks[index :: len(weights)] if alternate else blocks[first : first + count]
        fill_blocks(part, words_of(weight.detach(), kind))
        first += count
    return Packed(place.ctypes.data, stride, sum(counts), kind, inputs, outputs)


def words_of(weight: torch.Tensor, kind: int) -> np.ndarray:
    """A weight [O, I] as int32: bfloat16 numbers in pairs, float32 one by one."""
    rows = (weight if kind == BFLOAT16 else weight.float()).contiguous()
    words: np.ndarray = rows.view(torch.int32).numpy()
    return words
