"""Acceptance: pure functions against the papers' laws."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specgym.engine.testing import chi_square
from specgym.engine.types import Proposal, SamplingParams, common_prefix
from specgym.engine.verification import (
    accept_greedy,
    accept_sampling,
    law,
    one_hot,
    residual,
    sample,
    total_variation,
)

P_V = torch.tensor([0.05, 0.45, 0.3, 0.2, 0.0])
Q_V = torch.tensor([0.5, 0.1, 0.3, 0.05, 0.05])
NUM_DRAWS = 2500


def draws(proposing, judging, seed=1):
    """Verdicts on single tokens drawn from one law, judged by another, with the tokens."""
    generator = torch.Generator().manual_seed(seed)
    laws = torch.stack([judging, judging])
    for _ in range(NUM_DRAWS):
        token = sample(proposing, generator)
        proposal = Proposal((token,), proposing[None])
        yield token, accept_sampling(proposal, laws, generator)


def frequencies(tokens, size=5):
    counts = Counter(tokens)
    return [counts[token] for token in range(size)]


tokens = st.lists(st.integers(0, 2), max_size=6)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(proposed=tokens, extra=st.integers(0, 2), data=st.data())
def test_greedy_accepts_the_common_prefix_and_adds_one_token(proposed, extra, data):
    best = data.draw(st.lists(st.integers(0, 2), min_size=len(proposed), max_size=len(proposed)))
    best.append(extra)
    verdict = accept_greedy(Proposal(tuple(proposed)), best)
    count = verdict.num_accepted
    assert proposed[:count] == best[:count]
    assert count == len(proposed) or proposed[count] != best[count]
    assert verdict.emitted.tokens == tuple(best[: count + 1])
    assert verdict.emitted.laws_NV is None


def test_first_emitted_token_follows_the_verifiers_law():
    emitted = [verdict.emitted.tokens[0] for _, verdict in draws(Q_V, P_V)]
    assert chi_square(frequencies(emitted), P_V.tolist()) < 3
    assert chi_square(frequencies(emitted), Q_V.tolist()) > 500


def test_acceptance_rate_is_the_overlap_of_the_laws():
    """Leviathan et al. 2023, Theorem 3.5: beta = sum of min(p, q)."""
    accepted = sum(verdict.num_accepted for _, verdict in draws(Q_V, P_V))
    overlap = float(torch.minimum(P_V, Q_V).sum())
    assert chi_square([accepted, NUM_DRAWS - accepted], [overlap, 1 - overlap]) < 6


def test_a_resampled_token_follows_the_normalised_residual():
    resampled = [v.emitted.tokens[0] for _, v in draws(Q_V, P_V) if not v.num_accepted]
    rest = (P_V - Q_V).clamp_min(0)
    rest = rest / rest.sum()
    assert len(resampled) > 1000
    assert chi_square(frequencies(resampled), P_V.tolist()) > 50
    assert chi_square(frequencies(resampled), rest.tolist()) < 4
    softmaxed = (P_V - Q_V).clamp_min(0).softmax(-1)  # transformers#28508
    assert chi_square(frequencies(resampled), softmaxed.tolist()) > 50


def test_the_bonus_token_follows_the_law_after_the_last_proposed():
    generator = torch.Generator().manual_seed(1)
    laws = torch.stack([one_hot(2, P_V), P_V])
    verdicts = [
        accept_sampling(Proposal((2,), one_hot(2, P_V)[None]), laws, generator)
        for _ in range(NUM_DRAWS)
    ]
    assert all(verdict.num_accepted == 1 for verdict in verdicts)
    bonus = [verdict.emitted.tokens[1] for verdict in verdicts]
    assert chi_square(frequencies(bonus), P_V.tolist()) < 3


def test_equal_laws_always_accept_and_disjoint_laws_never_do():
    assert all(verdict.num_accepted == 1 for _, verdict in draws(P_V, P_V))
    left, right = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.1, 0.9])
    assert all(verdict.num_accepted == 0 for _, verdict in draws(left, right))


def test_a_certain_proposal_is_accepted_with_the_verifiers_probability():
    generator = torch.Generator().manual_seed(2)
    laws = torch.stack([P_V, P_V])
    verdicts = [accept_sampling(Proposal((1,)), laws, generator) for _ in range(NUM_DRAWS)]
    accepted = sum(verdict.num_accepted for verdict in verdicts)
    assert chi_square([accepted, NUM_DRAWS - accepted], [0.45, 0.55]) < 6
    emitted = [verdict.emitted.tokens[0] for verdict in verdicts]
    assert chi_square(frequencies(emitted), P_V.tolist()) < 3


def test_nothing_proposed_emits_one_token_of_the_verifier():
    verdict = accept_sampling(Proposal(), P_V[None], torch.Generator().manual_seed(0))
    assert verdict.num_accepted == 0
    assert len(verdict.emitted.tokens) == 1


def test_emitted_laws_are_the_verifiers_own():
    laws = torch.stack([P_V, Q_V, P_V])
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        proposed = torch.stack([Q_V, P_V])
        pair = tuple(sample(each, generator) for each in proposed)
        verdict = accept_sampling(Proposal(pair, proposed), laws, generator)
        count = len(verdict.emitted.tokens)
        assert count == verdict.num_accepted + 1
        assert torch.equal(verdict.emitted.laws_NV, laws[:count])
        assert verdict.emitted.tokens[: count - 1] == pair[: count - 1]


def test_residual_without_mass_falls_back_to_the_verifiers_law():
    assert torch.equal(residual(P_V, P_V), P_V)
    torch.testing.assert_close(residual(P_V, Q_V), torch.tensor([0.0, 0.35, 0.0, 0.15, 0.0]))


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        (SamplingParams(0.3), [TemperatureLogitsWarper(0.3)]),
        (SamplingParams(1.7), [TemperatureLogitsWarper(1.7)]),
        (SamplingParams(1.0, top_k=5), [TopKLogitsWarper(5)]),
        (SamplingParams(1.0, top_k=99), []),
        (SamplingParams(1.0, top_p=0.6), [TopPLogitsWarper(0.6)]),
        (
            SamplingParams(0.7, top_k=9, top_p=0.8),
            [TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.8)],
        ),
    ],
    ids=lambda each: f"{len(each)} warpers" if isinstance(each, list) else str(each),
)
def test_law_is_that_of_transformers_warpers(params, warpers):
    logits = torch.randn(200, 40, generator=torch.Generator().manual_seed(0)) * 2
    scores = logits
    for warper in warpers:
        scores = warper(None, scores)
    torch.testing.assert_close(law(logits, params), scores.softmax(-1))


def test_law_of_a_single_row_and_of_bfloat16_is_float32():
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    params = SamplingParams(0.7, top_k=4, top_p=0.9)
    rows = law(logits, params)
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.sum(-1), torch.ones(3))
    torch.testing.assert_close(law(logits[1], params), rows[1])


def test_top_p_keeps_at_least_the_likeliest_token():
    rows = law(torch.tensor([[0.0, 3.0, 1.0]]), SamplingParams(1.0, top_p=1e-6))
    assert rows.tolist() == [[0.0, 1.0, 0.0]]


def test_total_variation_is_half_the_l1_distance():
    half = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    other = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    assert total_variation(half, half) == 0.0
    assert total_variation(half, other) == pytest.approx(0.5)
    assert total_variation(P_V[None], Q_V[None]) == pytest.approx(0.5)


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0
    assert common_prefix([2], [1]) == 0
