"""Beta Thompson sampling: tokens are successes, time is trials."""

from collections.abc import Sequence

import numpy as np

from specgym.baselines.checks import check_count, check_range
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan


class BetaThompson(OnlineController):
    """Draws every arm's rate from Beta(1 + s, 1 + f); the allowed arm of the largest runs.

    The sources have s and f count rewards of 1 and 0. Ours: in the time of one iteration without
    speculation at most K_max + 2 tokens come, so an iteration of cost c that emits Y tokens is c
    trials with Y / (K_max + 2) successes. s / (s + f) is then U / (K_max + 2), a ratio of sums, and
    all arms count the same unit of time. `weight` multiplies both: how much an iteration is worth.

    Args:
        plans: the plan table, indexed by action.
        weight: trials in the time of one iteration without speculation.
        scope: whether counts survive a request: `stream` or `request`.
        seed: seed of the controller's own generator.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: Thompson 1933; Agrawal and Goyal, "Analysis of Thompson sampling for the multi-armed
        bandit problem" (2012).
    """

    kept = ("successes", "failures", "rng")

    def __init__(
        self, plans: Sequence[Plan], weight: float = 1.0, scope: str = "stream", seed: int = 0
    ) -> None:
        super().__init__(plans, scope)
        self._weight = check_range("weight", weight, 1e-6, 1e6)
        self._rng = np.random.default_rng(check_count("seed", seed, 0))
        self._scale = max(k for _, k in self._plans) + 2
        self._forget()

    def _forget(self) -> None:
        self._successes = np.zeros(len(self._plans))
        self._failures = np.zeros(len(self._plans))

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the allowed arm whose drawn rate is largest."""
        rates = self._rng.beta(1.0 + self._successes, 1.0 + self._failures)
        return int(np.where(mask, rates, -1.0).argmax())

    def _learn(self, outcome: Outcome) -> None:
        successes = outcome.tokens / self._scale
        self._successes[outcome.action] += self._weight * successes
        self._failures[outcome.action] += self._weight * max(outcome.cost - successes, 0.0)
