"""What an iteration of every plan costs, in iterations without speculation."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.plans import Plan, group_by_chain

Table = list[list[float]]  # by action: moving average of the cost, iterations that it is of


class PlanCosts:
    """Moving averages of every plan's relative cost, t / t0 without catch-up, by batch size.

    t0 belongs to the same context and batch, so the ratio changes little with either; batch sizes
    share an average where they lie between the same powers of two, and one that was never met
    takes what the nearest one knows. Of a chain that ran, a K that did not is interpolated between
    its neighbors, with cost 1 at K = 0; above the largest that ran the cost grows in proportion.

    Args:
        plans: the plan table, indexed by action.
        weight: weight of a new measurement; the first ones are averaged evenly.

    Source: profiled costs by K and padded batch are SGLang's (throughput-aware steps); moving
        averages, interpolation and ratios are ours.
    """

    def __init__(self, plans: Sequence[Plan], weight: float) -> None:
        self._plans = tuple(plans)
        self._weight = weight
        self._chains = group_by_chain(plans)
        self._tables: dict[str, Table] = {}
        self._size = 0  # of the batch seen last, as a power of two
        self._costs: list[float | None] = [1.0, *[None] * (len(self._plans) - 1)]

    def add(self, outcome: Outcome) -> None:
        """Takes the cost of an iteration in."""
        size = outcome.num_rows.bit_length() - 1
        table = self._tables.setdefault(str(size), [[0.0, 0] for _ in self._plans])
        average = table[outcome.action]
        average[1] += 1
        weight = max(self._weight, 1.0 / average[1])
        average[0] += weight * (outcome.cost - outcome.catchup - average[0])
        is_same = size == self._size
        self._size = size
        self._predict(*([self._plans[outcome.action][0]] if is_same else self._chains))

    def costs(self) -> list[float | None]:
        """Returns every plan's cost by action, at the batch size seen last; None where unknown."""
        return self._costs

    def _predict(self, *chains: tuple[str, ...]) -> None:
        """Works out the costs of these chains; no speculation always costs 1."""
        for chain in chains:
            actions = self._chains.get(chain, [])
            ks = [0, *(self._plans[action][1] for action in actions)]
            for action, cost in zip(actions, fill_gaps(ks, self._known(actions)), strict=True):
                self._costs[action] = cost

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages."""
        tables = {size: [list(each) for each in table] for size, table in self._tables.items()}
        return {"tables": tables, "size": self._size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the averages."""
        self._tables = {
            size: [list(each) for each in table] for size, table in state["tables"].items()
        }
        self._size = state["size"]
        self._costs = [1.0, *[None] * (len(self._plans) - 1)]
        self._predict(*self._chains)

    def _known(self, actions: Sequence[int]) -> list[float | None]:
        """A chain's averages where there are some, from the nearest batch size that has any."""
        for size in sorted(self._tables, key=lambda size: abs(int(size) - self._size)):
            table = self._tables[size]
            if any(table[action][1] for action in actions):
                return [table[action][0] if table[action][1] else None for action in actions]
        return [None] * len(actions)


def fill_gaps(ks: Sequence[int], known: Sequence[float | None]) -> list[float | None]:
    """Returns the costs of a chain's K values, those that are not known filled in.

    Args:
        ks: 0 and the K values, ascending.
        known: cost of each K but 0, whose cost is 1; None where it is not known.

    Source: ours.
    """
    costs: list[float | None] = [1.0, *known]
    points = [index for index, cost in enumerate(costs) if cost is not None]
    if len(points) == 1:
        return list(known)
    for left, right in pairwise(points):
        low, high = costs[left], costs[right]
        assert low is not None
        assert high is not None
        for index in range(left + 1, right):
            share = (ks[index] - ks[left]) / (ks[right] - ks[left])
            costs[index] = low + share * (high - low)
    last = points[-1]
    highest = costs[last]
    assert highest is not None
    for index in range(last + 1, len(ks)):
        costs[index] = max(highest, 1.0 + (highest - 1.0) * ks[index] / ks[last])
    return costs[1:]
