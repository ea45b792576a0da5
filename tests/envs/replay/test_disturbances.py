"""Noise, drift and changes of regime in the costs of a replay."""

import numpy as np
import pytest

from specgym.envs import ReplayEnv
from specgym.envs.replay.disturbances import MAX_DRIFT, Change, CostFactors, Disturbance
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.synthetic import synthetic_traces


@pytest.fixture(scope="module")
def mixture():
    return TraceLibrary(synthetic_traces(8, 30, experts_per_token=2))


def seconds_of(env, action, seed=0, episodes=1):
    """Seconds of every iteration, and baselines, under one action."""
    env.reset(seed=seed)
    seconds, baselines = [], []
    for _ in range(episodes):
        done = False
        while not done:
            asked = action if env.action_masks()[action] else 0
            _, _, terminated, truncated, info = env.step(asked)
            seconds.append(info["iter_seconds"])
            baselines.append(info["baseline_seconds"])
            done = terminated or truncated
        env.reset()
    return np.array(seconds), np.array(baselines)


def test_noise_is_log_normal_with_the_measured_spread(mixture):
    quiet, baseline = seconds_of(ReplayEnv(mixture), 0, episodes=40)
    noisy, same = seconds_of(ReplayEnv(mixture, disturbance=Disturbance(noise=0.5)), 0, episodes=40)
    logs = np.log(noisy / quiet)
    assert same.tolist() == baseline.tolist()
    assert abs(logs.mean()) < 0.01
    assert logs.std() == pytest.approx(0.05, rel=0.1)  # half of the synthetic spread


def test_a_change_multiplies_from_its_request_on(mixture):
    change = Change(at_request=1, target=3.0)
    env = ReplayEnv(mixture, order="recorded", disturbance=Disturbance(changes=(change,)))
    quiet = ReplayEnv(mixture, order="recorded")
    for episode in range(3):
        pair = [
            each.reset(**({"seed": 0} if not episode else {}))[1]["baseline_seconds"]
            for each in (env, quiet)
        ]
        assert pair[0] / pair[1] == pytest.approx(1.0 if not episode else 2.96, abs=0.03)


def test_dear_drafters_make_speculation_dear_and_leave_the_rest(mixture):
    disturbance = Disturbance(changes=(Change(0, drafters=2.0),))
    for action, is_dearer in ((0, False), (mixture.table.names.index("small@4"), True)):
        quiet, plain = seconds_of(ReplayEnv(mixture), action)
        dear, same = seconds_of(ReplayEnv(mixture, disturbance=disturbance), action)
        assert same.tolist() == plain.tolist()
        assert (dear.sum() > quiet.sum()) == is_dearer


def test_drift_stays_within_its_bounds_and_a_trend_goes_one_way():
    for disturbance in (Disturbance(drift=1.0), Disturbance(trend=0.01)):
        factors = CostFactors(disturbance, 3, np.random.default_rng(0))
        seen = []
        for _ in range(300):
            factors.advance()
            seen.append(np.log(factors.factors()[1]))
        assert np.abs(seen).max() <= MAX_DRIFT + 1e-12
        assert np.std(seen) > 0
    assert np.diff(np.array(seen), axis=0).min() >= -1e-12
    assert not CostFactors(disturbance, 3, np.random.default_rng(0)).is_quiet


def test_seeding_takes_drift_back(mixture):
    env = ReplayEnv(mixture, disturbance=Disturbance(trend=0.1))
    first, _ = seconds_of(env, mixture.table.names.index("small@2"))
    again, _ = seconds_of(env, mixture.table.names.index("small@2"))
    assert first.tolist() == again.tolist()


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Disturbance, {"noise": -1.0}),
        (Disturbance, {"drift": float("nan")}),
        (Disturbance, {"trend": float("inf")}),
        (Change, {"at_request": -1}),
        (Change, {"at_request": 0, "target": 0.0}),
        (Change, {"at_request": 0, "drafters": float("nan")}),
    ],
)
def test_wrong_disturbances_are_refused(kind, wrong):
    with pytest.raises(ValueError, match="must be"):
        kind(**wrong)
