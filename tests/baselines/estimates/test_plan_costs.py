"""Relative costs by plan and batch size."""

import pytest

from specgym.baselines.estimates.outcomes import read_outcome
from specgym.baselines.estimates.plan_costs import PlanCosts, fill_gaps

PLANS = [(("target",), 0), *((("ngram", "target"), k) for k in (1, 2, 4))]


def test_gaps_are_filled_between_neighbors():
    assert fill_gaps([0, 1, 2, 4], [None, 1.4, None]) == pytest.approx([1.2, 1.4, 1.8])
    assert fill_gaps([0, 1, 2, 4], [1.1, None, 1.4]) == pytest.approx([1.1, 1.2, 1.4])
    assert fill_gaps([0, 1, 2], [None, None]) == [None, None]
    assert fill_gaps([0, 1, 2], [0.9, None]) == pytest.approx([0.9, 0.9])  # never below


def test_costs_leave_catch_up_out_and_average(make_info):
    costs = PlanCosts(PLANS, weight=0.1)
    for cost in (1.5, 1.7):
        costs.add(read_outcome(2, make_info(2, 1, cost=cost, catchup=0.1)))
    assert costs.costs() == pytest.approx([1.0, 1.25, 1.5, 2.0])


def test_a_batch_size_never_met_takes_the_nearest(make_info):
    costs = PlanCosts(PLANS, weight=0.1)
    costs.add(read_outcome(3, make_info(3, 1, cost=1.2, rows=1)))
    costs.add(read_outcome(3, make_info(3, 1, cost=3.0, rows=16)))
    costs.add(read_outcome(0, make_info(0, rows=8)))
    assert costs.costs()[3] == pytest.approx(3.0)
    costs.add(read_outcome(0, make_info(0, rows=2)))
    assert costs.costs()[3] == pytest.approx(1.2)


def test_state_round_trip(make_info):
    costs, other = PlanCosts(PLANS, 0.1), PlanCosts(PLANS, 0.1)
    for rows in (1, 4):
        costs.add(read_outcome(1, make_info(1, cost=1.0 + rows, rows=rows)))
    other.load_state_dict(costs.state_dict())
    assert other.costs() == costs.costs()
    assert other.state_dict() == costs.state_dict()
