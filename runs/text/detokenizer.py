"""Text out of tokens as they come: whole characters only, and nothing that a stop string cuts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

UNFINISHED = "\ufffd"  # what a tokenizer makes of a character whose bytes are not all there


class Detokenizer:
    """Turns the tokens of one text into pieces of text that may be shown at once.

    A piece never ends inside a character, and what may be the beginning of a stop string waits
    until it is clear that it is none. Only the last few tokens are decoded again for context, so
    the work does not grow with the text.

    Args:
        tokenizer: A tokenizer of transformers.
        stop: Strings that end the text; neither they nor what follows is shown.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.context: list[int] = []  # tokens whose text is out: what follows is decoded after them
        self.pending: list[int] = []  # tokens whose text is not out yet
        self.held = ""  # text that may be the beginning of a stop string

    def push(self, tokens: Iterable[int]) -> str:
        """The text that can be shown after these further tokens; often empty."""
        self.held += self.take(tokens, is_last=False)
        kept = max((overlap(self.held, each) for each in self.stop), default=0)
        shown = self.held[: len(self.held) - kept]
        self.held = self.held[len(shown) :]
        return shown

    def finish(self, tokens: Iterable[int], *, is_stopped: bool) -> str:
        """The rest of the text after the last tokens, cut at the stop string that ended it."""
        rest = self.held + self.take(tokens, is_last=True)
        self.held = ""
        starts = [rest.find(each) for each in self.stop if each in rest]
        return rest[: min(starts)] if is_stopped and starts else rest

    def take(self, tokens: Iterable[int], *, is_last: bool) -> str:
        """The text of the pending tokens and these, empty where its last character is broken."""
        self.pending += tokens
        before = self.decode(self.context)
        after = self.decode([*self.context, *self.pending])
        if after.endswith(UNFINISHED) and not is_last:
            return ""
        if len(after) > len(before):  # what showed nothing is no context: its effect is to come
            self.context, self.pending = self.pending, []
        return after[len(before) :]

    def decode(self, tokens: list[int]) -> str:
        """The tokens' text, without special tokens; cleaning spaces up would change shown text."""
        return self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of a text that is a beginning, but not all, of a stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
