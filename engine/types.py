"""The vocabulary of the engine: plans, requests, proposals, verdicts, costs, step results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specgym.engine.checks import (
    check_stop_strings,
    check_tokens,
    check_whole,
    is_number,
    is_whole,
)

NO_SPECULATION_NAME = "none"


class EngineFault(RuntimeError):  # noqa: N818 (a fault, in the sense of the design)
    """A fault inside the engine (for example NaN logits), named where it arose."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which chain of members runs in one decode iteration, and how many tokens are drafted.

    Attributes:
        chain: Member names, drafter first, target last. A chain of one is no speculation.
        k: Number of tokens the drafter is asked for; 0 exactly when the chain has one member.

    Raises:
        ValueError: If the chain is empty, repeats a member, or does not fit ``k``.
    """

    chain: tuple[str, ...]
    k: int

    def __post_init__(self) -> None:
        if not self.chain or len(set(self.chain)) != len(self.chain):
            raise ValueError(
                f"plan.chain: must name each member once, target last; got {self.chain!r}"
            )
        if (self.k == 0) != (len(self.chain) == 1) or self.k < 0:
            raise ValueError(
                f"plan.k: must be 0 for a chain of one and at least 1 for a longer chain; "
                f"got k={self.k} with chain {'>'.join(self.chain)!r}"
            )

    @property
    def drafter(self) -> str | None:
        """Name of the member that drafts; None without speculation."""
        return self.chain[0] if self.k else None

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Names of the members that run after the draft, target last.

        Without speculation this is the target alone: it runs as a verifier of nothing.
        """
        return self.chain[1:] or self.chain

    @property
    def num_verifiers(self) -> int:
        """Number of members that verify a draft; 0 for no speculation."""
        return len(self.chain) - 1

    @property
    def max_tokens(self) -> int:
        """The most tokens an iteration of this plan can emit: K + V, or 1 without speculation."""
        return self.k + max(1, self.num_verifiers)

    @property
    def name(self) -> str:
        """The plan's name: ``none``, ``ngram@4`` or ``small>mid@2`` (the target is implied)."""
        if self.k == 0:
            return NO_SPECULATION_NAME
        return f"{'>'.join(self.chain[:-1])}@{self.k}"

    def without_speculation(self) -> Plan:
        """The plan of no speculation on the same target."""
        return Plan(self.chain[-1:], 0)

    def fit(self, num_remaining: int) -> Plan:
        """This plan where it cannot overrun ``num_remaining`` tokens, else no speculation."""
        return self if self.max_tokens <= num_remaining else self.without_speculation()


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request turns logits into tokens; ``temperature=0`` is greedy.

    Attributes:
        temperature: Divides the logits; 0 picks the largest.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with at least this mass; 1 keeps all.
        seed: Seeds the request's own random stream.

    Raises:
        ValueError: If a value is of another type, or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or not 0.0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature: must be a finite number >= 0 (0 is greedy); got {self.temperature!r}"
            )
        top_k = check_whole("top_k", self.top_k, 0, "0 keeps all tokens")
        if not is_number(self.top_p) or not 0.0 < self.top_p <= 1.0:
            raise ValueError(
                f"top_p: must be a number in (0, 1] (1 keeps all tokens); got {self.top_p!r}"
            )
        if not is_whole(self.seed) or not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed: must be a whole number of 64 bits; got {self.seed!r}")
        as_given = (float(self.temperature), top_k, float(self.top_p), int(self.seed))
        for field, value in zip(dataclasses.fields(self), as_given, strict=True):
            object.__setattr__(self, field.name, value)  # numpy's numbers become Python's

    @property
    def is_greedy(self) -> bool:
        """Whether tokens are the largest logits."""
        return self.temperature == 0.0


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
    sampling: SamplingParams = SamplingParams()
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


class Proposal(NamedTuple):
    """Tokens one level hands to the next, for one row of the batch.

    Attributes:
        tokens: The proposed token ids, possibly none.
        laws_NV: The distribution each token was drawn from, [num_tokens, vocab]; None when the
            tokens are certain (greedy decoding, prompt lookup): a one-hot law.
        logits_NV: Raw logits behind the tokens, kept only to measure divergence.
    """

    tokens: tuple[int, ...] = ()
    laws_NV: torch.Tensor | None = None
    logits_NV: torch.Tensor | None = None


class Verdict(NamedTuple):
    """What one verifier made of one row's proposal.

    Attributes:
        num_accepted: Length of the accepted prefix of the proposal.
        emitted: The accepted prefix and one token of the verifier's own, under the verifier's law.
    """

    num_accepted: int
    emitted: Proposal


class ForwardCost(NamedTuple):
    """What one forward of one member cost.

    Attributes:
        member: Name of the member.
        role: ``draft``, ``verify`` or ``catchup``.
        num_tokens: Real tokens fed, over all rows.
        num_rows: Rows of the token dimension, pads included (a CPU may spare the pads).
        num_catchup: Tokens among them that only caught up with what was committed before.
        seconds: Measured duration.
        unique_experts: Experts activated per MoE layer, or their mean alone; empty for a dense
            model.
    """

    member: str
    role: str
    num_tokens: int
    num_rows: int
    num_catchup: int
    seconds: float
    unique_experts: tuple[float, ...] = ()


class StepResult(NamedTuple):
    """What one decode iteration did and what it cost.

    Attributes:
        asked: The plan that was asked for.
        executed: The plan that ran.
        reason: Why they differ: ``""``, ``budget``, ``context`` or ``no_proposal``.
        tokens: Committed tokens of every row.
        proposed_per_level: Tokens proposed to each verifier, summed over rows.
        accepted_per_level: Tokens each verifier accepted, summed over rows.
        seconds: Duration of the iteration.
        forwards: Every forward in order.
        divergence: D_TV per adjacent pair (``"ngram>target"``), where it was measured.
        draft_entropy: Entropy in nats of the drafter's first law; 0 where it has none.
        finish_reasons: Per row None, ``eos``, ``stop``, ``length`` or ``context``.
    """

    asked: Plan
    executed: Plan
    reason: str
    tokens: tuple[tuple[int, ...], ...]
    proposed_per_level: tuple[int, ...]
    accepted_per_level: tuple[int, ...]
    seconds: float
    forwards: tuple[ForwardCost, ...]
    divergence: dict[str, float]
    draft_entropy: float
    finish_reasons: tuple[str | None, ...]

    @property
    def num_tokens(self) -> int:
        """Committed tokens, over all rows."""
        return sum(map(len, self.tokens))

    @property
    def num_active(self) -> int:
        """Rows that decoded: each got a token at least."""
        return sum(map(bool, self.tokens))

    @property
    def num_drafted(self) -> int:
        """Tokens the drafter proposed, over all rows."""
        return self.proposed_per_level[0] if self.proposed_per_level else 0

    @property
    def num_accepted(self) -> int:
        """Proposed tokens the target accepted, over all rows."""
        return self.accepted_per_level[-1] if self.accepted_per_level else 0

    @property
    def role_seconds(self) -> dict[str, float]:
        """Seconds of the forwards of each role."""
        seconds = {"draft": 0.0, "verify": 0.0, "catchup": 0.0}
        for cost in self.forwards:
            seconds[cost.role] += cost.seconds
        return seconds


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix of two token sequences."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return min(len(left), len(right))
