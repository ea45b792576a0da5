"""Sampling: the law of the output is the target's, whatever the chain; and each seed its own."""

import dataclasses
import functools
import itertools
from collections import Counter

import pytest
import torch

from specgym.engine import decoding
from specgym.engine.decoding import decode_step, start
from specgym.engine.testing import (
    chi_square,
    decode,
    random_plans,
    table_pool,
    tiny_llama,
    tiny_pool,
)
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, Plan, Proposal, SamplingParams, Verdict
from specgym.engine.verification import accept_sampling, law

VOCAB, NUM_TOKENS, NUM_ROWS = 5, 3, 600
PROMPT = (0, 1, 2, 3, 0, 1)
TWO, THREE = ("draft", "target"), ("draft", "mid", "target")
PARAMS = {
    "cold": SamplingParams(0.3),
    "plain": SamplingParams(1.0),
    "hot": SamplingParams(1.7),
    "top-k": SamplingParams(1.0, top_k=3),
    "top-p": SamplingParams(1.0, top_p=0.7),
    "all": SamplingParams(1.3, top_k=4, top_p=0.9),
}
HOLDS = 2.0  # Pearson's statistic over its degrees of freedom, about 1 where the law holds


def tables():
    """Logits of a drafter, a middle and a target that agree on nothing."""
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(3, VOCAB, VOCAB, generator=generator)
    favourites = [3 * torch.eye(VOCAB).roll(step, dims=1) for step in (1, 2)]
    return [favourites[0] + noise[0] / 2, favourites[1] + noise[1] / 2, noise[2]]


@pytest.fixture(scope="module")
def pool():
    return table_pool(tables(), k_values=range(1, 9))


def sampled(pool, params, pick, num_tokens=NUM_TOKENS, spoiler=None):
    """How often each text of ``num_tokens`` came out, over rows that differ in their seeds."""
    requests = [
        DecodeRequest(PROMPT, num_tokens, dataclasses.replace(params, seed=seed))
        for seed in range(NUM_ROWS)
    ]
    if spoiler is not None:
        requests.append(spoiler)
    state, _ = decode(pool, requests, pick)
    return Counter(tuple(state.output(row)) for row in range(NUM_ROWS))


def misfit(counts, next_law, num_tokens=NUM_TOKENS, vocab=VOCAB):
    """Chi-square of texts against the product of ``next_law(text so far)``."""
    observed, expected = [], []
    for text in itertools.product(range(vocab), repeat=num_tokens):
        probability = 1.0
        for end, token in enumerate(text):
            probability *= next_law(text[:end])[token]
        observed.append(counts[text])
        expected.append(probability)
    assert sum(observed) == NUM_ROWS
    assert sum(expected) == pytest.approx(1.0, abs=1e-5)
    return chi_square(observed, expected)


def table_law(params):
    """The target's law after a text, from its table."""
    rows = law(tables()[-1], params).tolist()
    return lambda text: rows[(PROMPT + text)[-1]]


@pytest.mark.parametrize("chain", [TWO, THREE], ids=">".join)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_texts_follow_the_targets_law(pool, params, chain):
    plan = Plan(chain, 2 if chain == TWO else 1)
    assert misfit(sampled(pool, params, lambda state: plan), table_law(params)) < HOLDS


@pytest.mark.parametrize("chain", [("ngram", "target"), ("ngram", "mid", "target"), ("target",)])
def test_texts_of_prompt_lookup_and_of_plain_decoding_follow_it_too(pool, chain):
    plan, params = Plan(chain, len(chain) - 1 and 1), PARAMS["plain"]
    assert misfit(sampled(pool, params, lambda state: plan), table_law(params)) < HOLDS


def test_texts_under_a_random_plan_at_every_step_follow_it_too(pool):
    counts = sampled(pool, PARAMS["plain"], random_plans(pool, 0))
    assert misfit(counts, table_law(PARAMS["plain"])) < HOLDS


@pytest.mark.parametrize("chain", [TWO, THREE], ids=">".join)
def test_drafts_beyond_the_budget_do_not_bend_the_law(pool, chain):
    """Rows that may have three tokens ride with one that drafts six (transformers#28508)."""
    spoiler, plan = DecodeRequest(PROMPT, 8, PARAMS["plain"]), Plan(chain, 6)
    counts = sampled(pool, PARAMS["plain"], lambda state: plan, spoiler=spoiler)
    assert misfit(counts, table_law(PARAMS["plain"])) < HOLDS


def test_texts_of_real_models_follow_the_targets_law():
    pool = tiny_pool(1, vocab_size=VOCAB, noise=(0.5, 0.3))
    reference, params = tiny_llama(1, vocab_size=VOCAB), SamplingParams(1.2, top_p=0.95)

    @functools.cache
    def next_law(text):
        with torch.inference_mode():
            logits = reference(torch.tensor([PROMPT + text])).logits[0, -1]
        return law(logits, params).tolist()

    counts = sampled(pool, params, random_plans(pool, 0))
    assert misfit(counts, next_law) < HOLDS


def hand_on_the_drafters_law(proposal, laws_NV, generator):
    """The mistake: what a verifier emits carries the law of what was proposed to it."""
    verdict = accept_sampling(proposal, laws_NV, generator)
    laws = laws_NV if proposal.laws_NV is None else torch.cat([proposal.laws_NV, laws_NV[-1:]])
    emitted = verdict.emitted._replace(laws_NV=laws[: len(verdict.emitted.tokens)])
    return Verdict(verdict.num_accepted, emitted)


