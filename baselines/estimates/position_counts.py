"""How often drafted tokens are accepted, position by position, and what is not known of them."""

from collections.abc import Mapping
from typing import Any

PRIOR_RATE = 0.5  # of a position when none was ever seen; ours
NEWTON_STEPS = 8


class PositionCounts:
    """How often each drafted position was reached, and how often accepted there.

    A round with m accepted tokens reached the positions 1..m + 1 and was accepted at 1..m. When
    all that was asked for is accepted, position m + 1 was never reached: the round is censored
    there, and says nothing of it (a product-limit estimate). So one verified round of length K
    tells what any smaller K would have brought, and what any K would where it was rejected.

    Of a batch only the mean of m is known. The geometric law of that mean takes the place of the
    rows' own counts [ours].

    Args:
        depth: positions.
        window: rounds that count, the last ones; 0 counts all.

    Attributes:
        reached: rounds that came to each position.
        accepted: rounds that were accepted at each position.

    Source: the window and the extrapolation follow SGLang's throughput-aware adaptive steps;
        counting conditionally, which uses censored rounds too, is ours.
    """

    def __init__(self, depth: int, window: int = 0) -> None:
        self._window = window
        self._rounds: list[list[float]] = []  # the window's survival, from 1 for position 0
        self.reached = [0.0] * depth
        self.accepted = [0.0] * depth

    def add(self, num_accepted: float, depth: int, num_rows: int = 1) -> None:
        """Counts a round.

        Args:
            num_accepted: drafted tokens that the target accepted, per row.
            depth: the most that it might have accepted.
            num_rows: rows that decoded.
        """
        survival = survival_of(num_accepted, depth, num_rows)
        self._count(survival, 1.0)
        if self._window:
            self._rounds.append(survival)
            if len(self._rounds) > self._window:
                self._count(self._rounds.pop(0), -1.0)

    def rates(self) -> list[float]:
        """Returns the probability of acceptance at each position, given that it is reached.

        A position nobody reached takes the rate of the last one before it that was reached.
        """
        rates, last = [], PRIOR_RATE
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            if reached > 1e-9:
                last = min(1.0, max(0.0, accepted / reached))
            rates.append(last)
        return rates

    def expected_tokens(self) -> list[float]:
        """Returns the expected tokens of an iteration by depth: E_k = 1 + p_1 + p_1 p_2 + ..."""
        return expected_tokens(self.rates())

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts and the window."""
        return {
            "rounds": [list(each) for each in self._rounds],
            "reached": list(self.reached),
            "accepted": list(self.accepted),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the counts and the window."""
        self._rounds = [list(each) for each in state["rounds"]]
        self.reached, self.accepted = list(state["reached"]), list(state["accepted"])

    def _count(self, survival: list[float], weight: float) -> None:
        for position in range(len(survival) - 1):
            self.reached[position] += weight * survival[position]
            self.accepted[position] += weight * survival[position + 1]


def expected_tokens(rates: list[float]) -> list[float]:
    """Returns 1, 1 + p_1, 1 + p_1 + p_1 p_2, ...: expected tokens by number of positions."""
    expected, alive = [1.0], 1.0
    for rate in rates:
        alive *= rate
        expected.append(expected[-1] + alive)
    return expected


def survival_of(num_accepted: float, depth: int, num_rows: int) -> list[float]:
    """Returns the share of rows with at least j accepted tokens, j = 0..depth.

    Args:
        num_accepted: accepted tokens per row.
        depth: the most that might be accepted.
        num_rows: rows; with more than one the law is geometric, with this mean.
    """
    if num_rows == 1 or num_accepted <= 0.0 or num_accepted >= depth:
        return [1.0 if position <= num_accepted else 0.0 for position in range(depth + 1)]
    rate = geometric_rate(num_accepted, depth)
    return [rate**position for position in range(depth + 1)]


def geometric_rate(mean: float, depth: int) -> float:
    """Returns the p for which p + p^2 + ... + p^depth is the mean, by Newton's steps from 1."""
    p = 1.0
    for _ in range(NEWTON_STEPS):
        value, slope = 0.0, 0.0
        for _ in range(depth):  # Horner's rule for the sum and its derivative
            slope = slope * p + value + 1.0
            value = (value + 1.0) * p
        p -= (value - mean) / slope
    return p
