import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgym.engine.members.ngram import NGramMember
from specgym.engine.testing import tiny_tokenizer
from specgym.envs.text_features import (
    TEXT_FEATURES,
    TextFeatures,
    TextReader,
    class_bytes,
    classify,
    token_classes,
)

NAMES = [name for name, _, _ in TEXT_FEATURES]
WORD, DIGIT, NEWLINE, PUNCTUATION = 1, 2, 4, 8


def named(text):
    return dict(zip(NAMES, text.values(), strict=True))


def recomputed(tokens, num_prompt, window):
    """The features by their definitions, from nothing but lookup's proposals."""
    member = NGramMember(max_window=window)

    def match(stop):
        memory = member.new_memory()
        memory.extend(tokens[:stop])
        return memory.match(tokens[:stop])

    recent = steady = runs = 0.0
    run = 0
    for stop in range(num_prompt, len(tokens)):
        hit = member.propose(member.new_memory(), tokens[:stop], 1) == (tokens[stop],)
        recent = 0.8 * recent + 0.2 * hit
        steady = 0.95 * steady + 0.05 * hit
        runs = runs if hit else 0.8 * runs + 0.2 * math.log2(1 + min(run, 31)) / 5
        run = run + 1 if hit else 0
    size, position = match(len(tokens))
    copied = 0
    while copied < min(31, position) and tokens[position - 1 - copied] == tokens[-1 - copied]:
        copied += 1
    return {
        "ngram_hit": size / window,
        "ngram_copy": math.log2(1 + copied) / 5,
        "ngram_recent": recent,
        "ngram_steady": steady,
        "ngram_runs": runs,
    }


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    num_prompt=st.integers(1, 60),
    window=st.integers(1, 4),
)
def test_features_are_what_lookup_says_of_the_text_so_far(tokens, num_prompt, window):
    num_prompt = min(num_prompt, len(tokens))
    text = TextFeatures(tokens[:num_prompt], 0, window)
    for token in tokens[num_prompt:]:
        text.push(token)
    seen, wanted = named(text), recomputed(tokens, num_prompt, window)
    assert {name: seen[name] for name in wanted} == pytest.approx(wanted)
    assert all(0.0 <= value <= 1.0 for value in seen.values())


def test_a_copy_is_known_by_its_length_and_a_loop_by_its_hits():
    text = TextFeatures([*range(40), *range(30)])
    assert named(text)["ngram_copy"] == pytest.approx(math.log2(31) / 5)
    assert named(text)["ngram_hit"] == 1.0
    text.push(30)
    text.push(31)
    assert named(text)["ngram_copy"] == 1.0  # 31 and more
    assert named(text)["ngram_recent"] == pytest.approx(1 - 0.8**2)
    assert named(text)["ngram_runs"] == 0.0
    text.push(499)
    assert named(text)["ngram_runs"] == pytest.approx(0.2 * math.log2(3) / 5)
    assert named(text)["ngram_hit"] == named(text)["ngram_copy"] == 0.0


def test_the_prompt_is_no_record_of_what_lookup_predicts():
    assert named(TextFeatures([1] * 50))["ngram_recent"] == 0.0


def test_the_last_tokens_class_is_four_entries():
    text = TextFeatures([5], DIGIT | WORD)
    flags = ("begins_word", "digit", "newline", "punctuation")
    assert [named(text)[name] for name in flags] == [1, 1, 0, 0]
    text.push(6, NEWLINE)
    assert [named(text)[name] for name in flags] == [0, 0, 1, 0]
    text.push(7)
    assert [named(text)[name] for name in flags] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("piece", "wanted"),
    [
        ("Ġthe", WORD),
        ("▁the", WORD),
        ("the", 0),
        ("Ġ12", WORD | DIGIT),
        ("Ċ", NEWLINE),
        ("ĊĊ", NEWLINE),
        ("<0x0A>", NEWLINE),
        ("<0x41>", 0),
        (");Ċ", PUNCTUATION | NEWLINE),
        ("Ġ(", WORD | PUNCTUATION),
        ("3.", DIGIT | PUNCTUATION),
    ],
)
def test_pieces_are_read_as_vocabularies_write_them(piece, wanted):
    assert classify(piece) == wanted


def test_a_tokenizers_classes_are_those_of_its_texts():
    tokenizer = tiny_tokenizer()
    classes = token_classes(tokenizer, len(tokenizer) + 3)
    assert classes.dtype == np.uint8
    assert classes[-3:].tolist() == [0, 0, 0]
    assert not classes[tokenizer.all_special_ids].any()
    for character, wanted in {
        " ": WORD,
        "7": DIGIT,
        "\n": NEWLINE,
        "a": 0,
        ";": PUNCTUATION,
    }.items():
        assert classes[tokenizer.convert_tokens_to_ids(character)] == wanted, character
    assert class_bytes(tokenizer, 9) is class_bytes(tokenizer, 9)
    assert list(class_bytes(tokenizer, 9)) == classes[:9].tolist()


def test_without_a_tokenizer_all_classes_are_zero():
    assert token_classes(None, 5).tolist() == [0] * 5


def test_a_reader_follows_lists_that_grow_and_reads_others_anew():
    reader = TextReader(bytes([0, DIGIT, NEWLINE]), 2)
    tokens = [1, 2, 1, 2]
    first = reader.read(0, tokens, 3)
    text = reader.texts[0]
    tokens += [1, 9]
    again = reader.read(0, tokens, 3)
    assert reader.texts[0] is text
    assert again == TextReader(reader.classes, 2).read(7, list(tokens), 3) != first
    other = [2, 2]
    assert reader.read(0, other, 2) == TextReader(reader.classes, 2).read(0, [2, 2], 2)
    assert dict(zip(NAMES, reader.read(0, other, 2), strict=True))["newline"] == 1.0
    reader.clear()
    assert not reader.texts
