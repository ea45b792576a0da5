"""Rewards: pure functions of an iteration's tokens and seconds.

Over a request the output is fixed, so the sum of raw utility is a sum over *tokens* of
t_base / t_iter: it is largest when one never speculates. ``net_utility`` is utility weighted by
time; its sum is the time saved. A test computes the optimal policy under each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Real = TypeVar("Real", float, np.ndarray)  # of one iteration, or of one in every row


def utility(tokens: Real, seconds: Real, baseline_seconds: Real) -> Real:
    """U = tokens / (t_iter / t_base): tokens per iteration over relative cost; 1 is break-even.

    For bandits (gamma = 0) and for reading. Source: Cascade (arXiv 2506.20675), utility.
    """
    return tokens * baseline_seconds / seconds


def net_utility(tokens: Real, seconds: Real, baseline_seconds: Real) -> Real:
    """(U - 1) t_iter / t_base = tokens - t_iter / t_base: time saved, in units of t_base. Ours."""
    return tokens - seconds / baseline_seconds


def log_utility(tokens: Real, seconds: Real, baseline_seconds: Real) -> Real:
    """log U: symmetric in speed-up and slow-down. For reading and for bandits."""
    return np.log(utility(tokens, seconds, baseline_seconds))


Reward = Callable[[Any, Any, Any], Any]  # of tokens, seconds and baseline seconds


def paced_utility(pace: float) -> Reward:
    """The reward ``pace`` x tokens - t_iter / t_base: time saved against a known pace.

    Over a request it differs from ``net_utility`` by a constant, for the output is fixed: the same
    policies are best. But where ``pace`` is about what a token costs in units of t_base, what lies
    ahead is worth nothing on average, so a discount below 1 no longer favours iterations that emit
    many tokens over those that emit them cheaply. Ours; the differential reward of average-cost
    problems.

    Raises:
        ValueError: If the pace is not above 0.
    """
    if not pace > 0.0:
        raise ValueError(f"pace: must be above 0; got {pace}")

    def reward(tokens: Real, seconds: Real, baseline_seconds: Real) -> Real:
        return pace * tokens - seconds / baseline_seconds

    return reward


REWARDS: dict[str, Reward] = {
    "net_utility": net_utility,
    "utility": utility,
    "log_utility": log_utility,
}


def get_reward(name: str | Reward) -> Reward:
    """The reward function of this name; a function is returned as it is.

    Raises:
        ValueError: If there is none.
    """
    if callable(name):
        return name
    if not isinstance(name, str) or name not in REWARDS:
        raise ValueError(f"reward: no reward {name!r}; rewards are {', '.join(REWARDS)}")
    return REWARDS[name]
