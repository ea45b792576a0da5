"""Regret: what decoding took beyond the oracle, in seconds, per step, and of the headroom."""

from __future__ import annotations

import dataclasses

import numpy as np

from specgym.baselines.hindsight.oracle import Oracle
from specgym.baselines.hindsight.problem import Rollout


@dataclasses.dataclass(frozen=True, eq=False)
class Regret:
    """What a path lost against the oracle, iteration by iteration.

    Attributes:
        positions: int64[T], tokens generated before each iteration.
        step_seconds: float64[T], loss of each action: its value less that of the state before it.
            At least 0 but for rounding; they add up to the regret of the path.
        is_exact: whether the oracle is the optimum. Losses are against its lower bound if not,
            and then at least as large as the true regret in total.
    """

    positions: np.ndarray
    step_seconds: np.ndarray
    is_exact: bool

    @property
    def cumulative_seconds(self) -> np.ndarray:
        """Loss up to and with each iteration, float64[T]."""
        return self.step_seconds.cumsum()

    @property
    def seconds(self) -> float:
        """Loss of the whole path."""
        return float(self.step_seconds.sum())


def regret(oracle: Oracle, path: Rollout) -> Regret:
    """Returns the regret of a path through the oracle's request.

    Source: the loss of an action is its advantage with the sign turned, Baird, "Advantage
        updating" (1993); that losses add up to the difference of the totals is Kakade and
        Langford's performance difference lemma (2002).
    """
    states = zip(path.positions, path.marks, strict=True)
    left = [oracle.value(int(at), tuple(map(int, marks))) for at, marks in states]
    gained = -np.diff(left, append=0.0)
    return Regret(path.positions, path.seconds - gained, oracle.is_exact)


def headroom_share(seconds: float, best_fixed: float, oracle: float) -> float:
    """Returns the share of the headroom that a controller captures.

    1 is the oracle, 0 the best fixed plan, and less than 0 is slower than that plan. The regret
    as a share of the headroom is 1 less this. NaN where there is no headroom.

    Args:
        seconds: of the controller, in total over some requests.
        best_fixed: of the best fixed plan over the same.
        oracle: of the oracle over the same.
    """
    headroom = best_fixed - oracle
    return (best_fixed - seconds) / headroom if headroom > 0 else float("nan")
