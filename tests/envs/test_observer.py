import json
import math

import numpy as np
import pytest

from specgym.engine.types import Plan, SamplingParams, StepResult
from specgym.envs.features import feature_table
from specgym.envs.observer import Observer
from specgym.envs.pool_spec import Layout


def seen(env, observation):
    """The observation by feature name."""
    return dict(zip((f.name for f in env.features), observation.tolist(), strict=True))


def assert_valid(env, observation):
    assert observation.dtype == env.observation_space.dtype == np.float32
    assert observation.shape == (len(env.features),)
    assert np.isfinite(observation).all(), seen(env, observation)
    assert env.observation_space.contains(observation), seen(env, observation)


def step_result(chain, k, proposed, accepted, entropy=0.0):
    plan = Plan(tuple(chain.split(">")), k)
    tokens = ((1,) * (accepted[-1] + 1),) if accepted else ((1,),)
    return StepResult(plan, plan, "", tokens, proposed, accepted, 1.0, (), {}, entropy, (None,))


def test_the_table_names_every_entry_once_with_unit_bounds_and_source(pool):
    table = feature_table(Layout.of(pool))
    names = [feature.name for feature in table]
    assert len(set(names)) == len(names)
    for feature in table:
        assert feature.unit
        assert feature.source
        assert -math.inf < feature.low < feature.high < math.inf
    pairs = ("ngram>target", "draft>target", "mid>target", "ngram>draft", "draft>mid", "ngram>mid")
    assert {f"acceptance[{pair}]" for pair in pairs} <= set(names)
    for chain in map(">".join, pool.chains):
        assert {f"{kind}[{chain}]" for kind in ("time_ratio", "tokens", "rounds_since")} <= set(
            names
        )
    assert [name for name in names if name.startswith("lag")] == ["lag[draft]", "lag[mid]"]


def test_the_space_is_the_table(make_env):
    env = make_env()
    assert env.observation_space.low.tolist() == [np.float32(f.low) for f in env.features]
    assert env.observation_space.high.tolist() == [np.float32(f.high) for f in env.features]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_observations_are_finite_float32_in_bounds_in_every_phase(
    make_env, play, by_chance, exact, temperature, seed
):
    env = make_env(exact=exact, num_requests=3, sampling=SamplingParams(temperature, seed=seed))
    for masked in (True, False):
        for observation in play(env, by_chance(seed, masked), seed=seed).observations:
            assert_valid(env, observation)


def test_an_episode_without_a_draft_has_no_nan_and_breaks_even(make_env, play):
    episode = play(env := make_env(), 0, seed=0)
    for observation in episode.observations:
        assert_valid(env, observation)
    assert episode.rewards == [0.0] * 24
    assert set(episode.column("utility")) == {1.0}
    assert set(episode.column("drafted")) == {0}


@pytest.mark.parametrize("reward", ["utility", "log_utility", "net_utility"])
def test_rewards_without_a_draft_are_finite(make_env, play, reward):
    wanted = {"utility": 1.0, "log_utility": 0.0, "net_utility": 0.0}[reward]
    assert play(make_env(reward=reward), 0, seed=0).rewards == [wanted] * 24


def test_a_drafter_that_rules_tokens_out_leaves_no_nan(make_env, play, pool, monkeypatch):
    member = pool.members["draft"]
    forward = type(member).forward

    def half(memory, fed, num_rows=None, *, need_logits=True, last_only=False):
        logits = forward(
            member, memory, fed, num_rows, need_logits=need_logits, last_only=last_only
        )
        if logits is not None:
            logits = logits.clone()
            logits[..., ::2] = -math.inf
        return logits

    monkeypatch.setattr(member, "forward", half)
    episode = play(env := make_env(), env.action_names.index("draft@2"), seed=0)
    for observation in episode.observations:
        assert_valid(env, observation)
    assert seen(env, episode.observations[-1])["draft_entropy"] > 0.0


