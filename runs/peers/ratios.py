"""From timed runs to rows and ratios: who is how much faster than whom, on one pool."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from specgym.runs.bench.measuring import row
from specgym.runs.peers.contestants import Contestant, Run, equal_share, total_seconds

OURS, TRANSFORMERS = "specgym", "transformers"
PLAIN, LOOKUP, ASSISTED, EXACT = "plain", "lookup", "assisted", "exact"
BF16 = "bf16"  # plain, over bf16 whatever the others read
AIMS = {  # of each ratio
    "plain_over_transformers": (">=", 1.8),
    "plain_over_vllm": (">=", 1.15),
    "lookup_over_transformers": (">=", 1.8),
    "over_byte_floor": ("<=", 2.3),
    "exact_over_fast": ("<=", 1.2),
    "moe_exact_over_fast": ("<=", 1.4),
    "moe_plain_over_transformers": (">=", 1.5),
}


def name_of(peer: str, mode: str) -> str:
    """A contestant's name."""
    return f"{peer}, {mode}"


def rows_of(
    pool: str,
    contestants: Sequence[Contestant],
    runs: Mapping[str, Sequence[Run]],
    new_tokens: int,
) -> list[dict[str, Any]]:
    """One row per contestant that came through: its seconds, and how alike its text is to ours."""
    ours = runs[name_of(OURS, PLAIN)]
    return [
        row(each.name, [run.seconds for run in runs[each.name]], "s")
        | {
            "pool": pool,
            "peer": each.peer,
            "precision": each.precision,
            "same_precision": each.precision == contestants[0].precision,
            "num_tokens": new_tokens,
            "tokens_per_second": new_tokens / statistics.median(r.seconds for r in runs[each.name]),
            "equal_tokens": equal_share(ours, runs[each.name]),
        }
        for each in contestants
        if each.name in runs
    ]


def dense_ratios(runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Seconds over seconds, for all whose runs are there."""
    pairs = {
        "plain_over_transformers": (name_of(TRANSFORMERS, PLAIN), name_of(OURS, PLAIN)),
        "plain_over_vllm": (name_of("vllm", PLAIN), name_of(OURS, PLAIN)),
        "plain_over_llama_cpp_bf16": (name_of("llama-cpp", BF16), name_of(OURS, PLAIN)),
        "lookup_over_transformers": (name_of(TRANSFORMERS, LOOKUP), name_of(OURS, LOOKUP)),
        "assisted_over_transformers": (name_of(TRANSFORMERS, ASSISTED), name_of(OURS, ASSISTED)),
        "exact_over_fast": (name_of(OURS, EXACT), name_of(OURS, PLAIN)),
    }
    return ratios_of(runs, pairs)


def mixture_ratios(runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    """Seconds over seconds on the mixture."""
    pairs = {
        "moe_exact_over_fast": (name_of(OURS, EXACT), name_of(OURS, PLAIN)),
        "moe_plain_over_transformers": (name_of(TRANSFORMERS, PLAIN), name_of(OURS, PLAIN)),
    }
    return ratios_of(runs, pairs)


def ratios_of(
    runs: Mapping[str, Sequence[Run]], pairs: Mapping[str, tuple[str, str]]
) -> dict[str, float]:
    """Total seconds of the first over those of the second, where both are there."""
    return {
        name: total_seconds(runs[over]) / total_seconds(runs[under])
        for name, (over, under) in pairs.items()
        if over in runs and under in runs
    }
