"""Visits of a recorded tiny pool, and its requests decoded under a policy."""

import numpy as np
import pytest

from specgym.baselines.hindsight.visits import values_of
from specgym.envs.replay.library import TraceLibrary
from specgym.runs.cli import main
from specgym.runs.traces.collect_visits import collect_visits
from specgym.runs.traces.yardstick import play


@pytest.fixture(scope="module")
def library(tiny_spec, short_prompts, tmp_path_factory):
    """Six requests of 12 tokens."""
    path = tmp_path_factory.mktemp("traces") / "t.npz"
    arguments = [
        "record", "--pool", tiny_spec, "--prompts", str(short_prompts), "--workload", "all",
        "--num-requests", "6", "--max-new-tokens", "12", "--cost-steps", "40",
        "--clock", "counting", "--out", str(path),
    ]  # fmt: skip
    assert main(arguments) == 0
    return TraceLibrary(path)


def plain(observations, masks):
    return np.zeros(len(observations), dtype=np.int64)


def last(observations, masks):
    """The last plan of the table where it is allowed."""
    return np.where(masks[:, -1], masks.shape[1] - 1, 0)


@pytest.mark.parametrize("choose", [plain, last])
def test_values_of_visits_are_what_decoding_takes(library, choose):
    visits = collect_visits(library, choose, 6, 40, (0.0,), seed=0)
    actions = choose(visits.observations, visits.allowed)
    decoded = play(library, choose, 2, seed=1)
    assert values_of(visits, actions)[:, 0] == pytest.approx(decoded)


def test_exploration_goes_where_the_policy_does_not(library):
    alone = collect_visits(library, last, 6, 40, (0.0,), seed=0)
    explored = collect_visits(library, last, 6, 40, (0.0, 1.0), seed=0)
    states = [set(zip(v.request, v.position, strict=True)) for v in (alone, explored)]
    assert len(states[1]) > len(states[0])


def test_same_seed_same_visits(library):
    first, second = (collect_visits(library, last, 4, 10, (0.5,), seed=3) for _ in range(2))
    assert np.array_equal(first.observations, second.observations)
    assert np.array_equal(first.position, second.position)
