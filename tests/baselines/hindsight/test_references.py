"""References are ordered, and an order that fails is reported with the request's name."""

import dataclasses

import numpy as np
import pytest

from specgym.baselines.hindsight.references import (
    best_fixed,
    check_ordering,
    fixed_seconds,
    solve_references,
)


@pytest.fixture
def references(draw_problem):
    return solve_references([draw_problem(seed, num_positions=16) for seed in range(10)])


def test_ordering_on_random_requests(references):
    assert references.is_exact.all()
    assert (references.oracle <= references.best_per_request).all()
    assert references.best_per_request.sum() < references.best_fixed.sum()
    assert references.best_fixed.sum() == pytest.approx(references.fixed.sum(axis=0).min())
    assert (references.oracle < references.greedy).any()


def test_brackets_are_ordered_too(draw_problem):
    problems = [draw_problem(seed, num_positions=16) for seed in range(10)]
    references = solve_references(problems, max_states=20)
    assert not references.is_exact.any()
    assert (references.lower < references.oracle).any()


def test_fixed_plans_of_a_worked_example(worked_problem):
    """Plan 1 takes 2.0 + 1.5; plan 2 takes 3.25, then 1.0 plain where it is not allowed."""
    assert fixed_seconds(worked_problem) == pytest.approx([4.0, 3.5, 4.25])
    references = solve_references([worked_problem, worked_problem])
    assert references.best_fixed_plan == 1
    assert references.no_speculation.tolist() == [4.0, 4.0]


def test_best_fixed_plan_of_each_workload(references):
    workloads = ["chat", "code"] * 5
    assert references.best_fixed_by(workloads) == {
        "chat": best_fixed(references.fixed[::2]),
        "code": best_fixed(references.fixed[1::2]),
    }
    with pytest.raises(ValueError, match="workloads must be one for each of 10 requests, got 2"):
        references.best_fixed_by(["chat", "code"])


@pytest.mark.parametrize(
    ("field", "factor", "message"),
    [
        ("oracle", 9.0, "request 3: oracle takes .* more than greedy policy"),
        ("greedy", 0.1, "request 3: oracle takes .* more than greedy policy"),
        ("fixed", 0.1, "request 3: oracle takes .* more than best fixed plan of the request"),
        ("lower", 9.0, "request 3: lower bound takes .* more than oracle"),
    ],
)
def test_a_broken_order_names_the_request(references, field, factor, message):
    broken = getattr(references, field).copy()
    broken[3] *= factor
    with pytest.raises(AssertionError, match=message):
        check_ordering(dataclasses.replace(references, **{field: broken}))


def test_problems_must_share_their_plans(draw_problem):
    with pytest.raises(ValueError, match=r"same number of actions, got \[4, 5\]"):
        solve_references([draw_problem(0), draw_problem(1, num_actions=4)])
    with pytest.raises(ValueError, match="at least one"):
        solve_references([])


def test_best_fixed_is_chosen_by_total_seconds():
    assert best_fixed(np.array([[3.0, 1.0, 2.0], [3.0, 5.0, 2.0]])) == 2
