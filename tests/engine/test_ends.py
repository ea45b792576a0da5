"""Ends: EOS in every slot, stop strings, exact budgets, the context's limit, and their order."""

import pytest
import torch

from specgym.engine.decoding import start
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import (
    decode,
    perturbed,
    random_plans,
    table_pool,
    tiny_llama,
    tiny_pool,
    tiny_tokenizer,
)
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, Plan

CYCLE = 16  # the counting models say (i + 1) % CYCLE after i
CHAINS = tiny_pool().chains
PROMPT = (*range(CYCLE), 0, 1)  # so that prompt lookup, too, counts on


def counting_table(vocab=CYCLE):
    return 9.0 * torch.eye(vocab).roll(1, dims=1)


@pytest.fixture(scope="module")
def counter():
    """A pool in which every drafter is right about every token."""
    return table_pool([counting_table()] * 3, k_values=range(1, 9))


@pytest.fixture(scope="module")
def pool():
    return tiny_pool(3, k_values=range(1, 9))


def always(plan):
    return lambda state: plan


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("chain", CHAINS, ids=">".join)
def test_eos_ends_the_output_in_every_slot_of_a_block(counter, chain, k):
    """First draft, middle, last draft, bonus slots (transformers#47912)."""
    plan = Plan(chain, k)
    for slot in range(plan.max_tokens):
        eos = (PROMPT[-1] + 1 + slot) % CYCLE
        request = DecodeRequest(PROMPT, 20, eos_ids=frozenset({eos}))
        state, results = decode(counter, [request], always(plan))
        assert len(results) == 1
        assert state.output() == [(2 + i) % CYCLE for i in range(slot + 1)]
        assert results[0].finish_reasons == ("eos",)
        assert results[0].accepted_per_level == results[0].proposed_per_level


@pytest.mark.parametrize("chain", CHAINS, ids=">".join)
def test_any_token_of_the_plain_output_declared_eos_ends_it_there(pool, chain):
    prompt = (1, 2, 3, 1, 2)
    full = decode(pool, [DecodeRequest(prompt, 24)])[0].output()
    for eos in list(dict.fromkeys(full))[:6]:
        expected = full[: full.index(eos) + 1]
        for k in (2, 8):
            request = DecodeRequest(prompt, 24, eos_ids=frozenset({eos}))
            state, _ = decode(pool, [request], always(Plan(chain, k)))
            assert state.output() == expected
            assert state.finish_reasons == ["eos"]


def test_one_row_ends_at_eos_and_the_others_go_on(pool):
    prompt = (1, 2, 3, 1, 2)
    full = decode(pool, [DecodeRequest(prompt, 24)])[0].output()
    ending = DecodeRequest(prompt, 24, eos_ids=frozenset({full[5]}))
    state, _ = decode(pool, [ending, DecodeRequest(prompt, 24)], random_plans(pool, 4))
    assert state.output(0) == full[: full.index(full[5]) + 1]
    assert state.output(1) == full
    assert state.finish_reasons == ["eos", "length"]


def test_any_of_a_list_of_eos_ids_ends_and_the_requests_list_replaces_the_pools(counter):
    plan = Plan(("draft", "target"), 8)
    pool = table_pool([counting_table()] * 2, k_values=range(1, 9), eos_ids=[9, 5])
    assert decode(pool, [DecodeRequest(PROMPT, 20)], always(plan))[0].output() == [2, 3, 4, 5]
    other = DecodeRequest(PROMPT, 20, eos_ids=frozenset({11, 7}))
    assert decode(pool, [other], always(plan))[0].output() == [2, 3, 4, 5, 6, 7]
    none = DecodeRequest(PROMPT, 20, eos_ids=frozenset())
    assert len(decode(pool, [none], always(plan))[0].output()) == 20


def test_a_drafters_own_eos_is_ignored():
    """transformers#31301: only the target's ids end a text, or a draft."""
    target = tiny_llama(3)
    full = decode(tiny_pool(3), [DecodeRequest((1, 2, 3), 20)])[0].output()
    twin = perturbed(target, 0.0)
    twin.config.eos_token_id = full[2]
    twin.generation_config.eos_token_id = [full[2], full[3]]
    pool = ModelPool([NGramMember(), ModelMember("draft", twin), ModelMember("target", target)])
    request = DecodeRequest((1, 2, 3), 20, eos_ids=frozenset({60} - set(full)))
    state, results = decode(pool, [request], always(Plan(("draft", "target"), 4)))
    assert state.output() == full
    assert results[0].proposed_per_level == (4,)
    assert results[0].tokens == (tuple(full[:5]),)


