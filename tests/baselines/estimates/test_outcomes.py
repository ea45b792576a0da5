"""What is read of a step, alone and in a batch."""

import math

import pytest

from specgym.baselines.estimates.outcomes import read_outcome


def test_one_row_by_hand(make_info):
    outcome = read_outcome(3, make_info(3, accepted=2, cost=1.5, catchup=0.25, context_len=70))
    assert outcome is not None
    assert (outcome.action, outcome.tokens, outcome.accepted) == (3, 3, 2)
    assert (outcome.cost, outcome.catchup, outcome.context) == (1.5, 0.25, 70)


def test_a_batch_is_read_as_a_mean_over_its_rows(make_info):
    alone = read_outcome(3, make_info(3, accepted=2, cost=1.5))
    batch = read_outcome(3, make_info(3, accepted=2, cost=1.5, rows=4))
    assert batch == alone._replace(num_rows=4)


def test_a_server_may_say_little():
    info = {"tokens": 3, "iter_seconds": 3.0, "baseline_seconds": 2.0}
    outcome = read_outcome(2, {**info, "executed_action": 2, "reason": ""})
    assert (outcome.accepted, outcome.cost, outcome.num_rows, outcome.is_last) == (2, 1.5, 1, False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "field", ["iter_seconds", "baseline_seconds", "catchup_seconds", "draft_seconds"]
)
def test_what_is_not_finite_is_not_read(make_info, field, value):
    assert read_outcome(1, make_info(1, **{field: value})) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"forwards": [{"seconds": math.nan}]},
        {"divergence": {"a>b": math.nan}},
        {"iter_seconds": 0.0},
        {"baseline_seconds": -1.0},
        {"error": "EngineFault"},
    ],
)
def test_nor_is_a_fault(make_info, changes):
    assert read_outcome(1, make_info(1, **changes)) is None
