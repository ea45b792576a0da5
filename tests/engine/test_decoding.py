"""A step's account of itself: plans asked and executed, forwards, divergence, the probe."""

import itertools
import random

import pytest
import torch

from specgym.engine.decoding import decode_step, probe_baseline, start
from specgym.engine.testing import decode, random_plans, table_pool, tiny_pool
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, Plan, SamplingParams

PROMPT = (1, 2, 3, 4, 1, 2, 3)
THREE = ("draft", "mid", "target")
NONE = Plan(("target",), 0)


@pytest.fixture(scope="module")
def pool():
    return tiny_pool(3, k_values=range(1, 9))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_plan_asked_for_is_the_plan_that_runs_or_the_reason_is_given(pool, num_rows):
    """transformers#40739: K as asked reaches the drafter, round after round."""
    requests = [DecodeRequest(PROMPT[row:], 60) for row in range(num_rows)]
    picked, plans = [], random_plans(pool, 5)

    def pick(state):
        picked.append((plans(state), max(state.num_remaining(row) for row in range(num_rows))))
        return picked[-1][0]

    _, results = decode(pool, requests, pick)
    for (plan, remaining), result in zip(picked, results, strict=True):
        assert result.asked == plan
        if result.executed == plan:
            assert result.reason == ""
        else:
            assert result.executed == NONE
            assert result.reason == ("budget" if plan.max_tokens > remaining else "no_proposal")
            assert result.reason != "no_proposal" or plan.chain[0] == "ngram"
        active = sum(len(tokens) > 0 for tokens in result.tokens)
        if result.executed.k and plan.chain[0] != "ngram":
            assert result.num_drafted == plan.k * active
        assert result.num_drafted <= result.executed.k * active


@pytest.mark.parametrize("num_rows", [1, 4])
def test_counts_of_a_step_add_up(pool, num_rows):
    """sglang#11572: never more accepted than proposed; a level's output is the next's input."""
    requests = [DecodeRequest(PROMPT[row:], 50 + row) for row in range(num_rows)]
    _, results = decode(pool, requests, random_plans(pool, 6))
    for result in results:
        assert len(result.proposed_per_level) == result.executed.num_verifiers
        pairs = list(zip(result.proposed_per_level, result.accepted_per_level, strict=True))
        assert all(0 <= accepted <= proposed for proposed, accepted in pairs)
        active = sum(len(tokens) > 0 for tokens in result.tokens)
        for (_, accepted), (proposed, _) in itertools.pairwise(pairs):
            assert proposed == accepted + active
        if not any(result.finish_reasons):
            assert result.num_tokens == result.num_accepted + active


def test_without_a_match_prompt_lookup_gives_way_and_says_so():
    counting = torch.eye(9).roll(1, dims=1)
    pool = table_pool([counting, counting, counting])
    state = start(pool, [DecodeRequest((1, 2, 3), 20)], CountingClock())
    for chain in (("ngram", "target"), ("ngram", "mid", "target")):
        result = decode_step(pool, state, Plan(chain, 4), CountingClock())
        assert (result.asked, result.executed) == (Plan(chain, 4), NONE)
        assert result.reason == "no_proposal"
        assert result.proposed_per_level == result.accepted_per_level == ()
        assert [cost.member for cost in result.forwards] == ["target"]
    assert state.output() == [4, 5]


def test_prompt_lookup_may_propose_fewer_than_k_and_the_count_says_so():
    table = torch.eye(9).roll(1, dims=1)
    state = start(table_pool([table]), [DecodeRequest((1, 2, 1), 20)], CountingClock())
    result = decode_step(state.pool, state, Plan(("ngram", "target"), 6), CountingClock())
    assert result.executed.k == 6
    assert result.num_drafted == 6  # (2, 1, 2, 1, 2, 1): a loop
    assert result.num_accepted == 1
    two_rows = [DecodeRequest((1, 2, 1), 20), DecodeRequest((4, 5), 20)]
    state = start(table_pool([table]), two_rows, CountingClock())
    result = decode_step(state.pool, state, Plan(("ngram", "target"), 4), CountingClock())
    assert result.reason == ""
    assert result.num_drafted == 4  # all of the first row's
    assert result.tokens == ((2, 3), (6,))