@pytest.mark.parametrize("chain", CHAINS, ids=">".join)
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 9])
def test_budgets_are_kept_to_the_token(pool, chain, budget):
    """transformers#47195: also where K, or K and the verifiers, pass what remains."""
    prompt = (1, 2, 3, 1, 2)
    expected = decode(pool, [DecodeRequest(prompt, 9)])[0].output()[:budget]
    state, results = decode(pool, [DecodeRequest(prompt, budget)], always(Plan(chain, 8)))
    assert state.output() == expected
    assert state.finish_reasons == ["length"]
    assert not any(result.executed.max_tokens > budget for result in results)


def test_nothing_to_decode_needs_no_forward(pool):
    state = start(pool, [DecodeRequest((1, 2), 0)], CountingClock())
    assert state.is_finished
    assert not state.memories


@pytest.mark.parametrize("chain", CHAINS, ids=">".join)
def test_without_any_eos_every_drafter_runs_to_the_budget(pool, chain):
    """transformers#46790: prompt lookup without an EOS id."""
    assert pool.eos_ids == frozenset()
    state, _ = decode(pool, [DecodeRequest((1, 2, 1), 15)], always(Plan(chain, 3)))
    assert len(state.output()) == 15
    assert state.finish_reasons == ["length"]


@pytest.fixture(scope="module")
def writer():
    """The counting pool with a tokenizer: token i is the character i of the alphabet."""
    tokenizer = tiny_tokenizer(CYCLE)
    return table_pool([counting_table()] * 3, k_values=range(1, 9), tokenizer=tokenizer)


def texts(writer, *slots):
    """The stop string made of these tokens."""
    return writer.tokenizer.decode(list(slots))


@pytest.mark.parametrize(("stop", "cap", "eos", "length", "reason"), [
    ((4,), 5, (), 3, "stop"),  # sglang#31599: a block of six, stop at three, cap at five
    ((3, 4), 5, (), 3, "stop"),
    ((9,), 5, (), 5, "length"),
    ((4,), 3, (), 3, "stop"),
    ((4,), 5, (4,), 3, "eos"),
    ((4,), 3, (4,), 3, "eos"),
    ((9,), 3, (4,), 3, "eos"),
    ((4,), 5, (3,), 2, "eos"),
    ((3,), 5, (4,), 2, "stop"),
])  # fmt: skip
@pytest.mark.parametrize("k", [0, 1, 5])
def test_eos_goes_before_stop_and_stop_before_length(writer, k, stop, cap, eos, length, reason):
    request = DecodeRequest(PROMPT, cap, eos_ids=frozenset(eos), stop=(texts(writer, *stop),))
    pool, spoiler = writer, DecodeRequest(PROMPT, 12)
    plan = Plan(("draft", "target"), k) if k else Plan(("target",), 0)
    # A second row with a larger budget lets the plan run although it passes the first row's cap.
    state, results = decode(pool, [request, spoiler], always(plan))
    assert results[0].executed == plan
    assert state.output(0) == [2 + i for i in range(length)]
    assert state.finish_reasons == [reason, "length"]


@pytest.mark.parametrize("chain", CHAINS, ids=">".join)
def test_a_stop_string_across_blocks_and_slots_ends_where_it_is_complete(writer, chain):
    stops = (texts(writer, 5, 6, 7), "never", texts(writer, 13, 12))
    for k in range(1, 9):
        request = DecodeRequest(PROMPT, 40, stop=stops)
        state, _ = decode(writer, [request], always(Plan(chain, k)))
        assert state.output() == [2, 3, 4, 5, 6, 7]
        assert state.finish_reasons == ["stop"]


def test_a_stop_string_of_the_prompt_does_not_count(writer):
    request = DecodeRequest(PROMPT, 6, stop=(texts(writer, 0, 1), texts(writer, 1, 2)))
    state, _ = decode(writer, [request], always(Plan(("draft", "target"), 4)))
    assert len(state.output()) == 6


