"""Programs of compiled forwards: what a model's layers become, and how one is run.

Legend: N tokens of a forward, B batch rows, S slots, D head size, G key/value heads.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specgym.engine.compiled.layout import (
    OP_WORDS,
    Attend,
    Epilogue,
    Experts,
    Job,
    Linear,
    Op,
    Place,
    Rotate,
    Token,
)
from specgym.engine.compiled.memory import LINE
from specgym.engine.compiled.packing import Arena, Move, Packed, moved
from specgym.engine.compiled.team import allocate, get_team
from specgym.engine.compiled.tiles import MAX_BLOCKS, MAX_ROWS
from specgym.engine.compiled.vectors import LANES

SMALL = 1 << 20  # bytes of weights that one thread reads while two would meet


@dataclasses.dataclass(frozen=True)
class Heads:
    """The shape of an attention block.

    Attributes:
        num_heads: Query heads.
        num_kv_heads: Key/value heads, G.
        size: D, even.
    """

    num_heads: int
    num_kv_heads: int
    size: int

    @property
    def padded_size(self) -> int:
        """D in whole vectors: what caches and queries have."""
        return -(-self.size // LANES) * LANES


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A buffer of float32 rows, or columns of one.

    Attributes:
        index: Its place in a program's table.
        width: Numbers of a row.
    """

    index: int
    width: int


@dataclasses.dataclass(frozen=True)
class Norm:
    """An RMS norm's weight: address of float32 numbers, and what is added to the mean square."""

    weight: int
    epsilon: float


