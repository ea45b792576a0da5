"""Controllers that learn nothing: no speculation, one plan for ever, a plan at random."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specgym.baselines.checks import check_count
from specgym.baselines.plans import Plan, check_plans, check_state, find_plan, plan_name


class Static:
    """One fixed plan; no speculation where the mask forbids it.

    Args:
        plans: the plan table, indexed by action.
        plan: the plan's name, such as `ngram@4`.

    Raises:
        ValueError: the table has no plan of that name.
    """

    needs_divergence = False

    def __init__(self, plans: Sequence[Plan], plan: str = "ngram@4") -> None:
        self._plans = check_plans(plans)
        self._action = find_plan(self._plans, plan)

    def begin(self, request: Mapping[str, Any]) -> None:
        """Takes note of a new request: nothing to do."""

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the plan's action, or 0 where it is forbidden."""
        return self._action if mask[self._action] else 0

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Takes note of a step: nothing is learned."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the plan table's names: there is no other state."""
        return {"plans": [plan_name(plan) for plan in self._plans]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that the state is of the same plan table: there is nothing to restore."""
        check_state(state, self._plans)


class NoSpeculation(Static):
    """Plain decoding: action 0 at every iteration."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        super().__init__(plans, plan="none")


class Random:
    """A plan drawn uniformly from those that the mask allows, at every iteration.

    Args:
        plans: the plan table, indexed by action.
        seed: seed of the controller's own generator.
    """

    needs_divergence = False

    def __init__(self, plans: Sequence[Plan], seed: int = 0) -> None:
        self._plans = check_plans(plans)
        self._rng = np.random.default_rng(check_count("seed", seed, 0))

    def begin(self, request: Mapping[str, Any]) -> None:
        """Takes note of a new request: nothing to do."""

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns an allowed action."""
        allowed = np.flatnonzero(mask)
        return int(allowed[self._rng.integers(len(allowed))])

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Takes note of a step: nothing is learned."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the generator's state."""
        names = [plan_name(plan) for plan in self._plans]
        return {"plans": names, "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the generator."""
        check_state(state, self._plans)
        self._rng.bit_generator.state = state["rng"]
