"""The fakes and law tests we hand to users."""

from collections import Counter

import pytest
import torch

from specgym.engine.testing import (
    chi_square,
    decode,
    random_plans,
    table_pool,
    tiny_pool,
    tiny_tokenizer,
)
from specgym.engine.types import DecodeRequest

LAW = [0.4, 0.3, 0.2, 0.1]


def counts_of(law, total, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(torch.tensor(law), total, replacement=True, generator=generator)
    counts = Counter(drawn.tolist())
    return [counts[index] for index in range(len(law))]


def test_chi_square_is_about_one_under_the_law_and_grows_with_the_draws_otherwise():
    values = [chi_square(counts_of(LAW, 1000, seed), LAW) for seed in range(200)]
    assert 0.8 < sum(values) / len(values) < 1.2
    wrong = [0.3, 0.4, 0.2, 0.1]
    few, many = (chi_square(counts_of(wrong, total), LAW) for total in (500, 50_000))
    assert few > 2
    assert many > 50 * few


def test_chi_square_pools_rare_categories_and_never_forgives_the_impossible():
    assert chi_square([500, 500, 0, 0], [0.5, 0.499, 0.0005, 0.0005]) < 1
    assert chi_square([450, 450, 60, 40], [0.5, 0.4999, 0.00005, 0.00005]) == float("inf")


def test_a_tiny_pools_drafters_agree_in_part():
    pool = tiny_pool(3)
    for name, least, most in (("draft", 0.05, 0.95), ("mid", 0.3, 0.99)):
        plans = [plan for plan in pool.plans() if plan.chain == (name, "target") and plan.k == 3]
        _, results = decode(pool, [DecodeRequest((1, 2, 3), 80)], lambda state: plans[0])  # noqa: B023
        rate = sum(r.num_accepted for r in results) / sum(r.num_drafted for r in results)
        assert least < rate < most


def test_random_plans_are_all_of_the_pools_and_repeat_with_their_seed():
    pool = tiny_pool()
    pick, again, other = (random_plans(pool, seed) for seed in (0, 0, 1))
    first = [pick(None) for _ in range(400)]
    assert first == [again(None) for _ in range(400)]
    assert first != [other(None) for _ in range(400)]
    assert set(first) == set(pool.plans())


def test_a_table_pool_has_up_to_three_models_the_last_of_them_the_target():
    table = torch.eye(5).roll(1, dims=1)
    assert list(table_pool([table]).members) == ["ngram", "target"]
    assert list(table_pool([table] * 2).members) == ["ngram", "draft", "target"]
    assert list(table_pool([table] * 3).members) == ["ngram", "draft", "mid", "target"]
    assert decode(table_pool([table]), [DecodeRequest((3,), 4)])[0].output() == [4, 0, 1, 2]


@pytest.mark.parametrize("vocab_size", [3, 16, 98])
def test_the_tiny_tokenizer_maps_characters_to_ids_and_back(vocab_size):
    tokenizer = tiny_tokenizer(vocab_size)
    assert len(tokenizer) == vocab_size
    ids = list(range(2, vocab_size))
    assert tokenizer.encode(tokenizer.decode(ids)) == ids
    assert tokenizer.eos_token_id == 1


@pytest.mark.parametrize("vocab_size", [2, 99])
def test_the_tiny_tokenizer_says_what_sizes_there_are(vocab_size):
    with pytest.raises(ValueError, match=r"vocab_size: must be in 3\.\.98"):
        tiny_tokenizer(vocab_size)
