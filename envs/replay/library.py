"""All traces of a split as flat tables that single and vectorised replays look their steps up in.

Legend: R requests, T rows (each request's positions and one more for its end), A actions, V
levels, M followers, L lags, P features of the position.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specgym.envs.actions import ActionTable
from specgym.envs.arguments import check_k_values
from specgym.envs.features import POSITION_FEATURES
from specgym.envs.observer import position_values
from specgym.envs.pool_spec import Layout
from specgym.envs.replay.costs import CostTable
from specgym.envs.replay.outcomes import TraceTables, make_tables
from specgym.envs.replay.traces import Trace, TraceSet, load_traces
from specgym.envs.text_features import TextFeatures

ENDED = ("eos", "stop")  # finish reasons that terminate; the others truncate
# What is tabulated per row, and as what: the last row of a request is its end.
COLUMNS: dict[str, type] = {
    "executed": np.int16,
    "tokens": np.int16,
    "proposed": np.uint8,
    "accepted": np.uint8,
    "draft_seconds": np.float64,
    "middle_seconds": np.float64,
    "target_seconds": np.float64,
    "overhead_seconds": np.float64,
    "baseline": np.float64,
    "kv_length": np.int32,
    "experts": np.float32,
    "entropy": np.float32,
    "divergence": np.float32,
    "uses": np.bool_,
    "lag_after": np.int16,
    "spread": np.float32,
}


class TraceLibrary:
    """What every action does at every position of every request; made once, shared by replays.

    Args:
        traces: Recorded traces with costs, or their file.
        split: ``train``, ``held-out`` or ``all``.
        k_values: Numbers of drafted tokens that the actions may ask for; None takes the recorded.

    Attributes:
        layout: Of the plans that are tabulated.
        table: Their actions.
        traces: The requests.
        starts: First row of each request, [R].
        ends: Row of each request's end, [R].
        num_prompt: Tokens of each prompt, [R].
        is_terminal: Whether a request ends by itself and not by its budget, [R].
        columns: By name as in ``COLUMNS``: [T], [T, A], [T, A, V] or [T, A, M].
        allowed: Actions that can run, [T, A].
        position: Features of the position, clipped to their bounds, float32 [T, P].
        catchup: Seconds that a follower's lag costs, [R, A, M, L].
        prefill: Seconds of a follower's first look at the prompt, [R, M].
        target_prefill: Seconds of the target's, where they were measured, [R].

    Raises:
        ValueError: If the file cannot be used, no costs were measured, the split is empty, or a K
            was not recorded.
    """

    def __init__(
        self,
        traces: TraceSet | Path | str,
        split: str = "all",
        k_values: Sequence[int] | None = None,
    ):
        if not isinstance(traces, TraceSet | Path | str):
            raise ValueError(f"traces: must be a TraceSet or its file; got {traces!r}")
        source = traces if isinstance(traces, TraceSet) else load_traces(Path(traces))
        part, costs = source.part(split), source.costs
        if costs is None:
            raise ValueError("traces: no costs were measured; run specgym record --costs on them")
        recorded, wanted = part.layout, None if k_values is None else check_k_values(k_values)
        self.layout = recorded if wanted is None else recorded.with_k_values(wanted)
        self.table = ActionTable(self.layout)
        self.traces = part.traces
        self.exact = bool(part.about["exact"])
        tables = [make_tables(t, recorded, costs, wanted, self.exact) for t in part.traces]
        self.fill(tables, costs)

    def __len__(self) -> int:
        return len(self.traces)

    def __deepcopy__(self, memo: dict[int, Any]) -> TraceLibrary:
        """The library itself: nothing in it changes."""
        return self

    def fill(self, tables: Sequence[TraceTables], costs: CostTable) -> None:
        """Lines the requests' tables up."""
        lengths = np.array([len(trace) + 1 for trace in self.traces])
        self.ends = np.cumsum(lengths) - 1
        self.starts = self.ends - lengths + 1
        self.num_prompt = np.array([len(trace.prompt) for trace in self.traces])
        self.is_terminal = np.array([trace.finish_reason in ENDED for trace in self.traces])
        split = [split_seconds(each, self.layout, costs) for each in tables]
        self.columns: dict[str, np.ndarray] = {
            name: stack(
                (part[name] if name in part else getattr(each, name))
                for each, part in zip(tables, split, strict=True)
            ).astype(kind)
            for name, kind in COLUMNS.items()
        }
        self.allowed = np.concatenate([self.masks(trace) for trace in self.traces])
        self.position = np.concatenate([position_table(t, self.layout) for t in self.traces])
        longest = max(each.catchup.shape[2] for each in tables)
        self.catchup = np.stack([widen(each.catchup, longest) for each in tables])
        self.prefill = np.stack([each.prefill for each in tables])
        target = self.layout.target
        self.target_prefill = np.array(
            [costs.prefill_seconds(target, count - 1) for count in self.num_prompt]
        )

    def masks(self, trace: Trace) -> np.ndarray:
        """Actions that can run at each position and at the end, [N + 1, A]."""
        generated = np.arange(len(trace) + 1)
        remaining = trace.max_new_tokens - generated
        remaining[-1] = 0
        return self.table.allowed(remaining, len(trace.prompt) + generated)


