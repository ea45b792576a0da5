"""Losslessness: whatever the plans, the tokens are those of plain decoding."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgym.engine.pools.loading import load_pool
from specgym.engine.testing import decode, random_plans, tiny_llama, tiny_pool
from specgym.engine.types import DecodeRequest, Plan

VOCAB = 61
K_VALUES = range(1, 9)
NUM_PLANS = 1 + 6 * len(K_VALUES)
FORMS = [(lean, exact) for lean in (True, False) for exact in (True, False)]
RAGGED = (  # batch 4: lengths from one token on, budgets down to none, a loop for prompt lookup
    DecodeRequest((7,), 16),
    DecodeRequest((1, 2, 3, 1, 2, 3, 1, 2), 12),
    DecodeRequest(tuple(range(40, 20, -1)), 3),
    DecodeRequest((5, 5), 0),
)

prompts = st.lists(st.integers(0, VOCAB - 1) | st.integers(0, 2), min_size=1, max_size=20).map(
    tuple
)
requests = st.builds(DecodeRequest, prompts, st.integers(0, 20))
batches = st.sampled_from((1, 4)).flatmap(
    lambda size: st.lists(requests, min_size=size, max_size=size)
)
plan_orders = st.lists(st.integers(0, NUM_PLANS - 1), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def pools():
    return {lean: tiny_pool(3, k_values=K_VALUES, lean=lean) for lean in (True, False)}


def plain(pool, batch, exact=False):
    """Outputs of plain decoding, every request by itself."""
    return [decode(pool, [request], exact=exact)[0].output() for request in batch]


@pytest.fixture(scope="module")
def expected(pools):
    """Plain outputs of a batch; in fp32 every form of the forward must give the same."""
    known = functools.cache(lambda request: plain(pools[True], [request])[0])
    return lambda batch: [known(request) for request in batch]


def in_order(pool, order):
    """A chooser that goes through these plans, again and again."""
    plans, turn = pool.plans(), itertools.cycle(order)
    return lambda state: plans[next(turn)]


@pytest.mark.parametrize(("lean", "exact"), FORMS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(batch=batches, order=plan_orders)
def test_any_plans_give_the_tokens_of_plain_decoding(pools, expected, lean, exact, batch, order):
    pool = pools[lean]
    assert len(pool.plans()) == NUM_PLANS
    state, _ = decode(pool, batch, in_order(pool, order), exact=exact)
    assert [state.output(row) for row in range(len(batch))] == expected(batch)


@pytest.mark.parametrize("chain", tiny_pool().chains, ids=">".join)
def test_every_chain_and_k_gives_the_tokens_of_plain_decoding(pools, expected, chain):
    pool, outputs = pools[True], expected(RAGGED)
    assert [len(output) for output in outputs] == [16, 12, 3, 0]
    for k in K_VALUES:
        for rows in ([0, 1, 2, 3], [1]):
            batch = [RAGGED[row] for row in rows]
            state, results = decode(pool, batch, lambda state: Plan(chain, k))  # noqa: B023
            assert [state.output(i) for i in range(len(rows))] == [outputs[i] for i in rows]
            assert any(result.executed == Plan(chain, k) for result in results)


@pytest.mark.parametrize(("lean", "exact"), FORMS)
def test_a_long_ragged_batch_stays_lossless_as_rows_end_and_members_come_and_go(
    pools, expected, lean, exact
):
    batch = [DecodeRequest(tuple(range(n)), 20 + 15 * i) for i, n in enumerate((1, 50, 3, 20))]
    state, results = decode(pools[lean], batch, random_plans(pools[lean], 0), exact=exact)
    assert [state.output(row) for row in range(4)] == expected(batch)
    assert sum(result.num_accepted for result in results) > 0
    assert any(not result.num_accepted for result in results if result.num_drafted)


def test_a_member_that_lags_far_in_a_ragged_batch_catches_up_within_its_slots(pools, expected):
    """The catch-up of a short row must not ask for slots behind a long row that has ended."""
    pool = pools[True]
    batch = [DecodeRequest(tuple(i % VOCAB for i in range(200)), 4), DecodeRequest((1, 2), 200)]
    plan = Plan(("draft", "target"), 2)

    def early_and_late(state):
        generated = state.num_generated(1)
        return plan if generated < 4 or generated > 180 else plan.without_speculation()

    for exact in (True, False):
        state, results = decode(pool, batch, early_and_late, exact=exact)
        assert any(result.executed == plan for result in results[100:])
        assert [state.output(row) for row in range(2)] == expected(batch)


def test_plain_decoding_is_the_greedy_generation_of_transformers(pools):
    for length in (1, 2, 13):
        prompt = tuple(range(30, 30 + length))
        generated = tiny_llama(3).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, length, dtype=torch.long),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        for lean, exact in FORMS:
            output = plain(pools[lean], [DecodeRequest(prompt, 40)], exact)
            assert output == [generated[0, length:].tolist()]


@pytest.mark.wheel
def test_real_weights_give_the_same_tokens_under_any_plans():
    pool = load_pool("smollm2")
    questions = (
        "List five fruits, one per line.",
        "Repeat exactly: red green blue red green blue.",
        "What is 17 + 25? Show the steps.",
    )
    num_accepted = 0
    for seed, question in enumerate(questions):
        request = DecodeRequest(pool.encode(question), 48)
        state, results = decode(pool, [request], random_plans(pool, seed))
        assert [state.output()] == plain(pool, [request], exact=True)
        num_accepted += sum(result.num_accepted for result in results)
    assert num_accepted > 10
