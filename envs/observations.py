"""What an agent sees: a table of features, and the running statistics behind them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specgym.engine.decoding import DecodeState, indices_of
from specgym.engine.members import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.types import StepResult

EMA_WEIGHT = 0.1
LAG_SCALE = 64.0
ROUNDS_SCALE = 32.0
NEVER = 10**6  # rounds since a chain was tried that never was: the feature is 1
STATISTICS = (
    "acceptance",
    "time_ratio",
    "tokens",
    "rounds_since",
    "unique_experts",
    "draft_entropy",
    "last",
)


@dataclasses.dataclass(frozen=True)
class Feature:
    """One entry of the observation.

    Attributes:
        name: Unique name; per-pair, per-chain and per-member entries carry theirs in brackets.
        unit: What it is measured in.
        low: Smallest value; the observation is clipped to it.
        high: Largest value.
        source: Where it comes from.
    """

    name: str
    unit: str
    low: float
    high: float
    source: str


def feature_table(pool: ModelPool) -> tuple[Feature, ...]:
    """All entries of the observation for a pool, in order."""
    table = [
        Feature("last_utility", "ratio", 0, 16, "tokens / (t_iter / t_base), last iteration"),
        Feature("last_tokens", "tokens", 0, 32, "tokens emitted by the last iteration"),
        Feature("last_k", "tokens", 0, 32, "K that ran in the last iteration"),
        Feature("last_reject", "0/1", 0, 1, "the target rejected a draft in the last iteration"),
        Feature("unique_experts", "ratio", 0, 64, "unique experts over a single token's, EMA"),
        Feature("draft_entropy", "nats", 0, 16, "entropy of the drafter's first law, EMA"),
        Feature("ngram_hit", "share", 0, 1, "longest suffix seen before, over the window"),
        Feature("context_fraction", "share", 0, 1, "tokens so far over the target's context"),
        Feature("budget_fraction", "share", 0, 1, "tokens so far over the budget"),
        Feature("generated", "log tokens", 0, 16, "log(1 + tokens generated)"),
    ]
    for pair in adjacent_pairs(pool):
        table.append(
            Feature(f"acceptance[{pair}]", "share", 0, 1, "accepted over proposed to it, EMA")
        )
    for chain in map(">".join, pool.chains):
        table += [
            Feature(f"time_ratio[{chain}]", "ratio", 0, 64, "t_iter over t_base, EMA"),
            Feature(f"tokens[{chain}]", "tokens", 0, 32, "tokens per iteration, EMA"),
            Feature(f"rounds_since[{chain}]", "share", 0, 1, "1 - exp(-rounds since tried / 32)"),
        ]
    for name in neural_drafters(pool):
        table.append(Feature(f"lag[{name}]", "share", 0, 1, "tokens behind the text, over 64"))
    return tuple(table)


def adjacent_pairs(pool: ModelPool) -> tuple[str, ...]:
    """``"ngram>target"`` for every two neighbours in some chain, in order of appearance."""
    pairs = (
        f"{left}>{right}" for chain in pool.chains for left, right in itertools.pairwise(chain)
    )
    return tuple(dict.fromkeys(pairs))


def neural_drafters(pool: ModelPool) -> tuple[str, ...]:
    """Members other than the target that keep a KV."""
    return tuple(n for n, m in pool.members.items() if m.is_neural and n != pool.target)


class Observer:
    """Running statistics of one environment, and the observation made from them.

    Args:
        pool: The pool that is watched.
    """

    def __init__(self, pool: ModelPool):
        self.pool = pool
        self.features = feature_table(pool)
        self.low = np.array([f.low for f in self.features], dtype=np.float32)
        self.high = np.array([f.high for f in self.features], dtype=np.float32)
        self.pairs = adjacent_pairs(pool)
        self.chains = tuple(map(">".join, pool.chains))
        self.drafters = neural_drafters(pool)
        self.lookup = next((m for m in pool.members.values() if isinstance(m, NGramMember)), None)
        self.clear()

    def clear(self) -> None:
        """Forgets everything seen."""
        self.acceptance = dict.fromkeys(self.pairs, 0.5)
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
        if self.pool.members[plan.chain[0]].is_neural:
            self.draft_entropy = ema(self.draft_entropy, result.draft_entropy)
        for level, (left, right) in enumerate(itertools.pairwise(plan.chain)):
            proposed = result.proposed_per_level[level]
            if proposed:
                pair, rate = f"{left}>{right}", result.accepted_per_level[level] / proposed
                self.acceptance[pair] = ema(self.acceptance[pair], rate)

    def observe(self, state: DecodeState) -> np.ndarray:
        """The observation at this state, float32, clipped to the table's bounds.

        What differs from row to row is the mean over the rows that decode.
        """
        rows = state.active_rows or range(state.batch_size)
        length = mean(len(state.tokens[row]) for row in rows)
        generated = mean(state.num_generated(row) for row in rows)
        values = [
            *self.last[:4],
            self.unique_experts,
            self.draft_entropy,
            self.ngram_hit(state, rows),
            length / self.pool.model(self.pool.target).context_limit,
            mean(state.num_generated(row) / max(state.budgets[row], 1) for row in rows),
            math.log1p(generated),
        ]
        values += self.acceptance.values()
        for chain in self.chains:
            since = 1.0 - math.exp(-self.rounds_since[chain] / ROUNDS_SCALE)
            values += (self.time_ratio[chain], self.tokens[chain], since)
        values += (state.num_lagging(name) / LAG_SCALE for name in self.drafters)
        observation = np.array(values, dtype=np.float32)
        return np.clip(observation, self.low, self.high, out=observation)

    def ngram_hit(self, state: DecodeState, rows: Sequence[int]) -> float:
        """Longest suffix that prompt lookup finds here, over its window; 0 without lookup."""
        if self.lookup is None:
            return 0.0
        indices = indices_of(state, self.lookup)
        sizes = (indices[row].match(state.tokens[row])[0] for row in rows)
        return mean(size / self.lookup.max_window for size in sizes)


def mean(values: Iterable[float]) -> float:
    """The mean of at least one value."""
    numbers = list(values)
    return sum(numbers) / len(numbers)


def ema(old: float, new: float) -> float:
    """The exponential moving average after one more value."""
    return old + EMA_WEIGHT * (new - old)
