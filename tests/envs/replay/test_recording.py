"""Recorded tables against the live engine: what a plan would get is what it gets."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from specgym.engine.forward.eagle import EagleCheckpoint
from specgym.engine.members.eagle import EagleMember
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import perturbed, tiny_llama, tiny_tokenizer
from specgym.engine.timing import CountingClock
from specgym.engine.training.eagle import init_eagle
from specgym.engine.types import DecodeRequest, SamplingParams
from specgym.envs import SpecDecodeEnv
from specgym.envs.pool_spec import Layout
from specgym.envs.replay.costs import fit_costs
from specgym.envs.replay.outcomes import make_tables
from specgym.envs.replay.recording import Recorder
from specgym.envs.replay.replay_env import ReplayEnv
from specgym.envs.replay.traces import TraceSet, check_trace
from specgym.envs.workloads import Request, Workload
from specgym.runs.traces.check import COUNTS
from specgym.runs.traces.random_plans import measured, walk_request

CHAINS = (
    ("ngram", "target"),
    ("eagle", "target"),
    ("draft", "target"),
    ("draft", "mid", "target"),
    ("ngram", "mid", "target"),
    ("ngram", "draft", "mid", "target"),
)
PROMPTS = (
    "the cat sat on the mat, the cat sat",
    "one two one two one",
    "x = f(x) + f(y)\ny = f(",
    "a",
)
REQUESTS = tuple(Request(f"r-{n}", text, "tiny") for n, text in enumerate(PROMPTS))


def make_pool(dtype=torch.float32, context=4096, eos_ids=()):
    tokenizer = tiny_tokenizer()
    target = tiny_llama(0, vocab_size=len(tokenizer), num_layers=4, max_position_embeddings=context)
    torch.manual_seed(5)
    head = init_eagle(target, (1, 2), len(tokenizer))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    drafters = {"draft": perturbed(target, 0.03, 1), "mid": perturbed(target, 0.01, 2)}
    target = target.to(dtype)
    eagle = EagleMember("eagle", EagleCheckpoint(head, None, None, None), target)
    models = [ModelMember(name, model.to(dtype)) for name, model in drafters.items()]
    return ModelPool(
        [NGramMember(), eagle, *models, ModelMember("target", target)],
        chains=CHAINS,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        name="tiny",
    )


@pytest.fixture(scope="module")
def full_pool():
    return make_pool()


def make_env(pool, budget=40, **changes):
    workload = Workload("tiny", (REQUESTS,))
    return SpecDecodeEnv(pool, workload, clock="counting", max_new_tokens=budget, **changes)


def record(pool, env, request, exact=True):
    trace = Recorder(pool, exact, CountingClock()).record(
        request, env.rows.decode_request(request), "train"
    )
    check_trace(trace, Layout.of(pool))
    return trace


def costs_of(pool, env):
    layout, iterations = Layout.of(pool), []
    for request in REQUESTS:
        begun, infos = walk_request(env, request, np.random.default_rng(3))
        iterations += measured(layout, begun, infos)
    return fit_costs(layout, iterations)


def replay_of(pool, env, trace):
    """The trace as an environment, with costs as the live one's clock has them."""
    about = {"exact": env.exact}
    return ReplayEnv(TraceSet((trace,), Layout.of(pool), costs_of(pool, env), about))


def assert_agrees(pool, env, request, trace, seeds=range(4)):
    """Walks the request under random plans; every count and every lag is the table's."""
    recorded = replay_of(pool, env, trace)
    options = {"request": request, "divergence_every": 1}
    for seed in seeds:
        rng, done = np.random.default_rng(seed), False
        _, info = env.reset(options=options)
        _, expected = recorded.reset(options=options)
        while not done:
            np.testing.assert_array_equal(info["action_mask"], expected["action_mask"])
            lags = [env.state.num_lagging(name) for name in recorded.layout.followers]
            assert lags == recorded.playback.feature_lags
            action = int(rng.choice(np.flatnonzero(info["action_mask"])))
            _, _, *ends, info = env.step(action)
            _, _, *expected_ends, expected = recorded.step(action)
            assert {key: info[key] for key in COUNTS} == {key: expected[key] for key in COUNTS}
            assert info["divergence"] == pytest.approx(expected["divergence"], abs=2e-3)
            assert info["unique_experts"] == pytest.approx(expected["unique_experts"], abs=1e-3)
            assert ends == expected_ends
            done = any(ends)
        assert info["output"] == trace.output.tolist()


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.id)
def test_every_plan_gets_what_was_recorded(full_pool, request_):
    env = make_env(full_pool)
    assert_agrees(full_pool, env, request_, record(full_pool, env, request_))


