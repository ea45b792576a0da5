"""Traces of the hill climb."""

import json

import pytest

from specgym.baselines.estimates.hill_climb import HillClimb


def trace(utilities, num_rungs, start, tolerance=0.1):
    """Returns the rungs that a climb tries when rung i has utility utilities[i]."""
    climb = HillClimb(num_rungs, start, tolerance)
    tried = []
    while climb.rung is not None:
        tried.append(climb.rung)
        climb.record(utilities[climb.rung])
    return tried


@pytest.mark.parametrize(
    ("utilities", "start", "tried"),
    [
        ([1.0, 1.5, 2.0, 2.5, 3.0], 0, [0, 1, 2, 3, 4]),  # rises to the end of the ladder
        ([1.0, 1.5, 2.0, 1.5, 1.0], 0, [0, 1, 2, 3]),  # passed the top
        ([1.2, 1.25, 2.0, 3.0, 4.0], 0, [0, 1]),  # two successive trials alike
        ([2.0, 1.5, 1.2, 1.0, 0.9], 0, [0, 1]),  # falls, turns: below is K = 0
        ([1.0, 1.5, 2.0, 1.5, 1.0], 2, [2, 3, 1]),  # the start is the top
        ([3.0, 2.5, 2.0, 1.5, 1.0], 2, [2, 3, 1, 0]),  # turns, then down to K = 0
        ([0.9, 0.8, 0.5, 0.4, 0.3], 2, [2, 1, 0]),  # speculation lost: down first
        ([0.2, 0.4, 0.9, 1.4, 2.0], 2, [2, 1, 3, 4]),  # down was wrong, turn up
        ([1.0, 1.5, 2.0, 2.5, 3.0], 4, [4, 3]),  # top of the ladder: down, which falls
        ([1.0, 2.0, 3.0, 2.0, 1.0], 4, [4, 3, 2, 1]),  # from the top down past the maximum
    ],
)
def test_traces(utilities, start, tried):
    assert trace(utilities, 5, start) == tried


def test_a_single_rung_is_tried_once():
    assert trace([1.5], 1, 0) == [0]


def test_zero_tolerance_climbs_on_a_plateau_that_rises_at_all():
    assert trace([1.0, 1.01, 1.02], 3, 0, tolerance=0.0) == [0, 1, 2]


def test_state_round_trip():
    climb = HillClimb(5, 2, 0.1)
    climb.record(1.0)
    climb.record(0.5)
    other = HillClimb(1, 0, 0.1)
    other.load_state_dict(json.loads(json.dumps(climb.state_dict())))
    assert other.state_dict() == climb.state_dict()
    assert other.rung == climb.rung == 1
