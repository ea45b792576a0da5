"""The byte floor: no forward is faster than reading its weights once from memory, in bf16."""

from __future__ import annotations

import dataclasses

import torch

from specgym.engine.eagle_member import EagleMember
from specgym.engine.members import ModelMember
from specgym.engine.pool import ModelPool

NUMBER_BYTES = 2  # of a weight in bf16, whatever type it is held in


@dataclasses.dataclass(frozen=True)
class ByteFloor:
    """The least seconds that a forward of one token can take on this machine.

    Attributes:
        num_bytes: Weights that it reads, in bf16.
        bandwidth: Bytes per second that all threads together read from memory.
    """

    num_bytes: int
    bandwidth: float

    @property
    def seconds(self) -> float:
        """Bytes over bandwidth."""
        return self.num_bytes / self.bandwidth


def weight_bytes(member: ModelMember) -> int:
    """Bytes of the weights that a forward of one token reads, in bf16.

    Of a mixture's experts those that a token visits; of an embedding nothing (a row is less than a
    thousandth), unless it is the head too.
    """
    num_read = member.num_active_parameters  # without an embedding that is the target's
    is_tied = member.model.config.get_text_config().tie_word_embeddings
    if member.draft_ids is None and not is_tied:
        num_read -= embedding_of(member).numel()
    return num_read * NUMBER_BYTES


def drafter_bytes(pool: ModelPool, name: str) -> int:
    """Bytes that a neural drafter's forward of one token reads, in bf16: layers and its own head.

    An EAGLE head's embedding counts no more than a model's, be it the target's or its own.
    """
    member = pool.members[name]
    if not isinstance(member, EagleMember):
        return weight_bytes(pool.model(name))
    shared = embedding_of(pool.model(pool.target))
    is_own = member.embedding.data_ptr() != shared.data_ptr()
    num_read = member.num_parameters - (member.embedding.numel() if is_own else 0)
    return num_read * NUMBER_BYTES


def embedding_of(member: ModelMember) -> torch.Tensor:
    """A model's embedding, [vocabulary, hidden]."""
    weight: torch.Tensor = member.model.get_input_embeddings().get_parameter("weight")
    return weight
