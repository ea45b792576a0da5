"""States that were visited on recorded requests, with what every action would do in each.

Legend: n visits, F features, A actions, R requests, N output tokens of the longest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

PER_VISIT = ("observations", "allowed", "seconds", "tokens", "request", "position")


@dataclasses.dataclass(frozen=True, eq=False)
class Visits:
    """Visited states, in any order and as often as they were met.

    Attributes:
        observations: float32[n, F].
        allowed: bool[n, A], what the mask allows; action 0 always.
        seconds: float64[n, A], seconds of each action's iteration from there, catch-up included.
        tokens: int64[n, A], tokens that it emits.
        request: int64[n], which request, below R.
        position: int64[n], tokens generated before.
        lengths: int64[R], output tokens of each request.

    Raises:
        ValueError: arrays do not go together, or a visit is not on its request.
    """

    observations: np.ndarray
    allowed: np.ndarray
    seconds: np.ndarray
    tokens: np.ndarray
    request: np.ndarray
    position: np.ndarray
    lengths: np.ndarray

    def __post_init__(self) -> None:
        count = len(self.request)
        table = (count, self.seconds.shape[-1])
        shapes = {
            "observations": (count, self.observations.shape[-1]),
            "allowed": table,
            "seconds": table,
            "tokens": table,
            "position": (count,),
        }
        for field, shape in shapes.items():
            got = getattr(self, field).shape
            if got != shape:
                raise ValueError(f"visits.{field} must be of shape {shape}, got {got}")
        if not ((self.request >= 0) & (self.request < len(self.lengths))).all():
            raise ValueError(f"visits.request must be below {len(self.lengths)}, the lengths given")
        ends = self.lengths[self.request]
        if not ((self.position >= 0) & (self.position < ends)).all():
            raise ValueError("visits.position must be before the end of the visit's request")

    def __len__(self) -> int:
        return len(self.request)

    @property
    def num_actions(self) -> int:
        """Plans of the table, A."""
        return self.seconds.shape[1]

    def at(self, rows: np.ndarray) -> Visits:
        """Returns these visits alone; the numbering of requests stays."""
        return Visits(**{f: getattr(self, f)[rows] for f in PER_VISIT}, lengths=self.lengths)

    def action_values(self, values: np.ndarray) -> np.ndarray:
        """Returns each action's seconds and those left after it, float64[n, A]; inf: not allowed.

        Args:
            values: float64[R, N + 1], seconds left from each position, as of `values_of`.
        """
        width = values.shape[1] - 1
        after = np.minimum(self.position[:, None] + self.tokens, width)
        total = self.seconds + values[self.request[:, None], after]
        return np.where(self.allowed, total, np.inf)


def join_visits(parts: Sequence[Visits]) -> Visits:
    """Returns the visits of all parts, which share their requests.

    Raises:
        ValueError: there is no part, or they are of other requests.
    """
    if not parts or any(not np.array_equal(p.lengths, parts[0].lengths) for p in parts):
        raise ValueError("parts must be at least one, all of the same requests")
    joined = {f: np.concatenate([getattr(part, f) for part in parts]) for f in PER_VISIT}
    return Visits(**joined, lengths=parts[0].lengths)


def values_of(visits: Visits, actions: np.ndarray | None = None) -> np.ndarray:
    """Returns the seconds left from each position of each request, float64[R, N + 1].

    From the last position back: the mean over the visits to a position of the seconds of the
    action and those left after it. Followers lag as they did at the visits. A position nobody
    visited takes what the next one does and the mean seconds of a token.

    Args:
        visits: what is known of the requests; best with every position visited.
        actions: int64[n], the action taken at each visit; None takes the best in hindsight, which
            makes the values a clairvoyant's.

    Source: ours; policy evaluation on an empirical model, the oracle's recursion for None.
    """
    count, longest = len(visits.lengths), int(visits.lengths.max())
    values = np.zeros((count, longest + 1))
    rows = np.arange(len(visits))
    taken = visits.seconds[:, :1].argmin(axis=1) if actions is None else actions
    per_token = visits.seconds[rows, taken].sum() / visits.tokens[rows, taken].sum()
    order = np.argsort(visits.position, kind="stable")
    bounds = np.searchsorted(visits.position[order], np.arange(longest + 1))
    for position in range(longest - 1, -1, -1):
        here = order[bounds[position] : bounds[position + 1]]
        request = visits.request[here]
        after = position + visits.tokens[here]
        total = visits.seconds[here] + values[request[:, None], np.minimum(after, longest)]
        if actions is None:
            best = np.where(visits.allowed[here], total, np.inf).min(axis=1, initial=np.inf)
        else:
            best = total[np.arange(len(here)), actions[here]]
        num_visits = np.bincount(request, minlength=count)
        sums = np.bincount(request, weights=best, minlength=count)
        unseen = values[:, position + 1] + per_token
        values[:, position] = np.where(num_visits > 0, sums / np.maximum(num_visits, 1), unseen)
        values[position >= visits.lengths, position] = 0.0
    return values
