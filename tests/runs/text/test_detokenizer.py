"""Pieces of text: whole characters, nothing that a stop string cuts, and all of the text."""

import random

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from specgym.engine.testing import tiny_tokenizer
from specgym.runs.text.detokenizer import Detokenizer, overlap

TEXTS = (
    "plain words, and more",
    "naïve café, Straße",
    "雪が降る。",
    "a🙂b👩‍👩‍👧c🇯🇵",
    " spaces  at \n both ends ",
    "",
)


@pytest.fixture(scope="module")
def bytewise():
    """A tokenizer of single bytes: most characters here take several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": 0} | {byte: index for index, byte in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def pieces_of(tokenizer, tokens, rng, stop=(), is_stopped=False, extra=()):
    """The pieces when tokens come in blocks of random size; the last block has some extra."""
    detokenizer, pieces = Detokenizer(tokenizer, stop), []
    while len(tokens) > (size := rng.randint(1, 5)):
        pieces.append(detokenizer.push(tokens[:size]))
        tokens = tokens[size:]
    return [*pieces, detokenizer.finish([*tokens, *extra], is_stopped=is_stopped)]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_make_up_the_text(bytewise, text):
    tokens = bytewise.encode(text)
    for seed in range(20):
        pieces = pieces_of(bytewise, tokens, random.Random(seed))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


def test_special_tokens_are_not_shown(bytewise):
    tokens = [*bytewise.encode("été"), 0, *bytewise.encode("雪"), 0]
    for seed in range(10):
        assert "".join(pieces_of(bytewise, tokens, random.Random(seed))) == "été雪"


def test_a_character_that_never_gets_whole_comes_at_the_end(bytewise):
    tokens = bytewise.encode("ab雪")[:-1]
    detokenizer = Detokenizer(bytewise)
    assert detokenizer.push(tokens[:2]) == "ab"
    assert detokenizer.push(tokens[2:]) == ""
    assert detokenizer.finish([], is_stopped=False) == bytewise.decode(tokens[2:])


def test_the_work_of_a_piece_does_not_grow_with_the_text(bytewise):
    detokenizer, longest = Detokenizer(bytewise), 0
    for token in bytewise.encode("あいうえお" * 100):
        detokenizer.push([token])
        longest = max(longest, len(detokenizer.context) + len(detokenizer.pending))
    assert longest <= 6


@pytest.mark.parametrize("stop", [("END",), ("END", "D!"), ("aa", "END", "ENDE"), ("E", "ND")])
def test_nothing_that_a_stop_string_cuts_is_ever_shown(stop):
    tokenizer = tiny_tokenizer()
    text = "aEaENaEN EEND! and more"
    cut = min(text.find(each) for each in stop if each in text)
    end = min(text.find(each) + len(each) for each in stop if each in text)
    for extra in range(3):  # the last token may hold more than the stop string
        tokens, more = tokenizer.encode(text[:end]), tokenizer.encode(text[end : end + extra])
        for seed in range(20):
            pieces = pieces_of(tokenizer, tokens, random.Random(seed), stop, True, more)
            assert "".join(pieces) == text[:cut]


def test_the_beginning_of_a_stop_string_is_shown_when_it_turns_out_to_be_none():
    tokenizer = tiny_tokenizer()
    detokenizer = Detokenizer(tokenizer, ("stop here",))
    assert detokenizer.push(tokenizer.encode("a sto")) == "a "
    assert detokenizer.push(tokenizer.encode("p")) == ""
    assert detokenizer.push(tokenizer.encode("ping st")) == "stopping "
    assert detokenizer.finish(tokenizer.encode("op"), is_stopped=False) == "stop"


def test_overlap_is_the_longest_beginning_at_the_end():
    assert [overlap(text, "aab") for text in ("", "a", "xaa", "aab", "ba", "x")] == [
        0,
        1,
        2,
        0,
        1,
        0,
    ]
