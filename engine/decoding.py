"""Speculative decoding: start a batch of requests, then one iteration at a time.

An iteration drafts, lets each verifier of the chain score and accept, commits what the target
emitted, and rolls every memory back to what it shares with the committed text. Only what the
target has verified is ever committed, so the output follows the target's law whatever the plan.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specgym.engine.checks import check_stop_strings, check_tokens, check_whole
from specgym.engine.compiled import entropy as entropies
from specgym.engine.eagle_member import EagleMember, EagleMemory
from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.forward.experts import count_unique
from specgym.engine.forward.lean_llama import widen
from specgym.engine.forward.transfer import to_device
from specgym.engine.members import ModelMember, NGramIndex, NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.timing import Clock
from specgym.engine.types import (
    EngineFault,
    ForwardCost,
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
    sample,
    total_variation,
)

NeuralMember = ModelMember | EagleMember
PREFILL_CHUNK = 512
KV_ROUNDING = 64
HALVES = (torch.bfloat16, torch.float16)
FAULTY = -1  # in place of a token that comes from logits that are not finite


@dataclasses.dataclass(frozen=True)
class DecodeRequest:
    """One request to decode.

    Attributes:
        prompt: Token ids, at least one.
        max_new_tokens: The token budget, kept to the token.
        sampling: How logits become tokens; greedy by default.
        eos_ids: Token ids that end the text (they are part of the output); None takes the pool's.
        stop: Strings that end the text; the output ends with the token that completes one.

    Raises:
        ValueError: If a value is of another type, or out of range.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)
    eos_ids: frozenset[int] | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        as_given = {
            "prompt": check_tokens("prompt", self.prompt),
            "max_new_tokens": check_whole("max_new_tokens", self.max_new_tokens, 0),
            "stop": check_stop_strings(self.stop),
        }
        for name, value in as_given.items():  # numpy's numbers become Python's
            object.__setattr__(self, name, value)
        if not self.prompt:
            raise ValueError("prompt: must hold at least one token; got none")
        if not isinstance(self.sampling, SamplingParams):
            raise ValueError(f"sampling: must be SamplingParams(...); got {self.sampling!r}")
        if self.eos_ids is not None:
            object.__setattr__(self, "eos_ids", frozenset(check_tokens("eos_ids", self.eos_ids)))


