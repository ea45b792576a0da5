"""Static controllers and the random one."""

import numpy as np
import pytest

from specgym.baselines import NoSpeculation, Random, Static

OBSERVATION = np.zeros(1, dtype=np.float32)


def test_none_is_always_zero(all_plans):
    assert NoSpeculation(all_plans).act(OBSERVATION, np.ones(len(all_plans), dtype=bool)) == 0


def test_static_runs_its_plan_or_nothing(ngram_plans):
    controller = Static(ngram_plans)
    mask = np.ones(len(ngram_plans), dtype=bool)
    assert ngram_plans[controller.act(OBSERVATION, mask)] == (("ngram", "target"), 4)
    mask[4] = False
    assert controller.act(OBSERVATION, mask) == 0


def test_unknown_plan_is_refused(ngram_plans):
    with pytest.raises(ValueError, match="plan must be one of none, ngram@1"):
        Static(ngram_plans, plan="eagle@4")


def test_random_is_uniform_over_what_is_allowed(ngram_plans):
    controller = Random(ngram_plans, seed=3)
    mask = np.array([True, False, True, False, True, False])
    counts = np.bincount([controller.act(OBSERVATION, mask) for _ in range(3000)], minlength=6)
    assert counts[~mask].sum() == 0
    assert np.all(np.abs(counts[mask] - 1000) < 130)  # 5 standard deviations


def test_random_depends_on_its_seed_alone(ngram_plans):
    mask = np.ones(len(ngram_plans), dtype=bool)
    runs = [
        [controller.act(OBSERVATION, mask) for _ in range(30)]
        for controller in (Random(ngram_plans, 1), Random(ngram_plans, 1), Random(ngram_plans, 2))
    ]
    assert runs[0] == runs[1] != runs[2]


def test_bad_seed_is_refused(ngram_plans):
    with pytest.raises(ValueError, match="seed must be a whole number >= 0, got -1"):
        Random(ngram_plans, seed=-1)
