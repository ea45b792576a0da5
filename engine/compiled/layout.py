"""How a program lies in memory: the words of a job, of an operation and of a token.

A program is a table of operations that all threads run in order, with a barrier after each. Words
are int64: counts, addresses, or the bits of a float32. Legend: N tokens of a forward.
"""

from __future__ import annotations

import enum


class Op(enum.IntEnum):
    """What an operation does; its words are the enumerations below."""

    EMBED = 0
    LINEAR = 1
    ROTATE = 2
    ATTEND = 3
    EXPERTS_UP = 4
    EXPERTS_DOWN = 5
    KEEP = 6
    GATHER = 7
    GUESS = 8


class Job(enum.IntEnum):
    """Words of a job: one forward of a program."""

    NUM_OPS = 0
    OPS = 1  # [NUM_OPS, OP_WORDS]
    NUM_TOKENS = 2
    TOKENS = 3  # [N, TOKEN_WORDS]
    NUM_WANTED = 4  # tokens whose outputs the last linear computes
    WANTED = 5  # [NUM_WANTED] tokens, then where each output's row begins
    BUFFERS = 6  # [..., 2]: address and bytes from row to row, of each buffer
    PRIVATE = 7  # a thread's own memory; of this one's
    PRIVATE_BYTES = 8  # per thread
    NORMED = 9  # offsets in a thread's own memory
    ROWS = 10
    TILE = 11
    SCORES = 12
    SLOTS = 13
    CHOICES = 14
    SHARES = 15
    VALID = 16  # uint8 [B, S]
    NUM_SLOTS = 17
    MASK = 18  # uint8 [N, NUM_SLOTS] in place of the rules, or 0
    LOADS = 19  # int32 [mixtures, E], tokens of each expert
    CHOSEN = 20  # int32 [mixtures, N, K]
    FEATURES = 21  # what KEEP writes and GATHER reads: [B, S, width] of KIND
    COUNTERS = 22  # [NUM_OPS, NUM_THREADS] lines, zero at the start: what each share has given
    ROTARY = 23  # float32 [positions, 2, D / 2]: cosines, then sines
    NUM_THREADS = 24
    CACHES = 25  # address of [layers, 2]: keys and values [B, G, S, padded D]
    GUESSES = 26  # float32 [B, hidden]: what GUESS copies
    SIZE = 27


class Token(enum.IntEnum):
    """Words of a token."""

    ID = 0
    ROW = 1  # of the batch
    SLOT = 2
    POSITION = 3
    START = 4  # first slot of its row's window: what stands before is seen where it is valid
    SOURCE = 5  # row of the features it reads; -1 takes its batch row's guess
    SIZE = 6


class Linear(enum.IntEnum):
    """Words of LINEAR: out = epilogue(norm(source) @ weights.T + bias)."""

    SOURCE = 1
    INPUTS = 2
    NORM = 3  # address of float32 [INPUTS], or 0
    EPSILON = 4
    SECOND_SOURCE = 5  # normed and read beside the first (EAGLE-3), or -1
    SECOND_NORM = 6
    WANTED_ONLY = 7  # reads wanted tokens alone, and writes where they say
    WEIGHTS = 8
    STRIDE = 9
    NUM_BLOCKS = 10
    KIND = 11
    BIAS = 12  # float32, padded like the blocks, or 0
    TARGET = 13
    OUTPUTS = 14
    EPILOGUE = 15
    SCALE = 16  # ADD: buffer the sigmoid of whose first number scales a row, or -1


class Epilogue(enum.IntEnum):
    """What becomes of a linear's outputs."""

    STORE = 0
    ADD = 1
    GATE = 2  # blocks of gate and up alternate: silu(gate) * up


class Rotate(enum.IntEnum):
    """Words of ROTATE: norms and rotates queries and keys, writes keys and values to the cache."""

    SOURCE = 1
    TARGET = 2
    HEADS = 3
    KV_HEADS = 4
    HEAD_SIZE = 5
    PADDED_SIZE = 6
    LAYER = 7
    KIND = 8  # type of the cache
    HEAD_NORM = 9  # per head: addresses of float32 [HEAD_SIZE], or 0
    KEY_HEAD_NORM = 10
    WIDE_NORM = 11  # over all heads: float32 [HEADS * HEAD_SIZE]
    KEY_WIDE_NORM = 12
    EPSILON = 13
    CLIP = 14  # bits; 0 is none


class Attend(enum.IntEnum):
    """Words of ATTEND."""

    SOURCE = 1
    TARGET = 2
    HEADS = 3
    KV_HEADS = 4
    HEAD_SIZE = 5
    PADDED_SIZE = 6
    LAYER = 7
    KIND = 8
    SCALE = 9
    SLIDING = 10  # positions, or 0


class Experts(enum.IntEnum):
    """Words of EXPERTS_UP and EXPERTS_DOWN; the router runs in the first, in each thread."""

    SOURCE = 1  # as in LINEAR, up to KIND
    INPUTS = 2
    NORM = 3
    EPSILON = 4
    SECOND_SOURCE = 5
    SECOND_NORM = 6
    WANTED_ONLY = 7
    WEIGHTS = 8  # of the first expert
    STRIDE = 9
    NUM_BLOCKS = 10  # of one expert
    KIND = 11
    ROUTER = 12
    ROUTER_STRIDE = 13
    ROUTER_BLOCKS = 14
    NUM_EXPERTS = 15
    PER_TOKEN = 16
    IS_NORMALIZED = 17
    INNER = 18
    TARGET = 19  # UP writes rows [N * K, INNER]; DOWN reads them and adds to SOURCE
    MIXTURE = 20  # index of this layer among the mixtures
    GATES = 21  # buffer that gets the router's logit behind the experts', or -1


class Place(enum.IntEnum):
    """Words of EMBED, KEEP, GATHER and GUESS."""

    SOURCE = 1  # EMBED: address of the embedding; KEEP: buffer
    TARGET = 2  # EMBED, GATHER: buffer
    SIZE = 3
    KIND = 4
    COLUMN = 5  # of the features, in numbers
    WIDTH = 6  # of the features
    NORM = 7  # KEEP: address of float32 [SIZE], or 0
    EPSILON = 8


OP_WORDS = 24
