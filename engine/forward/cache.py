"""A transformers cache with static buffers, append-only slots and a validity mask.

Legend: B batch, H key/value heads, S slots, T tokens of a window, L attended length, D head size.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
from transformers.cache_utils import Cache

from specgym.engine.forward.cache_layers import MaskedLayer, RowLayer, StaticWindow, allocate
from specgym.engine.forward.transfer import to_device


def plain(tensor: torch.Tensor) -> Any:
    """A tensor; on the CPU numpy's view of it, which needs far fewer instructions.

    They count where a forward has emptied the processor's caches: two assignments in torch took a
    quarter of a millisecond behind one.
    """
    return tensor.numpy() if tensor.is_cpu else tensor


class MaskedKVCache(Cache):
    """Key/value memory of one member for a batch of rows that accept different lengths.

    All rows append at one physical position (``num_used``). A rejected slot is marked invalid for
    its row (logical rollback); the suffix of slots that no row holds valid is then given back
    (physical truncation), and ``compact`` packs what is left when holes have gathered. Positions
    count *valid* tokens, so a hole shifts nothing. The mask hides every invalid slot, whatever
    finite value it holds.

    An *aligned* cache never has holes: each row's window is written behind the row's own tokens,
    so a token's slot is its position, and where it lies depends on its row alone. Exact mode
    needs that: the order in which attention sums must not depend on what other rows accepted.

    Args:
        num_layers: Layers of the model.
        batch_size: Rows.
        num_slots: Slots of the static buffers.
        device: Where the mask lives.
        dtype: Type of the additive mask.
        kv_length: Attended length when it is fixed (exact mode); None attends to slots in use.
        sliding_window: Window in positions of models that have one.
        name: The member it belongs to, for messages.
        aligned: Every row appends behind its own tokens.

    Attributes:
        is_view: Whether it is one row of another cache.

    Raises:
        EngineFault: If there is no memory for a buffer, here or when a layer's are made.
    """

    is_view = False

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
        aligned: bool = False,
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
        self.aligned = aligned
        self.num_used = 0
        self.row_slots: list[list[int]] = [[] for _ in range(batch_size)]
        self.features_BSF: torch.Tensor | None = None
        self.window: StaticWindow | None = None
        self.addresses: np.ndarray | None = None  # of the buffers, for compiled forwards
        shape = (batch_size, num_slots)
        kinds = (torch.empty(0, dtype=kind, device=device) for kind in (torch.bool, torch.long))
        self.valid_BS = allocate(name, "validity mask", next(kinds), shape)
        self.positions_BS = allocate(name, "positions", next(kinds), shape)
        self.steps_S = torch.arange(num_slots, device=device)
        self.rows_B1 = torch.arange(batch_size, device=device)[:, None]
        self.window_slots_BT: torch.Tensor | None = None  # None: all rows at ``num_used``

    def view(self, row: int) -> Self:
        """One row of this cache as a cache of its own; it shares the buffers there are."""
        view, only = copy.copy(self), slice(row, row + 1)
        view.is_view = True
        view.num_sequences = 1
        view.row_slots = [self.row_slots[row]]
        view.valid_BS, view.positions_BS = self.valid_BS[only], self.positions_BS[only]
        view.rows_B1, view.window_slots_BT = self.rows_B1[:1], None
        view.addresses = None
        if self.features_BSF is not None:
            view.features_BSF = self.features_BSF[only]
        view.buffers = [RowLayer(view, layer, row) for layer in self.buffers]
        view.layers = list(view.buffers)
        view.truncate()
        return view

    @contextlib.contextmanager
    def alone(self, row: int) -> Iterator[Self]:
        """Lets one row be fed by itself, behind its own tokens; the others take no part."""
        view = self.view(row)
        yield view
        if self.features_BSF is None and view.features_BSF is not None:
            features = view.features_BSF
            shape = (self.num_sequences, *features.shape[1:])
            self.features_BSF = allocate(self.name, "features", features, shape)
            self.features_BSF[row] = features[0]
        self.truncate()

    def forget(self, row: int) -> None:
        """Rolls one row back to nothing."""
        held = list(map(len, self.row_slots))
        self.keep([*held[:row], 0, *held[row + 1 :]])

    @property
    def device(self) -> torch.device:
        """Where the mask lives."""
        return self.valid_BS.device

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
        return first_B[:, None] + self.steps_S[:num_rows]

    def mask(self, num_fed: list[int], num_rows: int, *, sliding: bool = False) -> torch.Tensor:
        """The additive attention mask of the next window, [B, 1, T, L].

        A token sees the valid slots of its row and the window up to itself; a pad sees only
        itself (a row that sees nothing would be NaN).

        Args:
            num_fed: Real tokens of each row.
            num_rows: T, pads included.
            sliding: Also hide what is further back than the sliding window, in positions.
        """
        if self.aligned:
            visible_BTL = self.aligned_visible(num_fed, num_rows, sliding)
        else:
            visible_BTL = self.shared_visible(num_fed, num_rows, sliding)
        mask_BTL = torch.zeros(visible_BTL.shape, dtype=self.dtype, device=visible_BTL.device)
        mask_BTL.masked_fill_(~visible_BTL, torch.finfo(self.dtype).min)
        return mask_BTL[:, None]

    def aligned_visible(self, num_fed: list[int], num_rows: int, sliding: bool) -> torch.Tensor:
        """What a window sees where slots are positions, [B, T, L]: a range that ends at itself."""
        device = self.valid_BS.device
        last_BT = self.positions(num_rows)
        first_BT = torch.zeros_like(last_BT)
        if sliding and self.sliding_window is not None:
            first_BT = last_BT - (self.sliding_window - 1)
        if min(num_fed) < num_rows:
            is_pad_BT = self.steps_S[:num_rows] >= to_device(num_fed, device)[:, None]
            first_BT = torch.where(is_pad_BT, last_BT, first_BT)
        slots_L = self.steps_S[: self.attended_length(self.num_used + num_rows)]
        return (slots_L <= last_BT[..., None]) & (slots_L >= first_BT[..., None])

    def shared_visible(self, num_fed: list[int], num_rows: int, sliding: bool) -> torch.Tensor:
        """What a window sees that all rows append at one place, [B, T, L]."""
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
        return visible_BTL

    def write_features(self, features_BTF: torch.Tensor) -> None:
        """Keeps a window's features in its slots, from where heads on the model read them."""
        if self.features_BSF is None:
            batch, _, width = features_BTF.shape
            shape = (batch, self.num_slots, width)
            self.features_BSF = allocate(self.name, "features", features_BTF, shape)
        if self.window_slots_BT is not None:
            self.features_BSF[self.rows_B1, self.window_slots_BT] = features_BTF
            return
        stop = self.num_used + features_BTF.shape[1]
        self.features_BSF[:, self.num_used : stop] = features_BTF

    def advance(self, num_fed: list[int], num_rows: int) -> None:
        """Takes a window in after its forward: real tokens become valid, pads stay invalid.

        Called once per forward, after all layers: they all saw the same write position.
        """
        if self.num_sequences == 1:
            first, held, count = self.num_used, len(self.row_slots[0]), num_fed[0]
            plain(self.valid_BS)[0, first : first + count] = True
            steps_S = plain(self.steps_S)
            plain(self.positions_BS)[0, first : first + count] = steps_S[held : held + count]
        else:
            self.mark(num_fed, num_rows)
        for slots, count in zip(self.row_slots, num_fed, strict=True):
            first = len(slots) if self.aligned else self.num_used
            slots.extend(range(first, first + count))
        self.window_slots_BT = None
        self.truncate()

    def mark(self, num_fed: list[int], num_rows: int) -> None:
        """Writes down validity and positions of a window of several rows."""
        fed_B1 = to_device(num_fed, self.device)[:, None]
        real_BT, positions_BT = self.steps_S[:num_rows] < fed_B1, self.positions(num_rows)
        if self.window_slots_BT is None:
            window = slice(self.num_used, self.num_used + num_rows)
            self.valid_BS[:, window], self.positions_BS[:, window] = real_BT, positions_BT
        else:
            self.valid_BS[self.rows_B1, self.window_slots_BT] = real_BT
            self.positions_BS[self.rows_B1, self.window_slots_BT] = positions_BT

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
                plain(self.valid_BS)[row, slots[count] : slots[-1] + 1] = False
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
        self.positions_BS[:] = self.steps_S
        self.num_used = width

    def make_room(self, num_rows: int) -> None:
        """Settles where the next window goes.

        Compacts when it would not fit, or when a quarter of the slots comes back.

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
        is_ragged = self.aligned and self.num_sequences > 1
        self.window_slots_BT = self.positions(num_rows) if is_ragged else None

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
            assert not self.aligned or slots == list(range(len(slots))), f"row {row}: holes"
            positions = self.positions_BS[row, slots].tolist()
            assert positions == list(range(len(slots))), f"row {row}: positions {positions}"
        last = max((slots[-1] for slots in self.row_slots if slots), default=-1)
        assert self.num_used == last + 1, f"num_used {self.num_used}, last valid slot {last}"
