"""The exact optimum against every plan sequence, and brackets around it."""

import dataclasses
import itertools

import numpy as np
import pytest

from specgym.baselines.hindsight import value_table
from specgym.baselines.hindsight.oracle import (
    action_values,
    greedy_policy,
    lagging_followers,
    solve_oracle,
)
from specgym.baselines.hindsight.problem import rollout
from specgym.baselines.hindsight.value_table import ValueTable, num_states


def brute_force(problem, position=0, lags=None):
    """Returns the least seconds by trying every sequence of actions, lags kept as lags.

    None is the lag of a follower never used: its first use is a prefill, at the position's lag.
    """
    if position == len(problem.tokens):
        return 0.0
    lags = [None] * problem.uses.shape[2] if lags is None else lags
    totals = []
    for action in np.flatnonzero(problem.allowed[position]):
        tokens = int(problem.tokens[position, action])
        seconds, after = problem.seconds[position, action], []
        for follower, lag in enumerate(lags):
            if not problem.uses[position, action, follower]:
                after.append(None if lag is None else lag + tokens)
                continue
            if lag is None:
                seconds += problem.prefill[follower]
            seconds += problem.catchup[action, follower, position if lag is None else lag]
            after.append(int(problem.lag_after[position, action, follower]))
        totals.append(seconds + brute_force(problem, position + tokens, after))
    return min(totals)


@pytest.mark.parametrize("num_followers", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_equals_brute_force(draw_problem, seed, num_followers):
    problem = draw_problem(seed, num_followers=num_followers)
    result, oracle = solve_oracle(problem)
    assert result.seconds == pytest.approx(brute_force(problem), rel=1e-12)
    assert result.is_exact
    assert result.lower == result.upper == result.seconds
    assert oracle.value(0, problem.fresh) == pytest.approx(result.seconds, rel=1e-12)
    assert rollout(problem, result.actions).total_seconds == result.seconds


def test_longer_requests_in_single_precision(draw_problem, monkeypatch):
    problem = draw_problem(1, num_positions=8, num_actions=4)
    exact = brute_force(problem)
    monkeypatch.setattr(value_table, "FLOAT64_STATES", 10)
    result, oracle = solve_oracle(problem)
    assert result.seconds == pytest.approx(exact, rel=1e-6)
    assert oracle.value(0, problem.fresh) == pytest.approx(exact, rel=1e-6)
    assert oracle.value(0, problem.fresh) != result.seconds


def test_worked_example(worked_problem):
    """Plan 1 at 0 and at 2 takes 2.0 + 1.5, plain throughout 4.0, plan 2 and plain 3.25 + 1.0."""
    result, oracle = solve_oracle(worked_problem)
    assert result.actions.tolist() == [1, 1]
    assert result.seconds == 3.5
    assert oracle.action_values(0, worked_problem.fresh).tolist() == [4.0, 3.5, 4.25]


def test_every_state_equals_brute_force(draw_problem):
    problem = draw_problem(3, num_positions=5)
    _, oracle = solve_oracle(problem)
    for position in range(5):
        for marks in itertools.product(range(position + 2), repeat=2):
            lags = [position + 1 - mark if mark else None for mark in marks]
            expected = brute_force(problem, position, lags)
            assert oracle.value(position, marks) == pytest.approx(expected, rel=1e-12)
            assert min(oracle.action_values(position, marks)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_tracked", [0, 1, 2])
def test_bracket_contains_the_optimum(draw_problem, seed, num_tracked):
    problem = draw_problem(seed, num_positions=12, num_actions=6, num_followers=3)
    exact = solve_oracle(problem)[0].seconds
    result, oracle = solve_oracle(problem, max_states=3 * num_states(12, num_tracked))
    assert [len(table.tracked) for table in oracle.tables] == [num_tracked] * (
        3 if num_tracked else 1
    )
    assert not result.is_exact
    assert result.lower <= exact * (1 + 1e-12)
    assert exact <= result.upper * (1 + 1e-12)
    assert result.upper == result.seconds == rollout(problem, result.actions).total_seconds


def test_bracket_narrows_with_more_states(draw_problem):
    problem = draw_problem(5, num_positions=12, num_actions=6, num_followers=3)
    lowers = [solve_oracle(problem, states)[0].lower for states in (1, 300, 3000, 30_000)]
    assert lowers == sorted(lowers)
    assert lowers[0] < lowers[-1]


def test_followers_that_cost_nothing_need_no_states(draw_problem):
    problem = draw_problem(2, num_followers=3)
    prefill, catchup, uses = problem.prefill.copy(), problem.catchup.copy(), problem.uses.copy()
    prefill[0], catchup[:, 0] = 0.0, 0.25
    uses[..., 2] = False
    problem = dataclasses.replace(problem, prefill=prefill, catchup=catchup, uses=uses)
    assert lagging_followers(problem) == (1,)
    result, _ = solve_oracle(problem, max_states=num_states(6, 1))
    assert result.is_exact
    assert result.seconds == pytest.approx(brute_force(problem), rel=1e-12)


def test_action_values_along_a_path(draw_problem):
    problem = draw_problem(4)
    _, oracle = solve_oracle(problem)
    path = rollout(problem, greedy_policy(problem))
    values = action_values(oracle, path)
    assert values.shape == (len(path.actions), 5)
    assert values.dtype == np.float32
    assert np.array_equal(np.isinf(values), ~problem.allowed[path.positions])
    for row, (position, marks) in enumerate(zip(path.positions, path.marks, strict=True)):
        action = int(path.actions[row])
        seconds, after, moved = problem.step(position, tuple(marks), action)
        lags = [after + 1 - mark if mark else None for mark in moved]
        expected = seconds + brute_force(problem, after, lags)
        assert values[row, action] == pytest.approx(expected, rel=1e-6)


def test_greedy_takes_the_most_tokens_per_second(worked_problem):
    """Rates at the start: 1 / 1.0, 2 / 2.0 and 3 / 3.25; at position 1 with plan 1's prefill."""
    act = greedy_policy(worked_problem)
    assert act(0, (0, 0)) == 0
    assert act(2, (3, 0)) == 1
    assert act(0, (1, 1)) == 2


def test_no_states_at_all_is_refused(worked_problem):
    with pytest.raises(ValueError, match="max_states must be a whole number >= 1, got 0"):
        solve_oracle(worked_problem, max_states=0)


def test_table_of_followers_not_tracked_is_a_lower_bound(draw_problem):
    problem = draw_problem(6, num_positions=10)
    full = ValueTable(problem, (0, 1))
    for tracked in [(), (0,), (1,)]:
        table = ValueTable(problem, tracked)
        for position in range(10):
            for marks in itertools.product(range(position + 2), repeat=2):
                assert table.value(position, marks) <= full.value(position, marks) + 1e-12