class DecodeState:
    """A batch of requests being decoded: their tokens, memories and ends. Made by ``start``.

    Attributes:
        row_tokens: Tokens, prompt and budget together, that a row has slots for.
    """

    def __init__(
        self,
        pool: ModelPool,
        requests: Sequence[DecodeRequest],
        exact: bool,
        row_tokens: int | None = None,
    ):
        self.pool = pool
        self.requests = list(requests)
        self.exact = exact
        self.tokens = [list(request.prompt) for request in requests]
        self.budgets = [pool.budget(request) for request in requests]
        self.finish_reasons: list[str | None] = [None] * len(requests)
        self.generators = [
            torch.Generator().manual_seed(request.sampling.seed) for request in requests
        ]
        lengths = [len(r.prompt) + b for r, b in zip(requests, self.budgets, strict=True)]
        # Behind the tokens a window, and where all rows append at one place some more for holes.
        margin = pool.window * (1 if exact or len(requests) == 1 else 4)
        room = (row_tokens or max(lengths)) + margin
        self.num_slots = -(-room // KV_ROUNDING) * KV_ROUNDING
        self.row_tokens = self.num_slots - margin
        for length in lengths:
            self.check_room(length)
        self.memories: dict[str, MaskedKVCache] = {}
        self.indices: dict[str, list[NGramIndex]] = {}
        self.measure_divergence = False
        for row, budget in enumerate(self.budgets):
            if budget == 0:
                self.finish_reasons[row] = self.limit_reason(row)

    def check_room(self, num_tokens: int) -> None:
        """Refuses a request of so many tokens, prompt and budget together, that has no slots.

        Raises:
            ValueError: If it needs more than a row has.
        """
        if num_tokens > self.row_tokens:
            raise ValueError(
                f"request: its prompt and budget are {num_tokens} tokens, a row of this batch has "
                f"room for {self.row_tokens}; start the batch with a larger row_tokens, or ask for "
                f"fewer tokens (max_new_tokens)"
            )

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return len(self.tokens)

    @property
    def is_finished(self) -> bool:
        """Whether every row has ended."""
        return None not in self.finish_reasons

    def is_active(self, row: int) -> bool:
        """Whether this row still decodes."""
        return self.finish_reasons[row] is None

    @property
    def num_active(self) -> int:
        """How many rows still decode."""
        return self.finish_reasons.count(None)

    @property
    def active_rows(self) -> list[int]:
        """Rows that still decode."""
        return [row for row, reason in enumerate(self.finish_reasons) if reason is None]

    def num_remaining(self, row: int) -> int:
        """Tokens this row may still get."""
        return self.budgets[row] - self.num_generated(row)

    def num_generated(self, row: int) -> int:
        """Tokens this row got."""
        return len(self.tokens[row]) - len(self.requests[row].prompt)

    def output(self, row: int = 0) -> list[int]:
        """Tokens this row got."""
        return self.tokens[row][len(self.requests[row].prompt) :]

    def limit_reason(self, row: int) -> str:
        """Why this row ends when its budget is spent: ``length``, or ``context`` when cut."""
        return "length" if self.budgets[row] == self.requests[row].max_new_tokens else "context"

    @property
    def kv_length(self) -> int:
        """Slots the target's attention runs over in the next iteration of one token."""
        return self.memories[self.pool.target].attended_length(max(map(len, self.tokens)))

    def num_lagging(self, name: str) -> int:
        """Committed tokens a member has yet to catch up with, beyond the one it always eats."""
        memory = self.memories.get(name)
        if memory is None:
            return max(map(len, self.tokens)) - 1
        rows = self.active_rows or range(self.batch_size)
        return max(len(self.tokens[row]) - 1 - memory.num_eaten(row) for row in rows)


class Meter:
    """Runs forwards and writes down what each cost."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self.records: list[tuple[tuple[str, str, int, int, int], Any, Any, Sequence]] = []

    @property
    def costs(self) -> tuple[ForwardCost, ...]:
        """What the forwards cost, in order; to be read when the device has done them."""
        between = self.clock.between
        return tuple(
            ForwardCost(*what, between(started, ended), count_unique(loads) if loads else ())
            for what, started, ended, loads in self.records
        )

    def forward(
        self,
        member: NeuralMember,
        memory: MaskedKVCache,
        fed: Sequence[Sequence[int]],
        role: str,
        num_rows: int | None = None,
        num_catchup: int = 0,
        drawn_B: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """A member's timed forward; catch-up forwards need no logits and return None.

        ``drawn_B`` is a model's alone, see ``ModelMember.forward``.

        Raises:
            EngineFault: If the device has no memory for it.
        """
        before, started = member.setup_seconds, self.clock.stamp()
        need_logits = role != "catchup"
        width = num_rows or max(map(len, fed))
        forward: Callable[..., torch.Tensor | None] = member.forward
        if drawn_B is not None:
            forward = functools.partial(forward, drawn_B=drawn_B)
        try:
            logits = forward(
                memory, fed, num_rows, need_logits=need_logits, last_only=role == "draft"
            )
        except torch.OutOfMemoryError as error:
            raise EngineFault(
                f"member {member.name!r}: out of memory in a {role} forward of {len(fed)} x "
                f"{width} tokens; lower max_new_tokens, K or the batch ({error})"
            ) from error
        self.clock.charge(member.clock_cost, width)
        if (after := member.setup_seconds) != before:
            self.clock.skip(after - before)
        num_tokens, ended = sum(map(len, fed)), self.clock.stamp()
        what = (member.name, role, num_tokens, width, num_catchup)
        self.records.append((what, started, ended, member.loads))
        return logits


def start(
    pool: ModelPool,
    requests: Sequence[DecodeRequest],
    clock: Clock,
    *,
    exact: bool = True,
    row_tokens: int | None = None,
) -> DecodeState:
    """A new state with the target's prefill done.

    Args:
        pool: The members.
        requests: One per row of the batch.
        clock: Times the prefill.
        exact: Fixed shapes, so that in bf16 too a row's output is that of plain decoding bit for
            bit, whatever the plans, whatever the other rows hold and whenever it joined. What is
            fixed for it are the number of rows, which never changes, and the slots of a row:
            compare batches of the same size and ``row_tokens``. False computes only what is needed.
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
        memory_of(state, pool.model(pool.target), Meter(clock))
    return state


def check_stop(pool: ModelPool, request: DecodeRequest) -> None:
    """Refuses stop strings that nothing can spell out.

    Raises:
        ValueError: If there are any and the pool has no tokenizer.
    """
    if pool.tokenizer is None and request.stop:
        raise ValueError("stop: stop strings need a pool with a tokenizer")


def decode_step(pool: ModelPool, state: DecodeState, plan: Plan, clock: Clock) -> StepResult:
    """One iteration under a plan; commits at least one token to every active row.

    Raises:
        ValueError: If the plan names unknown members, does not end at the target, or drafts more
            than the pool's window holds; if every row has ended.
        EngineFault: If a member's logits are not finite. The state is as it was before the step
            (but for the random streams), so another plan may be tried.
    """
    pool.check(plan)
    if state.is_finished:
        raise ValueError("decode_step: every row has ended; start a new state")
    started = clock.now()
    meter = Meter(clock)
    executed, reason = executable(pool, state, plan)
    try:
        proposals, entropy = draft(pool, state, executed, meter)
        if executed.k and not any(proposal.tokens for proposal in proposals):
            executed, reason = executed.without_speculation(), "no_proposal"
        drafter = executed.chain[0]
        fed = {drafter: proposals} if executed.k else {}
        proposed, accepted, divergence = [], [], {}
        for name in executed.chain[1:] or executed.chain:
            verdicts, rows = verify(pool, state, name, proposals, meter)
            if executed.k:
                proposed.append(sum(len(proposal.tokens) for proposal in proposals))
                accepted.append(sum(verdict.num_accepted for verdict in verdicts))
                if state.measure_divergence:
                    divergence[f"{drafter}>{name}"] = diverge(state, proposals, verdicts, rows)
            fed[name] = proposals
            proposals = [verdict.emitted for verdict in verdicts]
            drafter = name
    except BaseException:
        undo(state)
        raise
    committed = commit(state, proposals)
    for name, shared in fed.items():
        roll_back(state, name, shared, committed)
    return StepResult(
        asked=plan,
        executed=executed,
        reason=reason,
        tokens=committed,
        proposed_per_level=tuple(proposed),
        accepted_per_level=tuple(accepted),
        seconds=clock.now() - started,
        forwards=meter.costs,
        divergence=divergence,
        draft_entropy=entropy,
        finish_reasons=tuple(state.finish_reasons),
    )


def undo(state: DecodeState) -> None:
    """Rolls every memory back to committed tokens, after a step that failed half way."""
    for memory in state.memories.values():
        ends = [len(tokens) - 1 for tokens in state.tokens]
        memory.keep([min(end, memory.num_valid(row)) for row, end in enumerate(ends)])
        memory.scrub()


def probe_baseline(
    pool: ModelPool, state: DecodeState, clock: Clock, num_samples: int
) -> list[float]:
    """Seconds of plain iterations at this point: run, timed, and undone."""
    member, seconds = pool.model(pool.target), []
    held = [memory_of(state, member, Meter(clock)).num_valid(r) for r in range(state.batch_size)]
    for _ in range(num_samples):
        started = clock.now()
        nothing = [Proposal()] * state.batch_size
        logits_BTV, _ = score(pool, state, member.name, nothing, Meter(clock))
        best_tokens(logits_BTV, member.name, state.memories[member.name])
        state.memories[member.name].keep(held)
        seconds.append(clock.now() - started)
    return seconds


def executable(pool: ModelPool, state: DecodeState, plan: Plan) -> tuple[Plan, str]:
    """The plan that can run here, and why it is not the one asked for (``""`` when it is)."""
    if plan.k == 0:
        return plan, ""
    active = state.active_rows
    if plan.fit(max(map(state.num_remaining, active))) != plan:
        return plan.without_speculation(), "budget"
    longest = max(len(state.tokens[row]) for row in active) + plan.max_tokens
    if longest > min(pool.members[name].context_limit for name in plan.chain):
        return plan.without_speculation(), "context"
    return plan, ""


def draft(
    pool: ModelPool, state: DecodeState, plan: Plan, meter: Meter
) -> tuple[list[Proposal], float]:
    """Every row's proposal under the plan, and the entropy (nats) of the first drafted law."""
    if plan.k == 0:
        return [Proposal()] * state.batch_size, 0.0
    drafter = pool.members[plan.chain[0]]
    if isinstance(drafter, NGramMember):
        return draft_lookup(state, drafter, plan.k), 0.0
    return draft_model(state, drafter, plan.k, meter)


def draft_lookup(state: DecodeState, member: NGramMember, k: int) -> list[Proposal]:
    """Every row's proposal by prompt lookup."""
    indices = indices_of(state, member)
    return [
        Proposal(member.propose(index, tokens, k)) if state.is_active(row) else Proposal()
        for row, (index, tokens) in enumerate(zip(indices, state.tokens, strict=True))
    ]


def draft_model(
    state: DecodeState, member: NeuralMember, k: int, meter: Meter
) -> tuple[list[Proposal], float]:
    """Every row's ``k`` tokens drawn from a model, one forward each.

    A head on the target has nothing to go by where the target has seen nothing (a prompt of one
    token, before the first iteration): such a row gets no proposal.
    """
    memory = memory_of(state, member, meter)
    fed, num_catchup = pending(state, member, memory, [0] * state.batch_size, meter)
    width = state.pool.window if state.exact else None
    drawn: list[list[int]] = [[] for _ in fed]
    laws: list[list[torch.Tensor]] = [[] for _ in fed]
    logits_kept: list[list[torch.Tensor]] = [[] for _ in fed]
    active = [row for row in range(len(fed)) if state.is_active(row) and fed[row]]
    if not active:
        return [Proposal()] * len(fed), 0.0
    if draws_unread(state, member, active):
        return draft_unread(state, member, memory, fed, num_catchup, k, meter)
    needs_laws = state.measure_divergence or not all(
        state.requests[row].sampling.is_greedy for row in active
    )
    entropy = 0.0
    for index in range(k):
        logits_B1R = meter.forward(member, memory, fed, "draft", width, num_catchup)
        assert logits_B1R is not None
        logits_BR = logits_B1R[:, 0]
        if index == 0:
            first = logits_BR if len(active) == len(fed) else logits_BR[active]
            entropy = float(mean_entropy(first))
        best = best_tokens(logits_BR, member.name, memory)
        logits_BV = logits_BR
        if needs_laws:
            logits_BV = widen(logits_BR, member.draft_ids, member.vocab_size)
        for row in active:
            params = state.requests[row].sampling
            if params.is_greedy:
                drawn[row].append(member.token_of(best[row]))
            else:
                laws[row].append(law(logits_BV[row], params).cpu())  # drawn from on the host
                drawn[row].append(sample(laws[row][-1], state.generators[row]))
            if state.measure_divergence:
                logits_kept[row].append(logits_BV[row])
        fed, num_catchup = [row[-1:] for row in drawn], 0
        if not memory.keeps_drafts:  # what is dropped again may have shapes of its own
            width = None
    memory.drop_guesses()
    return [
        Proposal(tuple(tokens), stack(law_rows), stack(logit_rows))
        for tokens, law_rows, logit_rows in zip(drawn, laws, logits_kept, strict=True)
    ], entropy


def draws_unread(state: DecodeState, member: NeuralMember, active: list[int]) -> bool:
    """Whether drawn tokens can stay on the device: a model on CUDA that drafts greedily."""
    is_model = member.device.type == "cuda" and isinstance(member, ModelMember)
    return is_model and all(state.requests[row].sampling.is_greedy for row in active)


def draft_unread(
    state: DecodeState,
    member: NeuralMember,
    memory: MaskedKVCache,
    fed: list[list[int]],
    num_catchup: int,
    k: int,
    meter: Meter,
) -> tuple[list[Proposal], float]:
    """As ``draft_model`` for greedy rows, but the host reads what was drawn only at the end.

    The device so goes from one forward to the next without waiting for the host.
    """
    width = state.pool.window if state.exact else None
    active = [row for row in range(len(fed)) if state.is_active(row) and fed[row]]
    logits_KBR: list[torch.Tensor] = []
    drawn_KB: list[torch.Tensor] = []
    for _ in range(k):
        drawn_B = drawn_KB[-1].clamp_min(0) if drawn_KB else None  # a fault is read at the end
        logits_B1R = meter.forward(member, memory, fed, "draft", width, num_catchup, drawn_B)
        assert logits_B1R is not None
        logits_KBR.append(logits_B1R[:, 0])
        drawn_KB.append(name_tokens(mark_faults(logits_KBR[-1]), member.draft_ids))
        fed, num_catchup = [[0] if row in active else [] for row in range(len(fed))], 0
    first = logits_KBR[0]
    if len(active) < len(fed):
        first = first[to_device(active, member.device)]
    entropy = mean_entropy(first)
    rows = torch.stack(drawn_KB, dim=1).tolist()
    if any(FAULTY in row for row in rows):
        for logits_BR in logits_KBR:  # the first faulty one raises
            best_tokens(logits_BR, member.name, memory)
    logits_kept: dict[int, torch.Tensor] = {}
    if state.measure_divergence:
        kept = widen(torch.stack(logits_KBR, dim=1), member.draft_ids, member.vocab_size)
        logits_kept = {row: kept[row] for row in active}
    return [
        Proposal(tuple(tokens) if row in active else (), logits_NV=logits_kept.get(row))
        for row, tokens in enumerate(rows)
    ], float(entropy)


def name_tokens(rows_B: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
    """Token ids of rows of a vocabulary head, on the device; ``FAULTY`` ones stay."""
    if draft_ids is None:
        return rows_B
    return torch.where(rows_B == FAULTY, rows_B, draft_ids[rows_B.clamp_min(0)])


def stack(rows: list[torch.Tensor]) -> torch.Tensor | None:
    """Rows as one tensor, None when there are none."""
    return torch.stack(rows) if rows else None


def mean_entropy(logits_BV: torch.Tensor) -> torch.Tensor | float:
    """Mean entropy in nats of the laws behind logits, at temperature 1."""
    if logits_BV.is_cpu:
        return entropies.mean_entropy(logits_BV.float().numpy())
    # A token of no mass has a log of minus infinity, and 0 times that is not a number.
    log_probs_BV = logits_BV.float().log_softmax(dim=-1).clamp_min_(-1e4)
    return -(log_probs_BV.exp() * log_probs_BV).sum(dim=-1).mean()


def verify(
    pool: ModelPool, state: DecodeState, name: str, proposals: list[Proposal], meter: Meter
) -> tuple[list[Verdict], list[torch.Tensor]]:
    """One verifier's verdict on every row; while D_TV is measured also the logits [N + 1, V]."""
    logits_BTV, firsts = score(pool, state, name, proposals, meter)
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
        if state.measure_divergence:
            rows.append(logits_BTV[row, judged])
            kept = rows[-1][: len(verdict.emitted.tokens)]
            verdict = verdict._replace(emitted=verdict.emitted._replace(logits_NV=kept))
        verdicts.append(verdict)
    return verdicts, rows


def score(
    pool: ModelPool, state: DecodeState, name: str, proposals: list[Proposal], meter: Meter
) -> tuple[torch.Tensor, list[int]]:
    """A verifier's logits [B, T, V] over pending suffix and proposal.

    The second value is, per row, the entry that judges the first proposed token.
    """
    member = pool.model(name)
    memory = memory_of(state, member, meter)
    extra = [len(proposal.tokens) for proposal in proposals]
    suffix, num_catchup = pending(state, member, memory, extra, meter)
    fed = [[*row, *proposal.tokens] for row, proposal in zip(suffix, proposals, strict=True)]
    window = pool.window if state.exact else None
    logits_BTV = meter.forward(member, memory, fed, "verify", window, num_catchup)
    assert logits_BTV is not None
    return logits_BTV, [max(len(row) - 1, 0) for row in suffix]


def memory_of(state: DecodeState, member: NeuralMember, meter: Meter) -> MaskedKVCache:
    """The member's cache; on first use it is made. Rows new to it are prefilled."""
    memory = state.memories.get(member.name)
    if memory is None:
        kv_length = state.num_slots if state.exact else None
        memory = member.new_memory(
            state.batch_size, state.num_slots, kv_length, aligned=state.exact
        )
        if isinstance(memory, EagleMemory):
            memory.source = memory_of(state, state.pool.model(state.pool.target), meter)
        state.memories[member.name] = memory
    for row in state.active_rows:
        prefill(state, member, memory, row, meter)
    return memory


def prefill(
    state: DecodeState, member: NeuralMember, memory: MaskedKVCache, row: int, meter: Meter
) -> None:
    """Feeds a row by itself all of its prompt but the end, where that has not been done.

    The shapes depend on the prompt alone, so that what a member remembers never depends on when
    it was first used, nor on the other rows.
    """
    prompt = state.requests[row].prompt
    while fed := prompt[memory.num_eaten(row) : -1][:PREFILL_CHUNK]:
        with memory.alone(row) as view:
            meter.forward(member, view, [fed], "catchup", None, len(fed))


def pending(
    state: DecodeState, member: NeuralMember, memory: MaskedKVCache, extra: list[int], meter: Meter
) -> tuple[list[list[int]], int]:
    """Committed tokens each row's memory lacks, short enough to ride with the proposal.

    What does not fit the window beside ``extra`` more tokens is eaten first, in catch-up forwards
    of the window's width (without exact mode, as wide as the memory's slots allow).

    Returns:
        The pending tokens of each row (none for a row that has ended), and how many tokens among
        them are catch-up, that is, more than the one token every member always eats.
    """
    window = state.pool.window
    while True:
        missing = [
            tokens[memory.num_eaten(row) :] if state.is_active(row) else []
            for row, tokens in enumerate(state.tokens)
        ]
        late = [
            row
            for row, tokens in enumerate(missing)
            if len(tokens) > 1 and len(tokens) + extra[row] > window
        ]
        if not late:
            return missing, sum(max(len(tokens) - 1, 0) for tokens in missing)
        room = memory.num_slots - max(map(len, memory.row_slots))
        size = window if state.exact else min(PREFILL_CHUNK, room)
        fed = [tokens[:-1][:size] if row in late else [] for row, tokens in enumerate(missing)]
        width = window if state.exact else None
        meter.forward(member, memory, fed, "catchup", width, sum(map(len, fed)))


def indices_of(state: DecodeState, member: NGramMember) -> list[NGramIndex]:
    """The member's n-gram index of every row, up to date with the committed tokens."""
    if member.name not in state.indices:
        state.indices[member.name] = [member.new_memory() for _ in state.tokens]
    indices = state.indices[member.name]
    for index, tokens in zip(indices, state.tokens, strict=True):
        index.extend(tokens)
    return indices


def best_tokens(logits: torch.Tensor, name: str, memory: MaskedKVCache | None = None) -> list:
    """Argmax over the vocabulary as nested lists, the first of equal ones.

    On the CPU numpy finds it, ten times as fast as torch: 4 against 44 microseconds for a row of
    49,152 logits.

    Args:
        logits: A member's logits [..., V].
        name: The member.
        memory: Its memory after that forward, to say in which layer a fault began.

    Raises:
        EngineFault: If a row of logits is not finite.
    """
    if not logits.is_cpu:
        best: list = mark_faults(logits).tolist()  # the one place where the host waits for tokens
        is_faulty = FAULTY in best or any(isinstance(row, list) and FAULTY in row for row in best)
    else:
        scores = (logits.float() if logits.dtype in HALVES else logits).numpy()
        indices = scores.argmax(axis=-1)  # of the first NaN where there is one
        best = indices.tolist()
        starts = range(0, scores.size, scores.shape[-1])
        places = map(operator.add, starts, indices.ravel().tolist())
        is_faulty = not all(map(math.isfinite, map(scores.item, places)))
    if is_faulty:
        where = (~logits.max(dim=-1).values.isfinite()).nonzero()[0].tolist()
        raise EngineFault(
            f"member {name!r}: logits are not finite (first at batch row and position {where})"
            f"{origin_of_fault(memory)}; check its weights and dtype"
        )
    return best


def mark_faults(logits: torch.Tensor) -> torch.Tensor:
    """Argmax over the vocabulary, [...]; ``FAULTY`` where logits are not finite."""
    values, indices = logits.max(dim=-1)
    return indices.masked_fill_(~values.isfinite(), FAULTY)


def origin_of_fault(memory: MaskedKVCache | None) -> str:
    """Where logits that are not finite come from, as the end of a sentence."""
    if memory is None:
        return ""
    fault = memory.first_fault()
    if fault is None:
        return ", and every layer's input is finite: it is the last layer or the head"
    layer, row, position = fault
    return f", from the input of layer {layer} on (batch row {row}, token {position} of the text)"


def diverge(
    state: DecodeState,
    proposals: list[Proposal],
    verdicts: list[Verdict],
    logits_rows: list[torch.Tensor],
) -> float:
    """Mean D_TV between proposing and judging law, over rows up to the first rejection."""
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
    """Appends each row's emitted tokens up to its end; returns what was appended."""
    committed = []
    for row, proposal in enumerate(emitted):
        taken: list[int] = []
        for token in proposal.tokens if state.is_active(row) else ():
            state.tokens[row].append(token)
            taken.append(token)
            state.finish_reasons[row] = finish_reason(state, row, token)
            if not state.is_active(row):
                break
        committed.append(tuple(taken))
    return tuple(committed)


def finish_reason(state: DecodeState, row: int, token: int) -> str | None:
    """Why a row ends with this token just appended: eos before stop before length."""
    request = state.requests[row]
    eos_ids = state.pool.eos_ids if request.eos_ids is None else request.eos_ids
    if token in eos_ids:
        return "eos"
    if request.stop and state.pool.completes_stop(state.output(row), request.stop):
        return "stop"
    return state.limit_reason(row) if state.num_remaining(row) == 0 else None


def roll_back(
    state: DecodeState,
    name: str,
    proposals: list[Proposal],
    committed: tuple[tuple[int, ...], ...],
) -> None:
    """Rolls a member's memory back to what it shares with the committed tokens.

    The last committed token always stays pending: its logits are the next iteration's first.
    """
    memory = state.memories.get(name)
    if memory is None:
        return
    counts = []
    for row, (proposal, taken) in enumerate(zip(proposals, committed, strict=True)):
        before = len(state.tokens[row]) - len(taken)
        shared = before + common_prefix(proposal.tokens, taken)
        counts.append(min(shared, len(state.tokens[row]) - 1, memory.num_valid(row)))
    memory.keep(counts)
