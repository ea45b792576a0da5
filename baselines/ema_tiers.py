"""EMA tiers: K moves up and down a few tiers by the average number of accepted tokens."""

from collections.abc import Sequence

import numpy as np

from specgym.baselines.checks import check_count, check_range
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.ladder import Ladder
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan
from specgym.baselines.spelling import parse_list

MARGIN = 0.5  # how far from a tier the average moves up or down
SLOTS = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}  # tiers from a batch size on
DOWN = -0.25  # added to the threshold downwards; at the last slot there is nothing below


class EMATiers(OnlineController):
    """Every few rounds K goes to a neighboring tier, or further, by an average of acceptances.

    From the source: ema = 0.8 ema + 0.2 m, where m is the mean accepted tokens of the batch; it
    starts at K - 1. After `warm_up` rounds, every `interval` rounds: down while ema <= the tier
    below - 0.5 + down, and down to tier 0 when ema <= 0.5 + down; else up while ema > this tier -
    0.5. A move may pass several tiers. At tier 0 there is nothing to average: the next decision
    probes the smallest positive tier. The tiers depend on the batch size: 1, 3, 5, 7 for one
    request, 0, 1, 3 from eight on, 0, 1 from 32, 0 alone from 64. So on hopeless text half of a
    batch's rounds still draft: there is no back-off.

    Ours: one chain of the table is used, and a tier is the largest K of it that is at most the
    source's; a tier that changes with the batch size goes to the largest one that is no larger.

    Args:
        plans: the plan table, indexed by action.
        chain: the chain, such as `ngram`; None takes the table's first.
        tiers: K values such as `1+3+5+7` for all batch sizes; None takes the source's.
        weight: weight of a new round in the average.
        interval: rounds from one decision to the next.
        warm_up: rounds before the first decision.
        down: added to the threshold downwards.
        scope: whether tier and average survive a request: `stream` or `request`.

    Raises:
        ValueError: a hyper-parameter is out of range, or the table has no such chain.

    Source: SGLang, adaptive speculative parameters (`adaptive_spec_params.py`).
    """

    kept = ("tier", "ema", "num_rounds", "num_rows")

    def __init__(
        self,
        plans: Sequence[Plan],
        chain: str | None = None,
        tiers: str | int | None = None,
        weight: float = 0.2,
        interval: int = 5,
        warm_up: int = 10,
        down: float = DOWN,
        scope: str = "stream",
    ) -> None:
        super().__init__(plans, scope)
        self._ladder = Ladder(self._plans, chain)
        slots = SLOTS if tiers is None else {1: parse_list("tiers", tiers)}
        self._slots = {
            size: tuple(sorted({self._ladder.floor(k) for k in slot}))
            for size, slot in slots.items()
        }
        self._weight = check_range("weight", weight, 0.0, 1.0)
        self._interval = check_count("interval", interval, 1)
        self._warm_up = check_count("warm_up", warm_up, 0)
        self._down = check_range("down", down, -100.0, 100.0)
        self._forget()

    def _forget(self) -> None:
        self._num_rows = 1
        self._tier = self._tiers()[0]
        self._ema = self._tier - 1.0
        self._num_rounds = 0

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the tier's plan, or the chain's largest smaller one that is allowed."""
        return self._ladder.action(self._tier, mask)

    def _learn(self, outcome: Outcome) -> None:
        self._num_rows = outcome.num_rows
        self._num_rounds += 1
        if self._tier > 0 and outcome.action > 0 and not outcome.is_last:
            self._ema += self._weight * (outcome.accepted - self._ema)
        tiers = self._tiers()
        self._tier = max([tier for tier in tiers if tier <= self._tier], default=tiers[0])
        if self._num_rounds > self._warm_up and self._num_rounds % self._interval == 0:
            self._move(tiers)

    def _move(self, tiers: Sequence[int]) -> None:
        """Goes down while the average is low, else up while it is high; from 0 to a probe."""
        at = tiers.index(self._tier)
        if self._tier == 0:
            self._tier = tiers[min(1, len(tiers) - 1)]
            self._ema = self._tier - 1.0 if self._ema < 0.0 else self._ema
            return
        fallen, risen = at, at
        while fallen > 0 and self._ema <= self._threshold(tiers[fallen - 1]):
            fallen -= 1
        while risen < len(tiers) - 1 and self._ema > tiers[risen] - MARGIN:
            risen += 1
        self._tier = tiers[fallen if fallen < at else risen]

    def _threshold(self, below: int) -> float:
        """The average at which the tier below takes over."""
        return (below - MARGIN if below else MARGIN) + self._down

    def _tiers(self) -> tuple[int, ...]:
        """The tiers at the batch size seen last."""
        return self._slots[max(size for size in self._slots if size <= self._num_rows)]
