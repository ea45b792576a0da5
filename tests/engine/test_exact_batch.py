"""Exact mode in a batch: in bf16 nothing a row computes depends on the other rows or on plans."""

import random

import pytest
import torch

from specgym.engine.decoding import decode_step, start
from specgym.engine.joining import join
from specgym.engine.members.eagle_memory import EagleMemory
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest

REQUEST = DecodeRequest((1, 2, 3, 1, 2, 3, 1), 40)
ROW_TOKENS = 80


class Neighbours:
    """Seeded requests for the other rows."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def draw(self):
        length, budget = self.rng.randrange(1, 30), self.rng.randrange(1, 25)
        return DecodeRequest(tuple(self.rng.randrange(61) for _ in range(length)), budget)


def run(pool, size, row, seed, pick, wait=0):
    """A request's output in this row, and the bits that each member remembers of its text.

    Args:
        seed: Seeds the neighbours; a new one joins whenever a row comes free.
        pick: Chooses each step's plan.
        wait: Tokens that another request gets in the row before; 0 starts with the request.
    """
    clock, neighbours = CountingClock(), Neighbours(seed)
    requests = [neighbours.draw() for _ in range(size)]
    requests[row] = DecodeRequest((4, 5), wait) if wait else REQUEST
    state = start(pool, requests, clock, row_tokens=ROW_TOKENS)
    while state.requests[row] is not REQUEST or state.is_active(row):
        for each in range(size):
            if not state.is_active(each):
                join(pool, state, each, REQUEST if each == row else neighbours.draw(), clock)
        decode_step(pool, state, pick(state), clock)
    return state.output(row), {name: held(state, name, row) for name in state.memories}


def held(state, name, row):
    """Keys and values of every layer at the row's committed tokens."""
    memory = state.memories[name]
    behind = isinstance(memory, EagleMemory)  # it has no position for the first token
    count = min(memory.num_valid(row), len(state.tokens[row]) - 1 - behind)
    return [states[row, :, :count] for layer in memory.buffers for states in layer.states()]


def assert_same_bits(left, right):
    assert left[0] == right[0]
    for name in left[1].keys() & right[1].keys():
        for one, other in zip(left[1][name], right[1][name], strict=True):
            count = min(one.shape[1], other.shape[1])
            assert count >= len(REQUEST.prompt) - 2
            assert torch.equal(one[:, :count], other[:, :count]), name


@pytest.mark.parametrize("lean", [True, False], ids=["lean", "hooked"])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize(("size", "row"), [(2, 1), (5, 0), (5, 3)])
def test_a_row_is_plain_decoding_whatever_the_others_hold(full_pool, kind, lean, size, row):
    """Other neighbours, other plans, other join times: the same bits in every memory."""
    pool = full_pool(kind, torch.bfloat16, lean)
    plans = pool.plans()
    expected = run(pool, size, row, 0, lambda state: plans[0])
    assert len(expected[0]) == REQUEST.max_new_tokens
    drafted = None
    for seed, wait in ((1, 0), (2, 5), (3, 17)):
        rng = random.Random(seed)
        result = run(pool, size, row, seed, lambda state: rng.choice(plans), wait)  # noqa: B023
        assert result[1].keys() == {"target", "eagle", "draft", "mid"}
        assert_same_bits(result, expected)
        drafted = drafted or result
        assert_same_bits(result, drafted)


def test_every_forward_of_a_batch_has_the_same_shape_but_prefills(full_pool):
    pool, clock = full_pool(dtype=torch.bfloat16), CountingClock()
    rng, plans, widths, guesses = random.Random(0), pool.plans(), set(), set()
    state = start(pool, [Neighbours(0).draw() for _ in range(3)], clock, row_tokens=ROW_TOKENS)
    while not state.is_finished:
        for cost in decode_step(pool, state, rng.choice(plans), clock).forwards:
            if cost.member == "eagle" and cost.role == "draft":
                guesses.add(cost.num_rows)
            elif cost.num_catchup < cost.num_tokens or cost.role != "catchup":
                widths.add(cost.num_rows)
        for memory in state.memories.values():
            assert memory.num_packable == 0
            assert memory.attended_length(1) == state.num_slots
    assert widths == {pool.window}
    assert guesses == {pool.window, 1}  # what a head guesses on is dropped again


def test_a_plan_at_a_position_yields_the_same_whatever_the_others_hold(full_pool):
    """But for lookup: where it finds nothing for any row, the rest of the chain does not run."""
    pool = full_pool(dtype=torch.bfloat16)
    plans = [plan for plan in pool.plans() if plan.k in (0, 3) and plan.chain[0] != "ngram"]
    seen, seen_twice = {}, 0
    for seed in range(8):
        rng, clock = random.Random(seed), CountingClock()
        neighbours = Neighbours(seed)
        requests = [neighbours.draw(), REQUEST, neighbours.draw()]
        state = start(pool, requests, clock, row_tokens=ROW_TOKENS)
        while state.is_active(1) and state.num_remaining(1) > pool.window:
            plan = rng.choice(plans)
            key = (state.num_generated(1), plan)
            tokens = decode_step(pool, state, plan, clock).tokens[1]
            seen_twice += key in seen
            assert seen.setdefault(key, tokens) == tokens
    assert seen_twice > 3
