"""Vocabularies and tokenizers: padded ones are fine, others are refused at build."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from specgym.engine.decoding import start
from specgym.engine.member_runs import best_tokens
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.pools.loading import load_pool
from specgym.engine.pools.vocabulary import check_tokenizers
from specgym.engine.testing import (
    TableLM,
    decode,
    random_plans,
    tiny_llama,
    tiny_pool,
    tiny_tokenizer,
)
from specgym.engine.timing import CountingClock
from specgym.engine.types import DecodeRequest, EngineFault, Plan, SamplingParams

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


def test_a_drafter_with_fewer_tokens_never_proposes_the_others(tmp_path, target, caplog):
    """Its model has a row for each of them, which nobody trained; and rows for more."""
    pool = load(save(tmp_path, 1, tiny_tokenizer(90), 98 + PADS), target)
    assert "lacks 8 of the target's 98 tokens" in caplog.text
    assert pool.members["draft"].unknown == frozenset(range(90, 98))
    check_lossless(pool, known=90)


def test_ids_that_a_drafter_has_no_row_for_do_not_crash_it(tmp_path, target):
    """The target has added tokens: they are in the prompt, in the output and in proposals."""
    pool = load(save(tmp_path, 1, tiny_tokenizer(90), 90), target)
    check_lossless(pool, known=90)


def check_lossless(pool, known):
    """Any plans give plain decoding's tokens though prompt and output go beyond what is known."""
    member = pool.members["draft"]
    logits = member.forward(member.new_memory(1, 64), [[5, 95, 97, 3]])
    assert logits.shape == (1, 4, 98)
    assert torch.isinf(logits[..., known:]).all()
    assert torch.isfinite(logits[..., :known]).all()
    outputs = set()
    for prompt in ((5, 95, 97, 95, 97), (96, 4, 9), (40, 41, 42)):
        for temperature in (0.0, 1.0):
            request = DecodeRequest(prompt, 60, SamplingParams(temperature), eos_ids=frozenset())
            state, results = decode(pool, [request], random_plans(pool, 0))
            assert any(result.executed.chain[-2:] == ("draft", "target") for result in results)
            outputs |= set(state.output())
            if temperature == 0.0:
                assert state.output() == decode(pool, [request])[0].output()
    assert max(outputs) >= known


def test_sampling_behind_a_drafter_with_fewer_tokens_keeps_the_law(tmp_path, target):
    """Tokens that the drafter lacks come as often as without it."""
    pool = load(save(tmp_path, 1, tiny_tokenizer(50), 50), target)
    shares = []
    for plan in (Plan(("target",), 0), Plan(("draft", "target"), 1)):
        requests = [
            DecodeRequest((5, 60), 2, SamplingParams(1.0, seed=seed), frozenset())
            for seed in range(300)
        ]
        state, _ = decode(pool, requests, lambda _: plan)  # noqa: B023
        tokens = [token for row in range(300) for token in state.output(row)]
        shares.append(sum(token >= 50 for token in tokens) / len(tokens))
    assert min(shares) > 0.2
    assert abs(shares[0] - shares[1]) < 0.09  # three standard deviations


def test_tokens_that_the_target_lacks_are_never_proposed(tmp_path):
    """Added to the drafter behind the target's last id, where the target has padded rows."""
    padded = save(tmp_path / "target", 0, tiny_tokenizer(90), 98)
    pool = load(save(tmp_path / "draft", 1, tiny_tokenizer(98), 98), padded)
    assert pool.model("draft").vocab_size == pool.model("target").vocab_size == 90


def test_an_id_that_the_target_skips_is_never_proposed(tmp_path):
    """Vocabularies may have holes, and the last id is then beyond the number of tokens."""
    skipping = with_vocabulary(lambda tokens: {t: i for t, i in tokens.items() if i != 70})
    holed = save(tmp_path / "target", 0, skipping, 98)
    pool = load(save(tmp_path / "draft", 1, tiny_tokenizer(), 98), holed)
    assert pool.model("target").vocab_size == 98
    assert pool.members["draft"].unknown == {70}


def with_vocabulary(change):
    """A tokenizer of single characters with another vocabulary."""
    state = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    state["model"]["vocab"] = change(state["model"]["vocab"])
    backend = type(tiny_tokenizer().backend_tokenizer).from_str(json.dumps(state))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: {**v, "e": 99}, r"in 1 tokens, first 'e': id 99 against id \d+"),
        (
            lambda v: {"E!" if t == "e" else t: i for t, i in v.items()},
            r"first 'E!': .*against 'e'",
        ),
    ],
    ids=["a token under another id", "another token under an id"],
)
def test_tokenizers_that_read_one_text_in_two_ways_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_tokenizers("draft", with_vocabulary(change), tiny_tokenizer())


def test_tokenizers_without_a_common_token_are_refused():
    foreign = SimpleNamespace(get_vocab=lambda: {"zz": 500})
    with pytest.raises(ValueError, match="must share tokens"):
        check_tokenizers("draft", foreign, tiny_tokenizer())
    check_tokenizers("draft", tiny_tokenizer(90), tiny_tokenizer())
    check_tokenizers("draft", tiny_tokenizer(), tiny_tokenizer(90))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", [(0, 0), (1, 2)])
def test_a_row_that_is_not_finite_is_found_wherever_it_is(dtype, place):
    wide = torch.randn(2, 3, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = wide[..., :61]  # as of a padded vocabulary: rows do not lie end to end
    wide[..., 61:] = torch.nan
    assert best_tokens(logits, "target") == logits.float().argmax(dim=-1).tolist()
    for index, value in ((7, torch.nan), (60, torch.inf), (slice(None), -torch.inf)):
        broken = wide.clone()[..., :61]
        broken[(*place, index)] = value
        with pytest.raises(EngineFault, match=rf"position \[{place[0]}, {place[1]}\]"):
            best_tokens(broken, "target")


def test_ties_of_drafter_and_target_are_broken_alike():
    flat = torch.zeros(VOCAB, VOCAB)
    flat[:, 5:8] = 1.0
    members = [ModelMember("draft", TableLM(flat)), ModelMember("target", TableLM(flat))]
    state, results = decode(
        ModelPool(members), [DecodeRequest((1,), 15)], lambda state: Plan(("draft", "target"), 4)
    )
    assert state.output() == [5] * 15
    assert all(result.num_accepted == 4 for result in results)