class Program:
    """Operations on buffers, built once for a model.

    Attributes:
        arena: The weights.
        ops: Words of each operation.
    """

    def __init__(self) -> None:
        self.arena = Arena()
        self.ops: list[list[int]] = []
        self.buffers: list[tuple[int, int, int]] = []  # parent, first column, rows per token
        self.widths: list[int] = []
        self.num_experts = self.per_token = self.num_mixtures = 0
        self.largest_norm = 1
        self.embedding = torch.empty(0)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"embedding_place": self.embedding.data_ptr()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Shift every address: in a copy, or behind a pickle, weights lie elsewhere."""
        place = state.pop("embedding_place")
        self.__dict__.update(state)
        num_bytes = self.embedding.numel() * self.embedding.element_size()
        lookup = Move(place, num_bytes, self.embedding.data_ptr())
        self.moves = [*self.arena.moves, lookup]
        self.ops = [[moved(word, self.moves) for word in op] for op in self.ops]

    def buffer(self, width: int, rows_per_token: int = 1) -> Buffer:
        """Add a buffer of so many numbers a row."""
        self.buffers.append((-1, 0, rows_per_token))
        self.widths.append(-(-width // LANES) * LANES)
        return Buffer(len(self.buffers) - 1, width)

    def columns(self, parent: Buffer, first: int, width: int) -> Buffer:
        """Add a name for columns of a buffer."""
        root, shift, rows = self.buffers[parent.index]
        self.buffers.append((parent.index if root < 0 else root, shift + first, rows))
        self.widths.append(self.widths[parent.index])
        return Buffer(len(self.buffers) - 1, width)

    def add(self, op: Op, words: Mapping[Any, int]) -> None:
        """Add an operation."""
        row = [int(op)] + [0] * (OP_WORDS - 1)
        for index, value in words.items():
            row[index] = int(value)
        self.ops.append(row)

    def linear(
        self,
        source: Buffer,
        weight: Packed,
        target: Buffer | None,
        *,
        norm: Norm | None = None,
        bias: int = 0,
        epilogue: Epilogue = Epilogue.STORE,
        second: tuple[Buffer, Norm] | None = None,
        scale: Buffer | None = None,
    ) -> None:
        """Add a linear layer.

        Args:
            source: What it reads.
            weight: Its weight.
            target: What it writes or adds to; None is the logits of wanted tokens.
            norm: In front of it.
            bias: Address of float32 numbers, padded to whole blocks; 0 is none.
            epilogue: What becomes of its outputs.
            second: A second source and its norm, read beside the first.
            scale: A buffer whose first number's sigmoid scales what is added.
        """
        self.largest_norm = max(self.largest_norm, weight.inputs)
        words = {
            Linear.SOURCE: source.index,
            Linear.INPUTS: weight.inputs,
            Linear.NORM: norm.weight if norm else 0,
            Linear.EPSILON: float_bits(norm.epsilon if norm else 0.0),
            Linear.WEIGHTS: weight.address,
            Linear.STRIDE: weight.stride,
            Linear.NUM_BLOCKS: weight.num_blocks,
            Linear.KIND: weight.kind,
            Linear.BIAS: bias,
            Linear.TARGET: 0 if target is None else target.index,
            Linear.OUTPUTS: weight.outputs,
            Linear.EPILOGUE: epilogue,
            Linear.WANTED_ONLY: target is None,
            Linear.SECOND_SOURCE: second[0].index if second else -1,
            Linear.SECOND_NORM: second[1].weight if second else 0,
            Linear.SCALE: -1 if scale is None else scale.index,
        }
        self.add(Op.LINEAR, words)

    def rotate(
        self,
        source: Buffer,
        target: Buffer,
        heads: Heads,
        layer: int,
        cache_kind: int,
        *,
        head_norms: tuple[Norm, Norm] | None = None,
        wide_norms: tuple[Norm, Norm] | None = None,
        clip: float = 0.0,
    ) -> None:
        """Add the step between projection and attention: norms, rotation, the cache's slots."""
        words = heads_words(Rotate, source, target, heads, layer, cache_kind)
        for norms, own, key in (
            (head_norms, Rotate.HEAD_NORM, Rotate.KEY_HEAD_NORM),
            (wide_norms, Rotate.WIDE_NORM, Rotate.KEY_WIDE_NORM),
        ):
            if norms is not None:
                words |= {own: norms[0].weight, key: norms[1].weight}
                words[Rotate.EPSILON] = float_bits(norms[0].epsilon)
        words[Rotate.CLIP] = float_bits(clip)
        self.add(Op.ROTATE, words)

    def attend(
        self,
        source: Buffer,
        target: Buffer,
        heads: Heads,
        layer: int,
        cache_kind: int,
        *,
        scale: float,
        sliding: int = 0,
    ) -> None:
        """Add attention of queries [heads, padded D] over a layer's cache."""
        words = heads_words(Attend, source, target, heads, layer, cache_kind)
        words |= {Attend.SCALE: float_bits(scale), Attend.SLIDING: sliding}
        self.add(Op.ATTEND, words)

    def embed(self, embedding: torch.Tensor, target: Buffer, kind: int) -> None:
        """Add the look-up of tokens in an embedding [vocabulary, hidden], which is kept."""
        self.embedding, size = embedding, embedding.shape[1]
        self.move(Op.EMBED, source=embedding.data_ptr(), target=target, size=size, kind=kind)

    def move(
        self,
        op: Op,
        *,
        source: int = 0,
        target: Buffer | None = None,
        size: int,
        kind: int = 0,
        column: int = 0,
        width: int = 0,
        norm: Norm | None = None,
    ) -> None:
        """Add EMBED, KEEP, GATHER or GUESS."""
        words = {
            Place.SOURCE: source,
            Place.TARGET: 0 if target is None else target.index,
            Place.SIZE: size,
            Place.KIND: kind,
            Place.COLUMN: column,
            Place.WIDTH: width,
            Place.NORM: norm.weight if norm else 0,
            Place.EPSILON: float_bits(norm.epsilon if norm else 0.0),
        }
        self.largest_norm = max(self.largest_norm, size)
        self.add(op, words)

    def experts(
        self,
        states: Buffer,
        inner: Buffer,
        norm: Norm | None,
        router: Packed,
        up: Sequence[Packed],
        down: Sequence[Packed],
        *,
        per_token: int,
        is_normalized: bool,
        gates: Buffer | None = None,
    ) -> None:
        """Add a mixture: routes, and adds the chosen experts' outputs to the states.

        Args:
            states: Read and added to.
            inner: Rows of [N * per_token]: the chosen experts' hidden states.
            norm: In front of router and experts.
            router: A row for each expert, then one that goes to ``gates`` where that is given.
            up: Gate and up of each expert, blocks taking turns; one behind the other in memory.
            down: Down of each expert, one behind the other in memory.
            per_token: Experts a token visits.
            is_normalized: Whether shares are among the chosen.
            gates: Buffer of one number.
        """
        common = {
            Experts.SOURCE: states.index,
            Experts.INPUTS: router.inputs,
            Experts.NORM: norm.weight if norm else 0,
            Experts.EPSILON: float_bits(norm.epsilon if norm else 0.0),
            Experts.SECOND_SOURCE: -1,
            Experts.ROUTER: router.address,
            Experts.ROUTER_STRIDE: router.stride,
            Experts.ROUTER_BLOCKS: router.num_blocks,
            Experts.KIND: router.kind,
            Experts.NUM_EXPERTS: len(up),
            Experts.PER_TOKEN: per_token,
            Experts.IS_NORMALIZED: is_normalized,
            Experts.INNER: down[0].inputs,
            Experts.TARGET: inner.index,
            Experts.MIXTURE: self.num_mixtures,
            Experts.GATES: -1 if gates is None else gates.index,
        }
        for op, bank in ((Op.EXPERTS_UP, up), (Op.EXPERTS_DOWN, down)):
            assert all(
                each.address == bank[0].address + index * each.stride * each.num_blocks
                for index, each in enumerate(bank)
            )
            place = {Experts.WEIGHTS: bank[0].address, Experts.STRIDE: bank[0].stride}
            self.add(op, common | place | {Experts.NUM_BLOCKS: bank[0].num_blocks})
        self.largest_norm = max(self.largest_norm, router.inputs)
        self.num_experts, self.per_token = len(up), per_token
        self.num_mixtures += 1


