"""Acceptance by position: what a round tells, and what it does not."""

import json
import random

import pytest

from specgym.baselines.estimates.position_counts import (
    PositionCounts,
    expected_tokens,
    geometric_rate,
    survival_of,
)


def test_a_rejection_says_nothing_of_what_comes_after():
    counts = PositionCounts(4)
    counts.add(2, depth=4)
    assert counts.accepted == [1, 1, 0, 0]
    assert counts.reached == [1, 1, 1, 0]


def test_a_full_acceptance_is_no_failure():
    counts = PositionCounts(4)
    counts.add(2, depth=2)
    assert counts.accepted == [1, 1, 0, 0]
    assert counts.reached == [1, 1, 0, 0]


def test_positions_nobody_reached_go_on_at_the_last_rate():
    counts = PositionCounts(4)
    for accepted in (2, 2, 1, 2):
        counts.add(accepted, depth=2)
    assert counts.rates() == [1.0, 0.75, 0.75, 0.75]
    assert PositionCounts(2).rates() == [0.5, 0.5]


def test_the_window_forgets_exactly():
    counts, fresh = PositionCounts(6, window=20), PositionCounts(6)
    rng = random.Random(0)
    rounds = [(rng.randint(0, k), k) for k in rng.choices(range(1, 7), k=200)]
    for accepted, depth in rounds:
        counts.add(accepted, depth)
    for accepted, depth in rounds[-20:]:
        fresh.add(accepted, depth)
    assert (counts.accepted, counts.reached) == (fresh.accepted, fresh.reached)


def test_mixed_depths_give_the_rates_that_drew_them():
    rates, rng = [0.9, 0.6, 0.8, 0.3], random.Random(1)
    counts = PositionCounts(4)
    for _ in range(40_000):
        depth = rng.randint(1, 4)
        accepted = 0
        while accepted < depth and rng.random() < rates[accepted]:
            accepted += 1
        counts.add(accepted, depth)
    assert counts.rates() == pytest.approx(rates, abs=0.02)


def test_expected_tokens_by_hand():
    assert expected_tokens([0.5, 0.5, 0.5]) == [1.0, 1.5, 1.75, 1.875]  # E = .875 accepted
    assert expected_tokens([1.0, 1.0]) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.9, 0.99])
def test_a_batch_has_the_geometric_law_of_its_mean(depth, share):
    mean = share * depth
    survival = survival_of(mean, depth, num_rows=16)
    assert sum(survival[1:]) == pytest.approx(mean, rel=1e-3)
    assert survival == sorted(survival, reverse=True)


def test_the_geometric_law_is_found_again():
    assert geometric_rate(0.7 + 0.49 + 0.343, 3) == pytest.approx(0.7)
    assert survival_of(0.0, 3, 8) == [1, 0, 0, 0]
    assert survival_of(3.0, 3, 8) == [1, 1, 1, 1]


def test_state_round_trip():
    counts, other = PositionCounts(3, window=4), PositionCounts(3, window=4)
    for accepted in (0, 1, 3, 2, 3, 1):
        counts.add(accepted, 3)
    other.load_state_dict(json.loads(json.dumps(counts.state_dict())))
    for each in (counts, other):
        each.add(2, 3)
    assert counts.state_dict() == other.state_dict()