def test_values_outside_the_table_are_clipped(make_env):
    env = make_env()
    env.reset(seed=0)
    env.observer.update(step_result("ngram>target", 6, (6,), (6,)), 1e30, 1e30)
    env.observer.update(step_result("draft>target", 2, (2,), (0,), 1e30), 1e-30, 0.0)
    observation = env.observer.observe(env.state)
    assert_valid(env, observation)
    assert seen(env, observation)["time_ratio[draft>target]"] == 64.0


def test_acceptance_is_over_what_was_proposed_to_that_level(pool):
    observer = Observer(Layout.of(pool))
    observer.update(step_result("draft>mid>target", 4, (4, 2), (1, 2)), 1.0, 1.0)
    assert observer.acceptance["draft>mid"] == pytest.approx(0.5 + 0.1 * (1 / 4 - 0.5))
    assert observer.acceptance["mid>target"] == pytest.approx(0.5 + 0.1 * (2 / 2 - 0.5))
    assert observer.acceptance["draft>target"] == 0.5


def test_the_entries_say_what_the_last_iteration_did(make_env):
    env = make_env()
    env.reset(seed=0)
    action = env.action_names.index("draft>mid@2")
    observation, _, _, _, info = env.step(action)
    entries = seen(env, observation)
    iteration = info["tokens"] / info["utility"]  # in units of t_base
    assert entries["last_utility"] == pytest.approx(info["utility"])
    assert entries["last_tokens"] == info["tokens"]
    assert entries["last_k"] == 2
    assert entries["last_reject"] == (info["accepted"] < info["proposed_per_level"][-1])
    assert entries["time_ratio[draft>mid>target]"] == pytest.approx(1 + 0.1 * (iteration - 1))
    assert entries["tokens[draft>mid>target]"] == pytest.approx(1 + 0.1 * (info["tokens"] - 1))
    assert entries["rounds_since[draft>mid>target]"] == 0.0
    assert entries["rounds_since[ngram>target]"] == 1.0  # never tried
    observation, *_ = env.step(0)
    since = seen(env, observation)["rounds_since[draft>mid>target]"]
    assert since == pytest.approx(1 - math.exp(-1 / 32))
    assert entries["context_fraction"] == pytest.approx(info["context_len"] / 4096)
    assert entries["budget_fraction"] == pytest.approx(info["tokens"] / 24)
    assert entries["generated"] == pytest.approx(math.log1p(info["tokens"]))


def test_a_drafter_lags_until_it_is_used(make_env):
    env = make_env()
    observation, info = env.reset(seed=0)
    assert seen(env, observation)["lag[draft]"] == pytest.approx((info["num_prompt"] - 1) / 64)
    observation, *_ = env.step(env.action_names.index("draft@1"))
    entries = seen(env, observation)
    assert entries["lag[draft]"] <= 1 / 64
    assert entries["lag[mid]"] > entries["lag[draft]"]


def test_ngram_hit_is_the_longest_suffix_seen_before(make_env, request_of):
    env = make_env()
    hits = {
        text: seen(env, env.reset(options=request_of(text))[0])["ngram_hit"]
        for text in ("abcd", "abca", "abcab", "abcabc", "abcdabcd")
    }
    assert hits == pytest.approx(
        {"abcd": 0, "abca": 1 / 3, "abcab": 2 / 3, "abcabc": 1, "abcdabcd": 1}
    )


def test_statistics_go_on_over_requests_and_start_anew_with_a_seed(make_env, play):
    env = make_env()
    fresh, _ = env.reset(seed=0)
    play(env, env.action_names.index("mid@4"), seed=0)
    observation, _ = env.reset()
    name = "acceptance[mid>target]"
    assert seen(env, observation)[name] != seen(env, fresh)[name] == 0.5
    again, _ = env.reset(seed=0)
    assert again.tolist() == fresh.tolist()


def test_restored_statistics_give_the_same_observation(make_env, play, by_chance, pool):
    env = make_env()
    play(env, by_chance(0), seed=0)
    saved = json.loads(json.dumps(env.observer.statistics()))
    observation, _ = env.reset()
    observer = Observer(Layout.of(pool))
    assert observer.observe(env.state).tolist() != observation.tolist()
    observer.restore(saved)
    assert observer.observe(env.state).tolist() == observation.tolist()
