"""Drafting: every row's proposal of up to K tokens, by the first member of a chain.

Legend: B batch, N drafted tokens, R rows of a member's vocabulary head, V vocabulary.
"""

from __future__ import annotations

import torch

from specgym.engine.compiled import entropy as entropies
from specgym.engine.forward.cache import MaskedKVCache
from specgym.engine.forward.lean_llama import widen
from specgym.engine.forward.transfer import to_device
from specgym.engine.member_runs import (
    FAULTY,
    Meter,
    best_tokens,
    catch_up,
    ensure_prefilled,
    mark_faults,
)
from specgym.engine.members.protocol import LookupMember, NeuralMember, has_kv, looks_up
from specgym.engine.state import DecodeState
from specgym.engine.types import Plan, Proposal
from specgym.engine.verification import law, sample


def draft(
    state: DecodeState, plan: Plan, meter: Meter, *, keep_logits: bool = False
) -> tuple[list[Proposal], float]:
    """Have the plan's drafter propose up to K tokens for every row that decodes.

    Args:
        state: The batch; only the drafter's memory changes.
        plan: Which member drafts, and how many tokens; none without speculation.
        meter: Records the forwards.
        keep_logits: Keep the logits behind the tokens, from which D_TV is measured.

    Returns:
        A proposal per row, and the mean entropy in nats of the first drafted law, over rows: 0 for
        a member that proposes from the text alone.

    Raises:
        EngineFault: If logits are not finite, or the device has no memory.
    """
    if plan.drafter is None:
        return [Proposal()] * state.batch_size, 0.0
    member = state.pool.members[plan.drafter]
    if has_kv(member):
        return draft_neural(state, member, plan.k, meter, keep_logits=keep_logits)
    assert looks_up(member)
    return draft_lookup(state, member, plan.k), 0.0


def draft_lookup(state: DecodeState, member: LookupMember, k: int) -> list[Proposal]:
    """Draft from each row's committed text alone."""
    if member.name not in state.indices:
        state.indices[member.name] = [member.new_memory() for _ in state.tokens]
    memories = state.indices[member.name]
    return [
        Proposal(member.propose(memory, tokens, k)) if state.is_active(row) else Proposal()
        for row, (memory, tokens) in enumerate(zip(memories, state.tokens, strict=True))
    ]


def draft_neural(
    state: DecodeState, member: NeuralMember, k: int, meter: Meter, *, keep_logits: bool = False
) -> tuple[list[Proposal], float]:
    """Draft with a model or a head, one forward per token.

    A head cannot draft for a row of which the target has seen nothing (a prompt of one token,
    before the first iteration): that row's proposal is empty.
    """
    memory = ensure_prefilled(state, member, meter)
    fed, num_catchup = catch_up(state, member, memory, [0] * state.batch_size, meter)
    if not any(fed):
        return [Proposal()] * len(fed), 0.0
    run = DraftRun(state, member, memory, meter, fed, num_catchup)
    if can_draft_on_device(run):
        return draft_on_device(run, k, keep_logits=keep_logits)
    return draft_on_host(run, k, keep_logits=keep_logits)


