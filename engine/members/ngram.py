"""Prompt lookup: propose what followed the last few tokens when they occurred before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specgym.engine.members.traits import LOOKUP


class NGramIndex:
    """Where each n-gram of one row was last continued; grows with the committed tokens only."""

    def __init__(self, max_window: int):
        self.max_window = max_window
        self.num_indexed = 0
        self.next_position: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the n-grams that end before the last token: those that have a continuation."""
        for stop in range(self.num_indexed + 1, len(tokens)):
            for size in range(1, min(self.max_window, stop) + 1):
                self.next_position[tuple(tokens[stop - size : stop])] = stop
        self.num_indexed = max(self.num_indexed, len(tokens) - 1)

    def match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Longest suffix seen before, and where it was continued; (0, 0) when there is none."""
        for size in range(min(self.max_window, len(tokens)), 0, -1):
            position = self.next_position.get(tuple(tokens[len(tokens) - size :]))
            if position is not None:
                return size, position
        return 0, 0


class NGramMember:
    """Prompt lookup: proposes what followed the latest earlier occurrence of the last tokens.

    The window runs from ``max_window`` tokens down to 1, longest match first. A continuation that
    reaches the end of the text goes on with its own proposal, so a loop is proposed as a loop.

    Args:
        name: The member's name in chains.
        max_window: Longest suffix that is looked up.

    Source: Saxena 2023, prompt lookup decoding; the windows and the latest-first order are ours.
    """

    architecture = "prompt lookup"
    context_limit = 2**31
    num_parameters = 0
    num_bytes = 0

    def __init__(self, name: str = "ngram", max_window: int = 3):
        if max_window < 1:
            raise ValueError(f"max_window: must be >= 1 token; got {max_window}")
        self.name = name
        self.max_window = max_window
        self.traits = dataclasses.replace(LOOKUP, max_ngram=max_window)

    def new_memory(self) -> NGramIndex:
        """An empty index for one row."""
        return NGramIndex(self.max_window)

    def propose(self, memory: NGramIndex, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        """Up to ``k`` tokens that may follow; none when no suffix was seen before."""
        memory.extend(tokens)
        size, position = memory.match(tokens)
        if not size:
            return ()
        proposed: list[int] = []
        for source in range(position, position + k):
            behind = source - len(tokens)
            proposed.append(tokens[source] if behind < 0 else proposed[behind])
        return tuple(proposed)