def hand_on_the_drafters_tokens(proposal, laws_NV, generator):
    """The mistake: every proposed token passes."""
    rest = accept_sampling(Proposal(), laws_NV[-1:], generator).emitted.tokens
    return Verdict(len(proposal.tokens), Proposal(proposal.tokens + rest, laws_NV))


@pytest.mark.parametrize(
    ("mistake", "chain"),
    [
        (hand_on_the_drafters_law, THREE),
        (hand_on_the_drafters_tokens, TWO),
        (hand_on_the_drafters_tokens, THREE),
    ],
)
def test_negative_control_a_biased_verifier_fails_the_law_test(pool, monkeypatch, mistake, chain):
    monkeypatch.setattr(decoding, "accept_sampling", mistake)
    plan = Plan(chain, 1)
    counts = sampled(pool, PARAMS["plain"], lambda state: plan)
    assert misfit(counts, table_law(PARAMS["plain"])) > 25 * HOLDS


def texts(pool, seeds, pick=None, budget=24):
    requests = [DecodeRequest(PROMPT, budget, SamplingParams(1.0, seed=seed)) for seed in seeds]
    state, _ = decode(pool, requests, pick)
    return [state.output(row) for row in range(len(seeds))]


@pytest.mark.parametrize("plan", [Plan(("target",), 0), Plan(TWO, 4), Plan(THREE, 3)])
def test_a_seed_determines_the_text_and_another_seed_another(pool, plan):
    first, again, other = (texts(pool, [seed], lambda state: plan)[0] for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_rows_of_a_batch_have_streams_of_their_own(pool):
    plan = Plan(THREE, 3)
    together = texts(pool, [1, 2, 1, 3], lambda state: plan)
    alone = [texts(pool, [seed], lambda state: plan)[0] for seed in (1, 2, 1)]
    assert together[0] == together[2]
    assert len({tuple(text) for text in together}) == 3
    # Alone, a row's last steps have no plan that fits the budget; together they may.
    common = 24 - plan.max_tokens
    assert [text[:common] for text in together[:3]] == [text[:common] for text in alone]


def test_interleaved_states_do_not_disturb_each_other(pool):
    plan = Plan(THREE, 2)
    alone = [texts(pool, [seed], lambda state: plan)[0] for seed in (5, 6)]
    clock = CountingClock()
    states = [
        start(pool, [DecodeRequest(PROMPT, 24, SamplingParams(1.0, seed=seed))], clock)
        for seed in (5, 6)
    ]
    torch.manual_seed(99)  # the global stream is nobody's
    while not all(state.is_finished for state in states):
        for state in states:
            torch.rand(3)
            if not state.is_finished:
                decode_step(pool, state, plan, clock)
    assert [state.output() for state in states] == alone


@pytest.mark.parametrize("exact", [True, False])
def test_greedy_and_sampling_rows_mix_in_a_batch(pool, exact):
    greedy = DecodeRequest(PROMPT, 20)
    mixed = [greedy, DecodeRequest(PROMPT, 20, SamplingParams(1.0, seed=3)), greedy]
    state, _ = decode(pool, mixed, lambda state: Plan(THREE, 3), exact=exact)
    expected = decode(pool, [greedy])[0].output()
    assert [state.output(0), state.output(2)] == [expected, expected]
    assert state.output(1) != expected


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_laws_are_there_whenever_a_model_sampled_and_are_what_it_sampled_from(monkeypatch, params):
    """vllm#40149, transformers#47932: the verifier is told the law the token was drawn from."""
    pool, judged = tiny_pool(noise=(0.5, 0.3)), []

    def spy(proposal, laws_NV, generator):
        judged.append(proposal)
        return accept_sampling(proposal, laws_NV, generator)

    monkeypatch.setattr(decoding, "accept_sampling", spy)
    for plan in (Plan(TWO, 4), Plan(THREE, 3), Plan(("ngram", "mid", "target"), 3)):
        judged.clear()
        request = DecodeRequest((1, 2, 3, 1, 2), 30, params)
        decode(pool, [request], lambda state: plan)  # noqa: B023
        speculative = [proposal for proposal in judged if proposal.tokens]
        assert speculative
        for index, proposal in enumerate(speculative):
            if plan.chain[0] == "ngram" and index % 2 == 0:
                assert proposal.laws_NV is None
                continue
            assert proposal.laws_NV.shape == (len(proposal.tokens), 61)
            torch.testing.assert_close(proposal.laws_NV.sum(-1), torch.ones(len(proposal.tokens)))
            for token, law_V in zip(proposal.tokens, proposal.laws_NV, strict=True):
                assert law_V[token] > 0
            if params.top_k:
                assert ((proposal.laws_NV > 0).sum(-1) <= params.top_k).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", float("nan")),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}: must be"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("option", ["repetition_penalty", "min_p", "min_new_tokens", "num_beams"])
def test_an_option_the_engine_does_not_have_raises_instead_of_passing(option):
    """TensorRT-LLM#17701, sglang#33643: nothing is silently ignored."""
    with pytest.raises(TypeError, match=option):
        SamplingParams(**{option: 2})
    with pytest.raises(TypeError, match=option):
        DecodeRequest(PROMPT, 4, **{option: 2})
