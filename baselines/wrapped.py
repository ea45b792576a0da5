"""A controller around another one."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from specgym.baselines.plans import Plan, check_plans, check_state, plan_name


class Inner(Protocol):
    """Any controller: what `specgym.runs.loop.Controller` asks for."""

    needs_divergence: bool

    def begin(self, request: Mapping[str, Any]) -> None:
        """A new request starts."""
        ...

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns an allowed action."""
        ...

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Learns from a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns everything learned."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores everything learned."""
        ...


class Wrapped:
    """Hands everything on to the controller inside; subclasses change what they are for.

    Args:
        plans: the plan table, indexed by action.
        inner: the controller inside, over the same table.
    """

    def __init__(self, plans: Sequence[Plan], inner: Inner) -> None:
        self._plans = check_plans(plans)
        self._inner = inner
        self.needs_divergence = inner.needs_divergence

    def begin(self, request: Mapping[str, Any]) -> None:
        """Tells the controller inside of the request."""
        self._inner.begin(request)

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the action of the controller inside."""
        return self._inner.act(observation, mask)

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Tells the controller inside of the step."""
        self._inner.observe(action, reward, info)

    def state_dict(self) -> dict[str, Any]:
        """Returns what the controller inside has learned."""
        names = [plan_name(plan) for plan in self._plans]
        return {"plans": names, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what the controller inside had learned."""
        check_state(state, self._plans)
        self._inner.load_state_dict(state["inner"])
