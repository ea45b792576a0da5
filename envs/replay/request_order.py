"""The order in which a replay's requests come."""

from __future__ import annotations

from typing import Literal

import numpy as np

from specgym.engine.checks import check_whole

Order = Literal["permuted", "recorded"]


class Deck:
    """An endless stream of requests in which each comes once before any comes again.

    Args:
        num_requests: Requests there are.
        order: ``permuted`` shuffles anew for each round; ``recorded`` never.
        rng: Shuffles.
    """

    def __init__(self, num_requests: int, order: Order, rng: np.random.Generator):
        self.num_requests, self.order, self.rng = num_requests, order, rng
        self.left: list[int] = []

    def __next__(self) -> int:
        if not self.left:
            count = self.num_requests
            cards = range(count) if self.order == "recorded" else self.rng.permutation(count)
            self.left = [int(card) for card in cards][::-1]
        return self.left.pop()


def check_stream(num_requests: int, order: str) -> int:
    """The number of requests of an episode.

    Raises:
        ValueError: If there is none, or their order is unknown.
    """
    num_requests = check_whole("num_requests", num_requests, 1)
    if order not in ("permuted", "recorded"):
        raise ValueError(f"order: must be permuted or recorded; got {order!r}")
    return num_requests
