"""Persistence: how long a plan is kept, and when not."""

import numpy as np
import pytest

from specgym.baselines.hold import Hold
from specgym.baselines.static import Random
from specgym.runs.controllers import make_controller

PLANS = [(("target",), 0), *((("small", "target"), k) for k in (1, 2, 4))]
ALL = np.ones(len(PLANS), dtype=bool)


def run(controller, make_info, num_steps, mask=ALL):
    """Returns the actions of so many iterations."""
    actions = []
    for _ in range(num_steps):
        actions.append(controller.act(np.zeros(1), mask))
        controller.observe(actions[-1], 0.0, make_info(actions[-1]))
    return actions


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_plan_runs_n_times(make_info, n):
    held = run(Hold(PLANS, Random(PLANS, seed=3), n), make_info, 12 * n)
    assert held == [
        action for action in run(Random(PLANS, seed=3), make_info, 12) for _ in range(n)
    ]


def test_a_forbidden_plan_ends_the_hold(make_info):
    controller = Hold(PLANS, make_controller("static:small@4", PLANS, [], 0), n=5)
    assert run(controller, make_info, 2) == [3, 3]
    none = np.array([True, False, False, False])
    assert run(controller, make_info, 2, none) == [0, 0]
    assert run(controller, make_info, 4) == [0, 0, 0, 3]  # the new hold began with the first 0


def test_a_request_ends_the_hold(make_info):
    controller = Hold(PLANS, Random(PLANS, seed=0), n=100)
    firsts = []
    for _ in range(30):
        controller.begin({})
        firsts.append(run(controller, make_info, 1)[0])
    assert set(firsts) == {0, 1, 2, 3}


def test_the_one_inside_sees_every_iteration(make_info):
    controller = Hold(PLANS, make_controller("ucb", PLANS, [], 0), n=3)
    run(controller, make_info, 12)
    assert controller.state_dict()["inner"]["num_plays"] == [3, 3, 3, 3]


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match="n must be a whole number >= 1"):
        Hold(PLANS, Random(PLANS), n=0)
