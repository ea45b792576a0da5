"""What a batch's iteration says of one of its rows."""

from collections.abc import Mapping
from typing import Any


def per_row(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the step's info with counts of a batch as means over its rows; a single row's as is.

    In a batch `tokens`, `drafted` and the tokens of forwards are sums, and `baseline_seconds` is
    the seconds of a token, not of an iteration. A mean number of drafted or fed tokens is rounded:
    what is learned per number is learned of the typical row. Source: ours (SpecRouter's Table 2
    schedules one chain for the batch, and does not say how).

    Args:
        info: a step's info; `num_active` is there in a batch only.
    """
    num_rows = info.get("num_active", 1)
    if num_rows == 1:
        return info
    forwards = [
        {**each, "num_tokens": max(1, round(each["num_tokens"] / num_rows))}
        for each in info["forwards"]
    ]
    return {
        **info,
        "tokens": info["tokens"] / num_rows,
        "drafted": round(info["drafted"] / num_rows),
        "baseline_seconds": info["baseline_seconds"] * num_rows,
        "forwards": forwards,
    }
