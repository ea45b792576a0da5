"""Censoring-aware average: K is where drafts stop, and grows when they do not."""

from collections.abc import Sequence

import numpy as np

from specgym.baselines.checks import check_count, check_range
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.ladder import Ladder
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan, num_positions


class CensoredEMA(OnlineController):
    """K = round(depth), where depth follows the point at which drafts were rejected.

    From the source: a partial acceptance tells exactly where the draft stopped being good, and is
    averaged with weight 0.25; a full one only tells that this point lies further on, so depth goes
    up by 1 instead of being averaged down to K. Depth starts at 2 and stays within the K values
    of the chain. Ours: one chain of the table is used, with the largest K that is at most the
    source's. In a batch the mean number of accepted tokens is averaged, and only a batch that is
    accepted whole counts as full.

    Args:
        plans: the plan table, indexed by action.
        chain: the chain, such as `ngram`; None takes the table's first.
        weight: weight of a partial acceptance.
        step: what a full acceptance adds.
        start: the depth at first.
        scope: whether the depth survives a request: `request` (the source's) or `stream`.

    Raises:
        ValueError: a hyper-parameter is out of range, or the table has no such chain.

    Source: a fork of llama.cpp with adaptive draft sizing (`--spec-draft-adaptive`).
    """

    kept = ("depth",)

    def __init__(
        self,
        plans: Sequence[Plan],
        chain: str | None = None,
        weight: float = 0.25,
        step: float = 1.0,
        start: int = 2,
        scope: str = "request",
    ) -> None:
        super().__init__(plans, scope)
        self._ladder = Ladder(self._plans, chain)
        self._weight = check_range("weight", weight, 0.0, 1.0)
        self._step = check_range("step", step, 0.0, 100.0)
        self._start = check_count("start", start, 1)
        self._forget()

    def _forget(self) -> None:
        self._depth = float(min(self._start, self._most))

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the plan of the depth, or the chain's largest smaller one that is allowed."""
        return self._ladder.action(max(round(self._depth), self._least), mask)

    def _learn(self, outcome: Outcome) -> None:
        asked = num_positions(self._plans[outcome.action])
        if asked == 0 or outcome.is_last:
            return
        if outcome.accepted >= asked:
            self._depth += self._step
        else:
            self._depth += self._weight * (outcome.accepted - self._depth)
        self._depth = min(max(self._depth, float(self._least)), float(self._most))

    @property
    def _least(self) -> int:
        return min(self._ladder.k_values, default=0)

    @property
    def _most(self) -> int:
        return max(self._ladder.k_values, default=0)
