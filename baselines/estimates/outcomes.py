"""What an iteration made of a plan: a step's `info` in a controller's terms."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from specgym.baselines.plans import charged_action


class Outcome(NamedTuple):
    """One iteration, as a mean over the rows of the batch.

    Attributes:
        action: the plan that it counts for (see `charged_action`).
        tokens: tokens emitted per row.
        cost: seconds in units of an iteration without speculation, catch-up included.
        catchup: the part of `cost` that caught drafters up with the text.
        accepted: drafted tokens that the target accepted, per row.
        num_rows: rows that decoded.
        baseline_seconds: seconds of an iteration without speculation.
        context: tokens of the longest text.
        is_last: whether the text ended, which may cut what the iteration emits.
    """

    action: int
    tokens: float
    cost: float
    catchup: float
    accepted: float
    num_rows: int
    baseline_seconds: float
    context: int
    is_last: bool


def is_sound(info: Mapping[str, Any]) -> bool:
    """Returns whether a step can be learned from: no fault, and all its measures are finite."""
    if "error" in info:
        return False
    seconds, baseline_seconds = info["iter_seconds"], info["baseline_seconds"]
    others = info.get("catchup_seconds", 0.0) + info.get("draft_seconds", 0.0)
    others += sum([forward["seconds"] for forward in info.get("forwards", ())])
    others += sum(info.get("divergence", {}).values())
    total = seconds + baseline_seconds + others
    return seconds > 0.0 and baseline_seconds > 0.0 and math.isfinite(total)


def read_outcome(action: int, info: Mapping[str, Any]) -> Outcome | None:
    """Returns the iteration that a step reports; None where nothing can be learned from it.

    In a batch `tokens` and acceptances are sums over rows, and `baseline_seconds` is the seconds
    of a token. A server that drives a controller may leave out `catchup_seconds` (0 then),
    `accepted_per_level` (all tokens but the last were accepted then), `context_len`,
    `finish_reason` and `num_active` (one row then).

    Args:
        action: the action that was asked for.
        info: the step's info.
    """
    if not is_sound(info):
        return None
    num_rows = info.get("num_active", 1)
    baseline_seconds = info["baseline_seconds"] * num_rows
    tokens = info["tokens"] / num_rows
    levels = info.get("accepted_per_level")
    accepted = tokens - 1.0 if levels is None else levels[-1] / num_rows if levels else 0.0
    return Outcome(
        action=charged_action(action, info),
        tokens=tokens,
        cost=info["iter_seconds"] / baseline_seconds,
        catchup=info.get("catchup_seconds", 0.0) / baseline_seconds,
        accepted=accepted,
        num_rows=num_rows,
        baseline_seconds=baseline_seconds,
        context=info.get("context_len", 0),
        is_last=info.get("finish_reason") is not None,
    )
