"""UCB1 on measured utility: an index per plan, the largest runs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specgym.baselines.checks import check_choice, check_range
from specgym.baselines.plans import Plan, charged_action, check_plans, check_state, plan_name


class UCB:
    """Upper confidence bounds over all plans, with constants tuned to utilities.

    Every arm once, in the order of the table, then the largest index U / (K_max + 2) + c
    sqrt(2 ln t / n): U is the arm's utility (a ratio of sums over its n iterations: tokens over
    seconds in units of the baseline, catch-up included), t counts all iterations. K_max + 2
    bounds what an iteration emits. UCB1 is Auer et al.'s; that an arm's mean is a ratio of sums,
    the scale and c = 0.1 are ours, for UCBSpec's radius (arXiv 2505.15141) is several tokens wide
    and never leaves round-robin within a request.

    An iteration counts for the plan that ran, also where another was asked and turned down; only
    a proposal of no tokens counts for the plan asked for (see `charged_action`).

    Args:
        plans: the plan table, indexed by action.
        exploration: c above.
        scope: whether statistics survive a request: `stream` or `request`. Some 25 arms cannot be
            explored inside one request.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: Auer, Cesa-Bianchi and Fischer 2002 (UCB1); the rest is ours.
    """

    needs_divergence = False

    def __init__(
        self, plans: Sequence[Plan], exploration: float = 0.1, scope: str = "stream"
    ) -> None:
        self._plans = check_plans(plans)
        self._exploration = check_range("exploration", exploration, 0.0, 1e6)
        self._scope = check_choice("scope", scope, ("request", "stream"))
        self._scale = max(k for _, k in self._plans) + 2
        self._forget()

    def begin(self, request: Mapping[str, Any]) -> None:
        """Forgets what it knows where the scope is the request."""
        if self._scope == "request":
            self._forget()

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the first allowed arm never played, else the allowed arm of largest index."""
        radius = 2.0 * math.log(max(sum(self._num_plays), 1))
        best, largest = 0, -math.inf
        for arm, is_allowed in enumerate(mask.tolist()):
            if not is_allowed:
                continue
            num_plays = self._num_plays[arm]
            if num_plays == 0:
                return arm
            index = self._tokens[arm] / self._costs[arm] / self._scale
            index += self._exploration * math.sqrt(radius / num_plays)
            if index > largest:
                best, largest = arm, index
        return best

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Adds an iteration to the sums of the arm that it counts for."""
        if "error" in info:
            return
        arm = charged_action(action, info)
        self._num_plays[arm] += 1
        self._tokens[arm] += info["tokens"]
        self._costs[arm] += info["iter_seconds"] / info["baseline_seconds"]

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums of every arm."""
        return {
            "plans": [plan_name(plan) for plan in self._plans],
            "num_plays": list(self._num_plays),
            "tokens": list(self._tokens),
            "costs": list(self._costs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the sums of every arm."""
        check_state(state, self._plans)
        self._num_plays = list(state["num_plays"])
        self._tokens = list(state["tokens"])
        self._costs = list(state["costs"])

    def _forget(self) -> None:
        self._num_plays = [0] * len(self._plans)
        self._tokens = [0] * len(self._plans)
        self._costs = [0.0] * len(self._plans)
