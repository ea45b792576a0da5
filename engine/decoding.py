"""Speculative decoding: start a batch of requests, then run one iteration at a time.

An iteration drafts, lets each verifier of the chain score and accept, commits what the target
emitted, and rolls every memory back to what it shares with the committed text. Only what the
target has verified is ever committed, so the output follows the target's law whatever the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgym.engine.drafting import draft
from specgym.engine.member_runs import Meter, best_tokens, ensure_prefilled, score
from specgym.engine.pool import ModelPool
from specgym.engine.state import DecodeState, limit_reason
from specgym.engine.timing import Clock
from specgym.engine.types import (
    DecodeRequest,
    Plan,
    Proposal,
    SamplingParams,
    StepResult,
    Verdict,
    common_prefix,
)
from specgym.engine.verification import (
    accept_greedy,
    accept_sampling,
    law,
    total_variation,
)


def start(
    pool: ModelPool,
    requests: Sequence[DecodeRequest],
    clock: Clock,
    *,
    exact: bool = True,
    row_tokens: int | None = None,
) -> DecodeState:
    """Return a new state, with the target's prefill done.

    Args:
        pool: The members.
        requests: One per row of the batch.
        clock: Times the prefill.
        exact: Use fixed shapes, so that in bf16 too a row's output is that of plain decoding bit
            for bit, whatever the plans, whatever the other rows hold and whenever it joined. The
            number of rows and the slots of a row are fixed for the batch's life: compare batches
            of the same size and ``row_tokens``. False computes only what is needed.
        row_tokens: Tokens, prompt and budget together, that every row gets slots for; None takes
            the longest request's. Requests that join later must fit.

    Raises:
        ValueError: If there is no request, one does not fit ``row_tokens``, a prompt leaves no
            room in the target's context, or there are stop strings and no tokenizer.
    """
    if not requests:
        raise ValueError("requests: must hold at least one request; got none")
    for request in requests:
        check_stop(pool, request)
    state = DecodeState(pool, requests, exact, row_tokens)
    if not state.is_finished:
        ensure_prefilled(state, pool.model(pool.target), Meter(clock))
    return state


def check_stop(pool: ModelPool, request: DecodeRequest) -> None:
    """Raise if the request has stop strings and the pool has no tokenizer.

    Raises:
        ValueError: If that is the case.
    """
    if pool.tokenizer is None and request.stop:
        raise ValueError("stop: stop strings need a pool with a tokenizer")


class Level(NamedTuple):
    """One verifier's part in an iteration.

    Attributes:
        proposals: What it was given, per row.
        verdicts: What it made of them, per row.
        divergence: Mean D_TV between the laws behind the two, where it was measured; else 0.
    """

    proposals: list[Proposal]
    verdicts: list[Verdict]
    divergence: float = 0.0

    @property
    def emitted(self) -> list[Proposal]:
        """What it hands to the next level, per row."""
        return [verdict.emitted for verdict in self.verdicts]

    @property
    def num_proposed(self) -> int:
        """Tokens it was given, over all rows."""
        return sum(len(proposal.tokens) for proposal in self.proposals)

    @property
    def num_accepted(self) -> int:
        """Tokens it accepted, over all rows."""
        return sum(verdict.num_accepted for verdict in self.verdicts)


def decode_step(
    pool: ModelPool,
    state: DecodeState,
    plan: Plan,
    clock: Clock,
    *,
    measure_divergence: bool = False,
) -> StepResult:
    """Run one iteration under a plan; it commits at least one token to every active row.

    Args:
        pool: The members.
        state: The batch; it moves on.
        plan: Who drafts, who verifies, and how many tokens are drafted.
        clock: Times the iteration.
        measure_divergence: Measure D_TV between each two neighbours of the chain. It takes time,
            which counts, and changes no token.

    Raises:
        ValueError: If the plan names unknown members, does not end at the target, or drafts more
            than the pool's window holds; if every row has ended.
        EngineFault: If a member's logits are not finite. The state is as it was before the step
            (but for the random streams), so another plan may be tried.
    """
    pool.check(plan)
    if state.is_finished:
        raise ValueError("decode_step: every row has ended; start a new state")
    started, meter, levels = clock.now(), Meter(clock), list[Level]()
    executed, reason = feasible_plan(pool, state, plan)
    try:
        proposals, entropy = draft(state, executed, meter, keep_logits=measure_divergence)
        if executed.k and not any(proposal.tokens for proposal in proposals):
            executed, reason = executed.without_speculation(), "no_proposal"
        for name in executed.verifiers:
            level = verify(state, name, proposals, meter, measure_divergence=measure_divergence)
            levels.append(level)
            proposals = level.emitted
    except BaseException:
        discard_step(state)
        raise
    committed = commit(state, proposals)
    judged = levels if executed.k else []  # without speculation nothing was judged
    for name, level in zip(executed.chain, [*judged[:1], *levels], strict=True):
        roll_back(state, name, level.proposals, committed)
    pairs = map(">".join, itertools.pairwise(executed.chain)) if measure_divergence else ()
    return StepResult(
        asked=plan,
        executed=executed,
        reason=reason,
        tokens=committed,
        proposed_per_level=tuple(level.num_proposed for level in judged),
        accepted_per_level=tuple(level.num_accepted for level in judged),
        seconds=clock.now() - started,
        forwards=meter.costs,
        divergence={pair: level.divergence for pair, level in zip(pairs, judged, strict=False)},
        draft_entropy=entropy,
        finish_reasons=tuple(state.finish_reasons),
    )


def discard_step(state: DecodeState) -> None:
    """Roll every memory back to committed tokens, after a step that failed half way."""
    for memory in state.memories.values():
        ends = [len(tokens) - 1 for tokens in state.tokens]
        memory.keep([min(end, memory.num_valid(row)) for row, end in enumerate(ends)])
        memory.scrub()


def probe_baseline(
    pool: ModelPool, state: DecodeState, clock: Clock, num_samples: int
) -> list[float]:
    """Return the seconds of iterations without speculation at this point; each is undone."""
    member, seconds = pool.model(pool.target), []
    memory = ensure_prefilled(state, member, Meter(clock))
    held = [memory.num_valid(row) for row in range(state.batch_size)]
    nothing = [Proposal()] * state.batch_size
    for _ in range(num_samples):
        started = clock.now()
        logits_BTV, _ = score(state, member.name, nothing, Meter(clock))
        best_tokens(logits_BTV, member.name, memory)
        memory.keep(held)
        seconds.append(clock.now() - started)
    return seconds


def feasible_plan(pool: ModelPool, state: DecodeState, plan: Plan) -> tuple[Plan, str]:
    """Return the plan that can run here, and why it is not the one asked for (``""`` if it is)."""
    if plan.k == 0:
        return plan, ""
    active = state.active_rows
    if plan.fit(max(map(state.num_remaining, active))) != plan:
        return plan.without_speculation(), "budget"
    longest = max(len(state.tokens[row]) for row in active) + plan.max_tokens
    if longest > min(pool.members[name].context_limit for name in plan.chain):
        return plan.without_speculation(), "context"
    return plan, ""


def verify(
    state: DecodeState,
    name: str,
    proposals: list[Proposal],
    meter: Meter,
    *,
    measure_divergence: bool = False,
) -> Level:
    """Have one verifier score every row's proposal, and accept or reject its tokens.

    Raises:
        EngineFault: If its logits are not finite, or the device has no memory.
    """
    logits_BTV, firsts = score(state, name, proposals, meter)
    best_BT = best_tokens(logits_BTV, name, state.memories[name])
    verdicts, rows = [], []
    for row, (proposal, first) in enumerate(zip(proposals, firsts, strict=True)):
        judged = slice(first, first + len(proposal.tokens) + 1)
        params = state.requests[row].sampling
        if not state.is_active(row):
            verdict = Verdict(0, Proposal())
        elif params.is_greedy:
            verdict = accept_greedy(proposal, best_BT[row][judged])
        else:
            laws_NV = law(logits_BTV[row, judged], params).cpu()  # one transfer: drawn on the host
            verdict = accept_sampling(proposal, laws_NV, state.generators[row])
        if measure_divergence:
            rows.append(logits_BTV[row, judged])
            kept = rows[-1][: len(verdict.emitted.tokens)]
            verdict = verdict._replace(emitted=verdict.emitted._replace(logits_NV=kept))
        verdicts.append(verdict)
    if not measure_divergence:
        return Level(proposals, verdicts)
    return Level(proposals, verdicts, mean_divergence(state, proposals, verdicts, rows))


def mean_divergence(
    state: DecodeState,
    proposals: list[Proposal],
    verdicts: list[Verdict],
    logits_rows: list[torch.Tensor],
) -> float:
    """Return the mean D_TV between proposing and judging law, up to the first rejection."""
    distances = []
    for row, (proposal, verdict) in enumerate(zip(proposals, verdicts, strict=True)):
        count = min(verdict.num_accepted + 1, len(proposal.tokens))
        if not count:
            continue
        params = state.requests[row].sampling
        scale = SamplingParams(temperature=1.0) if params.is_greedy else params
        p_NV = law(logits_rows[row][:count], scale)
        if proposal.logits_NV is None:
            tokens = torch.tensor(proposal.tokens[:count], device=p_NV.device)
            distances.append(float((1.0 - p_NV.gather(1, tokens[:, None])).mean()))
        else:
            distances.append(total_variation(p_NV, law(proposal.logits_NV[:count], scale)))
    return sum(distances) / len(distances) if distances else 0.0


def commit(state: DecodeState, emitted: list[Proposal]) -> tuple[tuple[int, ...], ...]:
    """Append each row's emitted tokens up to its end; return what was appended."""
    committed = []
    for row, proposal in enumerate(emitted):
        appended: list[int] = []
        for token in proposal.tokens if state.is_active(row) else ():
            state.tokens[row].append(token)
            appended.append(token)
            state.finish_reasons[row] = finish_reason(
                state.pool, state.requests[row], state.tokens[row], state.budgets[row]
            )
            if not state.is_active(row):
                break
        committed.append(tuple(appended))
    return tuple(committed)


