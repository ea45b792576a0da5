"""Sliding-window UCB: only the last iterations count."""

from collections.abc import Sequence

from specgym.agents.bandits.ucb import UCB
from specgym.baselines.checks import check_count
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.plans import Plan


class SlidingUCB(UCB):
    """UCB over the last `window` iterations of all arms; an arm that left the window is new.

    The index is that of `ucb`, with t at most the window. Ours: ratio, scale and c, as in `ucb`.

    Args:
        plans: the plan table, indexed by action.
        window: iterations that count; some plays of every plan must fit in.
        exploration: weight of the radius.
        scope: whether statistics survive a request: `stream` or `request`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: Garivier and Moulines, "On upper-confidence bound policies for switching bandit
        problems" (2011), SW-UCB.
    """

    kept = (*UCB.kept, "recent")

    def __init__(
        self,
        plans: Sequence[Plan],
        window: int = 200,
        exploration: float = 0.1,
        scope: str = "stream",
    ) -> None:
        super().__init__(plans, exploration, scope)
        self._window = check_count("window", window, 1)

    def _forget(self) -> None:
        super()._forget()
        self._recent: list[list] = []  # arm, tokens and cost, oldest first

    def _learn(self, outcome: Outcome) -> None:
        super()._learn(outcome)
        self._recent.append([outcome.action, outcome.tokens, outcome.cost])
        if len(self._recent) > self._window:
            self._drop(*self._recent.pop(0))

    def _drop(self, arm: int, tokens: float, cost: float) -> None:
        """Takes an iteration out of the sums; an arm without iterations has sums of exactly 0."""
        self._num_plays[arm] -= 1
        is_known = self._num_plays[arm] > 0
        self._tokens[arm] = self._tokens[arm] - tokens if is_known else 0.0
        self._costs[arm] = self._costs[arm] - cost if is_known else 0.0
