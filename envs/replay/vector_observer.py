"""``Observer`` in numpy: the statistics and observations of many environments at once.

Legend: B rows (environments), F features, C chains, P pairs, V levels, M followers. A test holds
it to ``Observer``, entry by entry.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from specgym.envs.features import ITERATION_FEATURES
from specgym.envs.observer import EMA_WEIGHT, LAG_SCALE, NEVER, SINCE, Observer
from specgym.envs.pool_spec import Layout


@dataclasses.dataclass(frozen=True)
class Iterations:
    """What the last iteration did in every row.

    Attributes:
        executed: Action that ran, [B].
        tokens: Tokens committed, [B].
        utility: Tokens over relative cost, [B].
        experts: Unique experts over a single token's, [B].
        entropy: Nats of the drafter's first law, [B].
        proposed: Tokens proposed to each level, [B, V].
        accepted: Tokens each level accepted, [B, V].
    """

    executed: np.ndarray
    tokens: np.ndarray
    utility: np.ndarray
    experts: np.ndarray
    entropy: np.ndarray
    proposed: np.ndarray
    accepted: np.ndarray


class VectorObserver:
    """Running statistics of many environments, and the observations made from them.

    Args:
        layout: The layout of the pool that is watched.
        num_rows: Environments.
    """

    def __init__(self, layout: Layout, num_rows: int):
        single = Observer(layout)
        self.features, self.low, self.high = single.features, single.low, single.high
        self.num_rows = num_rows
        plans, chains = layout.plans(), layout.chains
        chain_of = {chain: index for index, chain in enumerate(chains)}
        self.chain_of = np.array([chain_of.get(plan.chain, -1) for plan in plans])  # [A]
        self.k_of = np.array([float(plan.k) for plan in plans])
        self.last_level = np.array([max(plan.num_verifiers - 1, 0) for plan in plans])
        self.has_law = np.array([layout.traits[plan.chain[0]].has_law for plan in plans])
        self.has_law &= self.chain_of >= 0
        self.pair_of = np.full((len(plans), layout.max_verifiers), -1)  # [A, V]
        for action, plan in enumerate(plans):
            for level, pair in enumerate(itertools.pairwise(plan.chain)):
                self.pair_of[action, level] = layout.pairs.index(">".join(pair))
        self.since = np.array(SINCE, dtype=np.float32)
        self.acceptance = np.empty((num_rows, len(layout.pairs)))
        self.time_ratio = np.empty((num_rows, len(chains)))
        self.tokens = np.empty((num_rows, len(chains)))
        self.rounds_since = np.empty((num_rows, len(chains)), dtype=np.int64)
        self.iteration = np.empty((num_rows, len(ITERATION_FEATURES)))
        self.clear()

    def clear(self, rows: np.ndarray | None = None) -> None:
        """Forgets everything seen in these rows; None takes all."""
        own = slice(None) if rows is None else rows
        self.acceptance[own] = 0.5
        self.time_ratio[own] = 1.0
        self.tokens[own] = 1.0
        self.rounds_since[own] = NEVER
        self.iteration[own] = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)

    def update(self, done: Iterations) -> None:
        """Takes one iteration of every row in."""
        rows, last_level = np.arange(self.num_rows), self.last_level[done.executed]
        utility, experts, entropy = self.iteration[:, 0], self.iteration[:, 4], self.iteration[:, 5]
        utility[:] = done.utility
        self.iteration[:, 1] = done.tokens
        self.iteration[:, 2] = self.k_of[done.executed]
        accepted, offered = done.accepted[rows, last_level], done.proposed[rows, last_level]
        self.iteration[:, 3] = accepted < offered
        experts += EMA_WEIGHT * (done.experts - experts)
        seen = EMA_WEIGHT * self.has_law[done.executed]
        entropy += seen * (done.entropy - entropy)
        self.rounds_since += 1
        np.minimum(self.rounds_since, NEVER, out=self.rounds_since)
        chain = self.chain_of[done.executed]
        drafted = np.flatnonzero(chain >= 0)
        cells = drafted, chain[drafted]
        self.rounds_since[cells] = 0
        ratio = done.tokens[drafted] / np.maximum(done.utility[drafted], 1e-9)
        blend(self.time_ratio, cells, ratio)
        blend(self.tokens, cells, done.tokens[drafted])
        for level in range(done.proposed.shape[1]):
            self.update_pairs(done, level)

    def update_pairs(self, done: Iterations, level: int) -> None:
        """Takes the acceptance of one level in."""
        pair, proposed = self.pair_of[done.executed, level], done.proposed[:, level]
        judged = np.flatnonzero((pair >= 0) & (proposed > 0))
        rate = done.accepted[judged, level] / proposed[judged]
        blend(self.acceptance, (judged, pair[judged]), rate)

    def observe(
        self, position: np.ndarray, lags: np.ndarray, rows: np.ndarray | None = None
    ) -> np.ndarray:
        """The observations, float32 [B, F], clipped to the table's bounds.

        Args:
            position: What depends on the position in the text alone, [B, P].
            lags: Tokens that each follower is behind the text, [B, M].
            rows: Rows that are wanted; None takes all.
        """
        own = slice(None) if rows is None else rows
        parts = (self.iteration, position, self.acceptance, self.time_ratio, self.tokens)
        iteration, position, acceptance, time_ratio, tokens = (part[own] for part in parts)
        seen = np.empty((len(position), len(self.features)), dtype=np.float32)
        start = iteration.shape[1]
        seen[:, :start] = iteration
        seen[:, start : start + position.shape[1]] = position
        start += position.shape[1]
        seen[:, start : start + acceptance.shape[1]] = acceptance
        start += acceptance.shape[1]
        end = start + 3 * tokens.shape[1]
        seen[:, start:end:3] = time_ratio
        seen[:, start + 1 : end : 3] = tokens
        seen[:, start + 2 : end : 3] = self.since[self.rounds_since[own]]
        seen[:, end:] = lags[own] / LAG_SCALE
        return np.clip(seen, self.low, self.high, out=seen)


def blend(averages: np.ndarray, cells: tuple[np.ndarray, np.ndarray], new: np.ndarray) -> None:
    """Moves the averages of these cells, each of which is there once, towards new values."""
    old = averages[cells]
    averages[cells] = old + EMA_WEIGHT * (new - old)
