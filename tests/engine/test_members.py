"""Members: prompt lookup proposes what followed before; faults of a model are named at once."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgym.engine.decoding import decode_step, start
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import TableLM, decode, perturbed, table_pool, tiny_llama, tiny_pool
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, EngineFault, Plan, SamplingParams

PROMPT = (1, 2, 3, 4, 1, 2, 3)


def propose(tokens, k, window=3):
    member = NGramMember(max_window=window)
    return member.propose(member.new_memory(), tokens, k)


@pytest.mark.parametrize(
    ("tokens", "k", "proposed"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, (9, 1)),
        ([1, 2, 3], 4, ()),
        ([7], 4, ()),
        ([5, 6, 5], 1, (6,)),
        ([1, 2, 8, 1, 2, 9, 1, 2], 2, (9, 1)),  # the latest occurrence
        ([7, 1, 2, 8, 0, 1, 2, 9, 7, 1, 2], 1, (8,)),  # the longest match first
        ([1, 2, 3, 4, 5, 2, 3, 6, 1, 2, 3], 1, (4,)),
        ([4, 4], 5, (4, 4, 4, 4, 4)),  # a loop is proposed as a loop
        ([1, 2, 3, 1, 2, 3], 7, (1, 2, 3, 1, 2, 3, 1)),
    ],
)
def test_prompt_lookup_proposes_what_followed_the_latest_longest_match(tokens, k, proposed):
    assert propose(tokens, k) == proposed


def test_prompt_lookup_with_a_window_of_one_and_without_any():
    assert propose([1, 2, 8, 3, 2, 9, 1, 2], 1, window=1) == (9,)
    with pytest.raises(ValueError, match="max_window: must be >= 1 token; got 0"):
        NGramMember(max_window=0)


def search(tokens, k, window):
    """Prompt lookup by searching all of the text."""
    for size in range(min(window, len(tokens)), 0, -1):
        for stop in range(len(tokens) - 1, size - 1, -1):
            if tokens[stop - size : stop] == tokens[-size:]:
                text = list(tokens)
                for step in range(k):
                    text.append(text[stop + step])
                return tuple(text[len(tokens) :])
    return ()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    k=st.integers(1, 9),
    window=st.integers(1, 4),
    grown=st.lists(st.integers(0, 30), max_size=4),
)
def test_prompt_lookup_is_a_search_of_the_text_however_the_index_grew(tokens, k, window, grown):
    member = NGramMember(max_window=window)
    memory = member.new_memory()
    for length in grown:
        memory.extend(tokens[:length])
    assert member.propose(memory, tokens, k) == search(tokens, k, window)


@pytest.mark.parametrize("compiled", [True, False])
def test_forward_returns_one_row_of_logits_per_token_and_none_when_not_needed(compiled):
    """The compiled form computes no pads, so none are returned."""
    member = ModelMember("target", tiny_llama(), compiled=compiled)
    assert (member.compiled is not None) == compiled
    memory = member.new_memory(2, 32)
    assert member.forward(memory, [[1, 2], [3]], need_logits=False) is None
    assert member.forward(memory, [[1], [3, 4, 5]]).shape == (2, 3, 61)
    assert member.forward(memory, [[1], []], 8).shape == (2, 1 if compiled else 8, 61)
    assert [memory.num_valid(row) for row in (0, 1)] == [4, 4]


@pytest.mark.parametrize("compiled", [True, False])
def test_forward_does_not_run_past_the_context(compiled):
    member = ModelMember("target", tiny_llama(max_position_embeddings=16), compiled=compiled)
    memory = member.new_memory(1, 64)
    member.forward(memory, [list(range(15))])
    member.forward(memory, [[1]], 8)
    with pytest.raises(AssertionError, match="17 tokens overrun"):
        member.forward(memory, [[1]])


def test_size_is_counted_before_the_weights_are_packed():
    model = tiny_llama(dtype=torch.bfloat16)
    count = sum(weight.numel() for weight in model.parameters())
    member = ModelMember("target", model)
    assert (member.num_parameters, member.num_bytes) == (count, 2 * count)
    assert member.clock_cost == pytest.approx(count * 1e-10)
    assert member.context_limit == 512


FORMS = {
    "compiled": {},
    "fused": {"compiled": False},
    "hooked": {"lean": False},
}


def poisoned_pool(name, value, form):
    """A tiny pool, and a switch that ruins one member's logits by its last norm."""
    target = tiny_llama(3)
    models = {"draft": perturbed(target, 0.1, 1), "mid": perturbed(target, 0.05, 2)}
    models["target"] = target
    weight = models[name].model.norm.weight
    members = {each: ModelMember(each, model, **FORMS[form]) for each, model in models.items()}
    compiled = members[name].compiled
    assert (compiled is not None) == (form == "compiled")
    if compiled is not None:  # it has a copy
        arena, address = compiled.program.arena, compiled.final_norm.weight
        weight = torch.from_numpy(arena.view(address, len(weight)))
    good = weight.clone()

    def turn(on):
        weight.copy_(torch.full_like(good, value) if on else good)

    return ModelPool([NGramMember(), *members.values()]), turn


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["draft", "mid", "target"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_a_fault_that_names_the_member(
    name, value, form, temperature
):
    """vllm#53029: at once, at each level, and the state can go on under another plan."""
    pool, turn = poisoned_pool(name, value, form)
    plan, clock = Plan(("draft", "mid", "target"), 3), CountingClock()
    request = DecodeRequest(PROMPT, 20, SamplingParams(temperature))
    state = start(pool, [request], clock)
    decode_step(pool, state, plan, clock)
    tokens = list(state.tokens[0])
    turn(True)
    with pytest.raises(EngineFault, match=f"member '{name}': logits are not finite"):
        decode_step(pool, state, plan, clock)
    turn(False)
    assert state.tokens[0] == tokens
    for memory in state.memories.values():
        memory.check_integrity()
        assert memory.num_valid(0) <= len(tokens) - 1
    while not state.is_finished:
        decode_step(pool, state, plan, clock)
    if not temperature:
        assert state.output() == decode(pool, [request])[0].output()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    ("name", "call", "positions"),
    [("target", 1, 0), ("target", 1, 2), ("target", 1, slice(None)), ("draft", 4, slice(None))],
)
@pytest.mark.parametrize("exact", [True, False])
def test_a_fault_in_any_layer_at_any_position_is_seen_and_leaves_no_poison(
    name, call, positions, layer, exact
):
    """What the ruined forward wrote into the cache must not reach later forwards."""
    target = tiny_llama(3, num_layers=3)
    models = {"draft": perturbed(target, 0.0), "target": target}
    pool = ModelPool([ModelMember(each, model, lean=False) for each, model in models.items()])
    request, clock, plan = DecodeRequest(PROMPT, 30), CountingClock(), Plan(("draft", "target"), 4)
    expected, _ = decode(pool, [request], exact=exact)
    state = start(pool, [request], clock, exact=exact)
    decode_step(pool, state, plan, clock)
    calls = itertools.count(1)

    def ruin(module, args, output):
        output = output.clone()
        if next(calls) == call:
            output[:, positions] = float("nan")
        return output

    handle = models[name].model.layers[layer].register_forward_hook(ruin)
    with pytest.raises(EngineFault, match=rf"member '{name}'.*position"):
        decode_step(pool, state, plan, clock)
    handle.remove()
    while not state.is_finished:
        decode_step(pool, state, plan, clock)
    assert state.output() == expected.output()


