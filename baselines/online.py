"""What controllers share that learn from the outcomes of their actions."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from specgym.baselines.checks import check_choice
from specgym.baselines.estimates.outcomes import Outcome, read_outcome
from specgym.baselines.plans import Plan, check_plans, check_state, plan_name


class OnlineController:
    """A controller that learns from one outcome at a time; its methods `act` and `_learn` are open.

    Subclasses name in `kept` what they learn: attributes (without the underscore) that hold JSON
    values, arrays, generators, or objects with a `state_dict`. `_forget` sets those to what they
    are before anything was learned; it leaves random generators alone.

    Args:
        plans: the plan table, indexed by action.
        scope: whether what was learned survives a request: `stream` or `request`.

    Raises:
        ValueError: the plan table or the scope is refused.
    """

    needs_divergence = False
    kept: ClassVar[tuple[str, ...]] = ()

    def __init__(self, plans: Sequence[Plan], scope: str) -> None:
        self._plans = check_plans(plans)
        self._scope = check_choice("scope", scope, ("request", "stream"))

    def _forget(self) -> None:
        """Knows nothing."""
        raise NotImplementedError

    def begin(self, request: Mapping[str, Any]) -> None:
        """Forgets what was learned where the scope is the request."""
        if self._scope == "request":
            self._forget()

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the action to run, one that the mask allows."""
        raise NotImplementedError

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Learns from a step, unless it failed or a measure of it is not finite."""
        outcome = read_outcome(action, info)
        if outcome is not None:
            self._learn(outcome)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything learned, as JSON values."""
        names = [plan_name(plan) for plan in self._plans]
        return {"plans": names} | {name: save(getattr(self, f"_{name}")) for name in self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores everything learned."""
        check_state(state, self._plans)
        for name in self.kept:
            current = getattr(self, f"_{name}")
            setattr(self, f"_{name}", restore(current, state[name]))

    def _learn(self, outcome: Outcome) -> None:
        """Takes one iteration in."""
        raise NotImplementedError


def save(value: Any) -> Any:
    """Returns a copy of the value that JSON can hold."""
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: save(each) for key, each in value.items()}
    return copy.deepcopy(value)


def restore(current: Any, saved: Any) -> Any:
    """Returns what `save` was given, made again out of an object of the same kind."""
    if hasattr(current, "load_state_dict"):
        current.load_state_dict(saved)
        return current
    if isinstance(current, np.random.Generator):
        current.bit_generator.state = saved
        return current
    if isinstance(current, np.ndarray):
        return np.array(saved, dtype=current.dtype)
    if isinstance(current, dict) and current.keys() == saved.keys():
        return {key: restore(current[key], each) for key, each in saved.items()}
    return copy.deepcopy(saved)
