"""Features that are functions of the text so far: how well lookup predicts it, and its last token.

They cost no forward and depend on no plan, so live decoding and replay have them alike. Whether
lookup would have predicted a token is known in hindsight whatever plan ran.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from specgym.engine.members.ngram import NGramIndex

DEFAULT_WINDOW = 3  # where the pool has no prompt lookup of its own
COPY_CAP = 31
LOGS = tuple(math.log2(1 + length) / 5 for length in range(COPY_CAP + 1))
RECENT_WEIGHT = 0.2
STEADY_WEIGHT = 0.05
CLASSES = ("begins_word", "digit", "newline", "punctuation")  # bit i of a token's class
CLASS_FLAGS = tuple(
    tuple(float(bits >> bit & 1) for bit in range(len(CLASSES)))
    for bits in range(1 << len(CLASSES))
)
SPACES = ("Ġ", "▁", " ")  # a leading space as tokenizers of bytes, of pieces and of text write it
NEWLINES = ("Ċ", "\n")
BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte as tokenizers of pieces write it
PUNCTUATION = frozenset("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
TEXT_FEATURES = (
    ("ngram_hit", "share", "longest suffix seen before, over the window"),
    ("ngram_copy", "log2 tokens / 5", "how far back the text equals what lookup found, up to 31"),
    ("ngram_recent", "share", "output tokens that lookup would have predicted, EMA of 0.2"),
    ("ngram_steady", "share", "output tokens that lookup would have predicted, EMA of 0.05"),
    ("ngram_runs", "log2 tokens / 5", "runs of such tokens, EMA of 0.2 over the runs"),
    ("begins_word", "0/1", "the last token begins with a space"),
    ("digit", "0/1", "the last token has a digit"),
    ("newline", "0/1", "the last token has a line break"),
    ("punctuation", "0/1", "the last token has ASCII punctuation"),
)


class TextFeatures:
    """Features of one request's text, a constant amount of work per token.

    Args:
        prompt: Token ids of the prompt, at least one.
        last_class: Class of the prompt's last token.
        max_window: Longest suffix that is looked up.
    """

    def __init__(self, prompt: Sequence[int], last_class: int = 0, max_window: int = 0):
        self.tokens = list(prompt)
        self.last_class = last_class
        self.index = NGramIndex(max_window or DEFAULT_WINDOW)
        self.index.extend(self.tokens)
        self.size, self.position = self.index.match(self.tokens)
        self.recent = self.steady = self.runs = 0.0
        self.run = 0

    def __len__(self) -> int:
        return len(self.tokens)

    def push(self, token: int, token_class: int = 0) -> None:
        """Takes in the output's next token."""
        is_hit = self.size > 0 and self.tokens[self.position] == token
        self.recent += RECENT_WEIGHT * (is_hit - self.recent)
        self.steady += STEADY_WEIGHT * (is_hit - self.steady)
        if is_hit:
            self.run = min(self.run + 1, COPY_CAP)
        else:
            self.runs += RECENT_WEIGHT * (LOGS[self.run] - self.runs)
            self.run = 0
        self.tokens.append(token)
        self.last_class = token_class
        self.index.extend(self.tokens)
        self.size, self.position = self.index.match(self.tokens)

    def values(self) -> tuple[float, ...]:
        """The entries of ``TEXT_FEATURES`` now."""
        return (
            self.size / self.index.max_window,
            LOGS[self.copy_length()],
            self.recent,
            self.steady,
            self.runs,
            *CLASS_FLAGS[self.last_class],
        )

    def copy_length(self) -> int:
        """Tokens before the text's end that equal those before lookup's continuation."""
        length, tokens, end = self.size, self.tokens, len(self.tokens)
        limit = min(COPY_CAP, self.position)
        while length < limit and tokens[self.position - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return min(length, COPY_CAP)


class TextReader:
    """Text features of every row of a batch, kept up to date with its tokens.

    Args:
        classes: Class of every token id, as of ``token_classes``; none takes all as class 0.
        max_window: Longest suffix that is looked up; 0 takes 3.
    """

    def __init__(self, classes: bytes = b"", max_window: int = 0):
        self.classes = classes
        self.max_window = max_window
        self.clear()

    def clear(self) -> None:
        """Forgets every text."""
        self.sources: dict[int, Sequence[int]] = {}
        self.texts: dict[int, TextFeatures] = {}

    def read(self, row: int, tokens: Sequence[int], num_prompt: int) -> tuple[float, ...]:
        """The features of a row's text, of which the first ``num_prompt`` tokens are the prompt.

        A list that grows is read on from where it was read to; another one is read anew.
        """
        text = self.texts.get(row)
        if text is None or self.sources[row] is not tokens or len(text) > len(tokens):
            prompt = tokens[:num_prompt]
            text = TextFeatures(prompt, self.class_of(prompt[-1]), self.max_window)
            self.sources[row], self.texts[row] = tokens, text
        for token in tokens[len(text) :]:
            text.push(token, self.class_of(token))
        return text.values()

    def class_of(self, token: int) -> int:
        """A token's class; 0 for ids beyond the table."""
        return self.classes[token] if token < len(self.classes) else 0


def token_classes(tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Lexical class of every token id as a set of bits, uint8 [vocab_size].

    Bit i stands for ``CLASSES[i]``. Zeros without a tokenizer, and for ids that it lacks.
    """
    classes = np.zeros(vocab_size, dtype=np.uint8)
    if tokenizer is None:
        return classes
    count = min(vocab_size, len(tokenizer))
    special = set(tokenizer.all_special_ids)
    for token, piece in enumerate(tokenizer.convert_ids_to_tokens(range(count))):
        if piece and token not in special:
            classes[token] = classify(piece)
    return classes


@functools.lru_cache(maxsize=8)
def class_bytes(tokenizer: Any, vocab_size: int) -> bytes:
    """``token_classes`` as bytes, made once per tokenizer: a byte is read faster than an entry."""
    return token_classes(tokenizer, vocab_size).tobytes()


def classify(piece: str) -> int:
    """The class of a token that a vocabulary writes this way."""
    byte = BYTE.fullmatch(piece)
    text = chr(int(byte[1], 16)) if byte else piece
    return (
        text.startswith(SPACES)
        | any(map(str.isdigit, text)) << 1
        | any(newline in text for newline in NEWLINES) << 2
        | (not PUNCTUATION.isdisjoint(text)) << 3
    )
