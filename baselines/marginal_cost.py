"""The marginal rule: draft on while one more token costs less than tokens cost now."""

from collections.abc import Sequence

import numpy as np

from specgym.baselines.checks import check_count, check_range
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.estimates.plan_model import PlanModel
from specgym.baselines.estimates.probing import Probing
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan, group_by_chain


class MarginalCost(OnlineController):
    """Extends K while d cost / d accepted < the present cost of a token.

    From the paper: speculation is a stopping problem, and it pays to go on while the marginal cost
    of an accepted token is below the average cost of a token. Ours: the average is a moving one of
    what decoding costs now; E(K) and cost(K) are those of `PlanModel`; the rule climbs from no
    speculation over the K values of each chain, and of the chains that runs whose climb saves
    most, rate * (E(K) - 1) - (cost(K) - 1). `Probing` measures what the rule would never try.

    Args:
        plans: the plan table, indexed by action.
        window: rounds of a chain that acceptance is counted over.
        weight: weight of a new iteration in the present cost of a token.
        profile_iterations: iterations that each chain is tried for at the start.
        probe_every: iterations from one probe to the next; None for no probes.
        scope: whether what was learned survives a request: `stream` or `request`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: after "Limits of speculation", arXiv 2609.22156; a ratio's optimum by its marginal is
        Dinkelbach's (1967).
    """

    kept = ("model", "probing", "paid", "emitted")

    def __init__(
        self,
        plans: Sequence[Plan],
        window: int = 20,
        weight: float = 0.05,
        profile_iterations: int = 4,
        probe_every: int | None = 64,
        scope: str = "stream",
    ) -> None:
        super().__init__(plans, scope)
        self._window = check_count("window", window, 1)
        self._weight = check_range("weight", weight, 0.0, 1.0)
        self._trying = (profile_iterations, probe_every)
        self._chains = group_by_chain(self._plans)
        self._forget()

    def _forget(self) -> None:
        self._model = PlanModel(self._plans, self._window)
        self._probing = Probing(self._chains, len(self._plans), *self._trying)
        self._paid, self._emitted = 1.0, 1.0  # moving averages of an iteration

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the plan to profile or to probe, else the one where the rule stops."""
        allowed = mask.tolist()
        tried = self._probing.due(allowed)
        if tried is not None:
            return tried
        tokens, costs = self._model.tokens(), self._model.costs()
        best, most = 0, 0.0
        for actions in self._chains.values():
            steps = [
                (tokens[action], cost, action)
                for action in actions
                if allowed[action] and (cost := costs[action]) is not None
            ]
            saved, action = climb(steps, self._paid / self._emitted)
            if saved > most:
                best, most = action, saved
        return best

    def _learn(self, outcome: Outcome) -> None:
        self._model.add(outcome)
        self._probing.note(outcome.action)
        self._paid += self._weight * (outcome.cost - outcome.catchup - self._paid)
        self._emitted += self._weight * (outcome.tokens - self._emitted)


def climb(steps: Sequence[tuple[float, float, int]], rate: float) -> tuple[float, int]:
    """Returns what the rule's K saves over no speculation, and its action; 0 and 0 for none.

    Args:
        steps: (expected tokens, cost, action) of a chain's K values, ascending.
        rate: present cost of a token.
    """
    saved, best = 0.0, 0
    reached, paid = 1.0, 1.0
    for tokens, cost, action in steps:
        if cost - paid >= rate * (tokens - reached):
            break
        saved += rate * (tokens - reached) - (cost - paid)
        reached, paid, best = tokens, cost, action
    return saved, best
