"""Expected tokens over measured cost: what every plan is predicted to yield."""

from collections.abc import Mapping, Sequence
from typing import Any

from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.estimates.plan_costs import PlanCosts
from specgym.baselines.estimates.position_counts import PositionCounts
from specgym.baselines.plans import Plan, group_by_chain, num_positions

COST_WEIGHT = 0.1  # of a new measurement; ours


class PlanModel:
    """Predicts tokens E and relative cost c of every plan; their ratio is the utility E / c.

    E comes from acceptance by position (`PositionCounts`, one per chain, for all K of it), c from
    `PlanCosts`. No speculation has E = c = 1.

    Args:
        plans: the plan table, indexed by action.
        window: rounds of a chain that acceptance is counted over; 0 for all.
        cost_weight: weight of a new cost in its average.

    Source: SGLang's throughput-aware adaptive steps, for one chain; the rest is ours.
    """

    def __init__(
        self, plans: Sequence[Plan], window: int, cost_weight: float = COST_WEIGHT
    ) -> None:
        self._plans = tuple(plans)
        self._depths = [num_positions(plan) for plan in plans]
        self._chains = group_by_chain(plans)
        self._positions = {
            chain: PositionCounts(self._depths[actions[-1]], window)
            for chain, actions in self._chains.items()
        }
        self._cost_model = PlanCosts(plans, cost_weight)
        self._tokens = [1.0] * len(plans)
        self._predict_tokens()

    def add(self, outcome: Outcome) -> None:
        """Takes an iteration in."""
        self._cost_model.add(outcome)
        chain = self._plans[outcome.action][0]
        if chain in self._positions and not outcome.is_last:
            depth = self._depths[outcome.action]
            self._positions[chain].add(outcome.accepted, depth, outcome.num_rows)
            self._predict_tokens(chain)

    def tokens(self) -> list[float]:
        """Returns the expected tokens of an iteration, by action."""
        return self._tokens

    def costs(self) -> list[float | None]:
        """Returns the expected relative cost, by action; None where the chain never ran."""
        return self._cost_model.costs()

    def utilities(self) -> list[float]:
        """Returns the expected utility by action; 0 where the chain never ran."""
        pairs = zip(self._tokens, self.costs(), strict=True)
        return [tokens / cost if cost else 0.0 for tokens, cost in pairs]

    def state_dict(self) -> dict[str, Any]:
        """Returns acceptance by position, and costs under a name that a restart keeps."""
        return {
            "positions": [counts.state_dict() for counts in self._positions.values()],
            "cost_model": self._cost_model.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores acceptance and costs."""
        for counts, saved in zip(self._positions.values(), state["positions"], strict=True):
            counts.load_state_dict(saved)
        self._cost_model.load_state_dict(state["cost_model"])
        self._predict_tokens()

    def _predict_tokens(self, *chains: tuple[str, ...]) -> None:
        for chain in chains or self._chains:
            expected = self._positions[chain].expected_tokens()
            for action in self._chains[chain]:
                self._tokens[action] = expected[self._depths[action]]
