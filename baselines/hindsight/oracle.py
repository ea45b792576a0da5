"""The clairvoyant oracle: the fastest way through a request of which everything is known."""

from __future__ import annotations

import dataclasses
from itertools import combinations

import numpy as np

from specgym.baselines.checks import check_count
from specgym.baselines.hindsight.problem import DecisionProblem, Marks, Policy, Rollout, rollout
from specgym.baselines.hindsight.value_table import ValueTable, num_states

MAX_STATES = 100_000_000
ROUNDING = 1e-5


@dataclasses.dataclass(frozen=True, eq=False)
class OracleResult:
    """The optimum of a request, or a bracket around it.

    Attributes:
        seconds: of `actions`, the best decoding known: the optimum where `is_exact`.
        actions: int64[T], one action per iteration.
        lower: no decoding takes fewer seconds.
        upper: the optimum takes no more seconds; equal to `seconds`.
        is_exact: whether lower and upper are both the optimum.
    """

    seconds: float
    actions: np.ndarray
    lower: float
    upper: float
    is_exact: bool


class Oracle:
    """Action values, state values and the best policy of one request; made by `solve_oracle`.

    Without every follower's catch-up in them (`is_exact` is False) the values are lower bounds.

    Args:
        problem: the request.
        tables: values to take the largest of.
        is_exact: whether the tables hold the optimum.
    """

    def __init__(
        self, problem: DecisionProblem, tables: tuple[ValueTable, ...], is_exact: bool
    ) -> None:
        self.problem, self.tables, self.is_exact = problem, tables, is_exact

    def value(self, position: int, marks: Marks) -> float:
        """Returns the seconds that are left at best from a state."""
        return max(table.value(position, marks) for table in self.tables)

    def action_values(self, position: int, marks: Marks) -> np.ndarray:
        """Returns each action's seconds plus those left at best after it, float64[A].

        Infinite where the action is not allowed.
        """
        values = np.full(self.problem.num_actions, np.inf)
        for action in map(int, np.flatnonzero(self.problem.allowed[position])):
            seconds, after, moved = self.problem.step(position, marks, action)
            values[action] = seconds + self.value(after, moved)
        return values

    def act(self, position: int, marks: Marks) -> int:
        """Returns the action of the least value; the first of equals."""
        return int(self.action_values(position, marks).argmin())


def solve_oracle(
    problem: DecisionProblem, max_states: int = MAX_STATES
) -> tuple[OracleResult, Oracle]:
    """Returns the optimum of a request, and the values behind it.

    The states are the positions with the marks of the followers that some action uses. Where
    they are too many the optimum is bracketed. Lower bound: catch-up is charged for as many
    followers as `max_states` allows (for none if need be) and is at its least for the rest, the
    largest value over the choices of followers. Upper bound: the fastest of the policy that looks
    one step ahead to those values, the optima with the followers of each choice alone, the greedy
    policy and the fixed plans.

    Args:
        problem: the request.
        max_states: the most states to hold values of; each takes 4 bytes (8 in tables of up to
            10 million). The default is enough for three followers over 139 tokens.

    Raises:
        ValueError: `max_states` is below 1.

    Source: V(state) = min over actions of cost + V(next state), Bellman, "Dynamic Programming"
        (1957); the bracket is ours.
    """
    check_count("max_states", max_states, 1)
    followers = lagging_followers(problem)
    choices = _choices(problem.num_positions, followers, max_states)
    is_exact = choices == [followers]
    tables = tuple(ValueTable(problem, choice) for choice in choices)
    oracle = Oracle(problem, tables, is_exact)
    found = [rollout(problem, oracle.act)]
    if not is_exact:
        found += [rollout(problem, greedy_policy(problem))]
        found += [rollout(problem, fixed_policy(plan)) for plan in range(problem.num_actions)]
        found += [rollout(problem, _best_with_alone(problem, choice)) for choice in choices]
    best = min(found, key=lambda path: path.total_seconds)
    seconds = best.total_seconds
    value = oracle.value(0, problem.fresh)
    assert not is_exact or abs(seconds - value) <= ROUNDING * seconds, (seconds, value)
    lower = seconds if is_exact else min(value, seconds)
    return OracleResult(seconds, best.actions, lower, seconds, is_exact), oracle


def action_values(oracle: Oracle, path: Rollout) -> np.ndarray:
    """Returns the action values at the states of a path, float32[T, A]; infinite: not allowed."""
    states = zip(path.positions, path.marks, strict=True)
    rows = [oracle.action_values(int(at), tuple(map(int, marks))) for at, marks in states]
    return np.array(rows, dtype=np.float32)


def greedy_policy(problem: DecisionProblem) -> Policy:
    """Returns the policy of the most tokens per second at every step, catch-up included."""

    def act(position: int, marks: Marks) -> int:
        rates = np.full(problem.num_actions, -np.inf)
        for action in map(int, np.flatnonzero(problem.allowed[position])):
            seconds, after, _ = problem.step(position, marks, action)
            rates[action] = (after - position) / seconds
        return int(rates.argmax())

    return act


def fixed_policy(action: int) -> Policy:
    """Returns the policy of one plan throughout; action 0 is no speculation."""
    return lambda position, marks: action


def lagging_followers(problem: DecisionProblem) -> tuple[int, ...]:
    """Returns the followers that some action uses and whose lag costs something."""
    used = problem.uses & problem.allowed[..., None]
    by_lag = problem.catchup[..., : problem.num_positions]
    depends = (by_lag != by_lag[..., :1]).any(axis=-1) | (problem.prefill > 0)
    return tuple(map(int, np.flatnonzero((used.any(axis=0) & depends).any(axis=0))))


def _choices(
    num_positions: int, followers: tuple[int, ...], max_states: int
) -> list[tuple[int, ...]]:
    """Returns the followers to track together: all, or every choice of as many as fit."""
    for size in range(len(followers), 0, -1):
        choices = list(combinations(followers, size))
        if len(choices) * num_states(num_positions, size) <= max_states:
            return choices
    return [()]


def _best_with_alone(problem: DecisionProblem, followers: tuple[int, ...]) -> np.ndarray:
    """Returns the optimal actions of the plans that run no lagging follower but these."""
    others = [name for name in lagging_followers(problem) if name not in followers]
    allowed = problem.allowed & ~problem.uses[..., others].any(axis=-1)
    alone = dataclasses.replace(problem, allowed=allowed)
    return rollout(alone, Oracle(alone, (ValueTable(alone, followers),), True).act).actions
