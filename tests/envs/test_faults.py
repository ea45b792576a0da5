"""What an engine fault does to an episode: a step never raises, the environment can go on."""

import math

import pytest
import torch

from specgym.engine.timing import Baseline
from specgym.envs.workloads import Request, Workload


@pytest.fixture
def break_member(pool, monkeypatch):
    """Makes a member's forwards fail, or its logits not finite, after some good ones."""

    def apply(name, what, after=0):
        member = pool.members[name]
        forward, count = type(member).forward, iter(range(10**6))

        def broken(memory, fed, num_rows=None, *, need_logits=True, last_only=False):
            logits = forward(
                member, memory, fed, num_rows, need_logits=need_logits, last_only=last_only
            )
            if next(count) < after:
                return logits
            if isinstance(what, Exception):
                raise what
            return None if logits is None else torch.full_like(logits, what)

        monkeypatch.setattr(member, "forward", broken)
        return monkeypatch.undo

    return apply


def assert_truncated(env, returned, error):
    observation, reward, terminated, truncated, info = returned
    assert env.observation_space.contains(observation)
    assert math.isfinite(reward)
    assert (terminated, truncated) == (False, True)
    assert error in info["error"]
    assert info.keys() >= {"request_id", "asked_action", "action_mask"}
    with pytest.raises(ValueError, match="call reset"):
        env.step(0)


@pytest.mark.parametrize(
    "what",
    [
        math.nan,
        math.inf,
        RuntimeError("out of order"),
        torch.OutOfMemoryError("out of memory"),
        MemoryError("no memory"),
        ValueError("cache: a window does not fit"),
        IndexError("index out of range"),
        AssertionError("an invariant"),
    ],
    ids=lambda what: type(what).__name__ if isinstance(what, Exception) else str(what),
)
@pytest.mark.parametrize("name", ["draft", "mid", "target"])
def test_a_fault_in_any_member_truncates_and_the_environment_goes_on(
    make_env, play, break_member, name, what
):
    env = make_env()
    wanted = play(make_env(), 0, seed=0)
    env.reset(seed=0)
    env.step(0)
    undo = break_member(name, what)
    returned = env.step(env.action_names.index("draft>mid@2"))
    error = str(what) if isinstance(what, Exception) else f"member '{name}': logits are not finite"
    assert_truncated(env, returned, error)
    undo()
    episode = play(env, 0, seed=0)
    assert "error" not in episode.infos[-1]
    assert episode.infos[-1]["output"] == wanted.infos[-1]["output"]
    assert episode.rewards == wanted.rewards


def test_a_weight_that_is_not_a_number_is_named_at_its_member(make_env, pool):
    compiled = pool.members["mid"].compiled
    arena, norm = compiled.program.arena, compiled.final_norm
    weight = arena.view(norm.weight, compiled.states.width)
    good = weight.copy()
    env = make_env()
    env.reset(seed=0)
    try:
        weight[3] = math.nan
        returned = env.step(env.action_names.index("mid@1"))
    finally:
        weight[:] = good
    assert_truncated(env, returned, "EngineFault: member 'mid': logits are not finite")
    env.reset()
    *_, info = env.step(env.action_names.index("mid@1"))
    assert "error" not in info


def test_a_fault_in_the_baseline_probe_truncates_and_keeps_the_step(make_env, break_member):
    env = make_env(baseline=Baseline(every=1))
    env.reset(seed=0)
    break_member("target", math.nan, after=1)
    returned = env.step(0)
    assert_truncated(env, returned, "EngineFault: member 'target'")
    assert returned[-1]["tokens"] == 1
    assert returned[-1]["controller_seconds"] == 0.0


def test_a_fault_at_the_next_prefill_truncates_and_keeps_the_output(make_env, play, break_member):
    env = make_env(num_requests=2, max_new_tokens=1)
    env.reset(seed=0)
    break_member("target", RuntimeError("prefill"), after=1)
    returned = env.step(0)
    assert_truncated(env, returned, "prefill")
    assert len(returned[-1]["output"]) == 1


def test_a_prompt_too_long_for_the_context_is_named_in_mid_stream(make_env, play, variant):
    requests = (Request("short", "aaaa", "x"), Request("long", "a" * 100, "x"))
    env = make_env(
        pool=variant({"target": 60}), workload=Workload("two", (requests,)), num_requests=2
    )
    for seed in range(20):
        try:
            episode = play(env, seed=seed)
            break
        except ValueError:
            continue  # the long one came first, and reset() raises for it
    info = episode.infos[-1]
    assert (episode.terminated, episode.truncated) == (False, True)
    assert info["request_id"] == "short"
    assert info["finish_reason"] == "length"
    assert len(info["output"]) == 24
    assert info["error"].startswith("request 'long': ValueError: prompt: 100 tokens")


def test_a_fault_on_the_way_gives_finite_rewards_and_a_mask(make_env, play, break_member):
    break_member("draft", math.nan, after=12)
    env = make_env()
    episode = play(env, env.action_names.index("draft@3"), seed=0)
    assert "error" in episode.infos[-1]
    assert 1 < len(episode.infos) < 12
    assert all(map(math.isfinite, episode.rewards))
    assert all(env.observation_space.contains(each) for each in episode.observations)
    assert all(info["action_mask"][0] for info in episode.infos)
