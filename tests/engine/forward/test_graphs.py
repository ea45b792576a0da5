"""Captured forwards: their bookkeeping, driven on a CPU by a capture that records.

They are CUDA's, so members have the fused forward.
"""

import copy
import logging

import pytest
import torch
import transformers

from specgym.engine.decoding import decode_step, start
from specgym.engine.forward.capture import EagerCapture, accelerate
from specgym.engine.forward.experts import find_experts
from specgym.engine.forward.graphs import SMALLEST_BUCKET, GraphRunner, bucket_of
from specgym.engine.members.model import ModelMember
from specgym.engine.testing import decode, random_plans, serve, tiny_llama, tiny_mixtral, tiny_pool
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, Plan

PROMPT = (5, 9, 2, 7, 9, 2, 7)


class Failing:
    """A capture that cannot be done, and counts how often it was asked."""

    def __init__(self):
        self.num_asked = 0

    def __call__(self, forward, inputs):
        self.num_asked += 1
        forward(inputs)  # what a warm-up would have written by then
        raise RuntimeError("operation not permitted when stream is capturing\nmore lines")


def run_captured(pool, capture=None, **changes):
    """Gives every model of the pool captured forwards; returns the capture."""
    capture = capture or EagerCapture()
    for member in pool.members.values():
        if isinstance(member, ModelMember):
            member.graphs = GraphRunner(member, capture, **changes)
    return capture


def make_member(**changes):
    member = ModelMember("target", tiny_llama(3, **changes), compiled=False)
    member.graphs = GraphRunner(member, EagerCapture())
    return member


