"""On a CUDA device: graphs give the eager results, and nothing waits where nothing must."""

import logging

import pytest
import torch

from specgym.engine.decoding import decode_step, start
from specgym.engine.forward.capture import CudaCapture, accelerate, no_waiting
from specgym.engine.forward.graphs import GraphRunner
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import decode, perturbed, random_plans, tiny_llama
from specgym.engine.timing import WallClock
from specgym.engine.types import DecodeRequest, Plan, SamplingParams

pytestmark = pytest.mark.gpu
PROMPT = (5, 9, 2, 7, 9, 2, 7)


def make_pool(*, graphs, dtype=torch.float32, lean=True):
    target = tiny_llama(7)
    models = {"draft": perturbed(target, 0.15), "mid": perturbed(target, 0.05), "target": target}
    members = [
        ModelMember(name, model.to(dtype).cuda(), lean=lean) for name, model in models.items()
    ]
    accelerate(members, graphs=graphs)
    return ModelPool([NGramMember(), *members])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "hooked"])
def test_chains_give_the_eager_tokens(exact, lean):
    requests = [DecodeRequest(PROMPT, 60), DecodeRequest((9,), 40)]
    outputs = []
    for graphs in (False, True):
        pool = make_pool(graphs=graphs, lean=lean)
        for seed in range(2):
            state, _ = decode(pool, requests, random_plans(pool, seed), exact=exact)
            outputs.append([state.output(row) for row in range(2)])
        runner = pool.model("target").graphs
        assert (runner is not None) == graphs
        assert runner is None or (runner.replays and not runner.reason)
    assert all(output == outputs[0] for output in outputs)


def test_in_bf16_exact_mode_chains_are_plain_decoding():
    pool = make_pool(graphs=True, dtype=torch.bfloat16)
    plain, _ = decode(pool, [DecodeRequest(PROMPT, 60)])
    for seed in range(3):
        state, _ = decode(pool, [DecodeRequest(PROMPT, 60)], random_plans(pool, seed))
        assert state.output() == plain.output()


def test_sampled_tokens_are_the_eager_ones():
    sampling = SamplingParams(temperature=1.0, seed=3)
    outputs = []
    for graphs in (False, True):
        pool = make_pool(graphs=graphs)
        state, _ = decode(pool, [DecodeRequest(PROMPT, 40, sampling)], random_plans(pool, 1))
        outputs.append(state.output())
    assert outputs[0] == outputs[1]


def test_a_forward_does_not_wait_for_the_device():
    pool = make_pool(graphs=True)
    member = pool.model("target")
    memory = member.new_memory(1, 64, 64)
    for window in (list(PROMPT), [1, 2]):
        member.forward(memory, [window], 8)
    with no_waiting():
        member.forward(memory, [[3, 4, 5]], 8)
        memory.keep([len(PROMPT) + 3])


def test_a_forward_that_waits_falls_back_with_a_reason(caplog):
    member = ModelMember("target", tiny_llama(7).cuda(), lean=False)
    run = member.run

    def waiting(*arguments):
        logits, states = run(*arguments)
        assert logits is None or float(logits.sum()) < 1e9  # reads a number: the host waits
        return logits, states

    member.run = waiting
    member.graphs = GraphRunner(member, CudaCapture(member.device))
    memory = member.new_memory(1, 64)
    with caplog.at_level(logging.WARNING, logger="specgym"):
        for window in (list(PROMPT), [1], [2]):
            member.forward(memory, [window])
    assert "could not be captured" in member.graphs.reason
    assert len(caplog.records) == 1


def test_forwards_are_timed_by_events_without_their_capture():
    pool = make_pool(graphs=True)
    clock = WallClock("cuda")
    state = start(pool, [DecodeRequest(PROMPT, 40)], clock)
    for _ in range(3):
        result = decode_step(pool, state, Plan(("draft", "target"), 3), clock)
        assert all(cost.seconds > 0 for cost in result.forwards)
        assert sum(cost.seconds for cost in result.forwards) <= result.seconds * 1.05
    assert pool.model("target").setup_seconds > 0