def test_a_stop_string_inside_a_token_is_seen():
    """A token of several characters may complete a stop string in its middle."""
    tokenizer = tiny_tokenizer(CYCLE)
    tokenizer.add_tokens(["xSTOPx"])
    pool = table_pool([counting_table(CYCLE + 1)] * 2, tokenizer=tokenizer)
    request = DecodeRequest((3, 4), 30, stop=("STOP",))
    state, _ = decode(pool, [request], always(Plan(("draft", "target"), 4)))
    assert state.output() == list(range(5, CYCLE + 1))
    assert state.finish_reasons == ["stop"]


def test_stop_strings_that_cannot_work_are_refused_before_decoding(pool):
    with pytest.raises(ValueError, match="stop: must be a list"):
        DecodeRequest((1,), 4, stop="END")
    with pytest.raises(ValueError, match="strings that are not empty"):
        DecodeRequest((1,), 4, stop=("END", ""))
    with pytest.raises(ValueError, match="need a pool with a tokenizer"):
        start(pool, [DecodeRequest((1,), 4, stop=("END",))], CountingClock())


LIMIT, K = 64, 8


@pytest.fixture(scope="module")
def narrow():
    return tiny_pool(3, k_values=range(1, K + 1), max_position_embeddings=LIMIT)


@pytest.mark.parametrize("room", [1, K, K + 1, K + 2, K + 3])
@pytest.mark.parametrize("chain", CHAINS, ids=">".join)
def test_the_context_ends_a_text_at_its_last_position(pool, narrow, chain, room):
    """exllamav2#274: prompts of max - 1, max - K, max - K - 1 tokens and around."""
    prompt = tuple((7 * i) % 61 for i in range(LIMIT - room))
    expected = decode(pool, [DecodeRequest(prompt, room)])[0].output()
    for exact in (True, False):
        state, _ = decode(narrow, [DecodeRequest(prompt, 40)], always(Plan(chain, K)), exact=exact)
        assert state.output() == expected
        assert state.finish_reasons == ["context"]


def test_a_budget_that_fits_the_context_ends_by_length():
    pool = tiny_pool(max_position_embeddings=LIMIT)
    state, _ = decode(pool, [DecodeRequest(tuple(range(60)), 4)])
    assert state.finish_reasons == ["length"]
    assert len(state.output()) == 4


def test_a_prompt_that_fills_the_context_is_refused():
    pool = tiny_pool(max_position_embeddings=LIMIT)
    for length in (LIMIT, LIMIT + 1):
        with pytest.raises(ValueError, match=f"prompt: {length} tokens leave no room"):
            start(pool, [DecodeRequest((1,) * length, 4)], CountingClock())


@pytest.mark.parametrize("short", ["draft", "mid"])
def test_a_member_with_half_the_context_falls_back_when_it_is_full(short):
    """vllm#57941: no crash, and the chains without the member go on."""
    target = tiny_llama(3)
    limits = {"draft": 512, "mid": 512, short: LIMIT}
    members = [NGramMember()]
    for i, (name, limit) in enumerate(limits.items()):
        drafter = perturbed(target, 0.05, i)
        drafter.config.max_position_embeddings = limit
        members.append(ModelMember(name, drafter))
    pool = ModelPool([*members, ModelMember("target", target)])
    prompt = tuple(range(40))
    expected = decode(tiny_pool(3), [DecodeRequest(prompt, 60)])[0].output()
    plan, other = Plan(("draft", "mid", "target"), 3), Plan(("ngram", "target"), 3)
    state, results = decode(pool, [DecodeRequest(prompt, 60)], always(plan))
    assert state.output() == expected
    reasons = [result.reason for result in results]
    assert reasons[0] == ""
    assert reasons.count("context") > 10
    assert "" not in reasons[reasons.index("context") :]
    assert state.memories[short].num_valid(0) <= LIMIT
    # Later than the member can follow, a chain that has it is not even begun.
    state, results = decode(
        pool,
        [DecodeRequest(prompt, 60)],
        lambda state: other if state.num_generated(0) < 30 else plan,
    )
    assert state.output() == expected
    assert short not in state.memories
    state, _ = decode(pool, [DecodeRequest(prompt, 60)], random_plans(pool, 0))
    assert state.output() == expected
