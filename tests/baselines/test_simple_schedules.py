"""Censoring-aware average, and transformers' two up and one down."""

import math

import numpy as np
import pytest

from specgym.baselines.censored_ema import CensoredEMA
from specgym.baselines.heuristic import Heuristic

PLANS = [(("target",), 0), *((("small", "target"), k) for k in range(1, 9))]
ALL = np.ones(len(PLANS), dtype=bool)


def ks(controller, make_info, accepted):
    """Returns the K that ran in each round, where `accepted` says how the rounds went."""
    ran = []
    for m in accepted:
        action = controller.act(np.zeros(1), ALL)
        ran.append(PLANS[action][1])
        controller.observe(action, 0.0, make_info(action, min(m, ran[-1])))
    return ran


def test_full_acceptance_adds_one_each_round(make_info):
    assert ks(CensoredEMA(PLANS), make_info, [9] * 8) == [2, 3, 4, 5, 6, 7, 8, 8]


def test_a_partial_acceptance_is_averaged(make_info):
    controller = CensoredEMA(PLANS, start=6)
    # depth 6 -> 6 + (2 - 6) / 4 = 5 -> 5 + (2 - 5) / 4 = 4.25 -> 3.6875 -> 3.27
    assert ks(controller, make_info, [2, 2, 2, 2]) == [6, 5, 4, 4]
    assert controller.state_dict()["depth"] == pytest.approx(2 + 4 * 0.75**4)


def test_it_settles_around_where_drafts_stop(make_info):
    ran = ks(CensoredEMA(PLANS), make_info, [3] * 60)
    assert set(ran[20:]) <= {3, 4}


def test_it_never_stops_drafting(make_info):
    assert set(ks(CensoredEMA(PLANS), make_info, [0] * 40)[20:]) == {1}


def test_two_up_and_one_down(make_info):
    controller = Heuristic(PLANS, start=2)
    assert ks(controller, make_info, [2, 0, 0, 9, 9, 9, 0]) == [2, 4, 3, 2, 4, 6, 8]
    assert ks(controller, make_info, [0] * 9) == [7, 6, 5, 4, 3, 2, 1, 1, 1]


def test_it_starts_as_far_up_as_the_table_goes(make_info):
    assert ks(Heuristic(PLANS), make_info, [9, 0]) == [8, 8]


@pytest.mark.parametrize(("entropy", "k"), [(0.0, 8), (0.9, 8), (0.93, 1), (3.0, 1)])
def test_an_unsure_drafter_drafts_one(entropy, k):
    assert -math.log(0.4) == pytest.approx(0.916, abs=1e-3)
    controller = Heuristic(PLANS, features=("last_k", "draft_entropy"))
    assert PLANS[controller.act(np.array([0.0, entropy]), ALL)][1] == k
    never = Heuristic(PLANS, confidence=0.0, features=("last_k", "draft_entropy"))
    assert PLANS[never.act(np.array([0.0, entropy]), ALL)][1] == 8


def test_a_smaller_k_runs_where_the_mask_forbids(make_info):
    mask = ALL.copy()
    mask[4:] = False
    for controller in (CensoredEMA(PLANS, start=6), Heuristic(PLANS)):
        assert controller.act(np.zeros(1), mask) == 3


def test_the_end_of_a_text_says_nothing(make_info):
    for controller in (CensoredEMA(PLANS), Heuristic(PLANS)):
        before = controller.state_dict()
        controller.observe(3, 0.0, make_info(3, 0, finish_reason="length"))
        assert controller.state_dict() == before


@pytest.mark.parametrize("scope", ["request", "stream"])
@pytest.mark.parametrize("kind", [CensoredEMA, Heuristic])
def test_scope(make_info, kind, scope):
    controller = kind(PLANS, scope=scope)
    fresh = controller.state_dict()
    ks(controller, make_info, [0, 0, 0])
    controller.begin({})
    assert (controller.state_dict() == fresh) == (scope == "request")
