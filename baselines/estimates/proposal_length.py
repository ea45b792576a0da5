"""How many tokens a drafter proposes when asked for k."""

from collections.abc import Mapping
from typing import Any


class ProposalLength:
    """The measured distribution of the number of tokens that a drafter proposes, 0..k.

    Prompt lookup may propose fewer tokens than asked, or none. A proposal of n < k tokens tells
    what would have come for every k; one of n = k tells only that there were at least k. So the
    estimate is a product of continuation rates (a product-limit estimate), each a moving average
    that starts at 1: a drafter is trusted to deliver until it does not.

    Args:
        max_k: the largest k asked for.
        alpha: weight of a new proposal.

    Source: ours; SpecRouter (arXiv 2505.07680) has no drafter that proposes fewer.
    """

    def __init__(self, max_k: int, alpha: float) -> None:
        self._alpha = alpha
        self._continues = [1.0] * max_k  # [i]: probability of more than i tokens, given i

    def observe(self, num_proposed: int, k: int) -> None:
        """Takes in a proposal of `num_proposed` tokens where `k` were asked for."""
        for length in range(min(num_proposed + 1, k)):
            rate = self._continues[length]
            self._continues[length] = rate + self._alpha * ((num_proposed > length) - rate)

    def at_least(self) -> list[float]:
        """Returns the probability of a proposal of at least n tokens, for n = 0..max_k.

        Asked for k, the drafter proposes at least n <= k tokens with that probability.
        """
        tail = [1.0]
        for rate in self._continues:
            tail.append(tail[-1] * rate)
        return tail

    def state_dict(self) -> dict[str, Any]:
        """Returns the continuation rates."""
        return {"continues": list(self._continues)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the continuation rates."""
        self._continues = list(state["continues"])
