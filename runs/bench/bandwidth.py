"""What all threads together read from memory, measured beside whatever is compared with it."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch

READ_BYTES = 512_000_000  # many times what any cache holds
PASSES = 3


@numba.njit(nogil=True)
def read(words: np.ndarray) -> int:
    """Reads every word once; what comes back keeps the compiler from dropping the loop.

    Four streams, each of them in order: one alone leaves a core waiting for memory.
    """
    quarter = len(words) // 4
    first, second = words[:quarter], words[quarter : 2 * quarter]
    third, fourth = words[2 * quarter : 3 * quarter], words[3 * quarter : 4 * quarter]
    a, b, c, d = 0, 0, 0, 0
    for index in range(quarter):
        a ^= first[index]
        b ^= second[index]
        c ^= third[index]
        d ^= fourth[index]
    return a ^ b ^ c ^ d


class MemoryReader:
    """Streams a buffer far larger than the caches through all threads, whenever it is called.

    The loop is compiled, does an exclusive or per word and nothing else, and is the fastest plain
    read we know: on two Zen 3 cores torch's and numpy's own reductions reach less, over whatever
    type (``sum`` of float32 comes nearest).

    Args:
        num_bytes: Size of the buffer.
        num_threads: Threads; None takes as many as PyTorch has.

    Attributes:
        rates: Bytes per second of each call: of the fastest of its passes.
    """

    def __init__(self, num_bytes: int = READ_BYTES, num_threads: int | None = None):
        num_threads = num_threads or torch.get_num_threads()
        words = np.empty(num_bytes // 8, dtype=np.int64)
        words[:] = 1  # pages that were never written are all one page of zeros
        self.parts = np.array_split(words, num_threads)
        self.num_bytes = words.nbytes
        self.threads = ThreadPoolExecutor(num_threads)
        self.rates: list[float] = []
        read(words[:8])  # compiles it

    def __call__(self) -> float:
        """Seconds of the fastest of a few passes."""
        seconds = min(self.run_pass() for _ in range(PASSES))
        self.rates.append(self.num_bytes / seconds)
        return seconds

    def run_pass(self) -> float:
        """Seconds of one pass."""
        started = time.perf_counter()
        list(self.threads.map(read, self.parts))
        return time.perf_counter() - started

    @property
    def rate(self) -> float:
        """Bytes per second: the median of the calls."""
        return statistics.median(self.rates)
