"""The least seconds to the end of a request from every state, by backward induction."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from specgym.baselines.hindsight.problem import DecisionProblem, Marks

FLOAT64_STATES = 10_000_000


@dataclasses.dataclass
class _Group:
    """Actions at one position that run the same tracked followers at the same catch-up cost.

    Attributes:
        action: one of them: its catch-up cost is that of all.
        axes: the tracked followers they run, as axes of the value arrays.
        outcomes: seconds of the fastest action, by position after it and marks (of `axes`).
    """

    action: int
    axes: tuple[int, ...]
    outcomes: dict[tuple[int, Marks], float]


class ValueTable:
    """Least seconds from every state to the end; a position's states are computed at once.

    Of a follower that is not tracked the catch-up is charged at its least, as if the best lag
    could be chosen at every use, and no prefill: the values are a lower bound then.

    The array of a position g has an axis of g + 2 marks per tracked follower. Marks stay as they
    are while a follower is not used, so that what an action leads to is a block of the later
    array, fixed along the axes of the followers that it runs; their catch-up cost is one vector
    per axis to add. Values are float64 up to 10 million states and float32 beyond (relative
    error about 1e-6).

    Args:
        problem: the request.
        tracked: followers whose catch-up is charged as it is.

    Source: ours.
    """

    def __init__(self, problem: DecisionProblem, tracked: Sequence[int]) -> None:
        self.problem, self.tracked = problem, tuple(tracked)
        self._cost_rows = _cost_rows(problem)
        self._seconds = _seconds_at_least(problem, self.tracked)
        states = num_states(problem.num_positions, len(self.tracked))
        self._dtype = np.dtype(np.float64 if states <= FLOAT64_STATES else np.float32)
        scratch = np.empty((problem.num_positions + 1) ** len(self.tracked), self._dtype)
        self._values: dict[int, np.ndarray] = {}
        for position in reversed(range(problem.num_positions)):
            best = np.full((position + 2,) * len(self.tracked), np.inf, self._dtype)
            candidate = scratch[: best.size].reshape(best.shape)
            for block, cost in self._candidates(position):
                np.add(block, cost, out=candidate)
                np.minimum(best, candidate, out=best)
            self._values[position] = best

    def value(self, position: int, marks: Marks) -> float:
        """Returns the least seconds from the state to the end; 0 at the end."""
        if position == self.problem.num_positions:
            return 0.0
        return float(self._values[position][tuple(marks[follower] for follower in self.tracked)])

    def _candidates(self, position: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields pairs of arrays whose sums, broadcast, hold the least seconds of some actions."""
        for group in self._groups(position):
            blocks = (
                (self._block(position, after, dict(zip(group.axes, marks, strict=True))), seconds)
                for (after, marks), seconds in group.outcomes.items()
            )
            if not group.axes:
                yield from ((block, np.array(seconds, self._dtype)) for block, seconds in blocks)
                continue
            least = functools.reduce(np.minimum, (block + seconds for block, seconds in blocks))
            *costs, last = self._catchup(position, group)
            yield functools.reduce(np.add, costs, least), last

    def _groups(self, position: int) -> list[_Group]:
        """Returns the allowed actions by what they run and what its catch-up costs."""
        problem = self.problem
        groups: dict[tuple[int, ...], _Group] = {}
        for action in map(int, np.flatnonzero(problem.allowed[position])):
            used = problem.uses[position, action]
            axes = tuple(axis for axis, name in enumerate(self.tracked) if used[name])
            followers = [self.tracked[axis] for axis in axes]
            rows = [int(self._cost_rows[action, follower]) for follower in followers]
            group = groups.setdefault((*axes, *rows), _Group(action, axes, {}))
            _, after, marks = problem.step(position, problem.fresh, action)
            outcome = after, tuple(marks[follower] for follower in followers)
            seconds = float(self._seconds[position, action])
            group.outcomes[outcome] = min(seconds, group.outcomes.get(outcome, np.inf))
        return list(groups.values())

    def _block(self, position: int, after: int, marks: dict[int, int]) -> np.ndarray:
        """Returns the values after an action, by the marks before it; 1 long along used axes."""
        if after == self.problem.num_positions:
            return np.zeros((1,) * len(self.tracked), self._dtype)
        kept = slice(0, position + 2)
        return self._values[after][
            tuple(
                slice(marks[axis], marks[axis] + 1) if axis in marks else kept
                for axis in range(len(self.tracked))
            )
        ]

    def _catchup(self, position: int, group: _Group) -> list[np.ndarray]:
        """Returns the catch-up seconds of each follower that a group runs, along its axis."""
        costs = []
        for axis in group.axes:
            seconds = self.problem.catchup_seconds(position, group.action, self.tracked[axis])
            shape = [1] * len(self.tracked)
            shape[axis] = len(seconds)
            costs.append(seconds.reshape(shape).astype(self._dtype))
        return costs


def num_states(num_positions: int, num_tracked: int) -> int:
    """Returns the number of states of a table with this many followers tracked."""
    return sum((position + 2) ** num_tracked for position in range(num_positions))


def _cost_rows(problem: DecisionProblem) -> np.ndarray:
    """Returns numbers of the catch-up costs by lag, int[A, M]; equal costs have equal numbers."""
    numbers = np.zeros((problem.num_actions, problem.num_followers), dtype=np.int64)
    for follower in range(problem.num_followers):
        rows = problem.catchup[:, follower]
        numbers[:, follower] = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    return numbers


def _seconds_at_least(problem: DecisionProblem, tracked: Sequence[int]) -> np.ndarray:
    """Returns every iteration's seconds with the least catch-up of the rest, float64[N, A]."""
    others = [name for name in range(problem.num_followers) if name not in tracked]
    least = problem.catchup[:, others, : problem.num_positions].min(axis=-1)
    charged = np.where(problem.uses[..., others], least, 0.0)
    return problem.seconds + charged.sum(axis=-1)
