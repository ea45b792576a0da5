"""Seconds of fixed plans, of policies, and of the oracle on recorded requests."""

import numpy as np
import pytest

from specgym.baselines.hindsight.oracle import fixed_policy
from specgym.baselines.hindsight.problem import rollout
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.traces import load_traces
from specgym.runs.traces.yardstick import (
    argmax_of,
    fixed_seconds,
    make_problem,
    make_yardstick,
    play,
    split_requests,
)


@pytest.fixture
def traces(trace_file):
    return load_traces(trace_file).part("train")


@pytest.fixture
def library(traces):
    return TraceLibrary(traces)


def test_fixed_plans_take_what_the_decision_problem_says(traces, library):
    seconds = fixed_seconds(library)
    for index, trace in enumerate(traces.traces):
        problem = make_problem(traces, trace, library.layout.k_values)
        for action in range(problem.num_actions):
            expected = rollout(problem, fixed_policy(action)).total_seconds
            assert seconds[index, action] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("action", [0, 3])
def test_a_policy_that_is_a_fixed_plan_takes_as_long(library, action):
    def choose(observations, masks):
        return np.full(len(observations), action)

    seconds = play(library, choose, num_rows=3)
    assert seconds == pytest.approx(fixed_seconds(library)[:, action], rel=1e-9)


def test_the_yardstick_measures_in_ratios_of_sums(traces, library):
    said = []
    yardstick = make_yardstick(traces, library, 1, said.append)
    assert said[-1] == f"oracle {len(library)}/{len(library)}"
    assert yardstick.names == tuple(trace.request_id for trace in traces.traces)
    assert (yardstick.oracle <= yardstick.fixed.min(axis=1) * (1 + 1e-5)).all()
    none, fixed = yardstick.fixed[:, 0], yardstick.fixed[:, 1]
    assert yardstick.speedup(none) == 1.0
    assert yardstick.speedup(fixed) == pytest.approx(none.sum() / fixed.sum())
    if fixed.sum() > yardstick.oracle.sum():
        assert yardstick.share(fixed) == pytest.approx(0.0)
        assert yardstick.share(yardstick.oracle) == pytest.approx(1.0)


def test_masked_plans_are_never_chosen():
    choose = argmax_of(lambda observations: np.tile([0.0, 3.0, 2.0], (2, 1)))
    masks = np.array([[True, False, True], [True, True, True]])
    assert choose(np.zeros((2, 1)), masks).tolist() == [2, 1]


def test_every_nth_request_chooses(traces):
    fit, validation = split_requests(traces, 3)
    assert [t.request_id for t in validation.traces] == [t.request_id for t in traces.traces[2::3]]
    assert len(fit.traces) + len(validation.traces) == len(traces.traces)
