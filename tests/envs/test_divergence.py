"""The measured distance between adjacent members: when it is taken, and of whom."""

import collections
import itertools

import numpy as np
import pytest

from specgym.engine.types import SamplingParams


def measured(episode):
    return [info["divergence"] for info in episode.infos]


def test_divergence_is_measured_only_when_asked_for(make_env, play, by_chance):
    env = make_env(num_requests=2)
    asked = play(env, by_chance(0), seed=0, options={"divergence_every": 1})
    assert any(measured(asked))
    for reset in ({"seed": 0}, {"seed": 0, "options": {"divergence_every": 0}}):
        assert not any(measured(play(env, by_chance(0), **reset)))


@pytest.mark.parametrize("every", [1, 2, 3, np.int64(5)])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_divergence_is_of_every_adjacent_pair_in_every_nth_step_of_a_chain(
    make_env, play, by_chance, every, temperature
):
    env = make_env(num_requests=4, sampling=SamplingParams(temperature))
    episode = play(env, by_chance(3), seed=0, options={"divergence_every": every})
    speculative = [info for info in episode.infos if info["k"]]
    assert not any(info["divergence"] for info in episode.infos if not info["k"])
    assert len(speculative) > 10
    uses = collections.Counter()
    for info in speculative:
        chain = info["chain"].split(">")
        index = uses[info["chain"]]
        uses[info["chain"]] += 1
        pairs = [f"{a}>{b}" for a, b in itertools.pairwise(chain)]
        assert list(info["divergence"]) == (pairs if index % every == 0 else [])
        assert all(0.0 <= value <= 1.0 for value in info["divergence"].values())


def test_divergence_tells_a_good_drafter_from_a_bad_one(make_env, play):
    env = make_env(num_requests=2)
    means = {}
    for name in ("draft", "mid"):
        action = env.action_names.index(f"{name}@1")
        episode = play(env, action, seed=0, options={"divergence_every": 1})
        values = [each[f"{name}>target"] for each in measured(episode) if each]
        means[name] = np.mean(values)
    assert 0.0 < means["mid"] < means["draft"] < 1.0


def test_divergence_does_not_change_what_is_decoded(make_env, play, by_chance):
    without, with_ = (
        play(make_env(sampling=SamplingParams(0.7)), by_chance(3), seed=0, options=options)
        for options in ({}, {"divergence_every": 1})
    )
    assert without.infos[-1]["output"] == with_.infos[-1]["output"]
    assert without.actions == with_.actions
