"""Continuous batching: requests that join a running batch get what they would get alone."""

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgym.engine.decoding import decode_step, start
from specgym.engine.joining import join
from specgym.engine.members.model import ModelMember
from specgym.engine.testing import decode, serve, tiny_pool
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, Plan, SamplingParams

VOCAB, ROW_TOKENS = 61, 56
FORMS = [(lean, exact) for lean in (True, False) for exact in (True, False)]


@pytest.fixture(scope="module")
def alone(full_pool):
    """What a request gets by itself, in plain decoding."""
    return functools.cache(lambda kind, request: decode(full_pool(kind), [request])[0].output())


prompts = st.lists(st.integers(0, VOCAB - 1) | st.integers(0, 2), min_size=1, max_size=20)
requests = st.builds(DecodeRequest, prompts.map(tuple), st.integers(0, 20))


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.parametrize(("lean", "exact"), FORMS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(queue=st.lists(requests, min_size=2, max_size=9), size=st.integers(1, 4), seed=st.integers())
def test_every_request_gets_what_it_gets_alone(
    full_pool, alone, kind, lean, exact, queue, size, seed
):
    """Whatever the plans, whoever the neighbours, whenever it joins and whichever row."""
    pool, rng = full_pool(kind, lean=lean), random.Random(seed)
    plans = pool.plans()
    outputs = serve(
        pool,
        queue,
        min(size, len(queue)),
        lambda state: rng.choice(plans),
        exact=exact,
        row_tokens=ROW_TOKENS,
        delay=lambda: rng.random() < 0.5,
    )
    assert outputs == [alone(kind, request) for request in queue]


@pytest.mark.parametrize("exact", [True, False])
def test_sixty_four_rows_of_all_lengths_and_the_requests_that_follow(full_pool, alone, exact):
    pool, rng = full_pool(), random.Random(0)
    plans = pool.plans()
    queue = [
        DecodeRequest(tuple(rng.randrange(VOCAB) for _ in range(1 + i % 17)), i % 13)
        for i in range(72)
    ]
    outputs = serve(
        pool, queue, 64, lambda state: rng.choice(plans), exact=exact, row_tokens=ROW_TOKENS
    )
    assert outputs == [alone("llama", request) for request in queue]


def test_sampled_requests_follow_their_own_random_stream(full_pool):
    pool = full_pool()
    queue = [DecodeRequest((i, 2, 3), 9, SamplingParams(1.0, seed=i)) for i in range(5)]
    plan = Plan(("draft", "target"), 2)
    expected = [decode(pool, [request], lambda state: plan)[0].output() for request in queue]
    # A plan that passes what remains of one row may still run for another: same plan, longer text.
    served = serve(pool, queue, 2, lambda state: plan)
    shared = [
        sum(a == b for a, b in zip(*pair, strict=True))
        for pair in zip(served, expected, strict=True)
    ]
    assert all(len(each) == 9 for each in served)
    assert min(shared) >= 4


def running(pool, exact=True):
    """A batch of two, the second row of which has ended."""
    requests = [DecodeRequest((1, 2, 3), 30), DecodeRequest((4, 5, 6, 7), 2)]
    state = start(pool, requests, CountingClock(), exact=exact)
    while state.is_active(1):
        decode_step(pool, state, Plan(("ngram", "target"), 2), CountingClock())
    return state


@pytest.mark.parametrize(
    ("row", "request_", "message"),
    [
        (0, DecodeRequest((1,), 2), "row: 0 still decodes .* has ended: \\[1\\]"),
        (2, DecodeRequest((1,), 2), "row: must be in 0..1; got 2"),
        (-1, DecodeRequest((1,), 2), "row: must be in 0..1; got -1"),
        (1, DecodeRequest((1,) * 30, 60), "are 90 tokens, a row of this batch has room for"),
        (1, DecodeRequest((99,), 2), "outside the vocabulary"),
        (1, DecodeRequest((1,) * 600, 2), "leave no room in the target's context"),
        (1, DecodeRequest((1,), 2, stop=("x",)), "need a pool with a tokenizer"),
    ],
)
def test_what_cannot_join_is_refused_before_anything_is_touched(row, request_, message):
    pool = tiny_pool(3)
    state = running(pool)
    held = [list(slots) for slots in state.memories["target"].row_slots]
    before = (list(state.tokens), list(state.requests), list(state.finish_reasons))
    with pytest.raises(ValueError, match=message):
        join(pool, state, row, request_, CountingClock())
    assert (state.tokens, state.requests, state.finish_reasons) == before
    assert state.memories["target"].row_slots == held
    while not state.is_finished:
        decode_step(pool, state, Plan(("draft", "target"), 3), CountingClock())
    assert state.output(0) == decode(pool, [DecodeRequest((1, 2, 3), 30)])[0].output()


@pytest.mark.parametrize("exact", [True, False])
def test_a_failed_prefill_leaves_the_row_free_and_the_others_as_they_were(exact, monkeypatch):
    pool = tiny_pool(3)
    state = running(pool, exact)

    def fail(*arguments, **options):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(ModelMember, "forward", fail)
        with pytest.raises(MemoryError, match="no room"):
            join(pool, state, 1, DecodeRequest((8, 9, 10), 5), CountingClock())
    assert not state.is_active(1)
    assert state.is_active(0)
    request = DecodeRequest((8, 9, 10, 11), 5)
    join(pool, state, 1, request, CountingClock())
    while not state.is_finished:
        decode_step(pool, state, Plan(("draft", "target"), 3), CountingClock())
    assert state.output(1) == decode(pool, [request])[0].output()
    assert state.output(0) == decode(pool, [DecodeRequest((1, 2, 3), 30)])[0].output()


def test_nothing_to_decode_joins_and_has_ended():
    pool = tiny_pool(3)
    state = running(pool)
    join(pool, state, 1, DecodeRequest((1, 2), 0), CountingClock())
    assert state.finish_reasons[1] == "length"
    assert state.output(1) == []


def test_only_the_row_that_joins_is_prefilled():
    pool, fed = tiny_pool(3), []
    state = running(pool)
    member = pool.model("target")
    forward = member.forward

    def watched(memory, tokens, *rest, **options):
        fed.append([len(row) for row in tokens])
        return forward(memory, tokens, *rest, **options)

    member.forward = watched
    join(pool, state, 1, DecodeRequest(tuple(range(20)), 5), CountingClock())
    assert fed == [[19]]


def test_a_batch_has_slots_for_what_it_was_started_with():
    pool = tiny_pool(3)
    with pytest.raises(ValueError, match="a larger row_tokens"):
        start(pool, [DecodeRequest((1,) * 60, 60)], CountingClock(), row_tokens=50)
    state = start(pool, [DecodeRequest((1,), 2)] * 2, CountingClock(), row_tokens=200)
    assert state.row_tokens >= 200
