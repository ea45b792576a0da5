"""One layer of a masked cache: static buffers that a window is written into.

Legend: B batch, H key/value heads, S slots, T tokens of a window, L attended length, D head size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin

from specgym.engine.types import EngineFault

if TYPE_CHECKING:
    from specgym.engine.forward.cache import MaskedKVCache


@dataclasses.dataclass(frozen=True)
class StaticWindow:
    """Where a window is written when that must not be a number of the host (CUDA graphs).

    Attributes:
        slots: Slots of the window: [T] where all rows append at one place, else [B, T].
        length: Attended length: that of the context bucket.
    """

    slots: torch.Tensor
    length: int

    def write(
        self, buffer_BHSD: torch.Tensor, states_BHTD: torch.Tensor, rows_B1: torch.Tensor
    ) -> torch.Tensor:
        """Puts states into their slots; returns what the window attends to, [B, H, L, D]."""
        states_BHTD = states_BHTD.to(buffer_BHSD.dtype)
        if self.slots.ndim == 1:
            buffer_BHSD.index_copy_(2, self.slots, states_BHTD)
        else:
            buffer_BHSD[rows_B1, :, self.slots] = states_BHTD.transpose(1, 2)
        return buffer_BHSD[:, :, : self.length]


class MaskedLayer(CacheLayerMixin):
    """One layer's key and value buffers, written at the cache's shared position."""

    is_compileable = False
    is_sliding = False

    def __init__(self, owner: MaskedKVCache):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the buffers in the shape of the first states, [B, H, S, D]."""
        owner, heads = self.owner, key_states.shape[1]
        shape = (owner.num_sequences, heads, owner.num_slots)
        self.keys = allocate(owner.name, "keys", key_states, (*shape, key_states.shape[-1]))
        self.values = allocate(owner.name, "values", value_states, (*shape, value_states.shape[-1]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a window's states [B, H, T, D]; returns what it attends to, [B, H, L, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        if (window := self.owner.window) is not None:
            rows_B1 = self.owner.rows_B1
            keys = window.write(self.keys, key_states, rows_B1)
            return keys, window.write(self.values, value_states, rows_B1)
        start, stop = self.owner.num_used, self.owner.num_used + key_states.shape[-2]
        slots_BT = self.owner.window_slots_BT
        if slots_BT is None:
            self.keys[:, :, start:stop] = key_states
            self.values[:, :, start:stop] = value_states
        else:
            rows_B1 = self.owner.rows_B1
            self.keys[rows_B1, :, slots_BT] = key_states.transpose(1, 2)
            self.values[rows_B1, :, slots_BT] = value_states.transpose(1, 2)
        length = self.owner.attended_length(stop)
        return self.keys[:, :, :length], self.values[:, :, :length]

    def states(self) -> tuple[torch.Tensor, ...]:
        """The buffers of keys and of values, [B, H, S, D]; none before the first forward."""
        if self.keys is None or self.values is None:
            return ()
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Attended length and offset, as transformers' mask builder asks for them."""
        return self.owner.attended_length(self.owner.num_used + query_length), 0

    def get_seq_length(self) -> int:
        """Slots in use."""
        return self.owner.num_used

    def get_max_length(self) -> int:
        """Slots there are."""
        return self.owner.num_slots


class RowLayer(MaskedLayer):
    """One row of a layer's buffers."""

    def __init__(self, view: MaskedKVCache, layer: MaskedLayer, row: int):
        super().__init__(view)
        self.layer, self.row = layer, row
        if layer.is_initialized:
            self.narrow()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates the whole layer's buffers."""
        self.layer.lazy_initialization(key_states, value_states)
        self.narrow()

    def narrow(self) -> None:
        """Takes hold of the row."""
        self.keys, self.values = (each[self.row : self.row + 1] for each in self.layer.states())
        self.is_initialized = True


def allocate(name: str, what: str, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A buffer of zeros, of another tensor's type and on its device.

    Raises:
        EngineFault: If there is no memory for it.
    """
    try:
        return like.new_zeros(shape)
    except RuntimeError as error:  # both torch.OutOfMemoryError and the CPU allocator's
        num_bytes = math.prod(shape) * like.element_size()
        raise EngineFault(
            f"member {name!r}: out of memory for the {what} of its cache, {tuple(shape)} "
            f"{like.dtype}, {num_bytes / 1e9:.1f} GB on {like.device}; lower max_new_tokens or the "
            f"batch, or shorten the prompt"
        ) from error
