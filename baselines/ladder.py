"""The K values of one chain, for controllers that choose K and leave the chain alone."""

from collections.abc import Sequence

import numpy as np

from specgym.baselines.plans import Plan, group_by_chain


class Ladder:
    """The plans of one chain, in order of K.

    Args:
        plans: the plan table, indexed by action.
        chain: the chain, such as `ngram` or `ngram>target`; None takes the table's first.

    Attributes:
        k_values: the K values of the chain, ascending; empty where the table has no chain at all.

    Raises:
        ValueError: the table has no such chain.
    """

    def __init__(self, plans: Sequence[Plan], chain: str | None) -> None:
        actions = find_chain(plans, chain)
        self._rungs = [(plans[action][1], action) for action in actions]
        self.k_values = tuple(k for k, _ in self._rungs)

    def action(self, k: float, mask: np.ndarray) -> int:
        """Returns the allowed action of the largest K that is at most `k`; 0 where none is."""
        best = 0
        for rung, action in self._rungs:
            if rung <= k and mask[action]:
                best = action
        return best

    def floor(self, k: int) -> int:
        """Returns the largest K of the chain that is at most `k`; 0 where there is none."""
        return max((rung for rung in self.k_values if rung <= k), default=0)


def find_chain(plans: Sequence[Plan], chain: str | None) -> list[int]:
    """Returns the actions of a chain in order of K.

    Args:
        plans: the plan table, indexed by action.
        chain: the chain with or without the target at its end; None takes the table's first.

    Raises:
        ValueError: the table has no such chain.
    """
    by_name = {">".join(members): actions for members, actions in group_by_chain(plans).items()}
    if chain is None:
        return next(iter(by_name.values()), [])
    target = plans[0][0][0]
    for name in (str(chain), f"{chain}>{target}"):
        if name in by_name:
            return by_name[name]
    raise ValueError(f"chain must be one of {', '.join(by_name) or 'none'}, got {chain!r}")
