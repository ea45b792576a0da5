"""Linear regression, one sample at a time."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


class LeastSquares:
    """Ridge regression by recursive least squares (Sherman and Morrison's update).

    Args:
        width: features of a sample.
        ridge: pull of the coefficients to zero.
    """

    def __init__(self, width: int, ridge: float) -> None:
        self._inverse = np.eye(width) / ridge
        self._coefficients = np.zeros(width)
        self._weights = self._coefficients.tolist()
        self.num_samples = 0

    def add(self, features: Sequence[float], value: float) -> None:
        """Takes one sample in."""
        x = np.asarray(features)
        moved = self._inverse @ x
        gain = moved / (1.0 + x @ moved)
        self._coefficients += gain * (value - self._coefficients @ x)
        self._inverse -= np.outer(gain, moved)
        self._weights = self._coefficients.tolist()
        self.num_samples += 1

    def predict(self, features: Sequence[float]) -> float:
        """Returns the expected value of a sample with these features."""
        return sum(map(operator.mul, features, self._weights))

    def state_dict(self) -> dict[str, Any]:
        """Returns the regression."""
        return {
            "inverse": self._inverse.tolist(),
            "coefficients": self._coefficients.tolist(),
            "num_samples": self.num_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the regression."""
        self._inverse = np.array(state["inverse"])
        self._coefficients = np.array(state["coefficients"])
        self._weights = self._coefficients.tolist()
        self.num_samples = state["num_samples"]
