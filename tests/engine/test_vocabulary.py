"""Vocabularies and tokenizers: padded ones are fine, others are refused at build."""

import json

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specgym.engine.decoding import DecodeRequest, best_tokens, start
from specgym.engine.members import ModelMember, NGramMember
from specgym.engine.pool import ModelPool, check_tokenizers, load_pool
from specgym.engine.testing import (
    TableLM,
    decode,
    random_plans,
    tiny_llama,
    tiny_pool,
    tiny_tokenizer,
)
from specgym.engine.timing import CountingClock
from specgym.engine.types import Plan, SamplingParams

VOCAB, PADS = 12, 64
PLANS = [Plan(("draft", "target"), 4), Plan(("draft", "mid", "target"), 3), Plan(("target",), 0)]


def table(num_pads):
    """Random logits, and pads that would win every time."""
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    padded = torch.full((VOCAB + num_pads, VOCAB + num_pads), 50.0)
    padded[:VOCAB, :VOCAB] = logits
    return padded


@pytest.mark.parametrize("padded", ["draft", "mid", "target"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pads_are_neither_proposed_nor_accepted(padded, temperature):
    """vllm#7252: one tokenizer, vocabularies of unlike size."""
    members = [
        ModelMember(name, TableLM(table(PADS if name == padded else 0)), VOCAB)
        for name in ("draft", "mid", "target")
    ]
    pool = ModelPool(members)
    request = DecodeRequest((1, 2), 40, SamplingParams(temperature, seed=1))
    for plan in PLANS:
        state, results = decode(pool, [request], lambda state: plan)  # noqa: B023
        assert max(state.output()) < VOCAB
        # Cut to one vocabulary the three are copies of each other: nothing is ever refused.
        assert all(result.accepted_per_level == result.proposed_per_level for result in results)


def test_a_padded_drafter_of_real_layers_stays_lossless():
    wide = tiny_llama(1, vocab_size=61 + PADS)
    wide.lm_head.weight.data[61:] = 100.0 * torch.randn(PADS, 32)
    members = [NGramMember(), ModelMember("draft", wide, 61), ModelMember("target", tiny_llama(3))]
    pool = ModelPool(members)
    request = DecodeRequest((1, 2, 3), 30)
    state, _ = decode(pool, [request], random_plans(pool, 0))
    assert state.output() == decode(tiny_pool(3), [request])[0].output()


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused():
    with pytest.raises(ValueError, match="member 'draft': its vocabulary has 50 entries"):
        ModelMember("draft", tiny_llama(vocab_size=50), 61)


def test_unlike_vocabularies_without_a_tokenizer_are_refused():
    members = [
        ModelMember("draft", tiny_llama(vocab_size=50)),
        ModelMember("target", tiny_llama(vocab_size=61)),
    ]
    with pytest.raises(ValueError, match=r"vocabularies differ: \{'draft': 50, 'target': 61\}"):
        ModelPool(members)


def test_prompts_with_ids_beyond_the_vocabulary_are_refused():
    pool = ModelPool([ModelMember("target", TableLM(table(PADS)), VOCAB)])
    for token in (VOCAB, -1):
        with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 12"):
            start(pool, [DecodeRequest((1, token), 4)], CountingClock())


def permuted(tokenizer):
    """The same tokens under other ids."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary["e"], vocabulary["t"] = vocabulary["t"], vocabulary["e"]
    backend = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")


def save(folder, seed, tokenizer, vocab_size):
    """A folder with a model and its tokenizer, as ``--pool`` takes it."""
    tiny_llama(seed, vocab_size=vocab_size).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save(tmp_path_factory.mktemp("target"), 0, tiny_tokenizer(), 98)


def load(draft, target):
    return load_pool(f"draft={draft},target={target}", dtype=torch.float32)


def test_a_pool_is_built_from_folders_and_pads_beyond_the_tokenizer_are_cut(tmp_path, target):
    """Drafter with 64 rows more than the target, which has none to spare."""
    pool = load(save(tmp_path, 1, tiny_tokenizer(), 98 + PADS), target)
    assert pool.model("draft").vocab_size == pool.model("target").vocab_size == 98
    assert list(pool.members) == ["ngram", "draft", "target"]
    assert pool.eos_ids == {2}  # the generation config's, before the tokenizer's
    assert pool.fingerprints["draft"] != pool.fingerprints["target"]
    request = DecodeRequest(pool.encode("the cat"), 12)
    state, _ = decode(pool, [request], random_plans(pool, 0))
    assert state.output() == decode(pool, [request])[0].output()


def test_a_target_padded_more_than_its_drafter_is_fine(tmp_path):
    padded = save(tmp_path / "target", 0, tiny_tokenizer(), 98 + PADS)
    pool = load(save(tmp_path / "draft", 1, tiny_tokenizer(), 98), padded)
    assert pool.model("draft").vocab_size == pool.model("target").vocab_size == 98


def test_a_drafter_with_a_permuted_tokenizer_is_refused_at_build(tmp_path, target):
    """sglang#23838: the sizes agree, the ids do not."""
    draft = save(tmp_path, 1, permuted(tiny_tokenizer()), 98)
    with pytest.raises(ValueError, match=r"member 'draft': its tokenizer differs .* in 2 tokens"):
        load(draft, target)


def test_a_drafter_with_fewer_tokens_is_refused_at_build(tmp_path, target):
    draft = save(tmp_path, 1, tiny_tokenizer(90), 98)
    with pytest.raises(ValueError, match=r"differs .* in 8 tokens"):
        load(draft, target)
    check_tokenizers("draft", tiny_tokenizer(90), tiny_tokenizer(90))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 61, 49152])
def test_ties_go_to_the_lowest_id(dtype, vocab):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 3, (2, 4, vocab), generator=generator).to(dtype)
    best = best_tokens(logits, "target")
    for row in range(2):
        for index in range(4):
            values = logits[row, index].tolist()
            assert best[row][index] == values.index(max(values))


def test_ties_of_drafter_and_target_are_broken_alike():
    flat = torch.zeros(VOCAB, VOCAB)
    flat[:, 5:8] = 1.0
    members = [ModelMember("draft", TableLM(flat)), ModelMember("target", TableLM(flat))]
    state, results = decode(
        ModelPool(members), [DecodeRequest((1,), 15)], lambda state: Plan(("draft", "target"), 4)
    )
    assert state.output() == [5] * 15
    assert all(result.num_accepted == 4 for result in results)
