"""What bandits share that keep sums per arm and run the arm of largest index."""

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan

MIXED_SUMS = ("token_squares", "products", "cost_squares")


class IndexBandit(OnlineController):
    """Runs the first allowed arm never played, else the allowed arm of largest index.

    An arm is a plan. Its utility U is a ratio of sums over its iterations: tokens over cost, which
    is seconds in units of no speculation, catch-up included. An iteration counts for the plan that
    ran, also where another was asked and turned down; only a proposal of no tokens counts for the
    plan asked for (see `charged_action`). Subclasses say what the index is.

    Args:
        plans: the plan table, indexed by action.
        scope: whether statistics survive a request: `stream` or `request`.
    """

    kept: ClassVar[tuple[str, ...]] = ("num_plays", "tokens", "costs")

    def __init__(self, plans: Sequence[Plan], scope: str) -> None:
        super().__init__(plans, scope)
        self._scale = max(k for _, k in self._plans) + 2  # bounds what an iteration emits
        self._forget()

    def _forget(self) -> None:
        self._num_plays: list[float] = [0] * len(self._plans)
        self._tokens: list[float] = [0.0] * len(self._plans)
        self._costs: list[float] = [0.0] * len(self._plans)

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the first allowed arm never played, else the allowed arm of largest index."""
        self._begin_round()
        best, largest = 0, -math.inf
        for arm, is_allowed in enumerate(mask.tolist()):
            if not is_allowed:
                continue
            if self._num_plays[arm] == 0:
                return arm
            index = self._index(arm)
            if index > largest:
                best, largest = arm, index
        return best

    def _begin_round(self) -> None:
        """Works out what all arms' indices have in common: how often any arm was played, t."""
        self._log_rounds = math.log(max(sum(self._num_plays), 1))

    def _index(self, arm: int) -> float:
        """The arm's index; it was played before."""
        raise NotImplementedError

    def _utility(self, arm: int) -> float:
        """The arm's utility, a ratio of sums."""
        return self._tokens[arm] / self._costs[arm]

    def _learn(self, outcome: Outcome) -> None:
        arm = outcome.action
        self._num_plays[arm] += 1
        self._tokens[arm] += outcome.tokens
        self._costs[arm] += outcome.cost


class SpreadBandit(IndexBandit):
    """An index bandit that knows by how much an arm's iterations differ, too."""

    kept: ClassVar[tuple[str, ...]] = (*IndexBandit.kept, *MIXED_SUMS)

    def _forget(self) -> None:
        super()._forget()
        self._token_squares = [0.0] * len(self._plans)
        self._products = [0.0] * len(self._plans)
        self._cost_squares = [0.0] * len(self._plans)

    def _variance(self, arm: int) -> float:
        """The variance of one iteration's utility in units of the scale, squared.

        U is a ratio of sums, so that the error of an iteration is (tokens - U cost) over the mean
        cost (the delta method) [ours].
        """
        n, utility = self._num_plays[arm], self._utility(arm)
        errors = self._token_squares[arm] - 2.0 * utility * self._products[arm]
        errors += utility * utility * self._cost_squares[arm]
        spread = math.sqrt(max(errors, 0.0) * n) / (self._costs[arm] * self._scale)
        return spread * spread

    def _learn(self, outcome: Outcome) -> None:
        super()._learn(outcome)
        arm, tokens, cost = outcome.action, outcome.tokens, outcome.cost
        self._token_squares[arm] += tokens * tokens
        self._products[arm] += tokens * cost
        self._cost_squares[arm] += cost * cost
