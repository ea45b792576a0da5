"""UCB1 on measured utility: an index per plan, the largest runs."""

import math
from collections.abc import Sequence

from specgym.agents.bandits.index_bandit import IndexBandit
from specgym.baselines.checks import check_range
from specgym.baselines.plans import Plan


class UCB(IndexBandit):
    """Upper confidence bounds over all plans, with constants tuned to utilities.

    Every arm once, in the order of the table, then the largest index U / (K_max + 2) + c
    sqrt(2 ln t / n): U is the arm's utility (a ratio of sums over its n iterations: tokens over
    seconds in units of the baseline, catch-up included), t counts all iterations. K_max + 2
    bounds what an iteration emits. UCB1 is Auer et al.'s; that an arm's mean is a ratio of sums,
    the scale and c = 0.1 are ours, for UCBSpec's radius (arXiv 2505.15141) is several tokens wide
    and never leaves round-robin within a request.

    Args:
        plans: the plan table, indexed by action.
        exploration: c above.
        scope: whether statistics survive a request: `stream` or `request`. Some 25 arms cannot be
            explored inside one request.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: Auer, Cesa-Bianchi and Fischer 2002 (UCB1); the rest is ours.
    """

    def __init__(
        self, plans: Sequence[Plan], exploration: float = 0.1, scope: str = "stream"
    ) -> None:
        super().__init__(plans, scope)
        self._exploration = check_range("exploration", exploration, 0.0, 1e6)

    def _index(self, arm: int) -> float:
        radius = math.sqrt(2.0 * self._log_rounds / self._num_plays[arm])
        return self._utility(arm) / self._scale + self._exploration * radius