@pytest.mark.parametrize("exact", [True, False])
def test_every_forward_is_accounted_for(pool, exact):
    clock = CountingClock()
    state = start(pool, [DecodeRequest(PROMPT, 60)], clock, exact=exact)
    began = clock.now()
    first = decode_step(pool, state, Plan(THREE, 3), clock)
    assert [(cost.member, cost.role) for cost in first.forwards] == [
        ("draft", "catchup"),
        *[("draft", "draft")] * 3,
        ("mid", "catchup"),
        ("mid", "verify"),
        ("target", "verify"),
    ]
    assert [cost.num_tokens for cost in first.forwards] == [
        6, 1, 1, 1, 6, 4, 1 + first.proposed_per_level[1]
    ]  # fmt: skip
    assert [cost.num_catchup for cost in first.forwards] == [6, 0, 0, 0, 6, 0, 0]
    window = pool.window
    rows = [cost.num_rows for cost in first.forwards]
    if exact:
        assert rows == [6, window, window, window, 6, window, window]
    else:
        assert rows == [cost.num_tokens for cost in first.forwards]
    assert first.seconds == pytest.approx(sum(cost.seconds for cost in first.forwards))
    assert first.seconds == pytest.approx(clock.now() - began)
    again = decode_step(pool, state, Plan(THREE, 3), clock)
    assert not any(cost.role == "catchup" for cost in again.forwards)


def test_plain_steps_are_one_forward_of_the_target(pool):
    _, results = decode(pool, [DecodeRequest(PROMPT, 5)], exact=False)
    for result in results:
        (cost,) = result.forwards
        assert (cost.member, cost.role, cost.num_tokens, cost.num_rows) == (
            "target",
            "verify",
            1,
            1,
        )
        assert cost.num_catchup == 0
        assert result.num_tokens == 1


def distance(left, right):
    """D_TV at temperature 1 between two tables' rows."""
    return (left.softmax(-1) - right.softmax(-1)).abs().sum(-1) / 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_divergence_is_the_mean_distance_up_to_the_first_rejection(temperature):
    draft, mid, target = torch.randn(3, 9, 9, generator=torch.Generator().manual_seed(1))
    pool = table_pool([draft, mid, target])
    request = DecodeRequest((1, 2), 40, SamplingParams(temperature))
    state, clock = start(pool, [request], CountingClock()), CountingClock()
    assert decode_step(pool, state, Plan(THREE, 3), clock).divergence == {}
    num_rejected = 0
    while state.num_remaining(0) > 5:
        last = state.tokens[0][-1]
        result = decode_step(pool, state, Plan(THREE, 3), clock, measure_divergence=True)
        assert list(result.divergence) == ["draft>mid", "mid>target"]
        assert all(0 <= value <= 1 for value in result.divergence.values())
        if result.accepted_per_level[0] == 0:
            expected = float(distance(draft, mid)[last])
            assert result.divergence["draft>mid"] == pytest.approx(expected, abs=1e-5)
        judged = [last, *result.tokens[0]][: result.proposed_per_level[1]]
        expected = distance(mid, target)[judged[: result.num_accepted + 1]].mean()
        assert result.divergence["mid>target"] == pytest.approx(float(expected), abs=1e-5)
        num_rejected += result.accepted_per_level[0] == 0
    assert num_rejected > 2