def make_library(
    traces: TraceLibrary | TraceSet | Path | str, split: str, k_values: Sequence[int] | None
) -> TraceLibrary:
    """The library of these traces, or the library itself.

    Raises:
        ValueError: If a split or K values come with a library, or the traces cannot be used.
    """
    if not isinstance(traces, TraceLibrary):
        return TraceLibrary(traces, split, k_values)
    if split != "all" or k_values is not None:
        raise ValueError(
            "split and k_values: the library was made with its own; give them to TraceLibrary"
        )
    return traces


def split_seconds(tables: TraceTables, layout: Layout, costs: CostTable) -> dict[str, np.ndarray]:
    """Seconds apart: the target's, the middle verifiers', what is around them, [N, A] each."""
    middle = np.zeros_like(tables.seconds)
    bucket = costs.bucket(tables.kv_length)
    for action, plan in enumerate(layout.plans()):
        runs = tables.executed[:, action] == action
        for level, name in enumerate(plan.chain[1:-1]):
            fed = 1 + tables.proposed[:, action, level]
            middle[:, action] += runs * costs.forward_seconds(name, "verify", fed, bucket)
    return {
        "middle_seconds": middle,
        "target_seconds": tables.verify_seconds - middle,
        "overhead_seconds": tables.seconds - tables.draft_seconds - tables.verify_seconds,
    }


def stack(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Parts below each other, each with one more row of zeros at its end."""
    return np.concatenate(
        [row for part in parts for row in (part, np.zeros_like(part, shape=(1, *part.shape[1:])))]
    )


def widen(array: np.ndarray, width: int) -> np.ndarray:
    """The array with its last axis filled up with zeros."""
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])])


def position_table(trace: Trace, layout: Layout) -> np.ndarray:
    """The entries of ``POSITION_FEATURES`` at each position and at the end, [N + 1, P]."""
    num_prompt, limit = len(trace.prompt), layout.context_limits[layout.target]
    classes, prompt = trace.classes.tolist(), trace.prompt.tolist()
    text = TextFeatures(prompt, classes[num_prompt - 1], layout.max_ngram)
    rows = []
    for generated in range(len(trace) + 1):
        rows.append(
            position_values(text.values(), len(text), generated, trace.max_new_tokens, limit)
        )
        if generated < len(trace):
            text.push(int(trace.output[generated]), classes[num_prompt + generated])
    low = [feature.low for feature in POSITION_FEATURES]
    high = [feature.high for feature in POSITION_FEATURES]
    return np.array(rows, dtype=np.float32).clip(low, high).astype(np.float32)
