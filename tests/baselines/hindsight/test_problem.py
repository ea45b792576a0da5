"""Decoding on the tables: hand-worked requests, and what no request can be."""

import dataclasses

import numpy as np
import pytest

from specgym.baselines.hindsight.problem import rollout


def test_rollout_of_a_worked_example(worked_problem):
    """Plan 2, then plain, against the same sum by hand.

    Position 0, plan 2: 2.0, both followers for the first time: prefill 0.5 + 0.75, lags 0.
    It emits 3 tokens and leaves lags 0 and 1 at position 3: marks 4 and 3. Then plain: 1.0.
    """
    path = rollout(worked_problem, [2, 0])
    assert path.positions.tolist() == [0, 3]
    assert path.marks.tolist() == [[0, 0], [4, 3]]
    assert path.seconds.tolist() == [3.25, 1.0]
    assert path.total_seconds == 4.25


def test_lags_grow_while_a_follower_is_not_used(worked_problem):
    """Plain, plan 1, plain: the second is a first use at lag 1; the first follower ends at lag 1.

    Then plan 2 at position 2: the first follower at lag 0, the second for the first time at lag 2.
    """
    path = rollout(worked_problem, [0, 1, 2])
    assert path.positions.tolist() == [0, 1, 2]
    assert path.seconds == pytest.approx([1.0, 1.5 + 0.5 + 0.1, 2.0 + 0.75 + 2 * 0.25])
    path = rollout(worked_problem, [1, 2])
    assert path.marks.tolist() == [[0, 0], [3, 0]]
    path = rollout(worked_problem, [1, 0, 0])
    assert path.marks.tolist() == [[0, 0], [3, 0], [3, 0]]
    assert worked_problem.marks(3, [1, 3], [True, False]) == (3, 0)
    assert worked_problem.step(2, (1, 0), 1)[0] == pytest.approx(1.5 + 2 * 0.1)


def test_catchup_by_mark_is_what_steps_charge(draw_problem):
    problem = draw_problem(0)
    for position, action in np.argwhere(problem.uses[..., 0] & ~problem.uses[..., 1]):
        charged = [
            problem.step(position, (mark, 0), action)[0] - problem.seconds[position, action]
            for mark in range(position + 2)
        ]
        assert problem.catchup_seconds(position, action, 0) == pytest.approx(charged)


def test_what_is_not_allowed_falls_to_no_speculation(worked_problem):
    assert rollout(worked_problem, [0, 0, 0, 2]).actions.tolist() == [0, 0, 0, 0]
    assert rollout(worked_problem, lambda position, marks: 2).actions.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([2], "the 1 actions must reach position 4, got to 3; add actions"),
        ([2, 0, 0], "the actions must end with the request, after 2, got 3; leave the rest out"),
        ([3], "actions must be from 0 to 2, got 3 at position 0"),
        ([-1], "actions must be from 0 to 2, got -1 at position 0"),
    ],
)
def test_actions_that_do_not_fit(worked_problem, actions, message):
    with pytest.raises(ValueError, match=message):
        rollout(worked_problem, actions)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens", np.ones(4, int), r"tokens must be \[N, A\].*got shape \(4,\)"),
        ("tokens", np.ones((0, 3), int), "without output has nothing to decide"),
        ("tokens", [[1] * 3] * 4, "tokens must be an array of whole numbers.*got list"),
        ("tokens", np.ones((4, 3)), "tokens must be an array of whole numbers.*got float64"),
        (
            "seconds",
            np.ones((4, 2)),
            r"seconds must .* shape \(4, 3\), got float64, shape \(4, 2\)",
        ),
        ("allowed", np.ones((4, 3)), "allowed must be an array of booleans"),
        ("uses", np.ones((4, 2, 2), bool), r"uses must be \[N, A, M\]"),
        ("lag_after", np.ones((4, 3, 1), int), r"lag_after must be .* shape \(4, 3, 2\)"),
        ("catchup", np.ones((3, 2, 3)), "catchup must reach lag N - 1 = 3"),
        ("catchup", np.array(1.0), "catchup must reach lag N - 1 = 3"),
        ("catchup", np.ones((2, 2, 4)), "catchup must be an array of floats"),
        ("prefill", np.ones(3), r"prefill must .* shape \(2,\)"),
        ("baseline", np.ones(3), r"baseline must .* shape \(4,\)"),
    ],
)
def test_arrays_that_do_not_fit(worked_problem, field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(worked_problem, **{field: value})


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("tokens", (2, 1), 0, r"tokens must be from 1 to N - position, got 0 at \(2, 1\)"),
        ("tokens", (2, 1), 3, r"tokens must be from 1 to N - position, got 3 at \(2, 1\)"),
        ("seconds", (1, 2), np.nan, r"seconds must be finite and above 0, got nan at \(1, 2\)"),
        ("allowed", (1, 0), False, r"allowed must be True for action 0, got False at \(1, 0\)"),
        ("uses", (1, 0, 1), True, r"uses must be False for action 0, got True at \(1, 0, 1\)"),
        ("lag_after", (0, 1, 0), -1, r"lag_after must be from 0 to .* got -1 at \(0, 1, 0\)"),
        ("lag_after", (0, 1, 0), 3, r"lag_after must be from 0 to .* got 3 at \(0, 1, 0\)"),
        ("catchup", (1, 1, 2), np.inf, r"catchup must be finite, got inf at \(1, 1, 2\)"),
        ("prefill", (1,), -0.5, r"prefill must be finite and at least 0, got -0.5 at \(1,\)"),
        ("baseline", (3,), 0.0, r"baseline must be finite and above 0, got 0.0 at \(3,\)"),
    ],
)
def test_values_that_no_request_has(worked_problem, field, index, value, message):
    array = getattr(worked_problem, field).copy()
    array[index] = value
    with pytest.raises(ValueError, match=f"chat-3: {message}"):
        dataclasses.replace(worked_problem, name="chat-3", **{field: array})


def test_what_is_not_allowed_may_hold_anything(worked_problem):
    seconds = worked_problem.seconds.copy()
    seconds[3, 1] = np.nan
    assert rollout(dataclasses.replace(worked_problem, seconds=seconds), [2, 1]).actions[1] == 0