def test_minus_infinity_rules_a_token_out_and_is_no_fault():
    logits = torch.zeros(4, 4)
    logits[:, 0] = -torch.inf
    logits[:, 2] = 1.0
    pool = table_pool([logits, logits])
    for temperature in (0.0, 1.0):
        request = DecodeRequest((1,), 20, SamplingParams(temperature))
        state, results = decode(pool, [request], lambda state: Plan(("draft", "target"), 2))
        assert 0 not in state.output()
        assert 0 < results[0].draft_entropy < 1.1
    ruled_out = torch.full((4, 4), -torch.inf)
    with pytest.raises(EngineFault, match="member 'target'"):
        decode(table_pool([logits, ruled_out]), [DecodeRequest((1,), 4)])


def test_a_table_ignores_the_cache_and_says_its_row():
    table = torch.arange(9.0).view(3, 3)
    member = ModelMember("target", TableLM(table))
    memory = member.new_memory(1, 16)
    logits = member.forward(memory, [[2, 0]], 4)
    assert torch.equal(logits[0, :2], table[[2, 0]])
    assert memory.num_valid(0) == 2


def test_twins_share_nothing_with_their_model():
    model = tiny_llama()
    twin = perturbed(model, 0.0)
    assert twin.config is not model.config
    twin.model.norm.weight.data += 1
    assert not torch.equal(twin.model.norm.weight, model.model.norm.weight)
    assert tiny_pool().model("draft").vocab_size == 61
