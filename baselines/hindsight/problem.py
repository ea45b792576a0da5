"""One request as a decision problem: what every plan would bring and cost at every position."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

Marks = tuple[int, ...]
Policy = Callable[[int, Marks], int]
KINDS = {"b": "booleans", "iu": "whole numbers", "f": "floats"}


@dataclasses.dataclass(frozen=True, eq=False)
class DecisionProblem:
    """Tables of one request: N positions (tokens generated so far), A actions, M followers.

    A follower is a member with a memory of its own that lags behind the committed text while it
    is not used. Action 0 is no speculation. An action whose drafter proposes nothing has the
    tokens of action 0 and uses no follower.

    A state is the position and, per follower, its mark: 0 while it was never used, and from then
    on position + 1 - lag. A mark stays as it is until the follower is used again, whereas a lag
    grows with every token.

    Where an action is not allowed its tokens, seconds and lags are not read.

    Attributes:
        tokens: int[N, A], tokens emitted, from 1 to N - position.
        seconds: float[N, A], seconds of the iteration with every follower caught up.
        allowed: bool[N, A], what the mask allows; action 0 always.
        uses: bool[N, A, M], the followers that the action runs.
        lag_after: int[N, A, M], lag of a used follower afterwards; not read where it is unused.
        catchup: float[A, M, L + 1], extra seconds of a follower used at lag l rather than 0, with
            L >= N - 1.
        prefill: float[M], extra seconds of a follower's first use, where its lag is the position.
        baseline: float[N], seconds of plain decoding's iteration.
        name: the request, as errors name it.

    Raises:
        ValueError: an array has another shape or kind, or values that no request can have.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    allowed: np.ndarray
    uses: np.ndarray
    lag_after: np.ndarray
    catchup: np.ndarray
    prefill: np.ndarray
    baseline: np.ndarray
    name: str = "request"

    def __post_init__(self) -> None:
        self._check_shapes()
        self._check_values()

    @property
    def num_positions(self) -> int:
        """Tokens of the output, N."""
        return self.tokens.shape[0]

    @property
    def num_actions(self) -> int:
        """Plans of the table, A."""
        return self.tokens.shape[1]

    @property
    def num_followers(self) -> int:
        """Members with a memory beside the target's, M."""
        return self.uses.shape[2]

    @property
    def fresh(self) -> Marks:
        """The marks at the start: no follower was ever used."""
        return (0,) * self.num_followers

    def marks(self, position: int, lags: Sequence[int], used: Sequence[bool]) -> Marks:
        """Returns the marks of followers at these lags; 0 for those never used so far."""
        pairs = zip(lags, used, strict=True)
        return tuple(position + 1 - int(lag) if was else 0 for lag, was in pairs)

    def catchup_seconds(self, position: int, action: int, follower: int) -> np.ndarray:
        """Returns the extra seconds of a follower by its mark, float64[position + 2]."""
        by_lag = self.catchup[action, follower, : position + 1].astype(np.float64)
        return np.concatenate([by_lag[-1:] + self.prefill[follower], by_lag[::-1]])

    def step(self, position: int, marks: Marks, action: int) -> tuple[float, int, Marks]:
        """Returns the iteration's seconds, the position after it and the marks after it."""
        after = position + int(self.tokens[position, action])
        seconds, moved = float(self.seconds[position, action]), list(marks)
        for follower in np.flatnonzero(self.uses[position, action]):
            mark = marks[follower]
            lag = position + 1 - mark if mark else position
            seconds += float(self.catchup[action, follower, lag])
            seconds += 0.0 if mark else float(self.prefill[follower])
            moved[follower] = after + 1 - int(self.lag_after[position, action, follower])
        return seconds, after, tuple(moved)

    def _check_shapes(self) -> None:
        table = np.shape(self.tokens)
        if len(table) != 2 or 0 in table:
            raise ValueError(
                f"{self.name}: tokens must be [N, A] with N and A of at least 1, got shape "
                f"{table}; a request without output has nothing to decide"
            )
        if np.ndim(self.uses) != 3 or np.shape(self.uses)[:2] != table:
            raise ValueError(
                f"{self.name}: uses must be [N, A, M] with [N, A] = {table}, got shape "
                f"{np.shape(self.uses)}; with no follower M is 0"
            )
        num_followers, length = np.shape(self.uses)[2], np.shape(self.catchup)[-1:]
        if not length or length[0] < table[0]:
            raise ValueError(
                f"{self.name}: catchup must reach lag N - 1 = {table[0] - 1}, got shape "
                f"{np.shape(self.catchup)}; its last axis is lags 0 to L"
            )
        self._check_array("tokens", table, "iu")
        self._check_array("seconds", table, "f")
        self._check_array("allowed", table, "b")
        self._check_array("uses", (*table, num_followers), "b")
        self._check_array("lag_after", (*table, num_followers), "iu")
        self._check_array("catchup", (table[1], num_followers, length[0]), "f")
        self._check_array("prefill", (num_followers,), "f")
        self._check_array("baseline", table[:1], "f")

    def _check_array(self, field: str, shape: tuple[int, ...], kinds: str) -> None:
        value = getattr(self, field)
        if (
            not isinstance(value, np.ndarray)
            or value.shape != shape
            or value.dtype.kind not in kinds
        ):
            got = f"{getattr(value, 'dtype', type(value).__name__)}, shape {np.shape(value)}"
            raise ValueError(
                f"{self.name}: {field} must be an array of {KINDS[kinds]}, shape {shape}, got {got}"
            )

    def _check_values(self) -> None:
        runs = self.allowed
        position = np.arange(self.num_positions)[:, None]
        tokens = self.tokens.astype(np.int64)
        after = position + tokens
        lag_after = self.lag_after.astype(np.int64)
        speculates = np.arange(self.num_actions) > 0
        lags_on = self.uses & (runs & (after < self.num_positions))[..., None]
        rules = [
            ("tokens", "be from 1 to N - position", ~runs | (tokens >= 1) & (after <= len(tokens))),
            ("seconds", "be finite and above 0", ~runs | _is_positive(self.seconds)),
            ("allowed", "be True for action 0", self.allowed | speculates),
            ("uses", "be False for action 0", ~self.uses | speculates[:, None]),
            (
                "lag_after",
                "be from 0 to position + tokens where the follower is used",
                ~lags_on | ((lag_after >= 0) & (lag_after <= after[..., None])),
            ),
            ("catchup", "be finite", np.isfinite(self.catchup)),
            (
                "prefill",
                "be finite and at least 0",
                np.isfinite(self.prefill) & (self.prefill >= 0),
            ),
            ("baseline", "be finite and above 0", _is_positive(self.baseline)),
        ]
        for field, rule, holds in rules:
            if not holds.all():
                index = tuple(int(axis) for axis in np.argwhere(~holds)[0])
                value = getattr(self, field)[index]
                raise ValueError(f"{self.name}: {field} must {rule}, got {value} at {index}")


