"""What is believed of every plan's cost: its logarithm is normal."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

PRIOR_STRENGTH = 1.0  # observations that the prior mean of log 1 is worth; ours
PRIOR_SHAPE, PRIOR_SCALE = 2.0, 0.02  # of the inverse gamma of the variance: 0.02 on average; ours

ALL = slice(None)


class LogCosts:
    """Normal-inverse-gamma beliefs on the log of each plan's relative cost.

    Before anything was seen a plan is believed to cost what no speculation does, which makes it
    worth a try.

    Args:
        num_plans: plans of the table.

    Source: the conjugate update is textbook (Murphy, "Conjugate Bayesian analysis of the Gaussian
        distribution", 2007); that costs are log-normal is ours.
    """

    def __init__(self, num_plans: int) -> None:
        self._count = np.zeros(num_plans)
        self._mean = np.zeros(num_plans)
        self._squares = np.zeros(num_plans)  # sum of squared deviations from the mean
        self._believe()

    def add(self, plan: int, cost: float) -> None:
        """Takes one cost in; it must be positive, and one that is not is left out."""
        if cost <= 0.0:
            return
        value = math.log(cost)
        self._count[plan] += 1.0
        deviation = value - self._mean[plan]
        self._mean[plan] += deviation / self._count[plan]
        self._squares[plan] += deviation * (value - self._mean[plan])
        self._believe(plan)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Returns a cost of every plan drawn from the belief, float64[plans]."""
        strength, center, shape, scale = self._belief
        variance = scale / rng.standard_gamma(shape)
        drawn = center + np.sqrt(variance / strength) * rng.standard_normal(len(center))
        costs: np.ndarray = np.exp(drawn + 0.5 * variance)
        return costs

    def _believe(self, plan: int | slice = ALL) -> None:
        """Makes the parameters of the belief from the statistics: of one plan, or of all."""
        if plan == ALL:
            self._belief = np.zeros((4, len(self._count)))
        n, mean = self._count[plan], self._mean[plan]
        strength = PRIOR_STRENGTH + n
        shrunk = PRIOR_STRENGTH * n / strength * mean * mean
        self._belief[0, plan] = strength
        self._belief[1, plan] = n * mean / strength
        self._belief[2, plan] = PRIOR_SHAPE + 0.5 * n
        self._belief[3, plan] = PRIOR_SCALE + 0.5 * (self._squares[plan] + shrunk)

    def state_dict(self) -> dict[str, Any]:
        """Returns the sufficient statistics."""
        return {
            "count": self._count.tolist(),
            "mean": self._mean.tolist(),
            "squares": self._squares.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the sufficient statistics."""
        self._count = np.array(state["count"])
        self._mean = np.array(state["mean"])
        self._squares = np.array(state["squares"])
        self._believe()
