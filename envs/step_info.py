"""What a step's ``info`` says of an iteration, live or replayed."""

from __future__ import annotations

from typing import Any

from specgym.engine.types import ForwardCost, StepResult
from specgym.envs.actions import ActionTable
from specgym.envs.rewards import utility as utility_of


def describe_step(
    result: StepResult, baseline_seconds: float, table: ActionTable, experts_per_token: int
) -> dict[str, Any]:
    """A step's ``info``, but for what the environment alone knows.

    Args:
        result: What the iteration did.
        baseline_seconds: Of no speculation at this point.
        table: Which action each plan is.
        experts_per_token: Of the target; 0 for a dense one.
    """
    plan, seconds = result.executed, result.role_seconds
    return {
        "tokens": result.num_tokens,
        "drafted": result.num_drafted,
        "accepted": result.num_accepted,
        "accepted_per_level": list(result.accepted_per_level),
        "proposed_per_level": list(result.proposed_per_level),
        "chain": ">".join(plan.chain),
        "k": plan.k,
        "executed_action": table.index(plan),
        "reason": result.reason,
        "iter_seconds": result.seconds,
        "draft_seconds": seconds["draft"],
        "verify_seconds": seconds["verify"],
        "catchup_seconds": seconds["catchup"],
        "baseline_seconds": baseline_seconds,
        "utility": utility_of(result.num_tokens, result.seconds, baseline_seconds),
        "forwards": [describe_forward(cost) for cost in result.forwards],
        "divergence": result.divergence,
        "unique_experts": expert_ratio(result, experts_per_token),
        "finish_reason": finish_reason(result),
    }


def finish_reason(result: StepResult) -> str | None:
    """Why the last of the rows ended; None while one decodes."""
    ended = [
        reason
        for reason, tokens in zip(result.finish_reasons, result.tokens, strict=True)
        if tokens
    ]
    return None if None in ended else ended[-1]


def expert_ratio(result: StepResult, experts_per_token: int) -> float:
    """Mean unique experts per layer in the target's verification over one token's; 1 if dense."""
    counts = result.forwards[-1].unique_experts
    if not experts_per_token or not counts:
        return 1.0
    return sum(counts) / len(counts) / experts_per_token


def describe_forward(cost: ForwardCost) -> dict[str, Any]:
    """A forward's cost as plain values."""
    return {
        "member": cost.member,
        "role": cost.role,
        "num_tokens": cost.num_tokens,
        "num_rows": cost.num_rows,
        "num_catchup": cost.num_catchup,
        "seconds": cost.seconds,
        "unique_experts": list(cost.unique_experts),
    }
