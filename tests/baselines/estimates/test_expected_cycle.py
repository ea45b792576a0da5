"""Eq. 7's expansion against a sum over every outcome."""

import random

import pytest

from specgym.baselines.estimates.expected_cycle import expected_over_lengths, expected_verification


def enumerate_cycle(alphas, seconds, given):
    """Returns expected tokens and seconds by walking all outcomes of every level."""
    if not alphas:
        return float(given), 0.0
    alpha, tokens, cost = alphas[0], 0.0, seconds[0][given + 1]
    for accepted in range(given + 1):
        probability = alpha**accepted * (1.0 - alpha if accepted < given else 1.0)
        later_tokens, later_cost = enumerate_cycle(alphas[1:], seconds[1:], accepted + 1)
        tokens += probability * later_tokens
        cost += probability * later_cost
    return tokens, cost


@pytest.mark.parametrize("num_verifiers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_against_enumeration(num_verifiers, seed):
    rng = random.Random(seed)
    max_k = 6
    alphas = [rng.random() for _ in range(num_verifiers)]
    seconds = [[rng.random() for _ in range(max_k + num_verifiers + 1)] for _ in alphas]
    tokens, costs = expected_verification(alphas, seconds, max_k)
    assert len(tokens) == len(costs) == max_k + 1
    for k in range(1, max_k + 1):
        assert (tokens[k], costs[k]) == pytest.approx(enumerate_cycle(alphas, seconds, k))


def test_nothing_proposed_is_one_plain_token():
    tokens, costs = expected_verification([0.5, 0.5], [[9.0] * 5, [0.0, 2.0, 3.0, 4.0, 5.0]], 2)
    assert (tokens[0], costs[0]) == (1.0, 2.0)


@pytest.mark.parametrize(("alpha", "expected"), [(0.0, 1.0), (1.0, 5.0), (0.5, 1.9375)])
def test_one_verifier_by_hand(alpha, expected):
    # 1 + a + a^2 + a^3 + a^4
    tokens, _ = expected_verification([alpha], [[1.0] * 6], 4)
    assert tokens[4] == pytest.approx(expected)


def test_mean_of_the_proposals_is_not_enough():
    # k = 2, a = 1/2: level one emits 1, 2, 3 tokens with 1/2, 1/4, 1/4; level two, always
    # accepting, emits one more. Plugging the mean 1.75 into 1 + a + ... has no such meaning.
    tokens, costs = expected_verification([0.5, 0.5], [[1.0] * 5, [0.0, 0.0, 2.0, 3.0, 4.0]], 2)
    assert tokens[2] == pytest.approx(0.5 * 1.5 + 0.25 * 1.75 + 0.25 * 1.875)
    assert costs[2] == pytest.approx(1.0 + 0.5 * 2.0 + 0.25 * 3.0 + 0.25 * 4.0)


def test_lengths_against_enumeration():
    continues = [0.8, 0.5, 0.25]
    at_least = [1.0, 0.8, 0.4, 0.1]
    values = [1.0, 1.7, 2.1, 2.2]
    for k, expected in enumerate(expected_over_lengths(at_least, values)):
        outcome, reached = 0.0, 1.0
        for n in range(k):
            outcome += reached * (1.0 - continues[n]) * values[n]
            reached *= continues[n]
        assert expected == pytest.approx(outcome + reached * values[k])