def finish_reason(
    pool: ModelPool, request: DecodeRequest, tokens: Sequence[int], budget: int
) -> str | None:
    """Return why a request ends with the last of its tokens: eos before stop before its limit.

    Args:
        pool: The members.
        request: What is decoded.
        tokens: Its prompt and output so far, at least one token of output.
        budget: Tokens of output that it may get.
    """
    num_prompt = len(request.prompt)
    eos_ids = pool.eos_ids if request.eos_ids is None else request.eos_ids
    if tokens[-1] in eos_ids:
        return "eos"
    if request.stop and pool.completes_stop(tokens[num_prompt:], request.stop):
        return "stop"
    return limit_reason(request, budget) if len(tokens) - num_prompt >= budget else None


def roll_back(
    state: DecodeState,
    name: str,
    proposals: list[Proposal],
    committed: tuple[tuple[int, ...], ...],
) -> None:
    """Roll a member's memory back to what it shares with the committed tokens.

    The last committed token is never kept: its logits are the next iteration's first.
    """
    memory = state.memories.get(name)
    if memory is None:
        return
    counts = []
    for row, (proposal, appended) in enumerate(zip(proposals, committed, strict=True)):
        before = len(state.tokens[row]) - len(appended)
        shared = before + common_prefix(proposal.tokens, appended)
        counts.append(min(shared, len(state.tokens[row]) - 1, memory.num_valid(row)))
    memory.keep(counts)
