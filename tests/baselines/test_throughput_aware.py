"""Throughput-aware steps: scores and hysteresis by hand, and the plan it settles on."""

import pytest

from specgym.baselines.estimates.outcomes import read_outcome
from specgym.baselines.estimates.plan_model import PlanModel
from specgym.baselines.estimates.position_counts import expected_tokens
from specgym.baselines.throughput_aware import ThroughputAware, choose


def scores(*costs):
    """Returns E(S) / cost(S) for S = 1, 2, 3 at an acceptance of 0.8."""
    tokens = expected_tokens([0.8, 0.8, 0.8])[1:]
    return [each / cost for each, cost in zip(tokens, costs, strict=True)]


def test_scores_by_hand():
    assert scores(1.1, 1.2, 1.3) == pytest.approx([1.636, 2.033, 2.271], abs=5e-4)


@pytest.mark.parametrize(("last_cost", "chosen"), [(1.3, 2), (1.35, 1)])
def test_a_better_plan_must_be_better_by_a_tenth(last_cost, chosen):
    assert choose(scores(1.1, 1.2, last_cost), 1, margin=1.1) == chosen


def test_unseen_positions_never_gain_on_the_last_seen(ngram_plans, make_info):
    model = PlanModel(ngram_plans, window=20)
    for accepted in (2, 1, 2, 0):
        model.add(read_outcome(2, make_info(2, accepted, cost=1.2)))
    tokens = dict(zip((k for _, k in ngram_plans), model.tokens(), strict=True))
    # p_1 = 3/4, p_2 = 2/3, and so on from there: 1 + .75 + .5 + .333 + ...
    assert tokens[2] == pytest.approx(2.25)
    assert tokens[3] == pytest.approx(2.25 + 0.5 * 2 / 3)
    assert tokens[4] == pytest.approx(tokens[3] + 0.5 * (2 / 3) ** 2)


def test_settles_on_the_plan_of_most_tokens_per_second(all_plans, make_decoder, drive):
    alphas = {"ngram>target": 0.2, "small>target": 0.9, "small>mid": 0.5, "mid>target": 0.5}
    decoder = make_decoder(all_plans, alphas=alphas)
    controller = ThroughputAware(all_plans, margin=1.0, probe_every=None)
    ran = [all_plans[action] for action in drive(controller, decoder, 2000)]
    # 5.22 tokens at 1.6 and 4.10 at 1.4 against 1.83 at 1.0: the margin between the two is small
    assert ran.count((("small", "target"), 6)) > 0.5 * len(ran)
    assert sum(chain == ("small", "target") for chain, _ in ran) > 0.95 * len(ran)


def test_no_speculation_where_nothing_pays(all_plans, make_decoder, drive):
    alphas = dict.fromkeys(("ngram>target", "small>target", "small>mid", "mid>target"), 0.02)
    decoder = make_decoder(all_plans, alphas=alphas, per_token=0.2)
    actions = drive(ThroughputAware(all_plans, probe_every=None), decoder, 200)
    assert set(actions[50:]) == {0}


@pytest.mark.parametrize(
    ("field", "value"), [("window", 0), ("interval", 0), ("margin", 0.9), ("probe_every", 1)]
)
def test_bad_values_are_refused(all_plans, field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        ThroughputAware(all_plans, **{field: value})
