"""Nightjar: epsilon-greedy in doubling blocks, by batch size, with a price for turning on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specgym.baselines.checks import check_count, check_range
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan, nearest_allowed

SWITCH_WEIGHT = 0.2  # of a new measurement of the price; ours


class Nightjar(OnlineController):
    """Explores with probability 1 / b in bin b of a block, else runs the arm of least mean loss.

    From the paper: contexts are batch sizes, each with its own losses and its own blocks of 1, 2,
    4, ... bins; an arm runs for a whole bin; loss is the latency of a token, and an arm that
    speculates while the last one did not pays C_sw / gamma more, gamma being its draft length: the
    drafter's state must be made good first. Ours:

    - Arms are all plans, not the lengths of one drafter. Loss is in units of no speculation, a
      ratio of sums.
    - C_sw is a moving average of measured catch-up, where there was some after an iteration without
      speculation; losses leave catch-up out. `switch_cost` fixes it.
    - Batch sizes between the same powers of two are one context; a bin is `bin_size` iterations.
    - A plan that the mask forbids runs with the largest smaller K of its chain that is allowed.
    - An arm that never ran has no loss and is only explored.

    Args:
        plans: the plan table, indexed by action.
        bin_size: iterations of a bin.
        switch_cost: C_sw in iterations without speculation; None measures it.
        scope: whether losses survive a request: `stream` or `request`.
        seed: seed of the controller's own generator.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: Nightjar, arXiv 2512.22420.
    """

    kept = ("contexts", "context", "locked", "price", "is_on", "rng")

    def __init__(
        self,
        plans: Sequence[Plan],
        bin_size: int = 4,
        switch_cost: float | None = None,
        scope: str = "stream",
        seed: int = 0,
    ) -> None:
        super().__init__(plans, scope)
        self._bin_size = check_count("bin_size", bin_size, 1)
        self._switch_cost = (
            None if switch_cost is None else check_range("switch_cost", switch_cost, 0.0, 1e6)
        )
        self._rng = np.random.default_rng(check_count("seed", seed, 0))
        self._forget()

    def _forget(self) -> None:
        self._contexts: dict[str, dict[str, list]] = {}
        self._context = "0"
        self._locked = [0, 0]  # the bin's arm, and iterations left of the bin
        self._price = 0.0
        self._is_on = False

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the bin's arm; at a bin's start one to explore, or the one of least loss."""
        arm, num_left = self._locked
        if num_left == 0:
            allowed = np.flatnonzero(mask)
            place = self._here()["block"]
            if self._rng.random() * (place[1] + 1) < 1.0:
                return int(allowed[self._rng.integers(len(allowed))])
            return self._least(allowed.tolist())
        return nearest_allowed(self._plans, arm, mask)

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Locks the arm for the bin, or counts the bin down, and learns from the step."""
        if "error" not in info:
            is_locked = self._locked[1] > 0
            arm = self._locked[0] if is_locked else action
            left = self._locked[1] - 1 if is_locked else self._bin_size - 1
            self._locked = [arm, left]
            if left == 0:
                advance(self._here()["block"])
        super().observe(action, reward, info)

    def _learn(self, outcome: Outcome) -> None:
        speculates = outcome.action > 0
        if speculates and not self._is_on and outcome.catchup > 0.0:
            self._price += SWITCH_WEIGHT * (outcome.catchup - self._price)
        self._is_on = speculates
        self._context = str(outcome.num_rows.bit_length() - 1)
        here = self._here()
        here["costs"][outcome.action] += outcome.cost - outcome.catchup
        here["tokens"][outcome.action] += outcome.tokens

    def _least(self, allowed: Sequence[int]) -> int:
        """The allowed arm of least mean loss, the price of turning on included; 0 if none ran."""
        here, best, least = self._here(), 0, float("inf")
        price = self._price if self._switch_cost is None else self._switch_cost
        for arm in allowed:
            if here["tokens"][arm] > 0.0:
                loss = here["costs"][arm] / here["tokens"][arm]
                loss = switch_loss(loss, self._plans[arm][1], self._is_on, price)
                if loss < least:
                    best, least = arm, loss
        return best

    def _here(self) -> dict[str, list]:
        """Sums and the place in the blocks, of the batch size seen last."""
        if self._context not in self._contexts:
            zeros = [0.0] * len(self._plans)
            self._contexts[self._context] = {
                "costs": zeros,
                "tokens": list(zeros),
                "block": [1, 0],
            }
        return self._contexts[self._context]


def advance(block: list[int]) -> None:
    """Goes to the next bin: [bins of the block, bins of it that are over]."""
    block[1] += 1
    if block[1] == block[0]:
        block[:] = [2 * block[0], 0]


def switch_loss(loss: float, k: int, is_on: bool, price: float) -> float:
    """Returns the loss of an arm, with C_sw / K added where it would turn speculation on.

    Source: Nightjar, arXiv 2512.22420.
    """
    return loss + price / k if k and not is_on else loss
