"""Whether controllers' texts equal plain decoding's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specgym.engine.decoding import start
from specgym.engine.pool import ModelPool
from specgym.engine.timing import WallClock
from specgym.engine.types import DecodeRequest, common_prefix
from specgym.envs.workloads import Request
from specgym.runs.loop import RequestRecord

# Logits. In bf16 two correct computations of one row differ by up to 0.5; in fp32 by far less.
NEAR_TIE_BOUND = {torch.bfloat16: 0.5}
NEAR_TIE_BOUND_ELSE = 1e-3


def check_lossless(
    pool: ModelPool,
    requests: Sequence[Request],
    plain: Sequence[RequestRecord],
    others: Sequence[Sequence[RequestRecord]],
    *,
    exact: bool,
) -> dict[str, Any]:
    """Counts of texts that equal plain decoding's, differ in a near-tie, or are wrong.

    A near-tie is a first difference where plain decoding's two largest logits are closer than the
    bound; anything else that differs is a mismatch.

    Args:
        pool: What decoded.
        requests: The requests, in order.
        plain: Plain decoding's records of them.
        others: Every controller's records of them.
        exact: The mode they were decoded in.
    """
    bound = NEAR_TIE_BOUND.get(pool.model(pool.target).dtype, NEAR_TIE_BOUND_ELSE)
    counts = {"checked": 0, "identical": 0, "near_ties": 0, "mismatches": 0}
    for records in others:
        for request, theirs, ours in zip(requests, plain, records, strict=False):
            counts["checked"] += 1
            if theirs.output == ours.output:
                counts["identical"] += 1
            elif top_gap(pool, request, theirs.output, ours.output, exact) <= bound:
                counts["near_ties"] += 1
            else:
                counts["mismatches"] += 1
    return counts | {"near_tie_bound": bound}


def top_gap(
    pool: ModelPool, request: Request, plain: Sequence[int], ours: Sequence[int], exact: bool
) -> float:
    """Plain decoding's top-2 logit gap where two texts first differ; infinite where one is cut."""
    first = common_prefix(plain, ours)
    if first == min(len(plain), len(ours)):
        return float("inf")
    prompt = (*pool.encode(request.prompt), *plain[:first])
    member = pool.model(pool.target)
    state = start(pool, [DecodeRequest(prompt, 1)], WallClock(member.device), exact=exact)
    logits = member.forward(state.memories[member.name], [prompt[-1:]])
    assert logits is not None
    top = logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])
