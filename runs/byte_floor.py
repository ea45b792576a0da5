"""The byte floor: no forward is faster than reading its weights once from memory."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import torch

from specgym.engine.members import ModelMember

READ_BYTES = 512_000_000  # many times what any cache holds
READ_REPEATS = 9


@dataclasses.dataclass(frozen=True)
class ByteFloor:
    """The least seconds that a forward of one token can take on this machine.

    Attributes:
        num_bytes: Weights that it reads.
        bandwidth: Bytes per second that all threads together read from memory.
    """

    num_bytes: int
    bandwidth: float

    @property
    def seconds(self) -> float:
        """Bytes over bandwidth."""
        return self.num_bytes / self.bandwidth


def measure_floor(member: ModelMember, num_bytes: int = READ_BYTES) -> ByteFloor:
    """The byte floor of a member on the CPU, with the threads that PyTorch has."""
    return ByteFloor(weight_bytes(member), read_bandwidth(num_bytes))


def weight_bytes(member: ModelMember) -> int:
    """Bytes of the weights that a forward of one token reads.

    Of a mixture's experts those that a token visits; of an embedding nothing, unless it is the
    head too.
    """
    embedding: torch.Tensor = member.model.get_input_embeddings().get_parameter("weight")
    num_read = member.num_active_parameters
    if not member.model.config.get_text_config().tie_word_embeddings:
        num_read -= embedding.numel()
    return num_read * embedding.element_size()


def read_bandwidth(num_bytes: int = READ_BYTES, repeats: int = READ_REPEATS) -> float:
    """Bytes per second that this process reads from memory, at its best.

    The fastest pass of several reductions over a tensor far larger than the caches: what a
    reduction computes is little, and the best of them is the most that was seen to be possible.
    """
    numbers = torch.ones(math.ceil(num_bytes / 4), dtype=torch.float32)
    reductions: tuple[Callable[[], object], ...] = (
        lambda: torch.dot(numbers, numbers),
        numbers.sum,
        numbers.max,
    )
    fastest = math.inf
    for reduce in reductions * repeats:
        started = time.perf_counter()
        reduce()
        fastest = min(fastest, time.perf_counter() - started)
    return numbers.numel() * numbers.element_size() / fastest