def test_bfloat16_in_exact_mode_too():
    pool = make_pool(torch.bfloat16)
    env = make_env(pool)
    assert_agrees(pool, env, REQUESTS[0], record(pool, env, REQUESTS[0]))


def test_without_exact_mode_in_float32(full_pool):
    env = make_env(full_pool, exact=False)
    trace = record(full_pool, env, REQUESTS[0], exact=False)
    assert_agrees(full_pool, env, REQUESTS[0], trace, seeds=range(2))


def test_an_end_in_the_middle_of_drafts(full_pool):
    """What a verification accepts beyond the text's end is counted as the engine counts it."""
    output = record(full_pool, make_env(full_pool), REQUESTS[0]).output
    ends = sorted({int(token): place for place, token in enumerate(output)}.values())
    for place in ends[:: max(len(ends) // 4, 1)]:
        pool = ModelPool(
            list(map(copy.copy, full_pool.members.values())),
            chains=CHAINS,
            tokenizer=full_pool.tokenizer,
            eos_ids=[int(output[place])],
        )
        env = make_env(pool)
        trace = record(pool, env, REQUESTS[0])
        assert trace.finish_reason == "eos"
        assert len(trace) <= place + 1
        assert_agrees(pool, env, REQUESTS[0], trace, seeds=range(2))


def test_the_end_of_the_context():
    pool = make_pool(context=64)
    env = make_env(pool, budget=60)
    trace = record(pool, env, REQUESTS[0])
    assert trace.finish_reason == "context"
    assert_agrees(pool, env, REQUESTS[0], trace, seeds=range(2))


def test_unique_experts_are_those_of_the_verification():
    config = MixtralConfig(
        vocab_size=98, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=512,
    )  # fmt: skip
    torch.manual_seed(0)
    target = MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    members = [NGramMember(), ModelMember("target", target)]
    pool = ModelPool(members, tokenizer=tiny_tokenizer(), name="mixture")
    env = make_env(pool)
    for request in REQUESTS[:2]:
        trace = record(pool, env, request)
        assert trace.experts.max() > 2.0
        assert_agrees(pool, env, request, trace, seeds=range(3))


def test_recorded_seconds_are_the_counting_clocks(full_pool):
    """On a clock that models time the predicted seconds are the measured ones."""
    env = make_env(full_pool)
    recorded = replay_of(full_pool, env, record(full_pool, env, REQUESTS[0]))
    recorded.reset()
    for info in walk_request(env, REQUESTS[0], np.random.default_rng(9))[1]:
        expected = recorded.step(info["asked_action"])[-1]
        assert expected["iter_seconds"] == pytest.approx(info["iter_seconds"], rel=0.02)


def test_sampling_is_refused(full_pool):
    request = DecodeRequest((1, 2, 3), 8, sampling=SamplingParams(temperature=1.0))
    recorder = Recorder(full_pool, True, CountingClock())
    with pytest.raises(ValueError, match="greedy"):
        recorder.record(REQUESTS[0], request, "train")


def test_fewer_drafts_follow_by_prefix(full_pool):
    """Tables of some of the K values are columns of the tables of all."""
    env = make_env(full_pool)
    trace, layout = record(full_pool, env, REQUESTS[1]), Layout.of(full_pool)
    costs = costs_of(full_pool, env)
    everything = make_tables(trace, layout, costs)
    few = make_tables(trace, layout, costs, k_values=(2, 4))
    plans = list(layout.plans())
    columns = [plans.index(plan) for plan in layout.with_k_values((2, 4)).plans()]
    for field in dataclasses.fields(few):
        name = field.name
        if name in ("tokens", "seconds", "allowed", "uses", "lag_after", "divergence"):
            assert (getattr(few, name) == getattr(everything, name)[:, columns]).all(), name
    with pytest.raises(ValueError, match="k_values"):
        make_tables(trace, layout, costs, k_values=(5,))
