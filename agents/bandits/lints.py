"""LinTS on the observation: the regressions of LinUCB, explored by drawing from them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specgym.agents.bandits.linucb import LinUCB
from specgym.baselines.checks import check_count
from specgym.baselines.plans import Plan


class LinTS(LinUCB):
    """Thompson sampling with linear payoffs: theta ~ N(A^-1 b, v^2 A^-1) per plan.

    The score of a plan is x' theta, of tokens - rate * cost as in `LinUCB`. Plans have regressions
    of their own, so that a draw of theta matters by x' theta alone, which is N(x' A^-1 b, v^2 x'
    A^-1 x): that is what is drawn, one number per plan. With v = 0 this is `linucb` without
    exploration.

    Args:
        plans: the plan table, indexed by action.
        exploration: v above, in tokens.
        ridge: pull of the regressions to zero.
        num_warm_up: iterations that standardize; at least 2.
        scope: whether what was learned survives a request: `stream` or `request`.
        seed: seed of the controller's own generator.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: Agrawal and Goyal, "Thompson sampling for contextual bandits with linear payoffs"
        (2013), Alg. 1; the rest as in `LinUCB`.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        exploration: float = 0.3,
        ridge: float = 10.0,
        num_warm_up: int = 52,
        scope: str = "stream",
        seed: int = 0,
    ) -> None:
        super().__init__(plans, exploration, ridge, num_warm_up, scope)
        self._rng = np.random.default_rng(check_count("seed", seed, 0))

    def state_dict(self) -> dict[str, Any]:
        """Returns what `LinUCB` does, and the generator's state."""
        return super().state_dict() | {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores all of it."""
        super().load_state_dict(state)
        self._rng.bit_generator.state = state["rng"]

    def _bonus(self, widths: np.ndarray) -> np.ndarray:
        """What is added to every plan's score: a draw of the width of its posterior."""
        return self._exploration * widths * self._rng.standard_normal(len(widths))
