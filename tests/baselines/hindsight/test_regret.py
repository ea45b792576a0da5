"""Losses per step add up to the regret, and the headroom's share is what it says."""

import math

import numpy as np
import pytest

from specgym.baselines.hindsight.oracle import greedy_policy, solve_oracle
from specgym.baselines.hindsight.problem import rollout
from specgym.baselines.hindsight.regret import headroom_share, regret


@pytest.mark.parametrize("seed", range(6))
def test_losses_add_up_to_the_regret(draw_problem, seed):
    problem = draw_problem(seed, num_positions=20, num_followers=2)
    result, oracle = solve_oracle(problem)
    path = rollout(problem, greedy_policy(problem))
    lost = regret(oracle, path)
    assert lost.is_exact
    assert lost.seconds == pytest.approx(path.total_seconds - result.seconds, abs=1e-9)
    assert (lost.step_seconds >= -1e-9).all()
    assert lost.cumulative_seconds[-1] == pytest.approx(lost.seconds)
    assert np.array_equal(lost.positions, path.positions)
    for position, marks, action, loss in zip(
        path.positions, path.marks, path.actions, lost.step_seconds, strict=True
    ):
        values = oracle.action_values(position, tuple(marks))
        assert loss == pytest.approx(values[action] - values.min(), abs=1e-9)


def test_the_oracle_itself_loses_nothing(draw_problem):
    problem = draw_problem(0, num_positions=20)
    result, oracle = solve_oracle(problem)
    lost = regret(oracle, rollout(problem, result.actions))
    assert lost.step_seconds == pytest.approx(np.zeros(len(result.actions)), abs=1e-9)


def test_losses_against_a_lower_bound_are_no_smaller(draw_problem):
    problem = draw_problem(1, num_positions=20)
    path = rollout(problem, greedy_policy(problem))
    exact = regret(solve_oracle(problem)[1], path)
    bound = regret(solve_oracle(problem, max_states=1)[1], path)
    assert not bound.is_exact
    assert (bound.step_seconds >= -1e-9).all()
    assert bound.seconds > exact.seconds


def test_share_of_the_headroom():
    assert headroom_share(seconds=3.0, best_fixed=4.0, oracle=2.0) == 0.5
    assert headroom_share(seconds=2.0, best_fixed=4.0, oracle=2.0) == 1.0
    assert headroom_share(seconds=5.0, best_fixed=4.0, oracle=2.0) == -0.5
    assert math.isnan(headroom_share(seconds=2.0, best_fixed=2.0, oracle=2.0))
