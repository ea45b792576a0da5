"""EMA tiers: the rounds at which K moves, as the source moves it."""

import numpy as np
import pytest

from specgym.baselines.ema_tiers import EMATiers

PLANS = [(("target",), 0), *((("eagle", "target"), k) for k in (1, 3, 5, 7))]
ALL = np.ones(len(PLANS), dtype=bool)


def tiers_over(controller, make_info, num_rounds, accepted_of, rows=1):
    """Returns the K that runs after each round, from round 1 on."""
    ran = []
    for _ in range(num_rounds):
        action = controller.act(np.zeros(1), ALL)
        k = PLANS[action][1]
        controller.observe(action, 0.0, make_info(action, accepted_of(k), rows=rows))
        ran.append(PLANS[controller.act(np.zeros(1), ALL)][1])
    return ran


def changes(ran, first):
    """Returns (round, K) of every change."""
    pairs = zip([first, *ran], ran, strict=False)
    return [(n, after) for n, (before, after) in enumerate(pairs, start=1) if before != after]


def test_full_acceptance_climbs_at_rounds_15_25_and_35(make_info):
    ran = tiers_over(EMATiers(PLANS), make_info, 60, lambda k: k)
    assert changes(ran, 1) == [(15, 3), (25, 5), (35, 7)]


def test_hopeless_text_drafts_in_every_other_interval(make_info):
    controller = EMATiers(PLANS, tiers="0+1+3")
    controller.load_state_dict(controller.state_dict() | {"tier": 3, "ema": 2.0})
    ran = tiers_over(controller, make_info, 40, lambda k: 0)
    assert changes(ran, 3) == [(15, 0), (20, 1), (25, 0), (30, 1), (35, 0), (40, 1)]


@pytest.mark.parametrize(("rows", "most"), [(1, 7), (7, 7), (8, 3), (31, 3), (32, 1), (64, 0)])
def test_tiers_by_batch_size(make_info, rows, most):
    ran = tiers_over(EMATiers(PLANS), make_info, 100, lambda k: k, rows=rows)
    assert max(ran[60:]) == most


def test_a_tier_that_the_table_lacks_is_the_next_smaller_one(make_info):
    plans = [(("target",), 0), *((("eagle", "target"), k) for k in (1, 2, 4))]
    controller = EMATiers(plans)
    actions = []
    for _ in range(60):
        actions.append(controller.act(np.zeros(1), ALL[:4]))
        controller.observe(actions[-1], 0.0, make_info(actions[-1], plans[actions[-1]][1]))
    assert plans[actions[-1]][1] == 4


@pytest.mark.parametrize(
    ("field", "value"), [("tiers", "1,3"), ("chain", "small"), ("interval", 0), ("weight", 2.0)]
)
def test_bad_values_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        EMATiers(PLANS, **{field: value})