def _is_positive(values: np.ndarray) -> np.ndarray:
    return np.isfinite(values) & (values > 0)


@dataclasses.dataclass(frozen=True, eq=False)
class Rollout:
    """A request decoded from start to end, T iterations.

    Attributes:
        positions: int64[T], tokens generated before each iteration.
        marks: int64[T, M], the followers' marks before each.
        actions: int64[T], what ran: action 0 where the one asked for was not allowed.
        seconds: float64[T].
    """

    positions: np.ndarray
    marks: np.ndarray
    actions: np.ndarray
    seconds: np.ndarray

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole request."""
        return float(self.seconds.sum())


def rollout(problem: DecisionProblem, plan: Policy | Sequence[int] | np.ndarray) -> Rollout:
    """Returns the request decoded under a policy, or under a sequence of actions, in float64.

    Args:
        problem: the request.
        plan: the action by position and marks, or one action per iteration.

    Raises:
        ValueError: an action is none of the table; the sequence ends before the request does, or
            goes on after it.
    """
    position, marks = 0, problem.fresh
    steps: list[tuple[int, Marks, int, float]] = []
    while position < problem.num_positions:
        if callable(plan):
            action = int(plan(position, marks))
        elif len(steps) < len(plan):
            action = int(plan[len(steps)])
        else:
            raise ValueError(
                f"{problem.name}: the {len(plan)} actions must reach position "
                f"{problem.num_positions}, got to {position}; add actions"
            )
        if not 0 <= action < problem.num_actions:
            raise ValueError(
                f"{problem.name}: actions must be from 0 to {problem.num_actions - 1}, got "
                f"{action} at position {position}"
            )
        action = action if problem.allowed[position, action] else 0
        seconds, after, moved = problem.step(position, marks, action)
        steps.append((position, marks, action, seconds))
        position, marks = after, moved
    if not callable(plan) and len(plan) > len(steps):
        raise ValueError(
            f"{problem.name}: the actions must end with the request, after {len(steps)}, got "
            f"{len(plan)}; leave the rest out"
        )
    positions, all_marks, actions, all_seconds = zip(*steps, strict=True)
    shape = (len(steps), problem.num_followers)
    return Rollout(
        np.array(positions, dtype=np.int64),
        np.array(all_marks, dtype=np.int64).reshape(shape),
        np.array(actions, dtype=np.int64),
        np.array(all_seconds),
    )
