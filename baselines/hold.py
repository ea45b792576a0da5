"""Persistence: whatever a controller picks runs for n iterations."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specgym.baselines.checks import check_count
from specgym.baselines.estimates.outcomes import is_sound
from specgym.baselines.plans import Plan
from specgym.baselines.wrapped import Inner, Wrapped


class Hold(Wrapped):
    """Asks the controller inside every n iterations, and keeps its plan in between.

    From the paper: an action is held for N iterations (10 while learning, 30 when deployed), which
    spares decisions and shows what a plan does in a row. Ours: any controller may be inside. It
    observes every iteration, not their sum; a plan that the mask forbids, or a new request, ends
    the hold.

    Args:
        plans: the plan table, indexed by action.
        inner: the controller inside.
        n: iterations that a plan runs for.

    Raises:
        ValueError: n is not a whole number of at least 1.

    Source: Re-SpS, arXiv 2601.12212.
    """

    def __init__(self, plans: Sequence[Plan], inner: Inner, n: int = 10) -> None:
        super().__init__(plans, inner)
        self._n = check_count("n", n, 1)
        self._held, self._num_left = 0, 0

    def begin(self, request: Mapping[str, Any]) -> None:
        """Ends the hold, and tells the controller inside of the request."""
        self._num_left = 0
        super().begin(request)

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the held plan while it holds and is allowed, else what the one inside picks."""
        if self._num_left and mask[self._held]:
            return self._held
        return super().act(observation, mask)

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Counts the hold down, or begins one, and tells the controller inside of the step."""
        if is_sound(info):
            is_held = self._num_left > 0 and action == self._held
            self._num_left = self._num_left - 1 if is_held else self._n - 1
            self._held = action
        super().observe(action, reward, info)

    def state_dict(self) -> dict[str, Any]:
        """Returns the hold, and what the controller inside has learned."""
        return super().state_dict() | {"held": self._held, "num_left": self._num_left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the hold, and what the controller inside had learned."""
        super().load_state_dict(state)
        self._held, self._num_left = state["held"], state["num_left"]
