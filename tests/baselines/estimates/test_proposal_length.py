"""The distribution of how many tokens a drafter proposes."""

import random

import pytest

from specgym.baselines.estimates.proposal_length import ProposalLength


def test_full_until_seen_otherwise():
    assert ProposalLength(3, 0.1).at_least() == [1.0] * 4


def test_update_by_hand():
    length = ProposalLength(4, 0.5)
    length.observe(0, 4)  # continues: 0.5, 1, 1, 1
    length.observe(2, 2)  # 0.75, 1, unknown beyond: k was 2
    length.observe(2, 3)  # 0.875, 1, 0.5, 1
    assert length.at_least() == pytest.approx([1.0, 0.875, 0.875, 0.4375, 0.4375])


def test_recovers_the_distribution_from_mixed_k():
    rng = random.Random(0)
    length = ProposalLength(4, 0.002)
    for _ in range(20000):
        k = rng.choice([1, 2, 4])
        length.observe(min(rng.choice([0, 1, 3, 4]), k), k)
    assert length.at_least() == pytest.approx([1.0, 0.75, 0.5, 0.5, 0.25], abs=0.05)