def test_divergence_of_prompt_lookup_is_what_the_target_gives_to_other_tokens():
    target = torch.randn(9, 9, generator=torch.Generator().manual_seed(1))
    pool = table_pool([target])
    state = start(pool, [DecodeRequest((1, 2, 1), 20)], CountingClock())
    plan = Plan(("ngram", "target"), 1)
    result = decode_step(pool, state, plan, CountingClock(), measure_divergence=True)
    expected = 1 - float(target[1].softmax(-1)[2])
    assert result.divergence == {"ngram>target": pytest.approx(expected, abs=1e-6)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_measuring_divergence_changes_no_token(pool, temperature):
    request = DecodeRequest(PROMPT, 40, SamplingParams(temperature, seed=3))
    outputs = []
    for measured in (False, True):
        state, clock = start(pool, [request], CountingClock()), CountingClock()
        while not state.is_finished:
            decode_step(pool, state, Plan(THREE, 3), clock, measure_divergence=measured)
        outputs.append(state.output())
    assert outputs[0] == outputs[1]


def test_draft_entropy_is_that_of_the_first_drafted_law():
    table = torch.zeros(8, 8)
    table[1, 3] = 50.0
    pool = table_pool([table, table])
    state, clock = start(pool, [DecodeRequest((2,), 30)], CountingClock()), CountingClock()
    plan = Plan(("draft", "target"), 2)
    assert decode_step(pool, state, plan, clock).draft_entropy == pytest.approx(2.0794415)
    state = start(pool, [DecodeRequest((1,), 30)], clock)
    assert decode_step(pool, state, plan, clock).draft_entropy == pytest.approx(0.0, abs=1e-6)
    assert decode_step(pool, state, NONE, clock).draft_entropy == 0.0


def test_draft_entropy_leaves_out_rows_that_have_ended():
    table = torch.zeros(8, 8)
    table[1, 1] = 50.0
    pool, clock = table_pool([table, table]), CountingClock()
    requests = [DecodeRequest((2,), 1), DecodeRequest((1,), 30)]
    state = start(pool, requests, clock)
    decode_step(pool, state, NONE, clock)
    assert state.finish_reasons == ["length", None]
    result = decode_step(pool, state, Plan(("draft", "target"), 2), clock)
    assert result.draft_entropy == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_baseline_probe_leaves_the_state_as_it_was(pool, exact, temperature):
    requests = [
        DecodeRequest(PROMPT[row:], 30, SamplingParams(temperature, seed=row)) for row in range(2)
    ]
    outputs = []
    for probed in (False, True):
        rng, clock = random.Random(1), CountingClock()
        state = start(pool, requests, clock, exact=exact)
        while not state.is_finished:
            if probed:
                before = snapshot(state)
                assert len(probe_baseline(pool, state, clock, 3)) == 3
                assert snapshot(state) == before
            decode_step(pool, state, rng.choice(pool.plans()), clock)
        outputs.append(state.tokens)
    assert outputs[0] == outputs[1]


def snapshot(state):
    """All of a state that a later step depends on, but for the buffers' numbers."""
    memories, indices = state.memories.items(), state.indices.items()
    return (
        [list(tokens) for tokens in state.tokens],
        list(state.finish_reasons),
        {name: [memory.num_valid(row) for row in range(2)] for name, memory in memories},
        {name: [index.num_indexed for index in each] for name, each in indices},
        [generator.get_state().tolist() for generator in state.generators],
    )


def test_the_probe_measures_plain_forwards(pool):
    clock = CountingClock()
    state = start(pool, [DecodeRequest(PROMPT, 30)], clock)
    samples = probe_baseline(pool, state, clock, 4)
    result = decode_step(pool, state, NONE, clock)
    assert samples == [pytest.approx(result.seconds)] * 4


def test_kv_length_is_the_attended_length_of_the_next_plain_step(pool):
    clock = CountingClock()
    exact = start(pool, [DecodeRequest(PROMPT, 30)], clock)
    assert exact.kv_length == exact.num_slots == 64
    fast = start(pool, [DecodeRequest(PROMPT, 30)], clock, exact=False)
    assert fast.kv_length == len(PROMPT)
    decode_step(pool, fast, NONE, clock)
    assert fast.kv_length == len(PROMPT) + 1
