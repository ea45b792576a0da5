"""Whether a stream of numbers in 0..1 has changed its mean."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

SMALLEST = 1e-12  # means are kept this far from 0 and 1, where kl has no end


class Detector(Protocol):
    """Watches one stream."""

    def add(self, value: float) -> bool:
        """Takes the next value, in 0..1, and returns whether the mean has changed."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns what was seen."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what was seen."""
        ...


class GLR:
    """Bernoulli generalized likelihood ratio test over all places where a change may lie.

    The statistic is max_s [s kl(x_1:s, x_1:n) + (n - s) kl(x_s+1:n, x_1:n)]; it alarms above
    beta(n) = ln(3 n sqrt(n) / delta). Values in 0..1 that are not bits are allowed: they vary less
    than bits of the same mean. Ours: only the last `window` values are looked at, and only every
    `every`-th time.

    Args:
        delta: probability of a false alarm.
        window: values looked at.
        every: values from one test to the next.

    Source: Besson, Kaufmann, Maillard and Seznec, "Efficient change-point detection for tackling
        piecewise-stationary bandits" (2022), GLR-UCB; the threshold is the one of its experiments.
    """

    def __init__(self, delta: float, window: int = 200, every: int = 4) -> None:
        self._delta, self._window, self._every = delta, window, every
        self._values: list[float] = []
        self._count = 0

    def add(self, value: float) -> bool:
        """Takes the next value, in 0..1, and returns whether the mean has changed."""
        self._values.append(value)
        del self._values[: -self._window]
        self._count += 1
        n = len(self._values)
        if n < 2 or self._count % self._every:
            return False
        return glr_statistic(self._values)[0] > math.log(3.0 * n * math.sqrt(n) / self._delta)

    def state_dict(self) -> dict[str, Any]:
        """Returns the values of the window."""
        return {"values": list(self._values), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the values of the window."""
        self._values, self._count = list(state["values"]), state["count"]


class CUSUM:
    """Page's cumulative sums, in both directions.

    g+ = max(0, g+ + x - mu0 - shift / 2) and g- likewise; it alarms when one reaches `threshold`.
    Ours: mu0 is the mean of the first `num_reference` values.

    Args:
        shift: change of the mean that is looked for.
        threshold: sum that is an alarm.
        num_reference: values that mu0 is the mean of.

    Source: Page, "Continuous inspection schemes" (1954).
    """

    def __init__(self, shift: float = 0.2, threshold: float = 4.0, num_reference: int = 30) -> None:
        self._shift, self._threshold, self._num_reference = shift, threshold, num_reference
        self._num_values, self._mean = 0, 0.0
        self._up, self._down = 0.0, 0.0

    def add(self, value: float) -> bool:
        """Takes the next value and returns whether the mean has changed."""
        if self._num_values < self._num_reference:
            self._num_values += 1
            self._mean += (value - self._mean) / self._num_values
            return False
        self._up = max(0.0, self._up + value - self._mean - self._shift / 2.0)
        self._down = max(0.0, self._down + self._mean - value - self._shift / 2.0)
        return max(self._up, self._down) >= self._threshold

    def state_dict(self) -> dict[str, Any]:
        """Returns the reference and the sums."""
        return {
            "reference": [self._num_values, self._mean],
            "sums": [self._up, self._down],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the reference and the sums."""
        self._num_values, self._mean = state["reference"]
        self._up, self._down = state["sums"]


def glr_statistic(values: Sequence[float]) -> tuple[float, int]:
    """Returns the largest likelihood ratio of a change, and the number of values before it.

    Args:
        values: at least two values in 0..1.
    """
    x = np.asarray(values, dtype=np.float64)
    sums, n = x.cumsum(), len(x)
    s = np.arange(1, n)
    mean = sums[-1] / n
    before, after = sums[:-1] / s, (sums[-1] - sums[:-1]) / (n - s)
    ratios = s * divergence(before, mean) + (n - s) * divergence(after, mean)
    place = int(ratios.argmax())
    return float(ratios[place]), place + 1


def divergence(p: np.ndarray, q: float) -> np.ndarray:
    """Returns kl(p, q) of Bernoulli laws, elementwise in p."""
    p = p.clip(SMALLEST, 1.0 - SMALLEST)
    q = min(max(q, SMALLEST), 1.0 - SMALLEST)
    result: np.ndarray = p * np.log(p / q) + (1.0 - p) * np.log((1.0 - p) / (1.0 - q))
    return result
