"""Exact mode: in bf16, at batch 1, nothing a request computes depends on its plans."""

import pytest
import torch

from specgym.engine.members.model import ModelMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import decode, perturbed, random_plans, tiny_llama, tiny_pool
from specgym.engine.types import DecodeRequest, Plan

BUDGET = 48
PROMPTS = ((9,), (1, 2, 3, 1, 2, 3, 1), tuple(range(60, 0, -1)))


@pytest.fixture(scope="module", params=[True, False], ids=["lean", "hooked"])
def pool(request):
    return tiny_pool(5, k_values=range(1, 9), dtype=torch.bfloat16, lean=request.param)


def held(state, name):
    """Keys and values of every layer at the tokens that plain decoding holds too."""
    memory = state.memories[name]
    count = memory.num_valid(0)
    return count, [
        buffer[:, :, :count] for layer in memory.layers for buffer in (layer.keys, layer.values)
    ]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_output_and_memory_are_those_of_plain_decoding_bit_for_bit(pool, prompt):
    request = DecodeRequest(prompt, BUDGET)
    plain, _ = decode(pool, [request])
    count, expected = held(plain, "target")
    assert count == len(prompt) + BUDGET - 1
    for seed in range(3):
        state, results = decode(pool, [request], random_plans(pool, seed))
        assert state.output() == plain.output()
        assert any(result.num_drafted > result.num_accepted for result in results)
        for buffer, wanted in zip(held(state, "target")[1], expected, strict=True):
            assert torch.equal(buffer, wanted)


@pytest.mark.parametrize("name", ["draft", "mid"])
def test_what_a_drafter_remembers_does_not_depend_on_the_path(pool, name):
    """Caught up in one go after 30 plain tokens, or used all along: the same bits."""
    request = DecodeRequest(PROMPTS[1], BUDGET)
    plan = Plan((name, "target"), 4)
    always, _ = decode(pool, [request], lambda state: plan)
    late, _ = decode(
        pool,
        [request],
        lambda state: plan if state.num_generated(0) > 30 else plan.without_speculation(),
    )
    mixed, _ = decode(pool, [request], random_plans(pool, 1))
    for other in (late, mixed):
        count = min(held(always, name)[0], held(other, name)[0])
        assert count > len(request.prompt) + 25
        for left, right in zip(held(always, name)[1], held(other, name)[1], strict=True):
            assert torch.equal(left[:, :, :count], right[:, :, :count])


def test_tokens_a_plan_yields_at_a_position_are_a_fact(pool):
    """Reached by any path, a plan at a position proposes and commits the same."""
    request = DecodeRequest(PROMPTS[1], BUDGET)
    seen = {}
    for seed in range(5):
        plans, state = random_plans(pool, seed), None
        picked = []

        def pick(state, plans=plans, picked=picked):
            picked.append((state.num_generated(0), plans(state)))
            return picked[-1][1]

        state, results = decode(pool, [request], pick)
        for key, result in zip(picked, results, strict=True):
            fact = (result.tokens, result.proposed_per_level, result.accepted_per_level)
            assert seen.setdefault(key, fact) == fact
        assert state.is_finished
    assert len(seen) < 5 * len(results)


def test_window_and_attended_length_are_fixed_per_request():
    shapes = set()
    target = tiny_llama(dtype=torch.bfloat16)
    pool = ModelPool(
        [
            ModelMember("draft", perturbed(target, 0.1), lean=False),
            ModelMember("target", target, lean=False),
        ]
    )

    def watch(module, args, kwargs):
        shapes.add((kwargs["input_ids"].shape[1], kwargs["attention_mask"].shape[-1]))

    for name in ("draft", "target"):
        pool.model(name).model.register_forward_pre_hook(watch, with_kwargs=True)
    prompt = tuple(range(20))
    state, _ = decode(pool, [DecodeRequest(prompt, 40)], random_plans(pool, 0))
    assert state.num_slots == 128  # 20 + 40 + 8, rounded up to 64
    assert shapes == {(len(prompt) - 1, 128), (pool.window, 128)}
    shapes.clear()
    decode(pool, [DecodeRequest(prompt, 40)], random_plans(pool, 0), exact=False)
    assert len(shapes) > 10


@pytest.mark.parametrize("num_plain", [0, 1, 12, 30])
def test_a_drafters_catch_up_has_the_same_shapes_whenever_it_comes(num_plain):
    pool = tiny_pool()
    plan = Plan(("draft", "target"), 3)
    _, results = decode(
        pool,
        [DecodeRequest(tuple(range(20)), 40)],
        lambda state: plan if state.num_generated(0) >= num_plain else plan.without_speculation(),
    )
    costs = results[num_plain].forwards
    caught_up = [cost for cost in costs if cost.role == "catchup"]
    assert [cost.num_tokens for cost in caught_up[:1]] == [19]
    assert caught_up[0].num_rows == 19
    assert all(cost.num_rows == pool.window for cost in costs if cost not in caught_up[:1])
    assert sum(cost.num_catchup for cost in costs if cost.member == "draft") == 19 + num_plain
