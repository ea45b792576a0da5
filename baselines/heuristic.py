"""Two more when all was accepted, one less otherwise: transformers' schedule."""

import math
from collections.abc import Sequence

import numpy as np

from specgym.baselines.checks import check_count, check_range
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.ladder import Ladder
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan, num_positions

ENTROPY = "draft_entropy"  # the observation's entry


class Heuristic(OnlineController):
    """K += 2 when all drafted tokens are accepted, else K = max(1, K - 1).

    That is the source's schedule `heuristic`. Its confidence stop ends a draft when the drafter's
    largest probability is below 0.4; that happens inside drafting, which a controller does not
    see. Ours instead, before the draft: the observation has the average entropy H of drafts, and
    the largest probability is at least exp(-H); where that is below `confidence` the smallest K
    runs. Prompt lookup has no entropy and is never stopped, nor is a controller built without the
    features' names.

    Ours, too: one chain of the table is used, with the largest K that is at most the schedule's,
    which ends at the chain's largest. In a batch all rows must be accepted whole.

    Args:
        plans: the plan table, indexed by action.
        chain: the chain, such as `ngram`; None takes the table's first.
        start: K at first; 20 in transformers, as far as the table goes.
        confidence: largest probability below which a draft is not worth going on; 0 never stops.
        scope: whether K survives a request: `request` or `stream` (transformers' `heuristic`).
        features: names of the observation's entries.

    Raises:
        ValueError: a hyper-parameter is out of range, or the table has no such chain.

    Source: transformers, `AssistedCandidateGenerator.update_candidate_strategy` and
        `ConfidenceCriteria`.
    """

    kept = ("k",)

    def __init__(
        self,
        plans: Sequence[Plan],
        chain: str | None = None,
        start: int = 20,
        confidence: float = 0.4,
        scope: str = "stream",
        features: Sequence[str] = (),
    ) -> None:
        super().__init__(plans, scope)
        self._ladder = Ladder(self._plans, chain)
        self._start = check_count("start", start, 1)
        self._confidence = check_range("confidence", confidence, 0.0, 1.0)
        self._entry = list(features).index(ENTROPY) if ENTROPY in features else None
        self._forget()

    def _forget(self) -> None:
        self._k = self._start
        self._clip()

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the plan of K, the smallest one where the drafter is unsure."""
        least = min(self._ladder.k_values, default=0)
        return self._ladder.action(least if self._is_unsure(observation) else self._k, mask)

    def _learn(self, outcome: Outcome) -> None:
        asked = num_positions(self._plans[outcome.action])
        if asked == 0 or outcome.is_last:
            return
        self._k = self._k + 2 if outcome.accepted >= asked else self._k - 1
        self._clip()

    def _is_unsure(self, observation: np.ndarray) -> bool:
        if self._entry is None:
            return False
        return math.exp(-float(observation[self._entry])) < self._confidence

    def _clip(self) -> None:
        values = self._ladder.k_values
        self._k = min(max(self._k, min(values, default=0)), max(values, default=0))
