"""The cache of an EAGLE head, beside the target's features.

Legend: B batch, T tokens, S slots, L attended length, D rotary size, H hidden size.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import torch

from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.forward.lean_eagle import Rotation

CAUSAL_ROWS = 16  # longest window whose mask is looked up


class EagleMemory(MaskedKVCache):
    """An EAGLE head's cache; position t stands for token t + 1 beside the features of token t.

    Attributes:
        source: The target's memory, which holds the features of every committed token.
        guess_B1H: The last output of each row, which stands for the next position's features.
        guesses: The same of a compiled head, float32 [B, H].
        factors: Rotary factors of every position, [S, 1, D].
    """

    source: MaskedKVCache
    guess_B1H: torch.Tensor | None = None
    guesses: np.ndarray | None = None
    factors: Rotation
    causal_TS: torch.Tensor | None = None

    def view(self, row: int) -> Self:
        """One row, beside the same row of the target's memory."""
        view = super().view(row)
        view.source = self.source.view(row)
        return view

    def num_eaten(self, row: int) -> int:
        """Leading tokens behind what it holds: the first token has no position of its own."""
        return self.num_valid(row) + 1

    def num_known(self, row: int) -> int:
        """Positions whose features the target has computed."""
        return self.source.num_valid(row)

    def drop_guesses(self) -> None:
        """Keeps only what rests on the target's features."""
        rows = range(self.num_sequences)
        self.keep([min(self.num_valid(row), self.num_known(row)) for row in rows])

    def rotation(self, num_rows: int) -> Rotation:
        """Rotary factors of the next window, [B or 1, T, 1, D]."""
        cos, sin = self.factors
        if self.num_sequences == 1:
            first = self.num_used
            return cos[first : first + num_rows], sin[first : first + num_rows]
        positions_BT = self.positions(num_rows)
        return cos[positions_BT], sin[positions_BT]

    def bias(self, num_fed: list[int], num_rows: int) -> torch.Tensor | None:
        """The additive mask of the next window, [B, 1, T, L]; None sees all up to its end.

        A single request has no holes between its slots: its mask is a view of one that is made
        once, and a window of one token needs none, whatever the mode.
        """
        if self.num_sequences > 1 or num_rows > CAUSAL_ROWS:
            return self.mask(num_fed, num_rows)
        if num_rows == 1:
            return None
        S, start = self.num_slots, self.num_used
        if self.causal_TS is None:
            low = torch.finfo(self.dtype).min
            all_TS = torch.full((CAUSAL_ROWS, 2 * S), low, dtype=self.dtype, device=self.device)
            self.causal_TS = all_TS.triu_(S + 1)
        length = self.attended_length(start + num_rows)
        return self.causal_TS[None, None, :num_rows, S - start : S - start + length]
