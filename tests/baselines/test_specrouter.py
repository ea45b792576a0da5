"""SpecRouter's scheduler on paper decoders."""

import collections

import numpy as np
import pytest

from specgym.baselines import SpecRouter

OBSERVATION = np.zeros(1, dtype=np.float32)


def test_profiles_every_chain_with_largest_and_smallest_k(all_plans, make_decoder, drive):
    controller = SpecRouter(all_plans, profile_iterations=4)
    actions = drive(controller, make_decoder(all_plans), 12)
    plans = [all_plans[action] for action in actions]
    assert [k for _, k in plans] == [6, 1] * 6
    assert [chain[0] for chain, _ in plans[:8]] == ["ngram"] * 4 + ["small"] * 4
    assert all(len(chain) == 3 for chain, _ in plans[8:])


def test_prediction_by_hand(ngram_plans, make_decoder, drive):
    # Everything accepted, T(m) = 1 + 0.1 (m - 1), lookup free: T_eff(K) = (1 + K / 10) / (K + 1).
    alphas = {"ngram>target": 1.0}
    controller = SpecRouter(ngram_plans, probe_every=None)
    drive(controller, make_decoder(ngram_plans, alphas, {"target": 1.0}, per_token=0.1), 400)
    predicted = controller.predictions()
    assert predicted["none"] == 1.0
    for k in (1, 2, 3, 4, 6):
        assert predicted[f"ngram@{k}"] == pytest.approx((1 + k / 10) / (k + 1), rel=0.03)


def test_empty_proposals_enter_the_prediction(ngram_plans, make_decoder, drive):
    # A hit in half of the iterations, then all accepted, at K = 6: 1 / 2 (1 + 7) tokens a second.
    controller = SpecRouter(ngram_plans, alpha_length=0.01, probe_every=None)
    decoder = make_decoder(ngram_plans, {"ngram>target": 1.0}, hit_rate=0.5)
    drive(controller, decoder, 800)
    assert controller.predictions()["ngram@6"] == pytest.approx(1 / 4, rel=0.15)


@pytest.mark.parametrize(
    ("alphas", "per_token", "best"),
    [
        ({"ngram>target": 0.9, "small>target": 0.9}, 0.0, {("ngram", 6)}),
        ({"ngram>target": 0.1, "small>target": 0.95}, 0.0, {("small", 6)}),
        ({"ngram>target": 0.02, "small>target": 0.05}, 0.5, {("target", 0)}),
    ],
)
def test_runs_the_plan_of_least_time_per_token(
    all_plans, make_decoder, drive, alphas, per_token, best
):
    plans = [plan for plan in all_plans if len(plan[0]) < 3]
    controller = SpecRouter(plans)
    actions = drive(controller, make_decoder(plans, alphas, per_token=per_token), 500)
    common, count = collections.Counter(actions[200:]).most_common(1)[0]
    assert (plans[common][0][0], plans[common][1]) in best
    assert count > 250


def test_calibration_holds_predictions_against_measurements(all_plans, make_decoder, drive):
    controller = SpecRouter(all_plans)
    drive(controller, make_decoder(all_plans), 1500)
    report = controller.calibration()
    assert set(report["pairs"]) == {"ngram>target", "small>target", "small>mid", "mid>target"}
    often = [row for row in report["plans"].values() if row["num_iterations"] > 300]
    assert often
    for row in often:
        predicted = row["predicted_seconds_per_token"]
        assert predicted == pytest.approx(row["measured_seconds_per_token"], rel=0.1)


def test_window_is_the_papers_form(all_plans, make_decoder, drive):
    actions = drive(SpecRouter(all_plans, window=4), make_decoder(all_plans), 300)
    assert {all_plans[action][1] for action in actions} <= {0, 4}


def test_window_must_be_in_the_table(all_plans):
    with pytest.raises(ValueError, match=r"one of \[1, 2, 3, 4, 6\], or None; got 5"):
        SpecRouter(all_plans, window=5)


def test_a_chain_that_became_good_is_found_again(ngram_plans, make_decoder, drive):
    decoder = make_decoder(ngram_plans, {"ngram>target": 0.0}, per_token=0.2)
    controller = SpecRouter(ngram_plans)
    assert drive(controller, decoder, 300)[-40:].count(0) >= 39
    decoder.alphas["ngram>target"] = 1.0
    later = drive(controller, decoder, 4000)
    assert later[-100:].count(0) == 0
    silent = SpecRouter(ngram_plans, probe_every=None)
    decoder.alphas["ngram>target"] = 0.0
    drive(silent, decoder, 300)
    decoder.alphas["ngram>target"] = 1.0
    assert set(drive(silent, decoder, 4000)) == {0}


def test_probes_visit_all_chains_in_turn(all_plans, make_decoder, drive):
    controller = SpecRouter(all_plans, probe_every=10)
    actions = drive(controller, make_decoder(all_plans, per_token=3.0), 500)
    probed = collections.Counter(all_plans[action][0] for action in actions[19::10])
    assert len(probed) == 3
    assert min(probed.values()) > 10


def test_masked_chain_is_profiled_later(ngram_plans, make_decoder):
    controller = SpecRouter(ngram_plans)
    only_none = np.array([True] + [False] * 5)
    assert controller.act(OBSERVATION, only_none) == 0
    controller.observe(0, 0.0, make_decoder(ngram_plans).step(0))
    assert controller.act(OBSERVATION, np.ones(6, dtype=bool)) == 5


def test_an_iteration_cut_by_the_end_teaches_no_acceptance(ngram_plans, make_decoder):
    controller = SpecRouter(ngram_plans)
    info = make_decoder(ngram_plans, {"ngram>target": 1.0}).step(5)
    controller.observe(5, 0.0, {**info, "finish_reason": "eos", "accepted_per_level": [0]})
    assert controller.calibration()["pairs"]["ngram>target"]["num_judged"] == 0


def test_asks_for_divergence(ngram_plans):
    assert SpecRouter(ngram_plans).needs_divergence


def test_without_divergence_acceptances_alone_calibrate(ngram_plans, make_decoder):
    controller = SpecRouter(ngram_plans)
    decoder = make_decoder(ngram_plans, {"ngram>target": 0.8})
    for _ in range(500):
        controller.observe(4, 0.0, {**decoder.step(4), "divergence": {}})
    pair = controller.calibration()["pairs"]["ngram>target"]
    assert pair["sim_score"] is None
    assert pair["alpha"] == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha_time", 1.5),
        ("alpha_sim", -0.1),
        ("alpha_length", float("nan")),
        ("memory", 2.0),
        ("profile_iterations", 0),
        ("probe_every", 1),
    ],
)
def test_bad_values_are_refused(ngram_plans, field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        SpecRouter(ngram_plans, **{field: value})
