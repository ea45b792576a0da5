"""Faults that name their cause: memory that is not there, logits that are not finite; restarts."""

import pytest
import torch

from specgym.engine.decoding import decode_step, start
from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import decode, perturbed, tiny_llama, tiny_pool
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, EngineFault, Plan

PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)
PLAN = Plan(("draft", "mid", "target"), 3)


# Memory


def test_an_absurd_budget_names_the_buffer_its_size_and_the_way_out():
    pool = tiny_pool(max_position_embeddings=2**45)
    with pytest.raises(
        EngineFault, match=r"member 'target': out of memory for the .* of its cache"
    ):
        start(pool, [DecodeRequest(PROMPT, 2**44)], CountingClock())
    state, _ = decode(pool, [DecodeRequest(PROMPT, 4)])
    assert len(state.output()) == 4


@pytest.mark.parametrize("buffer", ["validity mask", "positions", "keys", "values", "features"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_buffer_is_named_when_there_is_no_memory_for_it(monkeypatch, buffer, error):
    from specgym.engine.forward import cache, cache_layers

    class NoRoom:
        dtype, device = torch.float32, torch.device("cpu")

        def new_zeros(self, shape):
            raise error

        def element_size(self):
            return 4

    def allocate(name, what, like, shape):
        return real(name, what, NoRoom() if what == buffer else like, shape)

    real = cache_layers.allocate
    for module in (cache, cache_layers):
        monkeypatch.setattr(module, "allocate", allocate)
    states = torch.zeros(2, 3, 5, 8)
    pattern = rf"'draft': out of memory for the {buffer} .*GB on cpu; lower max_new_tokens or the"

    def fill():
        memory = MaskedKVCache(1, 2, 64, torch.device("cpu"), torch.float32, name="draft")
        memory.write_features(states[:, 0])
        memory.buffers[0].update(states, states)

    with pytest.raises(EngineFault, match=pattern) as caught:
        fill()
    assert caught.value.__cause__ is error


def test_a_drafters_cache_that_does_not_fit_leaves_the_request_alive(monkeypatch):
    pool, clock = tiny_pool(3), CountingClock()
    expected = decode(pool, [DecodeRequest(PROMPT, 20)])[0].output()
    state = start(pool, [DecodeRequest(PROMPT, 20)], clock)
    decode_step(pool, state, PLAN.without_speculation(), clock)

    def refuse(batch_size, num_slots, kv_length=None, *, aligned=False):
        return MaskedKVCache(2, batch_size, 2**46, torch.device("cpu"), torch.float32, name="mid")

    monkeypatch.setattr(pool.members["mid"], "new_memory", refuse)
    with pytest.raises(EngineFault, match="member 'mid': out of memory for the validity mask"):
        decode_step(pool, state, PLAN, clock)
    monkeypatch.undo()
    while not state.is_finished:
        decode_step(pool, state, PLAN, clock)
    assert state.output() == expected


def test_a_forward_without_memory_names_member_role_and_size(monkeypatch):
    pool, clock = tiny_pool(3), CountingClock()
    state = start(pool, [DecodeRequest(PROMPT, 20)], clock)

    def forward(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(pool.members["target"], "forward", forward)
    pattern = r"'target': out of memory in a verify forward of 1 x 8 tokens; lower .*2 GiB"
    with pytest.raises(EngineFault, match=pattern):
        decode_step(pool, state, PLAN, clock)


# Logits


def poisoned(name, lean, spoil):
    """A tiny pool one of whose members is spoilt."""
    target = tiny_llama(3)
    models = {"draft": perturbed(target, 0.1, 1), "mid": perturbed(target, 0.05, 2)}
    models["target"] = target
    spoil(models[name])
    members = [ModelMember(each, model, lean=lean) for each, model in models.items()]
    return ModelPool([NGramMember(), *members])


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", ["draft", "mid", "target"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_is_named_by_layer_and_token(name, lean, value):
    """Token 2's embedding is bad, so the fault is in layer 0 and at the first 2 of the text."""

    def spoil(model):
        model.model.embed_tokens.weight[2] = value

    pool, clock = poisoned(name, lean, spoil), CountingClock()
    pattern = (
        rf"member '{name}': logits are not finite .*from the input of layer 0 on "
        rf"\(batch row 0, token 1 of the text\); check its weights"
    )
    state = start(pool, [DecodeRequest(PROMPT, 20)], clock)
    with pytest.raises(EngineFault, match=pattern):
        decode_step(pool, state, PLAN, clock)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_broken_layer_is_named_by_the_next_ones_input(lean, layer):
    def spoil(model):
        model.model.layers[layer].mlp.down_proj.weight[3] = float("nan")

    pool, clock = poisoned("mid", lean, spoil), CountingClock()
    where = (r"from the input of layer 1 on \(batch row 0, token 0", "it is the last layer or the")
    state = start(pool, [DecodeRequest(PROMPT, 20)] * 2, clock)
    with pytest.raises(EngineFault, match=where[layer]):
        decode_step(pool, state, PLAN, clock)


# Restarts


@pytest.mark.parametrize("name", ["draft", "mid", "target"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_step_that_is_interrupted_is_undone_and_a_new_start_is_clean(monkeypatch, name, moment):
    """Ctrl-C inside any member's forward, before or after it has taken its window in."""
    pool, clock = tiny_pool(3), CountingClock()
    expected = decode(pool, [DecodeRequest(PROMPT, 24)])[0].output()
    state = start(pool, [DecodeRequest(PROMPT, 24)], clock)
    decode_step(pool, state, PLAN, clock)
    tokens, member = list(state.tokens[0]), pool.members[name]
    forward = member.forward

    def interrupted(*args, **kwargs):
        if moment == "after":
            forward(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(member, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decode_step(pool, state, PLAN, clock)
    monkeypatch.undo()
    assert state.tokens[0] == tokens
    for memory in state.memories.values():
        memory.check_integrity()
    fresh = start(pool, [DecodeRequest(PROMPT, 24)], clock)
    for each in (fresh, state):  # both go on side by side
        while not each.is_finished:
            decode_step(pool, each, PLAN, clock)
        assert each.output() == expected
