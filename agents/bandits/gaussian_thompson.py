"""Gaussian Thompson sampling: the arm whose drawn mean utility is largest."""

import math
from collections.abc import Sequence

import numpy as np

from specgym.agents.bandits.index_bandit import SpreadBandit
from specgym.baselines.checks import check_count, check_range
from specgym.baselines.plans import Plan


class GaussianThompson(SpreadBandit):
    """Draws every arm's mean from N(U, (n variance + prior) / (n + 1) / n); the largest runs.

    U is in units of K_max + 2, and so is the variance, that of the ratio of sums. `prior` is a
    variance worth one iteration, so that two equal outcomes do not end exploration. Every arm runs
    once at first. The ratio, the units and the prior are ours.

    Args:
        plans: the plan table, indexed by action.
        prior: variance of an iteration before any was seen, in units of K_max + 2, squared.
        scope: whether statistics survive a request: `stream` or `request`.
        seed: seed of the controller's own generator.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: Agrawal and Goyal, "Further optimal regret bounds for Thompson sampling" (2013), with
        Gaussian posteriors.
    """

    kept = (*SpreadBandit.kept, "rng")

    def __init__(
        self, plans: Sequence[Plan], prior: float = 0.01, scope: str = "stream", seed: int = 0
    ) -> None:
        super().__init__(plans, scope)
        self._prior = check_range("prior", prior, 0.0, 1e6)
        self._rng = np.random.default_rng(check_count("seed", seed, 0))

    def _begin_round(self) -> None:
        self._noise = self._rng.standard_normal(len(self._plans)).tolist()

    def _index(self, arm: int) -> float:
        n = self._num_plays[arm]
        variance = (n * self._variance(arm) + self._prior) / (n + 1.0)
        return self._utility(arm) / self._scale + math.sqrt(variance / n) * self._noise[arm]
