"""Batches: rows that end and are filled again, one action for all, and what is told of them."""

import numpy as np
import pytest

from specgym.baselines.rows import per_row
from specgym.engine.testing import decode
from specgym.engine.types import DecodeRequest
from specgym.envs import decode as module

EXACT = [True, False]


@pytest.fixture
def begun():
    """Ids of the requests that began, of a reset's and every step's info."""

    def ids(episode):
        infos = [episode.reset_info, *episode.infos]
        return [each["request_id"] for i in infos for each in i.get("next_requests", [])]

    return ids


@pytest.mark.parametrize("exact", EXACT)
@pytest.mark.parametrize(("size", "total"), [(2, 2), (3, 8), (4, 5)])
def test_every_request_of_the_stream_gets_its_own_text(
    make_env, play, by_chance, begun, pool, exact, size, total
):
    env = make_env(batch_size=size, num_requests=total, exact=exact)
    episode = play(env, by_chance(size), seed=1)
    prompts = {request.id: request.prompt for request in env.workload.requests}
    ends = [end for info in episode.infos for end in info["ends"]]
    assert sorted(end["request_id"] for end in ends) == sorted(begun(episode))
    assert len(ends) == total
    for end in ends:
        request = DecodeRequest(pool.encode(prompts[end["request_id"]]), env.max_new_tokens)
        assert end["output"] == decode(pool, [request])[0].output()
    assert sum(episode.column("tokens")) == sum(len(end["output"]) for end in ends)
    assert episode.truncated
    assert episode.infos[-1]["finish_reason"] == "length"


def test_plain_decoding_earns_nothing_whatever_the_batch(make_env, play):
    episode = play(make_env(batch_size=3, num_requests=7), 0, seed=0)
    assert episode.column("utility") == pytest.approx([1.0] * len(episode.infos))
    assert episode.rewards == pytest.approx([0.0] * len(episode.infos), abs=1e-9)
    for info in episode.infos:
        assert info["tokens"] == info["num_active"]
    assert {info["num_active"] for info in episode.infos} <= {1, 2, 3}
    assert episode.infos[0]["num_active"] == 3


def test_the_reward_adds_up_the_rows(make_env, play, by_chance):
    episode = play(make_env(batch_size=3, num_requests=6), by_chance(0), seed=0)
    for reward, info in zip(episode.rewards, episode.infos, strict=True):
        relative = info["iter_seconds"] / info["baseline_seconds"]  # iteration over a token
        assert reward == pytest.approx(info["tokens"] - relative)
        whole = per_row(info)
        assert whole["baseline_seconds"] == pytest.approx(
            info["baseline_seconds"] * info["num_active"]
        )
    assert any(info["tokens"] > info["num_active"] for info in episode.infos)


def test_observations_stay_inside_the_space(make_env, play, by_chance):
    env = make_env(batch_size=4, num_requests=9)
    for observation in play(env, by_chance(2), seed=3).observations:
        assert observation in env.observation_space


def test_the_same_seed_gives_the_same_episode(make_env, play, by_chance):
    first, second = (
        play(make_env(batch_size=3, num_requests=6), by_chance(5), seed=4) for _ in range(2)
    )
    assert first.rewards == second.rewards
    assert np.array_equal(first.observations, second.observations)


def test_eos_of_the_last_rows_terminates(make_env, play, variant, pool):
    eos = next(
        token
        for token in range(len(pool.tokenizer))
        if all(
            token in decode(pool, [DecodeRequest(pool.encode(text), 24)])[0].output()
            for text in ("aaaa",)
        )
    )
    episode = play(make_env(pool=variant(eos_ids=[eos]), batch_size=6, num_requests=6), 0, seed=0)
    reasons = [end["finish_reason"] for info in episode.infos for end in info["ends"]]
    assert "eos" in reasons
    assert episode.terminated == (episode.infos[-1]["finish_reason"] == "eos")
    assert episode.terminated != episode.truncated


def test_a_prefill_that_fails_truncates(make_env, monkeypatch):
    env = make_env(batch_size=2, num_requests=4, max_new_tokens=2)
    env.reset(seed=0)

    def fail(*arguments):
        raise MemoryError("no room")

    monkeypatch.setattr("specgym.envs.batch_rows.join", fail)
    done = False
    while not done:
        *_, terminated, done, info = env.step(0)
    assert not terminated
    assert "no room" in info["error"]
    with pytest.raises(ValueError, match="call reset"):
        env.step(0)


def test_render_shows_every_row(make_env, play):
    env = make_env(batch_size=2, render_mode="ansi")
    play(env, 0, seed=0)
    assert env.render().count("\n\n") >= 1


def test_arguments_that_do_not_go_together_are_refused(make_env, request_of):
    with pytest.raises(ValueError, match=r"batch_size: must be in 1..num_requests = 2; got 3"):
        make_env(batch_size=3, num_requests=2)
    with pytest.raises(ValueError, match="must be a whole number >= 1"):
        make_env(batch_size=0)
    with pytest.raises(ValueError, match="goes with batch_size=1"):
        make_env(batch_size=2).reset(options=request_of("abc"))


def test_prefills_of_rows_that_join_are_charged_to_nobody(make_env, play, monkeypatch):
    env = make_env(batch_size=2, num_requests=6)
    probes = module.probe_baseline
    spent = []

    def timed(*arguments):
        started = env.clock.now()
        samples = probes(*arguments)
        spent.append(env.clock.now() - started)
        return samples

    monkeypatch.setattr(module, "probe_baseline", timed)
    started = env.clock.now()
    episode = play(env, 0, seed=0)
    joined = [e for i in episode.infos for e in i.get("next_requests", [])]
    assert len(joined) == 4
    prefills = episode.reset_info["prefill_seconds"] + sum(e["prefill_seconds"] for e in joined)
    total = sum(episode.column("total_seconds")) + prefills + sum(spent)
    assert env.clock.now() - started == pytest.approx(total)


@pytest.mark.parametrize("size", [1, 2])
def test_a_pause_is_charged_to_nobody_when_it_is_said(make_env, size):
    env = make_env(batch_size=size)
    env.reset(seed=0)
    env.clock.seconds += 8.0
    *_, info = env.step(0)
    assert info["total_seconds"] >= 8.0
    env.clock.seconds += 8.0
    env.resume()
    *_, info = env.step(0)
    assert info["total_seconds"] < 1.0
    assert info["controller_seconds"] == 0.0
