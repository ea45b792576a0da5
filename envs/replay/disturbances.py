"""What may happen to costs in a replay: noise, drift, and changes of regime."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import numpy as np

from specgym.engine.checks import is_number, is_whole

Real = TypeVar("Real", float, np.ndarray)
MAX_DRIFT = math.log(4.0)


@dataclasses.dataclass(frozen=True)
class Change:
    """Costs that are multiplied from some request on.

    Attributes:
        at_request: The first request it holds for, counted from 0 since the seeding.
        target: Factor on the seconds of the target's forwards, the baseline's among them.
        drafters: Factor on the seconds of all other members' forwards.
    """

    at_request: int
    target: float = 1.0
    drafters: float = 1.0

    def __post_init__(self) -> None:
        numbers = is_whole(self.at_request) and is_number(self.target) and is_number(self.drafters)
        if not numbers or self.at_request < 0 or not (self.target > 0.0 and self.drafters > 0.0):
            raise ValueError(
                f"change: at_request must be >= 0 and the factors > 0; got request "
                f"{self.at_request!r}, target {self.target!r}, drafters {self.drafters!r}"
            )


@dataclasses.dataclass(frozen=True)
class Disturbance:
    """How costs differ from the recorded table; by default not at all.

    Attributes:
        noise: Log-normal noise on every iteration, in units of the spread that was measured.
        drift: Standard deviation per iteration of a random walk of log drafters' cost, which
            stays within a factor of 4.
        trend: What log drafters' cost grows by in each iteration, within the same factor.
        changes: Changes of regime.
    """

    noise: float = 0.0
    drift: float = 0.0
    trend: float = 0.0
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        for name in ("noise", "drift", "trend"):
            if not is_number(value := getattr(self, name)):
                raise ValueError(f"disturbance.{name}: must be a number; got {value!r}")
        is_list = isinstance(self.changes, tuple | list)
        if not is_list or not all(isinstance(each, Change) for each in self.changes):
            raise ValueError(f"disturbance.changes: must be Change(...)s; got {self.changes!r}")
        if not (0.0 <= self.noise < math.inf and 0.0 <= self.drift < math.inf):
            raise ValueError(
                f"disturbance: noise and drift must be finite and >= 0; got {self.noise} and "
                f"{self.drift}"
            )
        if not math.isfinite(self.trend):
            raise ValueError(f"disturbance.trend: must be finite; got {self.trend}")


def check_disturbance(disturbance: Any) -> Disturbance:
    """What happens to costs, as a user gave it.

    Raises:
        ValueError: If it is something else.
    """
    if not isinstance(disturbance, Disturbance):
        raise ValueError(f"disturbance: must be Disturbance(...); got {disturbance!r}")
    return disturbance


class CostFactors:
    """The factors on costs in each of several rows, as a disturbance has them.

    Args:
        disturbance: What happens.
        num_rows: Rows.
        rng: Draws noise and drift.
    """

    def __init__(self, disturbance: Disturbance, num_rows: int, rng: np.random.Generator):
        self.disturbance = disturbance
        self.rng = rng
        self.log_drift = np.zeros(num_rows)
        self.base_target = np.ones(num_rows)
        self.base_drafters = np.ones(num_rows)
        self.is_quiet = disturbance == Disturbance()

    def begin(self, row: int, num_before: int) -> None:
        """A row goes on to a request, with this many before it since the seeding."""
        changes = [c for c in self.disturbance.changes if c.at_request <= num_before]
        self.base_target[row] = math.prod(change.target for change in changes)
        self.base_drafters[row] = math.prod(change.drafters for change in changes)

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """Factors on the target's and on the drafters' seconds now, [rows] each."""
        return self.base_target, self.base_drafters * np.exp(self.log_drift)

    def noise(self, spread: np.ndarray) -> np.ndarray:
        """The next iteration's factors on all seconds, [rows].

        Args:
            spread: Standard deviation of log seconds as measured, [rows].
        """
        if not self.disturbance.noise:
            return np.ones_like(self.log_drift)
        drawn = self.rng.standard_normal(len(self.log_drift))
        return np.exp(self.disturbance.noise * spread * drawn)

    def advance(self) -> None:
        """An iteration has passed in every row."""
        if self.disturbance.drift or self.disturbance.trend:
            steps = self.disturbance.drift * self.rng.standard_normal(len(self.log_drift))
            moved = self.log_drift + steps + self.disturbance.trend
            self.log_drift = np.clip(moved, -MAX_DRIFT, MAX_DRIFT)
