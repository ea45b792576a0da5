"""Which prompts a pool has room for: asked before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from specgym.engine.pool import ModelPool
from specgym.envs.workloads import Request, Workload


def fit_workload(workload: Workload, pool: ModelPool, *, skip_too_long: bool = False) -> Workload:
    """The workload, all of whose prompts leave room for a token in the target's context.

    Args:
        workload: The workload.
        pool: Its target decodes; without a tokenizer it reads no prompts, and nothing is checked.
        skip_too_long: Leave out what does not fit, and count it in ``num_skipped``.

    Raises:
        ValueError: If a prompt does not fit and is not to be skipped, or nothing is left of a
            category.
    """
    if pool.tokenizer is None:
        return workload
    kept = set(keep_fitting(workload.requests, pool, skip_too_long=skip_too_long))
    groups = tuple(tuple(r for r in group if r in kept) for group in workload.groups)
    for before, after in zip(workload.groups, groups, strict=True):
        if before and not after:
            raise ValueError(
                f"skip_too_long: must leave a prompt of each category, but every one of "
                f"{before[0].category!r} is too long; give shorter ones"
            )
    num_skipped = workload.num_skipped + len(workload.requests) - sum(map(len, groups))
    return dataclasses.replace(workload, groups=groups, num_skipped=num_skipped)


def keep_fitting(
    requests: Iterable[Request], pool: ModelPool, *, skip_too_long: bool
) -> list[Request]:
    """The requests whose prompts leave room for a token in the target's context, in their order.

    Raises:
        ValueError: If one does not, and is not to be skipped; names where it stands.
    """
    limit = pool.model(pool.target).context_limit
    lengths = [(request, len(pool.encode(request.prompt))) for request in requests]
    too_long = [(request, length) for request, length in lengths if length >= limit]
    if too_long and not skip_too_long:
        request, length = too_long[0]
        more = f" (the first of {len(too_long)})" if len(too_long) > 1 else ""
        raise ValueError(
            f"{request.source or f'prompt {request.id!r}'}{more}: a prompt must have fewer tokens "
            f"than the target's context of {limit}, but this one has {length}; shorten it, or "
            f"leave such prompts out with skip_too_long (--skip-too-long)"
        )
    return [request for request, length in lengths if length < limit]


def describe_skipped(num_skipped: int) -> str:
    """What is said of prompts that were left out."""
    prompts = "1 prompt was" if num_skipped == 1 else f"{num_skipped} prompts were"
    return f"{prompts} left out: too long for the target's context"
