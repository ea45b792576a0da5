"""Discounted UCB: old iterations count less, so that what changes is found again."""

from collections.abc import Sequence

from specgym.agents.bandits.ucb import UCB
from specgym.baselines.checks import check_range
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.plans import Plan


class DiscountedUCB(UCB):
    """UCB whose counts and sums of all arms fade by gamma in every iteration.

    n_g(a) = sum of gamma^(t - s) over the iterations s of arm a; the index is U_g / (K_max + 2) +
    c sqrt(2 ln(sum n_g) / n_g), where U_g is a ratio of discounted sums. With gamma = 1 it is
    `ucb`. Ours: the ratio, the scale and c, as in `ucb`.

    Args:
        plans: the plan table, indexed by action.
        gamma: discount of an iteration, the same for all arms, in 0.5..1.
        exploration: c above.
        scope: whether statistics survive a request: `stream` or `request`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: Garivier and Moulines, "On upper-confidence bound policies for switching bandit
        problems" (2011), D-UCB.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        gamma: float = 0.99,
        exploration: float = 0.1,
        scope: str = "stream",
    ) -> None:
        super().__init__(plans, exploration, scope)
        self._gamma = check_range("gamma", gamma, 0.5, 1.0)

    def _learn(self, outcome: Outcome) -> None:
        for sums in (self._num_plays, self._tokens, self._costs):
            sums[:] = [self._gamma * each for each in sums]
        super()._learn(outcome)

    def _utility(self, arm: int) -> float:
        """A ratio of sums; 0 where they have faded away, which the radius makes up for."""
        return self._tokens[arm] / self._costs[arm] if self._costs[arm] else 0.0