def feed(member, memory, windows):
    """Logits of windows fed one after another."""
    return [member.forward(memory, [list(window)]) for window in windows]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("lean", [True, False], ids=["lean", "hooked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chains_give_the_eager_tokens(exact, lean, dtype):
    requests = [DecodeRequest(PROMPT, 40)]
    for seed in range(2):
        eager, captured = (tiny_pool(7, lean=lean, dtype=dtype, compiled=False) for _ in range(2))
        capture = run_captured(captured)
        expected, _ = decode(eager, requests, random_plans(eager, seed), exact=exact)
        state, _ = decode(captured, requests, random_plans(captured, seed), exact=exact)
        if exact or dtype == torch.float32:
            assert state.output() == expected.output()
        assert capture.num_replays > capture.num_captures > 0


def test_in_exact_mode_the_bits_are_the_eager_ones():
    outputs, held = [], []
    for is_captured in (False, True):
        pool = tiny_pool(7, dtype=torch.bfloat16, compiled=False)
        if is_captured:
            run_captured(pool)
        state, _ = decode(pool, [DecodeRequest(PROMPT, 40)], random_plans(pool, 3))
        memory = state.memories["target"]
        outputs.append(state.output())
        held.append([layer.keys[:, :, : memory.num_used] for layer in memory.buffers])
    assert outputs[0] == outputs[1]
    assert all(torch.equal(a, b) for a, b in zip(*held, strict=True))


def test_rows_of_a_batch_accept_different_lengths():
    requests = [DecodeRequest((9,), 30), DecodeRequest(PROMPT, 24), DecodeRequest(PROMPT * 3, 40)]
    eager, captured = tiny_pool(2, compiled=False), tiny_pool(2, compiled=False)
    capture = run_captured(captured)
    expected, _ = decode(eager, requests, exact=False)
    state, _ = decode(captured, requests, random_plans(captured, 5), exact=False)
    assert [state.output(row) for row in range(3)] == [expected.output(row) for row in range(3)]
    assert capture.num_replays > 5


@pytest.mark.parametrize("exact", [True, False])
def test_rows_that_join_are_decoded_like_eager_ones(exact):
    prompts = (PROMPT, (9,), (4, 4), PROMPT * 3, (8, 1, 8))
    queue = [DecodeRequest(prompt, 14 + 3 * i) for i, prompt in enumerate(prompts)]
    dtype = torch.bfloat16 if exact else torch.float32
    eager, captured = (
        tiny_pool(2, dtype=dtype, compiled=False),
        tiny_pool(2, dtype=dtype, compiled=False),
    )
    capture = run_captured(captured)
    expected, outputs = (
        serve(pool, queue, 3, random_plans(pool, 6), exact=exact) for pool in (eager, captured)
    )
    assert outputs == expected
    assert capture.num_replays > 5
    assert {key.is_ragged for key in captured.model("target").graphs.replays} == {exact}


def test_a_row_by_itself_and_a_heard_router_are_not_replayed():
    member = ModelMember("target", tiny_mixtral(3), compiled=False)
    member.graphs = GraphRunner(member, EagerCapture())
    memory = member.new_memory(2, 64)
    member.forward(memory, [[1, 2], [3]])
    with memory.alone(1) as view:
        member.forward(view, [[4, 5]])
    member.dispatch.choices = []
    member.forward(memory, [[6], [7]])
    assert len(member.dispatch.choices) == 2
    assert not member.graphs.replays


def test_features_of_tapped_layers_are_kept():
    eager, captured = ModelMember("target", tiny_llama(3), compiled=False), make_member()
    windows, features = (PROMPT, (4,), (8, 2), (1,)), []
    for member in (eager, captured):
        member.taps = (0, 1, 2)
        memory = member.new_memory(1, 64)
        feed(member, memory, windows)
        features.append(memory.features_BSF[:, : memory.num_used])
    torch.testing.assert_close(*features)


def test_a_graph_is_made_for_tokens_bucket_and_what_is_read():
    member = make_member(max_position_embeddings=2048)
    memory, runner = member.new_memory(1, 600), member.graphs
    member.forward(memory, [list(range(40))])  # a prefill: too long, and nothing to lie in yet
    assert not runner.replays
    for window in ([1], [2], [1, 2], [3]):
        member.forward(memory, [window])
    member.forward(memory, [[4]], last_only=True)
    member.forward(memory, [[4]], need_logits=False)
    keys = list(runner.replays)
    assert {(key.tokens, key.need_logits, key.last_only) for key in keys} == {
        (1, True, False),
        (2, True, False),
        (1, True, True),
        (1, False, False),
    }
    assert {key.length for key in keys} == {SMALLEST_BUCKET}
    member.forward(memory, [[1] * 210])
    member.forward(memory, [[1]])
    assert {key.length for key in runner.replays} == {256, 512}


def test_buckets_are_powers_of_two_and_exact_mode_has_its_own_length():
    assert [bucket_of(n) for n in (1, 256, 257, 1000)] == [256, 256, 512, 1024]
    member = make_member()
    assert member.new_memory(1, 320).num_slots == 512
    memory = member.new_memory(1, 320, kv_length=320)
    assert memory.num_slots == 320
    feed(member, memory, (PROMPT, (1,)))
    assert next(iter(member.graphs.replays)).length == 320


def test_logits_outlive_the_next_replay():
    member = make_member()
    memory = member.new_memory(1, 64)
    feed(member, memory, (PROMPT, (1,)))
    first = member.forward(memory, [[2]])
    kept = first.clone()
    member.forward(memory, [[3]])
    assert torch.equal(first, kept)


def test_memories_take_turns_on_the_stage():
    member, plain = make_member(), ModelMember("target", tiny_llama(3), compiled=False)
    pairs = [(m, m.new_memory(1, 64)) for m in (member, plain)]
    others = [(m, m.new_memory(1, 64)) for m in (member, plain)]
    for window in (PROMPT, (1,), (2, 3), (4,)):
        for turn in (pairs, others):
            tokens = [token + 1 for token in window] if turn is others else list(window)
            ours, expected = (m.forward(memory, [tokens]) for m, memory in turn)
            torch.testing.assert_close(ours, expected)
    keys = [[layer.keys for layer in memory.buffers] for _, memory in (pairs[0], others[0])]
    assert not any(a.data_ptr() == b.data_ptr() for a, b in zip(*keys, strict=True))
    assert len(member.graphs.stages) == 1


def test_a_copied_memory_goes_on_by_itself():
    member = make_member()
    memory = member.new_memory(1, 64)
    feed(member, memory, (PROMPT, (1,)))
    twin = copy.deepcopy(memory)
    left = feed(member, memory, ((2,), (3,)))
    right = feed(member, twin, ((2,), (3,)))
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_buffers_made_anew_are_moved_in_again():
    member, plain = make_member(), ModelMember("target", tiny_llama(3), compiled=False)
    results = []
    for each in (member, plain):
        memory = each.new_memory(1, 64)
        feed(each, memory, (PROMPT, (1,)))
        for layer in memory.buffers:
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
        results.append(feed(each, memory, ((2,), (3,))))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_larger_memory_has_a_larger_stage_and_drops_the_old_graphs():
    member = make_member(max_position_embeddings=2048)
    small, large = member.new_memory(1, 64), member.new_memory(1, 600)
    feed(member, small, (PROMPT, (1,)))
    old = next(iter(member.graphs.replays.values()))
    expected = feed(
        ModelMember("target", tiny_llama(3), compiled=False), copy.deepcopy(small), ((2,),)
    )
    feed(member, large, (PROMPT, (1,)))
    assert member.graphs.stages[1].cache.num_slots == 1024
    assert old not in member.graphs.replays.values()
    torch.testing.assert_close(feed(member, small, ((2,),)), expected)
    assert member.graphs.stages[1].cache.num_slots == 1024


def test_batch_sizes_have_stages_of_their_own():
    member = make_member()
    for batch in (1, 2, 1):
        memory = member.new_memory(batch, 64)
        for window in (PROMPT, (1,)):
            member.forward(memory, [list(window)] * batch)
    assert sorted(member.graphs.stages) == [1, 2]
    assert sorted(key.batch for key in member.graphs.replays) == [1, 2]


def test_only_so_many_graphs_are_kept():
    pool = tiny_pool(1, compiled=False)
    run_captured(pool, max_graphs=2)
    decode(pool, [DecodeRequest(PROMPT, 40)], random_plans(pool, 0), exact=False)
    assert all(len(pool.model(name).graphs.replays) <= 2 for name in ("draft", "mid", "target"))


def test_a_failed_capture_falls_back_with_one_reason(caplog):
    eager, captured = tiny_pool(7, compiled=False), tiny_pool(7, compiled=False)
    capture = run_captured(captured, Failing())
    requests = [DecodeRequest(PROMPT, 30)]
    with caplog.at_level(logging.WARNING, logger="specgym"):
        state, _ = decode(captured, requests, random_plans(captured, 1))
    expected, _ = decode(eager, requests, random_plans(eager, 1))
    assert state.output() == expected.output()
    assert capture.num_asked == 3
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert messages[0].startswith("member '")
    assert "runs eagerly" in messages[0]
    assert "not permitted when stream is capturing)" in messages[0]


def test_after_a_fault_the_next_plan_runs_on():
    pool, twin = tiny_pool(4, compiled=False), tiny_pool(4, compiled=False)
    run_captured(pool)
    states = [start(each, [DecodeRequest(PROMPT, 20)], CountingClock()) for each in (pool, twin)]
    plan, none = Plan(("draft", "target"), 3), Plan(("target",), 0)
    clock = CountingClock()
    decode_step(pool, states[0], plan, clock)
    decode_step(twin, states[1], plan, clock)
    target = pool.model("target")
    run, target.graphs.capture = target.run, Failing()
    target.graphs.replays.clear()
    target.run = lambda *arguments: (_ for _ in ()).throw(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        decode_step(pool, states[0], plan, clock)
    target.run = run
    for each, state in zip((pool, twin), states, strict=True):
        while not state.is_finished:
            decode_step(each, state, none, clock)
    assert states[0].output() == states[1].output()


def make_mixture():
    config = transformers.MixtralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(config).eval().requires_grad_(False)
        for name, value in model.named_parameters():
            if "experts" in name or "gate" in name:
                value.normal_(0.0, 0.2)
    return model


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "hooked"])
def test_mixtures_replay_the_grouped_products_and_their_loads(lean):
    results = []
    for is_captured in (False, True):
        model = make_mixture()
        kept = [(experts, dict(experts.named_parameters())) for _, experts in find_experts(model)]
        member = ModelMember("target", model, lean=lean, compiled=False)
        assert (member.lean is not None) == lean
        for experts, weights in kept:
            del experts.bank  # an accelerator has none, but the weights
            for name, weight in weights.items():
                setattr(experts, name, weight)
        if is_captured:
            member.graphs = GraphRunner(member, EagerCapture())
        memory, seen = member.new_memory(1, 64, 64), []
        member.forward(memory, [list(PROMPT)])
        for window in ([1, 2], [3], [4], [5, 6, 7]):
            logits = member.forward(memory, [window], 8)
            seen.append((logits[:, : len(window)], member.dispatch.tokens_per_expert))
        results.append(seen)
    for (logits, loads), (expected, wanted) in zip(*reversed(results), strict=True):
        torch.testing.assert_close(logits, expected)
        assert loads == wanted


def test_on_a_cpu_nothing_is_captured_and_the_log_can_say_so(caplog):
    pool = tiny_pool()
    with caplog.at_level(logging.INFO, logger="specgym"):
        accelerate(pool.members.values())
    assert pool.model("target").graphs is None
    assert [r.levelname for r in caplog.records] == ["INFO"] * 3
    assert "member 'target' runs eagerly: there are no CUDA graphs on this device" in caplog.text
