"""A transformers cache with static buffers, append-only slots and a validity mask.

Legend: B batch, H key/value heads, S slots, T tokens of a window, L attended length, D head size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from specgym.engine.transfer import to_device
from specgym.engine.types import EngineFault


@dataclasses.dataclass(frozen=True)
class StaticWindow:
    """Where a window is written when that must not be a number of the host (CUDA graphs).

    Attributes:
        slots_T: Slots of the window.
        length: Attended length: that of the context bucket.
    """

    slots_T: torch.Tensor
    length: int

    def write(self, buffer_BHSD: torch.Tensor, states_BHTD: torch.Tensor) -> torch.Tensor:
        """Puts states into their slots; returns what the window attends to, [B, H, L, D]."""
        buffer_BHSD.index_copy_(2, self.slots_T, states_BHTD.to(buffer_BHSD.dtype))
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
        batch, heads, _, size = key_states.shape
        slots, owner = self.owner.num_slots, self.owner.name
        self.keys = allocate(owner, "keys", key_states, (batch, heads, slots, size))
        size = value_states.shape[-1]
        self.values = allocate(owner, "values", value_states, (batch, heads, slots, size))
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
            return window.write(self.keys, key_states), window.write(self.values, value_states)
        start, stop = self.owner.num_used, self.owner.num_used + key_states.shape[-2]
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
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


class MaskedKVCache(Cache):
    """Key/value memory of one member for a batch of rows that accept different lengths.

    All rows append at one physical position (``num_used``). A rejected slot is marked invalid for
    its row (logical rollback); the suffix of slots that no row holds valid is then given back
    (physical truncation), and ``compact`` packs what is left when holes have gathered. Positions
    count *valid* tokens, so a hole shifts nothing. The mask hides every invalid slot, whatever
    finite value it holds.

    Args:
        num_layers: Layers of the model.
        batch_size: Rows.
        num_slots: Slots of the static buffers.
        device: Where the mask lives.
        dtype: Type of the additive mask.
        kv_length: Attended length when it is fixed (exact mode); None attends to slots in use.
        sliding_window: Window in positions of models that have one.
        name: The member it belongs to, for messages.

    Raises:
        EngineFault: If there is no memory for a buffer, here or when a layer's are made.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        num_slots: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_length: int | None = None,
        sliding_window: int | None = None,
        name: str = "",
    ):
        self.name = name
        self.buffers = [MaskedLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.buffers))
        assert kv_length is None or kv_length <= num_slots
        self.num_sequences = batch_size
        self.num_slots = num_slots
        self.kv_length = kv_length
        self.dtype = dtype
        self.sliding_window = sliding_window
        self.num_used = 0
        self.row_slots: list[list[int]] = [[] for _ in range(batch_size)]
        self.features_BSF: torch.Tensor | None = None
        self.window: StaticWindow | None = None
        shape = (batch_size, num_slots)
        kinds = (torch.empty(0, dtype=kind, device=device) for kind in (torch.bool, torch.long))
        self.valid_BS = allocate(name, "validity mask", next(kinds), shape)
        self.positions_BS = allocate(name, "positions", next(kinds), shape)

    def num_valid(self, row: int) -> int:
        """Tokens a row holds: its logical length."""
        return len(self.row_slots[row])

    def num_eaten(self, row: int) -> int:
        """Leading tokens of a row's text that are behind what it holds."""
        return self.num_valid(row)

    def drop_guesses(self) -> None:
        """Forgets what rests on drafted tokens beyond their number: here nothing does."""

    def attended_length(self, stop: int) -> int:
        """Attended length of a window that ends at slot ``stop``."""
        if self.window is not None:
            return self.window.length
        return stop if self.kv_length is None else self.kv_length

    @property
    def num_packable(self) -> int:
        """Slots that ``compact`` would give back."""
        return self.num_used - max(map(len, self.row_slots))

    def positions(self, num_rows: int) -> torch.Tensor:
        """Position ids of the next window, [B, T]: each row counts on from its valid tokens."""
        device = self.valid_BS.device
        first_B = to_device([len(slots) for slots in self.row_slots], device)
        return first_B[:, None] + torch.arange(num_rows, device=device)

    def mask(self, num_fed: list[int], num_rows: int, *, sliding: bool = False) -> torch.Tensor:
        """The additive attention mask of the next window, [B, 1, T, L].

        A token sees the valid slots of its row and the window up to itself; a pad sees only
        itself (a row that sees nothing would be NaN).

        Args:
            num_fed: Real tokens of each row.
            num_rows: T, pads included.
            sliding: Also hide what is further back than the sliding window, in positions.
        """
        start, stop = self.num_used, self.num_used + num_rows
        length = self.attended_length(stop)
        device = self.valid_BS.device
        visible_BTL = self.valid_BS[:, None, :length].expand(-1, num_rows, -1).clone()
        causal_TT = torch.ones(num_rows, num_rows, dtype=torch.bool, device=device).tril()
        if min(num_fed) == num_rows:
            visible_BTL[:, :, start:stop] = causal_TT
        else:
            steps_T = torch.arange(num_rows, device=device)
            real_BT = steps_T < to_device(num_fed, device)[:, None]
            itself_TT = steps_T[:, None] == steps_T
            block_BTT = (causal_TT & real_BT[:, None, :] & real_BT[:, :, None]) | itself_TT
            visible_BTL[:, :, start:stop] = block_BTT
            visible_BTL[:, :, :start] &= real_BT[:, :, None]
        if sliding and self.sliding_window is not None:
            query_BT = self.positions(num_rows)
            slots_BL = self.positions_BS[:, :length].clone()
            slots_BL[:, start:stop] = query_BT
            far_BTL = query_BT[:, :, None] - slots_BL[:, None, :] >= self.sliding_window
            visible_BTL &= ~far_BTL
        mask_BTL = torch.zeros(visible_BTL.shape, dtype=self.dtype, device=device)
        mask_BTL.masked_fill_(~visible_BTL, torch.finfo(self.dtype).min)
        return mask_BTL[:, None]

    def write_features(self, features_BTF: torch.Tensor) -> None:
        """Keeps a window's features in its slots, from where heads on the model read them."""
        if self.features_BSF is None:
            batch, _, width = features_BTF.shape
            shape = (batch, self.num_slots, width)
            self.features_BSF = allocate(self.name, "features", features_BTF, shape)
        stop = self.num_used + features_BTF.shape[1]
        self.features_BSF[:, self.num_used : stop] = features_BTF

    def advance(self, num_fed: list[int], num_rows: int) -> None:
        """Takes a window in after its forward: real tokens become valid, pads stay invalid.

        Called once per forward, after all layers: they all saw the same write position.
        """
        start = self.num_used
        for row, (slots, count) in enumerate(zip(self.row_slots, num_fed, strict=True)):
            first = len(slots)
            slots.extend(range(start, start + count))
            self.valid_BS[row, start : start + count] = True
            self.positions_BS[row, start : start + count] = torch.arange(
                first, first + count, device=self.valid_BS.device
            )
        self.num_used = start + num_rows
        self.truncate()

    def keep(self, counts: list[int]) -> None:
        """Rolls each row back to its first ``counts[row]`` tokens, then truncates.

        Raises:
            ValueError: If a count is negative or larger than what the row holds.
        """
        held = list(zip(self.row_slots, counts, strict=True))
        for row, (slots, count) in enumerate(held):
            if not 0 <= count <= len(slots):
                raise ValueError(
                    f"keep: row {row} holds {len(slots)} tokens, cannot keep {count}; "
                    f"counts must be between 0 and what the row holds"
                )
        for row, (slots, count) in enumerate(held):
            if count < len(slots):
                self.valid_BS[row, slots[count] :] = False
                del slots[count:]
        self.truncate()

    def truncate(self) -> None:
        """Gives back the common suffix of slots that no row holds valid."""
        self.num_used = 1 + max((slots[-1] for slots in self.row_slots if slots), default=-1)

    @torch.inference_mode()
    def scrub(self) -> None:
        """Zeroes every slot that holds nothing; a NaN there would poison what attends past it."""
        empty_B1S1 = ~self.valid_BS[:, None, :, None]
        for layer in self.buffers:
            for states_BHSD in layer.states():
                states_BHSD.masked_fill_(empty_B1S1, 0.0)

    @torch.inference_mode()
    def compact(self) -> None:
        """Packs every row's valid tokens to the front; order and positions stay."""
        width = max((len(slots) for slots in self.row_slots), default=0)
        padded = [slots + [0] * (width - len(slots)) for slots in self.row_slots]
        order_BW = to_device(padded, self.valid_BS.device, torch.long)
        for layer in self.buffers:
            for states_BHSD in layer.states():
                heads, size = states_BHSD.shape[1], states_BHSD.shape[3]
                index = order_BW[:, None, :, None].expand(-1, heads, -1, size)
                states_BHSD[:, :, :width] = states_BHSD.gather(2, index)
        if self.features_BSF is not None:
            index = order_BW[:, :, None].expand(-1, -1, self.features_BSF.shape[-1])
            self.features_BSF[:, :width] = self.features_BSF.gather(1, index)
        self.valid_BS.zero_()
        for row, slots in enumerate(self.row_slots):
            self.row_slots[row] = list(range(len(slots)))
            self.valid_BS[row, : len(slots)] = True
        self.positions_BS[:] = torch.arange(self.num_slots, device=self.valid_BS.device)
        self.num_used = width

    def make_room(self, num_rows: int) -> None:
        """Compacts when the next window would not fit, or when a quarter of the slots comes back.

        Raises:
            ValueError: If it does not fit even then.
        """
        overflows = self.num_used + num_rows > self.num_slots
        if self.num_packable and (overflows or self.num_packable * 4 > self.num_used):
            self.compact()
        if self.num_used + num_rows > self.num_slots:
            raise ValueError(
                f"cache: a window of {num_rows} rows does not fit behind {self.num_used} of "
                f"{self.num_slots} slots; ask for fewer tokens (max_new_tokens) or a smaller K"
            )

    @torch.inference_mode()
    def first_fault(self) -> tuple[int, int, int] | None:
        """The first layer whose keys or values are not finite, and the row and position there.

        A layer's keys and values are its input's, so its input or its own weights are at fault.
        """
        for index, layer in enumerate(self.buffers):
            for states_BHSD in layer.states():
                is_broken_BS = ~states_BHSD.isfinite().all(dim=3).all(dim=1) & self.valid_BS
                if bool(is_broken_BS.any()):
                    row, slot = is_broken_BS.nonzero()[0].tolist()
                    return index, row, int(self.positions_BS[row, slot])
        return None

    def check_integrity(self) -> None:
        """Asserts that slots, validity and positions tell one story (a debugging aid)."""
        for row, slots in enumerate(self.row_slots):
            assert slots == sorted(set(slots)), f"row {row}: slots out of order: {slots}"
            assert not slots or slots[-1] < self.num_used, f"row {row}: slot beyond num_used"
            valid = self.valid_BS[row].nonzero().flatten().tolist()
            assert valid == slots, f"row {row}: validity {valid} and slots {slots} differ"
            positions = self.positions_BS[row, slots].tolist()
            assert positions == list(range(len(slots))), f"row {row}: positions {positions}"
        last = max((slots[-1] for slots in self.row_slots if slots), default=-1)
        assert self.num_used == last + 1, f"num_used {self.num_used}, last valid slot {last}"


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
