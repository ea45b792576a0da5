"""UCB-Tuned: the radius shrinks with the measured variance of an arm."""

import math
from collections.abc import Sequence

from specgym.agents.bandits.index_bandit import SpreadBandit
from specgym.baselines.checks import check_range
from specgym.baselines.plans import Plan


class UCBTuned(SpreadBandit):
    """Index U / (K_max + 2) + c sqrt(ln t / n min(1/4, V)), V = variance + sqrt(2 ln t / n).

    1/4 bounds the variance of a number in 0..1; V is what it might be. Ours: an arm's mean is a
    ratio of sums, its variance that of the ratio; both are in units of K_max + 2, which bounds
    what an iteration emits. There is nothing to tune: c = 1 is the source's.

    Args:
        plans: the plan table, indexed by action.
        exploration: c above.
        scope: whether statistics survive a request: `stream` or `request`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: Auer, Cesa-Bianchi and Fischer 2002, UCB1-Tuned.
    """

    def __init__(
        self, plans: Sequence[Plan], exploration: float = 1.0, scope: str = "stream"
    ) -> None:
        super().__init__(plans, scope)
        self._exploration = check_range("exploration", exploration, 0.0, 1e6)

    def _index(self, arm: int) -> float:
        share = self._log_rounds / self._num_plays[arm]
        variance = tuned_variance(self._variance(arm), share)
        return self._utility(arm) / self._scale + self._exploration * math.sqrt(share * variance)


def tuned_variance(variance: float, share: float) -> float:
    """Returns min(1/4, variance + sqrt(2 share)), where share is ln t / n."""
    return min(0.25, variance + math.sqrt(2.0 * share))
