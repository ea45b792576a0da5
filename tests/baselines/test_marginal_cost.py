"""The marginal rule: where a climb stops, and what it comes to."""

import numpy as np
import pytest

from specgym.baselines.estimates.position_counts import expected_tokens
from specgym.baselines.marginal_cost import MarginalCost, climb


def steps(alpha, costs):
    """Returns a chain's (tokens, cost, K) for K = 1, 2, ..."""
    tokens = expected_tokens([alpha] * len(costs))[1:]
    return [(t, c, k) for k, (t, c) in enumerate(zip(tokens, costs, strict=True), start=1)]


@pytest.mark.parametrize(
    ("costs", "stop"), [((1.1, 1.2, 1.3), 3), ((1.1, 1.35, 1.9), 2), ((2.0, 2.1, 2.2), 0)]
)
def test_where_it_stops(costs, stop):
    """Expected tokens over cost is largest at 3, 2 and, of a convex climb, nowhere."""
    rate = 1.0  # of a token, when nothing is speculated
    if stop:
        rate = min(c / t for t, c, _ in steps(0.9, costs))
    assert climb(steps(0.9, costs), rate)[1] == stop


def test_at_the_best_rate_the_rule_is_the_argmax():
    rng = np.random.default_rng(0)
    for _ in range(500):
        alpha = rng.uniform(0.05, 0.95)
        costs = 1.0 + np.sort(rng.uniform(0.01, 0.4, 8)).cumsum()  # convex: one maximum
        found = steps(alpha, costs.tolist())
        utilities = [1.0, *(t / c for t, c, _ in found)]
        best = int(np.argmax(utilities))
        assert climb(found, 1.0 / utilities[best])[1] in (best, best - 1)
        saved, k = climb(found, 1.0 / utilities[best])
        assert utilities[k] == pytest.approx(utilities[best], rel=1e-9)
        assert saved >= 0.0


def test_the_rate_climbs_to_the_best_plan(ngram_plans, make_decoder, drive):
    decoder = make_decoder(ngram_plans, alphas={"ngram>target": 0.8}, per_token=0.1)
    controller = MarginalCost(ngram_plans, window=300, probe_every=None)
    ran = [ngram_plans[action][1] for action in drive(controller, decoder, 1500)][800:]
    tokens = expected_tokens([0.8] * 6)
    best = max((1, 2, 3, 4, 6), key=lambda k: tokens[k] / (1.0 + 0.1 * k))
    assert ran.count(best) > 0.5 * len(ran)
    assert set(ran) <= {4, 6}


def test_no_speculation_where_nothing_pays(ngram_plans, make_decoder, drive):
    decoder = make_decoder(ngram_plans, alphas={"ngram>target": 0.05}, per_token=0.2)
    actions = drive(MarginalCost(ngram_plans, probe_every=None), decoder, 300)
    assert set(actions[50:]) == {0}
