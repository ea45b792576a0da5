"""The causal estimate on requests whose best policy is known."""

import dataclasses

import numpy as np
import pytest

from specgym.baselines.causal import CausalConfig, estimate_causal
from specgym.baselines.visits import Visits, values_of

CONFIG = CausalConfig(num_folds=4, num_units=20, num_resamples=200)


def make_visits(is_seen, num_requests=16, length=40, seed=0):
    """Speculation brings two tokens for 1.2 s or one for 1.2 s; plain decoding one for 1 s.

    Which of both holds is in the observation, or is not.
    """
    rng = np.random.default_rng(seed)
    count = num_requests * length
    is_easy = rng.random(count) < 0.4
    request, position = np.divmod(np.arange(count), length)
    shown = is_easy if is_seen else rng.random(count) < 0.4
    tokens = np.stack([np.ones(count, int), 1 + is_easy], axis=1)
    tokens[:, 1] = np.minimum(tokens[:, 1], length - position)
    return Visits(
        observations=np.stack([shown, rng.random(count)], axis=1).astype(np.float32),
        allowed=np.ones((count, 2), bool),
        seconds=np.tile([1.0, 1.2], (count, 1)),
        tokens=tokens,
        request=request,
        position=position,
        lengths=np.full(num_requests, length),
    )


def test_finds_what_the_observation_tells():
    visits = make_visits(is_seen=True)
    estimate = estimate_causal(visits, CONFIG)
    best = values_of(visits)[:, 0].sum()
    assert estimate.none.sum() / best * 0.97 < estimate.speedup <= estimate.none.sum() / best + 1e-9
    assert 1.0 < estimate.low <= estimate.speedup <= estimate.high


def test_knows_nothing_of_the_future():
    visits = make_visits(is_seen=False)
    estimate = estimate_causal(visits, CONFIG)
    assert estimate.none.sum() / values_of(visits)[:, 0].sum() > 1.2
    assert estimate.speedup == pytest.approx(1.4 / 1.2, abs=0.06)  # speculating always


def test_same_seed_same_estimate():
    visits = make_visits(is_seen=True)
    first, second = estimate_causal(visits, CONFIG), estimate_causal(visits, CONFIG)
    assert first.seconds.tolist() == second.seconds.tolist()
    assert (first.low, first.high) == (second.low, second.high)


def test_masks_are_obeyed():
    visits = make_visits(is_seen=True)
    barred = dataclasses.replace(visits, allowed=np.tile([True, False], (len(visits), 1)))
    assert estimate_causal(barred, CONFIG).speedup == pytest.approx(1.0)


def test_requests_without_visits_are_refused():
    visits = make_visits(is_seen=True)
    with pytest.raises(ValueError, match="got visits to 15 of 16"):
        estimate_causal(visits.at(np.flatnonzero(visits.request)), CONFIG)
    with pytest.raises(ValueError, match="at least 20 requests"):
        estimate_causal(visits, dataclasses.replace(CONFIG, num_folds=20))


@pytest.mark.parametrize(
    ("field", "value"), [("num_folds", 1), ("num_rounds", 0), ("num_units", 0), ("ridge", 0.0)]
)
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"causal.{field} must be"):
        CausalConfig(**{field: value})
