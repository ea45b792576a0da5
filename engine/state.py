"""The state of a batch that is being decoded: tokens, budgets, memories and ends of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.pool import ModelPool
from specgym.engine.types import DecodeRequest

KV_ROUNDING = 64  # slots of a row are a multiple of this


class DecodeState:
    """A batch of requests being decoded, one per row. Made by ``start``.

    Args:
        pool: The members.
        requests: One per row.
        exact: Whether forwards run in fixed shapes.
        row_tokens: Tokens, prompt and budget together, that each row has room for; None takes the
            longest request's.

    Attributes:
        tokens: Committed tokens of each row, prompt included.
        budgets: Tokens that each row may get, cut to the target's context.
        finish_reasons: Why each row has ended; None while it decodes.
        generators: Each row's random stream.
        memories: The KV cache of each member that was used.
        indices: The memories, one per row, of each member that drafts from the text alone.
        num_slots: KV slots of a row.
        row_tokens: Tokens, prompt and budget together, that a row has room for.

    Raises:
        ValueError: If a request needs more room than a row has.
    """

    def __init__(
        self,
        pool: ModelPool,
        requests: Sequence[DecodeRequest],
        exact: bool,
        row_tokens: int | None = None,
    ):
        self.pool = pool
        self.requests = list(requests)
        self.exact = exact
        self.tokens = [list(request.prompt) for request in requests]
        self.budgets = [pool.budget(request) for request in requests]
        self.finish_reasons: list[str | None] = [None] * len(requests)
        self.generators = [
            torch.Generator().manual_seed(request.sampling.seed) for request in requests
        ]
        lengths = [len(r.prompt) + b for r, b in zip(requests, self.budgets, strict=True)]
        # Room for a window behind the tokens; for holes too where all rows append at one place.
        margin = pool.window * (1 if exact or len(requests) == 1 else 4)
        room = (row_tokens or max(lengths)) + margin
        self.num_slots = -(-room // KV_ROUNDING) * KV_ROUNDING
        self.row_tokens = self.num_slots - margin
        for length in lengths:
            self.check_room(length)
        self.memories: dict[str, MaskedKVCache] = {}
        self.indices: dict[str, list[Any]] = {}
        for row, budget in enumerate(self.budgets):
            if budget == 0:
                self.finish_reasons[row] = self.limit_reason(row)

    def check_room(self, num_tokens: int) -> None:
        """Raise if a request of this length, prompt and budget together, does not fit a row.

        Raises:
            ValueError: If it needs more room than a row has.
        """
        if num_tokens > self.row_tokens:
            raise ValueError(
                f"request: its prompt and budget are {num_tokens} tokens, a row of this batch has "
                f"room for {self.row_tokens}; start the batch with a larger row_tokens, or ask for "
                f"fewer tokens (max_new_tokens)"
            )

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    @property
    def is_finished(self) -> bool:
        """Whether every row has ended."""
        return None not in self.finish_reasons

    def is_active(self, row: int) -> bool:
        """Return whether this row still decodes."""
        return self.finish_reasons[row] is None

    @property
    def num_active(self) -> int:
        """Number of rows that still decode."""
        return self.finish_reasons.count(None)

    @property
    def active_rows(self) -> list[int]:
        """Rows that still decode."""
        return [row for row, reason in enumerate(self.finish_reasons) if reason is None]

    def num_remaining(self, row: int) -> int:
        """Return how many tokens this row may still get."""
        return self.budgets[row] - self.num_generated(row)

    def num_generated(self, row: int) -> int:
        """Return how many tokens this row has got."""
        return len(self.tokens[row]) - len(self.requests[row].prompt)

    def output(self, row: int = 0) -> list[int]:
        """Return the tokens this row has got."""
        return self.tokens[row][len(self.requests[row].prompt) :]

    def limit_reason(self, row: int) -> str:
        """Return why this row ends when its budget is spent."""
        return limit_reason(self.requests[row], self.budgets[row])

    @property
    def kv_length(self) -> int:
        """Slots the target's attention runs over in the next iteration of one token."""
        return self.memories[self.pool.target].attended_length(max(map(len, self.tokens)))

    def num_lagging(self, name: str) -> int:
        """Return how many committed tokens a member lacks, beyond the one it always lacks."""
        memory = self.memories.get(name)
        if memory is None:
            return max(map(len, self.tokens)) - 1
        rows = self.active_rows or range(self.batch_size)
        return max(len(self.tokens[row]) - 1 - memory.num_eaten(row) for row in rows)


def limit_reason(request: DecodeRequest, budget: int) -> str:
    """Return why a request ends when its budget is spent: ``length``, or ``context`` if cut."""
    return "length" if budget == request.max_new_tokens else "context"
