"""Goodput: the closed form's best lengths, and the cost model behind it."""

import numpy as np
import pytest

from specgym.baselines.estimates.least_squares import LeastSquares
from specgym.baselines.goodput import Goodput, best_length, expected_tokens

LENGTHS = range(40)


@pytest.mark.parametrize(
    ("alpha", "c", "best", "rate"),
    [
        (0.8, 0.1, 6, 2.4696),
        (0.6, 0.1, 3, 1.6738),
        (0.9, 0.05, 13, 4.6741),
        (0.5, 0.3, 1, 1.1538),
        (0.8, 0.3, 3, 1.5537),
    ],
)
def test_best_length_by_hand(alpha, c, best, rate):
    seconds = [1.0 + c * k for k in LENGTHS]
    assert best_length(alpha, seconds) == best
    assert expected_tokens(alpha, best) / seconds[best] == pytest.approx(rate, abs=5e-5)


@pytest.mark.parametrize("c", [0.1, 0.3, 0.7])
def test_nothing_pays_where_a_token_costs_more_than_it_is_accepted(c):
    seconds = [1.0 + c * k for k in LENGTHS]
    assert all(best_length(alpha, seconds) == 0 for alpha in np.linspace(0.01, c, 20))


def test_best_length_is_where_the_marginal_falls_to_the_mean():
    for alpha in np.arange(0.05, 0.96, 0.05):
        for c in np.arange(0.02, 0.6, 0.04):
            seconds = [1.0 + c * k for k in range(300)]
            rates = [expected_tokens(alpha, k) / seconds[k] for k in range(300)]
            stop = next(k for k in range(300) if alpha ** (k + 1) / c <= rates[k])
            assert rates[stop] == pytest.approx(max(rates), abs=1e-12)


def test_expected_tokens_at_the_ends():
    assert expected_tokens(1.0, 4) == 5.0
    assert expected_tokens(0.0, 4) == 1.0


def test_regression_finds_the_plane():
    model, rng = LeastSquares(3, ridge=1e-6), np.random.default_rng(0)
    for _ in range(200):
        x = rng.random(3)
        model.add(x.tolist(), float(x @ [1.0, -2.0, 0.5]))
    assert model.predict((0.3, 0.1, 0.9)) == pytest.approx(0.3 - 0.2 + 0.45, abs=1e-4)


@pytest.mark.parametrize("rate", ["proposed", "judged"])
def test_acceptance_of_what(ngram_plans, make_info, rate):
    controller = Goodput(ngram_plans, rate=rate)
    for _ in range(5):
        controller.observe(4, 0.0, make_info(4, accepted=1, cost=1.2))
    alpha = controller.state_dict()["alphas"]["ngram>target"]
    assert alpha == pytest.approx({"proposed": 0.25, "judged": 0.5}[rate])


def run_batches(controller, plans, make_info, sizes, alpha):
    """Lets it decode batches whose cost grows with B (K + 1); returns what ran at each size."""
    rng, ran, mask = np.random.default_rng(0), {}, np.ones(len(plans), dtype=bool)
    for step in range(1500):
        rows = sizes[step // 30 % len(sizes)]
        action = controller.act(np.zeros(1), mask)
        k = plans[action][1]
        accepts = rng.random((rows, k)) < alpha
        accepted = float(accepts.cumprod(axis=1).sum()) / rows if k else 0.0
        base = 1.0 + 0.05 * rows
        cost = (1.0 + 0.05 * rows * (k + 1) + 0.02 * k) / base
        info = make_info(action, accepted, cost=cost, rows=rows, baseline=base)
        controller.observe(action, 0.0, info)
        if step > 900 and step % 30 > 0:  # the first step of a size has not seen it
            ran.setdefault(rows, []).append(k)
    return {rows: max(set(ks), key=ks.count) for rows, ks in ran.items()}


def test_larger_batches_speculate_less(ngram_plans, make_info):
    controller = Goodput(ngram_plans, rate="judged", probe_every=None, window=50)
    ran = run_batches(controller, ngram_plans, make_info, [1, 16, 128], alpha=0.7)
    assert ran[1] > ran[16] > ran[128] == 0


@pytest.mark.parametrize(("field", "value"), [("rate", "all"), ("window", 0)])
def test_bad_values_are_refused(ngram_plans, field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        Goodput(ngram_plans, **{field: value})
