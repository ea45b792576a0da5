"""Throughput-aware steps: the plan of most expected tokens over measured cost."""

from collections.abc import Sequence

import numpy as np

from specgym.baselines.checks import check_count, check_range
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.estimates.plan_model import PlanModel
from specgym.baselines.estimates.probing import Probing
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan, group_by_chain, nearest_allowed


class ThroughputAware(OnlineController):
    """Every few rounds, argmax over S of E(S) / cost(S), with hysteresis.

    From the source: p_k is the share of the last `window` rounds with more than k accepted
    tokens, E(S) = 1 + p_0 + ... + p_(S-1), positions never seen continue geometrically, and the
    steps change every `interval` rounds when the best score is above `margin` times the present
    one. Ours:

    - No speculation is a candidate with score 1, and so is every chain with every K; the source
      has one chain and positive steps.
    - Costs are measured on line in units of no speculation, not profiled beforehand; `Probing`
      takes the place of the profile and comes back to a chain that was not seen for a while.
    - p_k is counted conditionally (`PositionCounts`), so that rejections inform about a larger K,
      too; statistics above a smaller K leave by the window instead of being cleared.

    Args:
        plans: the plan table, indexed by action.
        window: rounds of a chain that acceptance is counted over.
        interval: rounds from one decision to the next.
        margin: how many times the present score a better one must be.
        profile_iterations: iterations that each chain is tried for at the start.
        probe_every: iterations from one probe to the next; None for no probes.
        scope: whether what was learned survives a request: `stream` or `request`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: SGLang, adaptive speculative steps, strategy `throughput_aware`.
    """

    kept = ("model", "probing", "current", "num_rounds")

    def __init__(
        self,
        plans: Sequence[Plan],
        window: int = 20,
        interval: int = 5,
        margin: float = 1.1,
        profile_iterations: int = 4,
        probe_every: int | None = 64,
        scope: str = "stream",
    ) -> None:
        super().__init__(plans, scope)
        self._window = check_count("window", window, 1)
        self._interval = check_count("interval", interval, 1)
        self._margin = check_range("margin", margin, 1.0, 100.0)
        self._trying = (profile_iterations, probe_every)
        self._forget()

    def _forget(self) -> None:
        self._model = PlanModel(self._plans, self._window)
        self._probing = Probing(group_by_chain(self._plans), len(self._plans), *self._trying)
        self._current = 0
        self._num_rounds = 0

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the plan to profile or to probe, else the present one or what fits of it."""
        tried = self._probing.due(mask.tolist())
        return nearest_allowed(self._plans, self._current, mask) if tried is None else tried

    def _learn(self, outcome: Outcome) -> None:
        self._model.add(outcome)
        self._probing.note(outcome.action)
        self._num_rounds += 1
        if self._num_rounds % self._interval == 0:
            self._current = choose(self._model.utilities(), self._current, self._margin)


def choose(scores: Sequence[float], current: int, margin: float) -> int:
    """Returns the best candidate where it beats the present one by the margin, else the present.

    Source: SGLang, strategy `throughput_aware`.
    """
    best = max(range(len(scores)), key=scores.__getitem__)
    return best if scores[best] > margin * scores[current] else current