class DraftRun:
    """One member's draft in progress: what its next forward is fed.

    Attributes:
        active: Rows that get a proposal.
        is_greedy: Whether none of them samples.
    """

    def __init__(
        self,
        state: DecodeState,
        member: NeuralMember,
        memory: MaskedKVCache,
        meter: Meter,
        fed: list[list[int]],
        num_catchup: int,
    ):
        self.state, self.member, self.memory, self.meter = state, member, memory, meter
        self.fed, self.num_catchup = fed, num_catchup
        self.width = state.pool.window if state.exact else None
        self.active = [row for row, tokens in enumerate(fed) if tokens]
        samplings = [state.requests[row].sampling for row in self.active]
        self.is_greedy = all(params.is_greedy for params in samplings)

    def forward(self, drawn_B: torch.Tensor | None = None) -> torch.Tensor:
        """Run the next forward; logits [B, R] of what follows each row's last token."""
        logits_B1R = self.meter.forward(
            self.member, self.memory, self.fed, "draft", self.width, self.num_catchup, drawn_B
        )
        assert logits_B1R is not None
        return logits_B1R[:, 0]

    def feed_next(self, fed: list[list[int]]) -> None:
        """Set what the next forward is fed: one token per row that gets a proposal."""
        self.fed, self.num_catchup = fed, 0

    def widened(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [..., R] over the whole vocabulary, [..., V]."""
        return widen(logits, self.member.draft_ids, self.member.vocab_size)


def draft_on_host(run: DraftRun, k: int, *, keep_logits: bool) -> tuple[list[Proposal], float]:
    """Draft token by token; the host draws each one."""
    num_rows, entropy = len(run.fed), 0.0
    drawn: list[list[int]] = [[] for _ in range(num_rows)]
    laws: list[list[torch.Tensor]] = [[] for _ in range(num_rows)]
    kept: list[list[torch.Tensor]] = [[] for _ in range(num_rows)]
    for index in range(k):
        logits_BR = run.forward()
        if index == 0:
            is_full = len(run.active) == num_rows
            entropy = float(mean_entropy(logits_BR if is_full else logits_BR[run.active]))
        best = best_tokens(logits_BR, run.member.name, run.memory)
        logits_BV = run.widened(logits_BR) if keep_logits or not run.is_greedy else logits_BR
        for row in run.active:
            params = run.state.requests[row].sampling
            if params.is_greedy:
                drawn[row].append(run.member.token_of(best[row]))
            else:
                laws[row].append(law(logits_BV[row], params).cpu())  # drawn from on the host
                drawn[row].append(sample(laws[row][-1], run.state.generators[row]))
            if keep_logits:
                kept[row].append(logits_BV[row])
        run.feed_next([tokens[-1:] for tokens in drawn])
        if not run.member.traits.keeps_drafts:  # what is dropped again may have shapes of its own
            run.width = None
    run.memory.drop_guesses()
    return [
        Proposal(tuple(tokens), stack(law_rows), stack(logit_rows))
        for tokens, law_rows, logit_rows in zip(drawn, laws, kept, strict=True)
    ], entropy


def can_draft_on_device(run: DraftRun) -> bool:
    """Return whether drawn tokens can stay on the device: on CUDA, where no row samples."""
    return run.member.device.type == "cuda" and run.member.takes_drawn and run.is_greedy


def draft_on_device(run: DraftRun, k: int, *, keep_logits: bool) -> tuple[list[Proposal], float]:
    """Draft greedily without waiting for the device: the host reads all tokens at the end."""
    num_rows, member = len(run.fed), run.member
    logits_NBR: list[torch.Tensor] = []
    drawn_NB: list[torch.Tensor] = []
    for _ in range(k):
        drawn_B = drawn_NB[-1].clamp_min(0) if drawn_NB else None  # a fault is read at the end
        logits_NBR.append(run.forward(drawn_B))
        drawn_NB.append(rows_to_token_ids(mark_faults(logits_NBR[-1]), member.draft_ids))
        run.feed_next([[0] if row in run.active else [] for row in range(num_rows)])
    first_BR = logits_NBR[0]
    if len(run.active) < num_rows:
        first_BR = first_BR[to_device(run.active, member.device)]
    entropy = mean_entropy(first_BR)
    drawn_BN = torch.stack(drawn_NB, dim=1).tolist()
    if any(FAULTY in tokens for tokens in drawn_BN):
        for logits_BR in logits_NBR:  # the first faulty one raises
            best_tokens(logits_BR, member.name, run.memory)
    kept: dict[int, torch.Tensor] = {}
    if keep_logits:
        logits_BNV = run.widened(torch.stack(logits_NBR, dim=1))
        kept = {row: logits_BNV[row] for row in run.active}
    return [
        Proposal(tuple(tokens) if row in run.active else (), logits_NV=kept.get(row))
        for row, tokens in enumerate(drawn_BN)
    ], float(entropy)


def rows_to_token_ids(rows_B: torch.Tensor, draft_ids: torch.Tensor | None) -> torch.Tensor:
    """Return the token ids of rows of a vocabulary head, on the device; ``FAULTY`` ones stay."""
    if draft_ids is None:
        return rows_B
    return torch.where(rows_B == FAULTY, rows_B, draft_ids[rows_B.clamp_min(0)])


def stack(rows: list[torch.Tensor]) -> torch.Tensor | None:
    """Stack rows to one tensor; return None if there are none."""
    return torch.stack(rows) if rows else None


def mean_entropy(logits_BV: torch.Tensor) -> torch.Tensor | float:
    """Return the mean entropy in nats of the laws behind logits, at temperature 1."""
    if logits_BV.is_cpu:
        return entropies.mean_entropy(logits_BV.float().numpy())
    # A token of no mass has a log of minus infinity, and 0 times that is not a number.
    log_probs_BV = logits_BV.float().log_softmax(dim=-1).clamp_min_(-1e4)
    return -(log_probs_BV.exp() * log_probs_BV).sum(dim=-1).mean()
