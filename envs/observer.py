"""What an agent sees: running statistics of iterations, and the observation made from them."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specgym.engine.state import DecodeState
from specgym.engine.types import StepResult
from specgym.envs.features import feature_table
from specgym.envs.pool_spec import Layout
from specgym.envs.text_features import TextReader

EMA_WEIGHT = 0.1
LAG_SCALE = 64.0
ROUNDS_SCALE = 32.0
NEVER = 1024  # rounds since a chain was tried that never was: the feature is 1 from here on
SINCE = tuple((1.0 - np.exp(-np.arange(NEVER + 1) / ROUNDS_SCALE)).tolist())
STATISTICS = (
    "acceptance",
    "time_ratio",
    "tokens",
    "rounds_since",
    "unique_experts",
    "draft_entropy",
    "last",
)


class Observer:
    """Running statistics of one environment, and the observation made from them.

    Args:
        layout: The layout of the pool that is watched.
        classes: Lexical class of every token id, as of ``token_classes``.
    """

    def __init__(self, layout: Layout, classes: bytes = b""):
        self.layout = layout
        self.features = feature_table(layout)
        self.low = np.array([f.low for f in self.features], dtype=np.float32)
        self.high = np.array([f.high for f in self.features], dtype=np.float32)
        self.pairs_of = {c: tuple(map(">".join, itertools.pairwise(c))) for c in layout.chains}
        self.chains = tuple(map(">".join, layout.chains))
        self.followers = layout.followers
        self.reader = TextReader(classes, layout.max_ngram)
        self.clear()

    def clear(self) -> None:
        """Forgets everything seen."""
        self.acceptance = dict.fromkeys(self.layout.pairs, 0.5)
        self.time_ratio = dict.fromkeys(self.chains, 1.0)
        self.tokens = dict.fromkeys(self.chains, 1.0)
        self.rounds_since = dict.fromkeys(self.chains, NEVER)
        self.unique_experts = 1.0
        self.draft_entropy = 0.0
        self.last = (1.0, 0.0, 0.0, 0.0)

    def statistics(self) -> dict[str, Any]:
        """Everything seen, as plain values."""
        return copy.deepcopy({name: getattr(self, name) for name in STATISTICS})

    def restore(self, statistics: Mapping[str, Any]) -> None:
        """Goes back to statistics taken before."""
        for name in STATISTICS:
            setattr(self, name, copy.deepcopy(statistics[name]))

    def update(self, result: StepResult, utility: float, experts: float) -> None:
        """Takes one iteration in."""
        plan = result.executed
        rejected = (
            result.num_drafted > 0
            and result.accepted_per_level[-1] < (result.proposed_per_level[-1])
        )
        num_tokens = result.num_tokens / result.num_active
        self.last = (utility, num_tokens, float(plan.k), float(rejected))
        self.unique_experts = ema(self.unique_experts, experts)
        for chain in self.rounds_since:
            self.rounds_since[chain] += 1
        if not plan.k:
            return
        chain = ">".join(plan.chain)
        self.rounds_since[chain] = 0
        ratio = num_tokens / max(utility, 1e-9)
        self.time_ratio[chain] = ema(self.time_ratio[chain], ratio)
        self.tokens[chain] = ema(self.tokens[chain], num_tokens)
        if self.layout.traits[plan.chain[0]].has_law:
            self.draft_entropy = ema(self.draft_entropy, result.draft_entropy)
        for level, pair in enumerate(self.pairs_of[plan.chain]):
            proposed = result.proposed_per_level[level]
            if proposed:
                rate = result.accepted_per_level[level] / proposed
                self.acceptance[pair] = ema(self.acceptance[pair], rate)

    def observe(self, state: DecodeState) -> np.ndarray:
        """The observation at this state, float32, clipped to the table's bounds.

        What depends on the position in a text is the mean over the rows that decode.
        """
        rows = state.active_rows or range(state.batch_size)
        positions = [self.position(state, row) for row in rows]
        lags = [state.num_lagging(name) for name in self.followers]
        return self.observation(mean_entries(positions), lags)

    def position(self, state: DecodeState, row: int) -> tuple[float, ...]:
        """The entries of ``POSITION_FEATURES`` at the end of a row's text."""
        tokens, num_generated = state.tokens[row], state.num_generated(row)
        return position_values(
            self.reader.read(row, tokens, len(state.requests[row].prompt)),
            len(tokens),
            num_generated,
            state.budgets[row],
            self.context_limit,
        )

    @property
    def context_limit(self) -> int:
        """The longest text that the target takes, in tokens."""
        return self.layout.context_limits[self.layout.target]

    def observation(self, position: Sequence[float], lags: Sequence[int]) -> np.ndarray:
        """The observation from the statistics and what else it holds.

        Args:
            position: What depends on the position in the text alone, as of ``position_values``.
            lags: Tokens that each follower is behind the text.
        """
        values = [*self.last, self.unique_experts, self.draft_entropy, *position]
        values += self.acceptance.values()
        for chain in self.chains:
            since = SINCE[min(self.rounds_since[chain], NEVER)]
            values += (self.time_ratio[chain], self.tokens[chain], since)
        values += [lag / LAG_SCALE for lag in lags]
        observation = np.array(values, dtype=np.float32)
        np.maximum(observation, self.low, out=observation)  # two calls of np.clip's, in its third
        return np.minimum(observation, self.high, out=observation)


def position_values(
    text: Sequence[float],
    num_tokens: int,
    num_generated: int,
    budget: int,
    context_limit: int,
) -> tuple[float, ...]:
    """The entries of ``POSITION_FEATURES`` at one position of a text."""
    return (
        *text,
        num_tokens / context_limit,
        num_generated / max(budget, 1),
        math.log1p(num_generated),
    )


def mean_entries(rows: Sequence[Sequence[float]]) -> Sequence[float]:
    """The mean of each entry over at least one row."""
    if len(rows) == 1:
        return rows[0]
    return [sum(entries) / len(rows) for entries in zip(*rows, strict=True)]


def ema(old: float, new: float) -> float:
    """The exponential moving average after one more value."""
    return old + EMA_WEIGHT * (new - old)
