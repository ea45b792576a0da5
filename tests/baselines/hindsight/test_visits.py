"""Visits of small requests, values worked out by hand."""

import dataclasses

import numpy as np
import pytest

from specgym.baselines.hindsight.visits import Visits, join_visits, values_of


def make_visits(position, seconds, tokens, request=None, lengths=(3,), allowed=None):
    count = len(position)
    seconds = np.array(seconds, dtype=float)
    return Visits(
        observations=np.zeros((count, 2), np.float32),
        allowed=np.ones(seconds.shape, bool) if allowed is None else np.array(allowed),
        seconds=seconds,
        tokens=np.array(tokens),
        request=np.zeros(count, int) if request is None else np.array(request),
        position=np.array(position),
        lengths=np.array(lengths),
    )


WHOLE = make_visits(
    position=[0, 1, 2],
    seconds=[[1.0, 1.5], [1.0, 1.4], [1.0, 3.0]],
    tokens=[[1, 2], [1, 2], [1, 1]],
)


def test_values_of_a_policy_by_hand():
    assert values_of(WHOLE, np.array([0, 0, 0])).tolist() == [[3.0, 2.0, 1.0, 0.0]]
    assert values_of(WHOLE, np.array([1, 1, 0])).tolist() == [[2.5, 1.4, 1.0, 0.0]]


def test_values_in_hindsight_by_hand():
    assert values_of(WHOLE)[0] == pytest.approx([2.4, 1.4, 1.0, 0.0])


def test_hindsight_obeys_masks():
    allowed = [[True, True], [True, False], [True, True]]
    assert values_of(dataclasses.replace(WHOLE, allowed=np.array(allowed)))[0, 0] == 2.5


def test_several_visits_count_alike():
    twice = join_visits([WHOLE, WHOLE.at(np.array([0]))])
    assert values_of(twice, np.array([0, 0, 0, 1]))[0, 0] == pytest.approx((3.0 + 2.5) / 2)


def test_position_without_a_visit_takes_a_token_more():
    visits = WHOLE.at(np.array([0, 2]))  # plain iterations: one second per token
    assert values_of(visits, np.array([0, 0])).tolist() == [[3.0, 2.0, 1.0, 0.0]]


def test_requests_of_other_lengths_stay_apart():
    visits = make_visits(
        position=[0, 0, 1],
        seconds=[[5.0], [1.0], [2.0]],
        tokens=[[1], [1], [1]],
        request=[0, 1, 1],
        lengths=(1, 2),
    )
    assert values_of(visits, np.zeros(3, int)).tolist() == [[5.0, 0.0, 0.0], [3.0, 2.0, 0.0]]


def test_action_values_by_hand():
    values = values_of(WHOLE, np.array([0, 0, 0]))
    assert WHOLE.action_values(values).tolist() == [[3.0, 2.5], [2.0, 1.4], [1.0, 3.0]]
    barred = dataclasses.replace(WHOLE, allowed=np.array([[True, False]] * 3))
    assert np.isinf(barred.action_values(values)[:, 1]).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.ones((2, 2), int)}, "visits.tokens must be of shape"),
        ({"request": np.array([0, 0, 1])}, "visits.request must be below 1"),
        ({"position": np.array([0, 1, 3])}, "visits.position must be before the end"),
    ],
)
def test_bad_visits_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(WHOLE, **changes)


def test_parts_of_other_requests_are_refused():
    other = dataclasses.replace(WHOLE, lengths=np.array([4]))
    with pytest.raises(ValueError, match="all of the same requests"):
        join_visits([WHOLE, other])
