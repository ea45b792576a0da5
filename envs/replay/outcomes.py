"""What each action gets and costs at each position of a trace: all that a replay looks up.

Legend: N positions, A actions, V levels, M followers (members with a KV, the target aside).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from specgym.engine.state import KV_ROUNDING
from specgym.engine.types import Plan
from specgym.envs.pool_spec import Layout
from specgym.envs.replay.costs import CostTable
from specgym.envs.replay.traces import Trace, accepted_per_level


@dataclasses.dataclass(frozen=True)
class TraceTables:
    """One trace under one table of plans.

    An iteration takes ``seconds[g, a]``, and for each follower m that it uses (``uses``) and that
    lags l tokens, ``catchup[a, m, l]`` more; a follower that the request never used lags g tokens
    and takes ``prefill[m]`` besides.

    Attributes:
        trace: The trace.
        executed: The action that really runs, [N, A]: 0 where nothing is proposed.
        tokens: Tokens committed, [N, A]; cut at the end of the output.
        proposed: Tokens proposed to each level, [N, A, V].
        accepted: Tokens that each level accepts, [N, A, V].
        allowed: Whether budget and context leave room, [N, A].
        draft_seconds: Of the forwards that draft, [N, A].
        verify_seconds: Of those that verify, [N, A].
        seconds: Of an iteration in which no follower lags, [N, A].
        baseline: Seconds of no speculation as they were probed, [N].
        kv_length: Slots that the target attends to, [N].
        experts: Unique experts over a single token's, [N, A]; 1 for dense targets.
        entropy: Nats of the drafter's first law, [N, A].
        divergence: D_TV per level, mean up to the first rejection, [N, A, V].
        uses: Followers that take part, [N, A, M].
        lag_after: Tokens that each of those lags afterwards, [N, A, M].
        catchup: Seconds by lag, [A, M, N].
        prefill: Seconds of a follower's first look at the prompt, [M].
        spread: Standard deviation of log seconds, [N, A].
    """

    trace: Trace
    executed: np.ndarray
    tokens: np.ndarray
    proposed: np.ndarray
    accepted: np.ndarray
    allowed: np.ndarray
    draft_seconds: np.ndarray
    verify_seconds: np.ndarray
    seconds: np.ndarray
    baseline: np.ndarray
    kv_length: np.ndarray
    experts: np.ndarray
    entropy: np.ndarray
    divergence: np.ndarray
    uses: np.ndarray
    lag_after: np.ndarray
    catchup: np.ndarray
    prefill: np.ndarray
    spread: np.ndarray


def make_tables(
    trace: Trace,
    layout: Layout,
    costs: CostTable,
    k_values: tuple[int, ...] | None = None,
    exact: bool = True,
) -> TraceTables:
    """The tables of a trace.

    Args:
        trace: The trace.
        layout: What it was recorded with.
        costs: Seconds of forwards.
        k_values: Plans to tabulate, of those that were recorded; None takes all.
        exact: Whether the engine runs in fixed shapes.

    Raises:
        ValueError: If a K was not recorded.
    """
    own = layout if k_values is None else layout.with_k_values(k_values)
    maker = Maker(trace, layout, costs, own.plans(), exact)
    for action, plan in enumerate(maker.plans):
        maker.fill(action, plan)
    return maker.finish()


class Maker:
    """Fills the tables of one trace, action by action."""

    def __init__(
        self,
        trace: Trace,
        layout: Layout,
        costs: CostTable,
        plans: tuple[Plan, ...],
        exact: bool,
    ):
        self.trace, self.layout, self.costs, self.plans = trace, layout, costs, plans
        self.exact = exact
        count, actions = len(trace), len(plans)
        levels, followers = layout.max_verifiers, len(layout.followers)
        self.kv_length = kv_lengths(trace, layout, exact)
        self.bucket = costs.bucket(self.kv_length)
        self.executed = np.zeros((count, actions), np.int16)
        self.tokens = np.ones((count, actions), np.int64)
        self.proposed = np.zeros((count, actions, levels), np.int64)
        self.accepted = np.zeros((count, actions, levels), np.int64)
        self.draft_seconds = np.zeros((count, actions))
        self.verify_seconds = np.zeros((count, actions))
        self.overhead = np.zeros((count, actions))
        self.experts = np.ones((count, actions), np.float32)
        self.entropy = np.zeros((count, actions), np.float32)
        self.divergence = np.zeros((count, actions, levels), np.float32)
        self.uses = np.zeros((count, actions, followers), bool)
        self.lag_after = np.zeros((count, actions, followers), np.int16)
        self.catchup = np.zeros((actions, followers, count))
        self.lag_tables: dict[tuple[str, str, int], np.ndarray] = {}
        self.spread = np.zeros((count, actions))

    def fill(self, action: int, plan: Plan) -> None:
        """An action's columns."""
        if plan.k == 0:
            self.fill_plain(action, plan)
            return
        chain = self.layout.speculative_chains.index(plan.chain)
        drafter = self.layout.drafters.index(plan.chain[0])
        num_drafted = np.minimum(self.trace.num_proposed[:, drafter].astype(np.int64), plan.k)
        runs = num_drafted > 0
        self.executed[runs, action] = action
        matches = self.trace.matches[:, chain, : plan.num_verifiers].astype(np.int64)
        for level, (offered, accepted) in enumerate(
            zip(*accepted_per_level(matches.T, num_drafted), strict=True)
        ):
            self.proposed[:, action, level] = offered
            self.accepted[:, action, level] = accepted
            self.divergence[:, action, level] = self.mean_divergence(
                chain, level, accepted, offered
            )
        left = len(self.trace) - np.arange(len(self.trace))
        self.tokens[:, action] = np.minimum(accepted + 1, left)
        self.entropy[:, action] = self.trace.entropy[:, drafter]
        self.fill_costs(action, plan, chain, num_drafted)
        self.follow(action, plan, drafter, num_drafted)
        self.spread[:, action] = self.costs.spread[1 + chain, num_drafted]
        self.fill_idle(action, ~runs)

    def fill_plain(self, action: int, plan: Plan) -> None:
        """The columns of no speculation."""
        one = self.trace.experts[:, 0, 0] if self.trace.experts.shape[1] else None
        self.verify_seconds[:, action] = self.costs.forward_seconds(
            self.layout.target, "verify", 1, self.bucket, self.seen_experts(one)
        )
        self.overhead[:, action] = self.costs.overhead_seconds(plan.chain, 0)
        self.spread[:, action] = self.costs.spread[0, 0]

    def fill_idle(self, action: int, idle: np.ndarray) -> None:
        """Where nothing is proposed an action is no speculation; the look-up still costs."""
        columns: list[np.ndarray] = [
            self.tokens,
            self.proposed,
            self.accepted,
            self.draft_seconds,
            self.verify_seconds,
            self.overhead,
            self.experts,
            self.entropy,
            self.divergence,
            self.uses,
            self.spread,
        ]
        for column in columns:
            column[idle, action] = column[idle, 0]

    def fill_costs(self, action: int, plan: Plan, chain: int, num_drafted: np.ndarray) -> None:
        """Seconds of the forwards, all followers caught up, and the experts of the last one."""
        costs, bucket = self.costs, self.bucket
        if self.layout.traits[plan.chain[0]].has_kv:
            first = costs.forward_seconds(plan.chain[0], "draft", 1, bucket)
            guess = costs.forward_seconds(plan.chain[0], "guess", 1, bucket)
            self.draft_seconds[:, action] = first + (num_drafted - 1) * guess
        for level, name in enumerate(plan.chain[1:]):
            fed = 1 + self.proposed[:, action, level]
            experts = None
            if name == self.layout.target:
                rows = np.arange(len(self.trace))
                experts = self.seen_experts(self.trace.experts[rows, chain, fed - 1])
            self.verify_seconds[:, action] += costs.forward_seconds(
                name, "verify", fed, bucket, experts
            )
            if experts is not None:
                self.experts[:, action] = experts / self.layout.experts_per_token
        self.overhead[:, action] = costs.overhead_seconds(plan.chain, num_drafted)

    def seen_experts(self, experts: np.ndarray | None) -> np.ndarray | None:
        """Unique experts as floats; None for a dense target."""
        if experts is None or not self.layout.experts_per_token:
            return None
        return experts.astype(np.float64)

    def mean_divergence(
        self, chain: int, level: int, accepted: np.ndarray, offered: np.ndarray
    ) -> np.ndarray:
        """Mean D_TV of the rows up to the first rejection."""
        rows_NW = self.trace.divergence[:, chain, level].astype(np.float64)
        sums = rows_NW.cumsum(axis=1)
        count = np.minimum(accepted + 1, offered)
        taken = np.take_along_axis(sums, np.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        return np.where(count > 0, taken / np.maximum(count, 1), 0.0)

    def follow(self, action: int, plan: Plan, drafter: int, num_drafted: np.ndarray) -> None:
        """Who takes part, how far each lags afterwards, and what a lag costs.

        The rules are the engine's: a model keeps what it ate and what the target confirmed, never
        the last token of the text; a head keeps what rests on the target's features.
        """
        tokens = self.tokens[:, action]
        matches = self.trace.draft_matches[:, drafter].astype(np.int64)
        shared = np.minimum(np.minimum(matches, num_drafted), tokens)
        below = num_drafted
        for level, name in enumerate(plan.chain[:-1]):
            if name in self.layout.followers:
                follower = self.layout.followers.index(name)
                eaten = self.eaten(name, level, shared, tokens, num_drafted)
                self.uses[:, action, follower] = True
                self.lag_after[:, action, follower] = tokens - 1 - eaten
                role, extra = ("draft", 0) if level == 0 else ("verify", int(below.max()))
                self.catchup[action, follower] = self.lag_seconds(name, role, extra)
            if level:  # what a middle verifier passed on stands for the drafts of the next
                chain = self.layout.speculative_chains.index(plan.chain)
                agreed = self.trace.matches[:, chain, level].astype(np.int64)
                shared = np.minimum(np.minimum(agreed, self.proposed[:, action, level]), tokens)
                below = self.proposed[:, action, level]

    def eaten(
        self,
        name: str,
        level: int,
        shared: np.ndarray,
        tokens: np.ndarray,
        num_drafted: np.ndarray,
    ) -> np.ndarray:
        """Tokens beyond the text of before that a follower holds after the iteration."""
        if not self.layout.traits[name].keeps_drafts:
            return np.zeros_like(tokens)
        held = np.minimum(shared, tokens - 1)
        return np.minimum(held, num_drafted - 1) if level == 0 else held

    def lag_seconds(self, name: str, role: str, extra: int) -> np.ndarray:
        """Seconds more that a follower's first forward takes, and those before it, by lag [N]."""
        if (name, role, extra) not in self.lag_tables:
            self.lag_tables[name, role, extra] = self.count_lag_seconds(name, role, extra)
        return self.lag_tables[name, role, extra]

    def count_lag_seconds(self, name: str, role: str, extra: int) -> np.ndarray:
        """Those seconds, counted."""
        bucket = int(np.median(self.bucket))
        caught_up = self.costs.forward_seconds(name, role, 1 + extra, bucket)
        pending, total = np.arange(1, len(self.trace) + 1), np.zeros(len(self.trace))
        most = self.layout.window if self.exact else len(self.trace)
        while (late := (pending > 1) & (pending + extra > self.layout.window)).any():
            fed = np.minimum(np.where(late, pending - 1, 1), most)
            total += late * self.costs.forward_seconds(name, "catchup", fed, bucket)
            pending -= late * fed
        first = self.costs.forward_seconds(name, role, pending + extra, bucket)
        return total + first - caught_up

    def finish(self) -> TraceTables:
        """The tables."""
        trace, layout = self.trace, self.layout
        generated = np.arange(len(trace))
        most = np.array([plan.max_tokens for plan in self.plans])
        limits = [min(layout.context_limits[name] for name in plan.chain) for plan in self.plans]
        allowed = generated[:, None] + most <= trace.max_new_tokens
        allowed &= len(trace.prompt) + generated[:, None] + most <= np.array(limits)
        allowed[:, 0] = True
        prefill = [
            self.costs.prefill_seconds(
                name, len(trace.prompt) - 1 - layout.traits[name].first_position
            )
            for name in layout.followers
        ]
        seconds = self.draft_seconds + self.verify_seconds + self.overhead
        return TraceTables(
            trace=trace,
            executed=self.executed,
            tokens=self.tokens,
            proposed=self.proposed,
            accepted=self.accepted,
            allowed=allowed,
            draft_seconds=self.draft_seconds,
            verify_seconds=self.verify_seconds,
            seconds=seconds,
            baseline=self.costs.baseline[self.bucket],
            kv_length=self.kv_length,
            experts=self.experts,
            entropy=self.entropy,
            divergence=self.divergence,
            uses=self.uses,
            lag_after=self.lag_after,
            catchup=self.catchup,
            prefill=np.array(prefill),
            spread=self.spread,
        )


def kv_lengths(trace: Trace, layout: Layout, exact: bool) -> np.ndarray:
    """Slots that the target attends to at each position, [N]: fixed in exact mode."""
    longest = len(trace.prompt) + trace.max_new_tokens + layout.window
    if exact:
        return np.full(len(trace), -(-longest // KV_ROUNDING) * KV_ROUNDING)
    return len(trace.prompt) + np.arange(len(trace))
