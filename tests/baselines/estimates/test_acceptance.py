"""SimScore and its calibration."""

import random

import pytest

from specgym.baselines.estimates.acceptance import PairAcceptance


def test_identity_before_any_acceptance():
    for divergence in (0.1, 0.5, 0.8):
        pair = PairAcceptance(alpha_sim=0.1, memory=0.98)
        pair.observe_divergence(divergence)
        assert pair.alpha == pytest.approx(1.0 - divergence)


def test_sim_score_by_hand():
    pair = PairAcceptance(alpha_sim=0.1, memory=0.98)
    pair.observe_divergence(0.4)
    pair.observe_divergence(0.2)
    assert pair.sim_score == pytest.approx(0.62)  # 1 - (0.4 + 0.1 (0.2 - 0.4))


def test_newton_step_by_hand():
    # At s = 1/2, x = 0: alpha = 1/2. Three accepted of four proposed judge four tokens: residual
    # 3 - 2 = 1, weight 1; precision of the intercept 4 + 1.
    pair = PairAcceptance(alpha_sim=0.1, memory=0.98)
    pair.observe_acceptance(3, 4)
    assert pair.alpha == pytest.approx(0.5498, abs=1e-4)  # sigmoid(1 / 5)


@pytest.mark.parametrize(("sim_score", "rate"), [(0.5, 0.9), (0.9, 0.5), (0.3, 0.3), (0.8, 0.0)])
def test_converges_to_the_realised_rate(sim_score, rate):
    rng = random.Random(1)
    pair = PairAcceptance(alpha_sim=0.1, memory=0.995)
    pair.observe_divergence(1.0 - sim_score)
    for _ in range(2000):
        accepted = next((i for i in range(4) if rng.random() >= rate), 4)
        pair.observe_acceptance(accepted, 4)
    assert pair.alpha == pytest.approx(rate, abs=0.06)
    report = pair.report()
    assert report["realised_rate"] == pytest.approx(rate, abs=0.03)
    assert abs(report["predicted_rate"] - report["realised_rate"]) < 0.05


def test_follows_a_changed_rate():
    pair = PairAcceptance(alpha_sim=0.1, memory=0.98)
    for _ in range(200):
        pair.observe_acceptance(4, 4)
    assert pair.alpha > 0.95
    for _ in range(200):
        pair.observe_acceptance(0, 4)
    assert pair.alpha < 0.1


def test_slope_never_turns_negative():
    pair = PairAcceptance(alpha_sim=1.0, memory=0.98)
    for _ in range(300):  # similar and rejected, dissimilar and accepted
        pair.observe_divergence(0.1)
        pair.observe_acceptance(0, 4)
        pair.observe_divergence(0.9)
        pair.observe_acceptance(4, 4)
    low = pair.alpha
    pair.observe_divergence(0.1)
    assert pair.alpha >= low


def test_extremes_stay_finite_and_nothing_judged_changes_nothing():
    pair = PairAcceptance(alpha_sim=0.1, memory=1.0)
    pair.observe_acceptance(0, 0)
    assert pair.alpha == 0.5
    assert pair.report()["realised_rate"] is None
    for divergence in (0.0, 1.0):
        for _ in range(500):
            pair.observe_divergence(divergence)
            pair.observe_acceptance(8 if divergence == 0.0 else 0, 8)
            assert 0.0 < pair.alpha < 1.0
