"""A replay is what the live engine does: same observations, same ``info``, under any plans."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MixtralConfig, MixtralForCausalLM

from specgym.engine.forward.eagle import EagleCheckpoint, EagleHead, EagleShape
from specgym.engine.members.eagle import EagleMember
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import perturbed, tiny_llama, tiny_tokenizer
from specgym.engine.timing import CountingClock
from specgym.envs import ReplayEnv
from specgym.envs.workloads import Request, Workload

REQUESTS = (
    Request("repeats", "the cat sat on the mat, the cat sat", "tiny"),
    Request("short", "ab", "tiny"),
    Request("code", "x = f(x) + f(y)\ny = f(", "tiny"),
)
CHAINS = (
    ("ngram", "target"),
    ("eagle", "target"),
    ("draft", "target"),
    ("ngram", "mid", "target"),
    ("eagle", "mid", "target"),
    ("draft", "mid", "target"),
)


def make_pool(target, drafters, tokenizer, chains):
    """Lookup, a random head, drafters and a target."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = EagleHead(EagleShape(config, (), True, len(tokenizer), 32))
    eagle = EagleMember("eagle", EagleCheckpoint(head.eval(), None, None, None), target)
    members = [NGramMember(), eagle, *drafters, ModelMember("target", target)]
    return ModelPool(members, tokenizer=tokenizer, chains=chains, k_values=(1, 2, 4))


@pytest.fixture(scope="module")
def dense():
    """Lookup, a head, two drafters that often agree, a dense target."""
    tokenizer = tiny_tokenizer()
    target = tiny_llama(0, vocab_size=len(tokenizer), max_position_embeddings=4096)
    drafters = [
        ModelMember(name, perturbed(target, noise, seed))
        for seed, (name, noise) in enumerate({"draft": 0.04, "mid": 0.01}.items())
    ]
    return make_pool(target, drafters, tokenizer, CHAINS)


@pytest.fixture(scope="module")
def mixture():
    """Lookup and a head before a mixture of experts."""
    tokenizer = tiny_tokenizer()
    config = MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target = MixtralForCausalLM(config).eval().requires_grad_(False)
    return make_pool(target, [], tokenizer, CHAINS[:2])


def assert_same(name, live, replayed):
    """Equal; numbers but for rounding, and half precision in what is stored so."""
    if isinstance(live, dict):
        assert live.keys() == replayed.keys(), name
        for key in live:
            assert_same(f"{name}.{key}", live[key], replayed[key])
    elif isinstance(live, list):
        assert len(live) == len(replayed), name
        for index, pair in enumerate(zip(live, replayed, strict=True)):
            assert_same(f"{name}[{index}]", *pair)
    elif isinstance(live, float):
        loose = 2e-3 if "divergence" in name or "experts" in name else 1e-6
        assert math.isclose(live, replayed, rel_tol=loose, abs_tol=loose), name
    elif isinstance(live, np.ndarray):
        assert live.tolist() == replayed.tolist(), name
    else:
        assert live == replayed, name


def assert_close(env, live, replayed):
    """Equal observations, but for half precision in what is stored so."""
    names = [feature.name for feature in env.features]
    far = ~np.isclose(replayed, live, rtol=2e-3, atol=1e-4)
    assert not {names[i]: (live[i], replayed[i]) for i in np.flatnonzero(far)}


def mean_experts(info):
    """The ``info``, with the mean alone of a forward's unique experts, of the target alone."""
    for forward in info["forwards"]:
        counts = forward["unique_experts"]
        forward["unique_experts"] = [float(np.mean(counts))] if counts else []
    return info


def play_both(live, replay, request, rng, **options):
    """Plays a request in both with the same actions, and compares all that they return."""
    seen, begun = live.reset(options={"request": request, **options})
    replayed, begun_too = replay.reset(options={"request": request.id, **options})
    begun["prefill_seconds"] = begun_too["prefill_seconds"]
    assert_same("reset", begun, begun_too)
    assert_close(live, seen, replayed)
    done = False
    while not done:
        masks = live.action_masks()
        assert masks.tolist() == replay.action_masks().tolist()
        is_careful = rng.random() < 0.9
        action = int(rng.choice(np.flatnonzero(masks) if is_careful else len(masks)))
        seen, reward, *ends, info = live.step(action)
        replayed, reward_too, *ends_too, info_too = replay.step(action)
        assert ends == ends_too
        assert_same("info", mean_experts(info), info_too)
        assert_same("reward", reward, reward_too)
        assert_close(live, seen, replayed)
        done = any(ends)


@pytest.mark.parametrize(
    ("kind", "stop", "exact"),
    [
        ("dense", (), True),
        ("dense", (" ", "3", "e"), True),
        ("dense", (), False),
        ("mixture", (), True),
        ("mixture", (" ", "3", "e"), True),
    ],
)
def test_a_replay_returns_what_the_live_engine_does(request, record, make_env, kind, stop, exact):
    pool = request.getfixturevalue(kind)
    workload = Workload("three", (REQUESTS,))
    live = make_env(pool=pool, workload=workload, stop=stop, exact=exact, clock=CountingClock(0.0))
    replay = ReplayEnv(record(pool, REQUESTS, stop=stop, exact=exact))
    live.reset(seed=0)
    replay.reset(seed=0)
    assert replay.action_names == live.action_names
    assert replay.features == live.features
    rng = np.random.default_rng(0)
    for round_ in range(4):
        for each in REQUESTS:
            play_both(live, replay, each, rng, divergence_every=round_)


def test_a_long_prompt_is_caught_up_in_several_forwards(dense, record, make_env):
    long = Request("long", "the cat sat on the mat; " * 15, "tiny")
    workload = Workload("long", ((long,),))
    live = make_env(pool=dense, workload=workload, max_new_tokens=40, clock=CountingClock(0.0))
    replay = ReplayEnv(record(dense, (long,), max_new_tokens=40))
    live.reset(seed=0)
    replay.reset(seed=0)
    for seed in range(3):
        play_both(live, replay, long, np.random.default_rng(seed))
