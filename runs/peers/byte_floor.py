"""The byte floor: no forward is faster than reading its weights once from memory, in bf16."""

from __future__ import annotations

import dataclasses

from specgym.engine.members.protocol import NeuralMember

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


def weight_bytes(member: NeuralMember) -> int:
    """Return the bytes of the weights that a forward of one token reads, in bf16."""
    return member.num_read_parameters * NUMBER_BYTES