def heads_words(
    words: type[Rotate] | type[Attend],
    source: Buffer,
    target: Buffer,
    heads: Heads,
    layer: int,
    cache_kind: int,
) -> dict[int, int]:
    """The words that ROTATE and ATTEND share."""
    return {
        words.SOURCE: source.index,
        words.TARGET: target.index,
        words.HEADS: heads.num_heads,
        words.KV_HEADS: heads.num_kv_heads,
        words.HEAD_SIZE: heads.size,
        words.PADDED_SIZE: heads.padded_size,
        words.LAYER: layer,
        words.KIND: cache_kind,
    }


def float_bits(value: float) -> int:
    """The bits of a float32 as a number."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


@dataclasses.dataclass
class Given:
    """What a forward is given beside its tokens; addresses are 0 where there is nothing.

    Attributes:
        num_slots: S of the cache.
        caches: Address of [layers, 2] addresses of keys and values, [B, G, S, padded D].
        valid: Address of bool [B, S].
        rotary: Address of the rotary table.
        features: Address of features, [B, S, width].
        guesses: Address of float32 [B, hidden].
        mask: Address of bool [N, S], in place of what is valid.
    """

    num_slots: int = 0
    caches: int = 0
    valid: int = 0
    rotary: int = 0
    features: int = 0
    guesses: int = 0
    mask: int = 0


class Machine:
    """Runs a program's operations; keeps the memory they work in, which grows with what is asked.

    Args:
        program: The program, all of whose operations run until others are set.
    """

    def __init__(self, program: Program):
        self.program = program
        get_team()  # compiles now, rather than in a timed forward
        self.capacity = self.num_slots = self.num_threads = 0
        self.job = allocate(8 * Job.SIZE).view(np.int64)
        self.job_address = self.job.ctypes.data
        self.set_ops(program.ops)

    def __reduce__(self) -> tuple[Any, ...]:
        return Machine, (self.program,)

    def set_ops(self, ops: Sequence[Sequence[int]]) -> None:
        """Run these operations from now on."""
        self.ops = allocate(8 * OP_WORDS * len(ops)).view(np.int64)
        self.ops[:] = np.array(ops, dtype=np.int64).reshape(-1)
        self.job[Job.NUM_OPS], self.job[Job.OPS] = len(ops), self.ops.ctypes.data
        self.make_counters()

    def make_counters(self) -> None:
        """Have a counter for each operation and thread."""
        self.counters = allocate(LINE * self.job[Job.NUM_OPS] * max(self.num_threads, 1))
        self.job[Job.COUNTERS] = self.counters.ctypes.data

    def make_room(self, num_tokens: int, num_slots: int, num_threads: int) -> None:
        """Have memory for a forward of so many tokens over so many slots."""
        fits = num_tokens <= self.capacity and num_slots <= self.num_slots
        if fits and num_threads == self.num_threads:
            return
        program, job = self.program, self.job
        self.capacity = capacity = max(self.capacity, 1 << (num_tokens - 1).bit_length(), 8)
        self.num_slots = max(self.num_slots, num_slots)
        self.num_threads = num_threads
        self.make_counters()
        self.tokens = np.zeros((capacity, Token.SIZE), dtype=np.int64)
        self.wanted = np.zeros(2 * capacity, dtype=np.int64)
        own = [
            (parent, 4 * width * rows * capacity)
            for (parent, _, rows), width in zip(program.buffers, program.widths, strict=True)
        ]
        places = np.cumsum([0] + [size if parent < 0 else 0 for parent, size in own])
        self.states = allocate(int(places[-1]) + 64)
        self.states_address = self.states.ctypes.data
        self.table = np.zeros((len(own) + 1, 2), dtype=np.int64)
        for index, (parent, first, _) in enumerate(program.buffers):
            root = index if parent < 0 else parent
            self.table[index] = (
                self.states_address + int(places[root]) + 4 * first,
                4 * program.widths[index],
            )
        visits = capacity * max(program.per_token, 1)
        sizes = {
            Job.NORMED: 4 * program.largest_norm * capacity,
            Job.ROWS: 8 * (capacity + visits),
            Job.TILE: 4 * MAX_ROWS * MAX_BLOCKS * LANES,
            Job.SCORES: 4 * (max(self.num_slots, program.num_experts + LANES) + 2 * LANES),
            Job.SLOTS: 8 * (max(self.num_slots, visits) + 1),
            Job.CHOICES: 8 * visits,
            Job.SHARES: 4 * visits,
        }
        offset = 0
        for name, size in sizes.items():
            job[name] = offset
            offset += -(-size // 64) * 64
        self.private = allocate(offset * num_threads)
        job[Job.PRIVATE], job[Job.PRIVATE_BYTES] = self.private.ctypes.data, offset
        self.loads = np.zeros((program.num_mixtures, max(program.num_experts, 1)), np.int32)
        self.chosen = np.zeros(program.num_mixtures * visits + 1, np.int32)
        job[Job.TOKENS], job[Job.WANTED] = self.tokens.ctypes.data, self.wanted.ctypes.data
        job[Job.BUFFERS] = self.table.ctypes.data
        job[Job.LOADS], job[Job.CHOSEN] = self.loads.ctypes.data, self.chosen.ctypes.data

    def run(self, num_tokens: int, num_wanted: int, given: Given) -> None:
        """Run the operations on ``tokens``, which the caller has filled in."""
        job = self.job
        self.counters.fill(0)
        job[Job.NUM_TOKENS], job[Job.NUM_WANTED] = num_tokens, num_wanted
        job[Job.NUM_SLOTS], job[Job.CACHES] = given.num_slots, given.caches
        job[Job.VALID], job[Job.ROTARY], job[Job.MASK] = given.valid, given.rotary, given.mask
        job[Job.FEATURES], job[Job.GUESSES] = given.features, given.guesses
        job[Job.NUM_THREADS] = self.num_threads
        get_team().run(self.job_address, self.num_threads)

    def rows(self, buffer: Buffer, tokens: Sequence[int]) -> np.ndarray:
        """A copy of these tokens' rows of a buffer, float32 [..., width]."""
        first = int(self.table[buffer.index, 0]) - self.states_address
        width = self.program.widths[buffer.index]
        whole = self.states[first : first + 4 * width * self.capacity].view(np.float32)
        return whole.reshape(-1, width)[tokens, : buffer.width]


def thread_count(program: Program) -> int:
    """Threads that a program is run with: torch's setting, and one where waiting takes longer."""
    return 1 if program.arena.num_bytes < SMALL else torch.get_num_threads()
