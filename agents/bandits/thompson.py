"""Thompson sampling of expected tokens over cost, with acceptance position by position."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specgym.agents.bandits.log_costs import LogCosts
from specgym.baselines.checks import check_count
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.estimates.position_counts import PositionCounts
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan, group_by_chain, num_positions


class Thompson(OnlineController):
    """Draws acceptance rates and costs from what is believed of them; the largest E / c runs.

    The throughput-aware rule with draws for means. Position i of a chain has Beta(1 + s_i, 1 +
    f_i): s_i counts iterations with at least i accepted tokens, f_i those rejected there;
    positions after the first rejection and after a full acceptance were not observed. The log of a
    plan's cost is normal with a normal-inverse-gamma prior (`LogCosts`). E = 1 + p_1 + p_1 p_2 +
    ... up to the plan's last position; no speculation has E / c = 1. All of it is ours.

    In a batch one cost per plan is believed, whatever the batch size.

    Args:
        plans: the plan table, indexed by action.
        window: rounds of a chain that acceptance is counted over; 0 for all.
        scope: whether what was learned survives a request: `stream` or `request`.
        seed: seed of the controller's own generator.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: ours; Thompson 1933, and SGLang's throughput-aware score.
    """

    kept = ("positions", "cost_model", "rng")

    def __init__(
        self, plans: Sequence[Plan], window: int = 200, scope: str = "stream", seed: int = 0
    ) -> None:
        super().__init__(plans, scope)
        self._window = check_count("window", window, 0)
        self._rng = np.random.default_rng(check_count("seed", seed, 0))
        self._names = [">".join(chain) for chain, _ in self._plans]
        self._chains = [">".join(chain) for chain in group_by_chain(self._plans)]
        self._depths = np.array([num_positions(plan) for plan in self._plans])
        self._rows = np.array([0, *map(self._chains.index, self._names[1:])])
        self._forget()

    def _forget(self) -> None:
        depth = int(self._depths.max())
        self._positions = {name: PositionCounts(depth, self._window) for name in self._chains}
        self._cost_model = LogCosts(len(self._plans))
        self._believe()

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the allowed plan whose drawn tokens over drawn cost are most."""
        if not self._chains:
            return 0
        rates = self._rng.beta(self._successes, self._failures)
        tokens = 1.0 + rates.cumprod(axis=1).cumsum(axis=1)
        scores = tokens[self._rows, self._depths - 1] / self._cost_model.draw(self._rng)
        scores[0] = 1.0
        return int(np.where(mask, scores, -np.inf).argmax())

    def _learn(self, outcome: Outcome) -> None:
        action = outcome.action
        self._cost_model.add(action, outcome.cost - outcome.catchup)
        if action > 0 and not outcome.is_last:
            depth = int(self._depths[action])
            self._positions[self._names[action]].add(outcome.accepted, depth, outcome.num_rows)
            self._believe()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores everything learned."""
        super().load_state_dict(state)
        self._believe()

    def _believe(self) -> None:
        """Makes the Betas' parameters from the counts, [chains, positions]."""
        accepted = np.array([counts.accepted for counts in self._positions.values()])
        reached = np.array([counts.reached for counts in self._positions.values()])
        self._successes = 1.0 + np.maximum(accepted, 0.0)
        self._failures = 1.0 + np.maximum(reached - accepted, 0.0)
