"""A learned policy as a controller: one pass of a small network in numpy per decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specgym.agents.policy import Policy, load_policy
from specgym.baselines.plans import Plan, check_state


class LearnedController:
    """Runs the allowed plan that a learned policy scores highest; it learns nothing more.

    Args:
        plans: Plan table, indexed by action.
        features: Names of the observation's entries.
        policy: A policy, or the file of one; it is mapped to these plans and features by name.
        features_version: Version of the table of features, where it is known.

    Raises:
        ValueError: If the file cannot be used, or the policy does not fit.
    """

    needs_divergence = False

    def __init__(
        self,
        plans: Sequence[Plan],
        features: Sequence[str],
        policy: Policy | Path | str,
        features_version: int | None = None,
    ):
        known = policy if isinstance(policy, Policy) else load_policy(Path(policy))
        self.policy = known.fit(plans, features, features_version)
        self._mean = self.policy.mean
        self._factor = 1.0 / self.policy.scale
        self._low, self._high = np.float32(-self.policy.clip), np.float32(self.policy.clip)
        self._is_tanh = self.policy.activation == "tanh"
        self._input = np.empty(len(self.policy.features), np.float32)
        self._layers = [
            (weight, bias, np.empty(len(bias), np.float32)) for weight, bias in self.policy.layers
        ]

    def begin(self, request: Mapping[str, Any]) -> None:
        """Takes note of a new request: nothing to do."""

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """The allowed action of largest score."""
        x = self._input
        np.subtract(observation, self._mean, out=x)
        np.multiply(x, self._factor, out=x)
        np.minimum(x, self._high, out=x)
        np.maximum(x, self._low, out=x)
        for weight, bias, out in self._layers:
            if x is not self._input:
                if self._is_tanh:
                    np.tanh(x, out=x)
                else:
                    np.maximum(x, 0.0, out=x)
            np.dot(weight, x, out=out)
            x = np.add(out, bias, out=out)
        x[~mask] = -np.inf
        return int(x.argmax())

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Takes note of a step: nothing is learned."""

    def state_dict(self) -> dict[str, Any]:
        """The plan table's names: the rest lies in the policy's file."""
        return {"plans": list(self.policy.plan_names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checks that the state is of the same plan table."""
        check_state(state, self.policy.plans)
