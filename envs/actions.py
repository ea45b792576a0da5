"""The action table: one flat index per plan, and the mask of plans that can run now."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from specgym.engine.state import DecodeState
from specgym.engine.types import Plan
from specgym.envs.pool_spec import Layout


class ActionTable:
    """Discrete index <-> plan; index 0 is no speculation.

    Args:
        layout: The layout whose plans are the actions.
    """

    def __init__(self, layout: Layout):
        self.plans: tuple[Plan, ...] = layout.plans()
        self.index_by_plan = {plan: index for index, plan in enumerate(self.plans)}
        self.max_tokens = np.array([plan.max_tokens for plan in self.plans])
        self.context_limits = np.array(
            [min(layout.context_limits[name] for name in plan.chain) for plan in self.plans]
        )
        self.most_tokens = int(self.max_tokens.max())
        self.least_context = int(self.context_limits.min())
        self.everything = np.ones(len(self.plans), dtype=bool)

    def __len__(self) -> int:
        return len(self.plans)

    @property
    def names(self) -> tuple[str, ...]:
        """The plans' names, by action."""
        return tuple(plan.name for plan in self.plans)

    def arrays(self) -> Sequence[tuple[tuple[str, ...], int]]:
        """The table as plain tuples (chain, K), for controllers."""
        return [(plan.chain, plan.k) for plan in self.plans]

    def has(self, action: Any) -> bool:
        """Whether this is an action; as the space's ``contains``, but quick enough for any step."""
        try:
            return 0 <= operator.index(action) < len(self.plans)
        except TypeError:
            return False

    def index(self, plan: Plan) -> int:
        """The action of a plan."""
        return self.index_by_plan[plan]

    def mask(self, state: DecodeState) -> np.ndarray:
        """Which actions can run now, [n] bool: the rule of the engine's ``feasible_plan``."""
        remaining, longest = sizes(state)
        if self.most_tokens <= remaining and longest + self.most_tokens <= self.least_context:
            return self.everything.copy()  # nearly always, and ten times as fast
        return self.allowed(remaining, longest)

    def allows(self, state: DecodeState, action: int) -> bool:
        """One action's entry of the mask."""
        if action == 0:
            return True
        remaining, longest = sizes(state)
        most = self.plans[action].max_tokens
        return most <= remaining and longest + most <= int(self.context_limits[action])

    def allowed(self, num_remaining: int | np.ndarray, num_tokens: int | np.ndarray) -> np.ndarray:
        """Which actions can run where this much budget is left and the text is this long.

        Args:
            num_remaining: Tokens of the budget, [...].
            num_tokens: Tokens of prompt and output so far, [...].

        Returns:
            [..., n] bool.
        """
        remaining, longest = np.asarray(num_remaining)[..., None], np.asarray(num_tokens)[..., None]
        allowed = self.max_tokens <= remaining
        allowed &= longest + self.max_tokens <= self.context_limits
        allowed[..., 0] = True
        return allowed


def sizes(state: DecodeState) -> tuple[int, int]:
    """Tokens left of the largest budget among rows that decode, and tokens of the longest text."""
    remaining = longest = 0
    for row, reason in enumerate(state.finish_reasons):
        if reason is None:
            remaining = max(remaining, state.num_remaining(row))
            longest = max(longest, len(state.tokens[row]))
    return remaining, longest
