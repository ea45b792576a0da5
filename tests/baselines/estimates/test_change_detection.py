"""Change detection: statistics and delays by hand, false alarms, and restarts."""

import math
import random

import numpy as np
import pytest

from specgym.agents.bandits.ucb import UCB
from specgym.baselines.estimates.change_detection import CUSUM, GLR, divergence, glr_statistic
from specgym.baselines.restart import Restart, renewed
from specgym.baselines.throughput_aware import ThroughputAware

PLANS = [(("target",), 0), *((("small", "target"), k) for k in (1, 2, 4))]
ALL = np.ones(len(PLANS), dtype=bool)


def test_statistic_by_hand():
    statistic, place = glr_statistic([0.0] * 10 + [1.0] * 10)
    assert statistic == pytest.approx(20.0 * math.log(2.0), abs=1e-6)  # 13.863
    assert place == 10
    assert glr_statistic([0.4] * 30)[0] == pytest.approx(0.0, abs=1e-9)


def test_statistic_against_the_sum():
    rng = np.random.default_rng(0)
    for _ in range(50):
        x = rng.random(rng.integers(2, 40))
        mean = x.mean()
        ratios = [
            s * float(divergence(x[:s].mean(keepdims=True), mean)[0])
            + (len(x) - s) * float(divergence(x[s:].mean(keepdims=True), mean)[0])
            for s in range(1, len(x))
        ]
        assert glr_statistic(x)[0] == pytest.approx(max(ratios))


def alarm_at(detector, values):
    """Returns after how many values the detector alarms; None if it never does."""
    return next((n for n, value in enumerate(values, start=1) if detector.add(value)), None)


def test_a_stream_without_change_seldom_alarms():
    rng = random.Random(0)
    streams = [[float(rng.random() < 0.7) for _ in range(400)] for _ in range(200)]
    alarms = sum(alarm_at(GLR(0.01), stream) is not None for stream in streams)
    assert alarms <= 4


def test_a_change_is_found_within_some_multiple_of_the_information_bound():
    rng, delays = random.Random(1), []
    for _ in range(100):
        before = [float(rng.random() < 0.8) for _ in range(100)]
        after = [float(rng.random() < 0.3) for _ in range(300)]
        found = alarm_at(GLR(0.001, window=400, every=1), before + after)
        assert found is not None
        delays.append(found - 100)
    bound = math.log(1000) / float(divergence(np.array([0.3]), 0.8)[0])
    assert bound == pytest.approx(11.9, abs=0.3)
    assert 0.5 * bound < np.mean(delays) < 6.0 * bound


def test_cusum_by_hand():
    detector = CUSUM(shift=1.0, threshold=4.0, num_reference=1)
    assert not detector.add(0.0)  # the reference
    assert alarm_at(detector, [1.0] * 20) == 8  # ceil(h / (d / 2))
    quiet = CUSUM(shift=1.0, threshold=4.0, num_reference=1)
    assert alarm_at(quiet, [0.25] * 100) is None
    assert quiet.state_dict()["sums"] == [0.0, 0.0]


def test_what_survives_a_restart():
    fresh = {"a": 1, "model": {"positions": 0, "cost_model": {"x": 0}}, "rng": 0}
    now = {"a": 2, "model": {"positions": 5, "cost_model": {"x": 9}}, "rng": 7}
    assert renewed(fresh, now) == {
        "a": 1,
        "model": {"positions": 0, "cost_model": {"x": 9}},
        "rng": 7,
    }


@pytest.mark.parametrize("detector", ["glr", "cusum"])
def test_a_change_has_the_one_inside_forget(make_info, detector):
    controller = Restart(PLANS, UCB(PLANS), detector=detector)
    for accepted in [4] * 100 + [0] * 60:
        controller.observe(3, 0.0, make_info(3, accepted))
    assert controller.num_restarts == 1
    assert controller.state_dict()["inner"]["num_plays"][3] < 60


def test_other_plans_running_is_no_change(make_info):
    controller = Restart(PLANS, UCB(PLANS))
    for action in [1] * 200 + [3] * 200:
        controller.observe(action, 0.0, make_info(action, 1))
    assert controller.num_restarts == 0


def test_costs_are_kept(make_info):
    controller = Restart(PLANS, ThroughputAware(PLANS, window=200))
    for accepted in [4] * 100 + [0] * 60:
        controller.observe(3, 0.0, make_info(3, accepted, cost=1.5))
    model = controller.state_dict()["inner"]["model"]
    assert controller.num_restarts == 1
    assert model["cost_model"]["tables"]["0"][3][1] == 160
    assert model["positions"][0]["reached"][0] < 60


@pytest.mark.parametrize(
    ("field", "value"), [("detector", "t-test"), ("delta", 0.0), ("window", 1)]
)
def test_bad_values_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        Restart(PLANS, UCB(PLANS), **{field: value})
