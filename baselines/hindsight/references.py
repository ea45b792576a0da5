"""What controllers are measured against: fixed plans, the greedy policy and the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from specgym.baselines.hindsight.oracle import (
    MAX_STATES,
    ROUNDING,
    fixed_policy,
    greedy_policy,
    solve_oracle,
)
from specgym.baselines.hindsight.problem import DecisionProblem, rollout


@dataclasses.dataclass(frozen=True, eq=False)
class References:
    """Seconds of every reference on R requests with the same A plans.

    Attributes:
        names: the requests.
        fixed: float64[R, A], each plan throughout; action 0 where it is not allowed.
        greedy: float64[R], the most tokens per second at every step.
        lower: float64[R], the oracle's lower bound.
        oracle: float64[R], the oracle; the best decoding found where it is a bracket.
        is_exact: bool[R], whether `oracle` is the optimum.
    """

    names: tuple[str, ...]
    fixed: np.ndarray
    greedy: np.ndarray
    lower: np.ndarray
    oracle: np.ndarray
    is_exact: np.ndarray

    @property
    def no_speculation(self) -> np.ndarray:
        """Seconds of plain decoding, float64[R]."""
        return self.fixed[:, 0]

    @property
    def best_fixed_plan(self) -> int:
        """The plan of the fewest seconds over all requests."""
        return best_fixed(self.fixed)

    @property
    def best_fixed(self) -> np.ndarray:
        """Seconds of that plan, float64[R]."""
        return self.fixed[:, self.best_fixed_plan]

    @property
    def best_per_request(self) -> np.ndarray:
        """Seconds of each request's own best fixed plan, float64[R]."""
        return self.fixed.min(axis=1)

    def best_fixed_by(self, workloads: Sequence[Hashable]) -> dict[Hashable, int]:
        """Returns each workload's best fixed plan.

        Args:
            workloads: every request's.

        Raises:
            ValueError: they are not one per request.
        """
        if len(workloads) != len(self.names):
            raise ValueError(
                f"workloads must be one for each of {len(self.names)} requests, got "
                f"{len(workloads)}"
            )
        rows: dict[Hashable, list[int]] = {}
        for row, workload in enumerate(workloads):
            rows.setdefault(workload, []).append(row)
        return {workload: best_fixed(self.fixed[chosen]) for workload, chosen in rows.items()}


def best_fixed(seconds: np.ndarray) -> int:
    """Returns the plan of the fewest seconds in total; the first of equals.

    Args:
        seconds: float[R, A]. Give it the training requests alone to choose a plan without
            hindsight.
    """
    return int(seconds.sum(axis=0).argmin())


def fixed_seconds(problem: DecisionProblem) -> np.ndarray:
    """Returns the seconds of every plan throughout a request, float64[A]."""
    paths = (rollout(problem, fixed_policy(action)) for action in range(problem.num_actions))
    return np.array([path.total_seconds for path in paths])


def solve_references(
    problems: Sequence[DecisionProblem], max_states: int = MAX_STATES
) -> References:
    """Returns every reference's seconds, their ordering checked.

    Args:
        problems: requests with the same plans.
        max_states: as `solve_oracle` takes it.

    Raises:
        ValueError: there is no request, or the plans differ in number.
        AssertionError: a reference beats one that it cannot beat.
    """
    sizes = {problem.num_actions for problem in problems}
    if len(sizes) != 1:
        raise ValueError(
            f"problems must be at least one, all with the same number of actions, got "
            f"{sorted(sizes)}; split them by plan table"
        )
    results = [solve_oracle(problem, max_states)[0] for problem in problems]
    paths = [rollout(problem, greedy_policy(problem)) for problem in problems]
    references = References(
        names=tuple(problem.name for problem in problems),
        fixed=np.stack([fixed_seconds(problem) for problem in problems]),
        greedy=np.array([path.total_seconds for path in paths]),
        lower=np.array([result.lower for result in results]),
        oracle=np.array([result.seconds for result in results]),
        is_exact=np.array([result.is_exact for result in results]),
    )
    check_ordering(references)
    return references


def check_ordering(references: References) -> None:
    """Checks lower <= oracle <= best per request <= best fixed <= any fixed, oracle <= greedy.

    Per request up to the best per request; what is the best over all requests is so in total.

    Raises:
        AssertionError: it does not hold; names the request and the two references.
    """
    oracle, per_request = references.oracle, references.best_per_request
    pairs = [
        ("lower bound", references.lower, "oracle", oracle),
        ("oracle", oracle, "greedy policy", references.greedy),
        ("oracle", oracle, "best fixed plan of the request", per_request),
        ("best fixed plan of the request", per_request, "best fixed plan", references.best_fixed),
    ]
    for faster, few, slower, many in pairs:
        for row in np.flatnonzero(few > many * (1 + ROUNDING)):
            raise AssertionError(
                f"{references.names[row]}: {faster} takes {few[row]:.9g} s, more than "
                f"{slower} with {many[row]:.9g} s"
            )
    totals, best = references.fixed.sum(axis=0), references.best_fixed.sum()
    for action in np.flatnonzero(best > totals * (1 + ROUNDING)):
        raise AssertionError(
            f"all {len(references.names)} requests: best fixed plan takes {best:.9g} s, more "
            f"than plan {action} with {totals[action]:.9g} s"
        )
