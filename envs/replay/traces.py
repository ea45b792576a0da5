"""Counterfactual traces: what every plan would get at every position of a request.

Under greedy decoding the output does not depend on the controller, so this is a table. Recorded
by ``specgym.envs.replay.recording``; this file reads and writes it, with numpy alone.

Legend: N output tokens, D drafters, C speculative chains, V verifiers of the longest chain, K
tokens drafted at most, W = K + V - 1 tokens proposed to a verifier at most, T prompt and output.
"""

from __future__ import annotations

import dataclasses
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specgym.envs.pool_spec import Layout
from specgym.envs.replay.costs import CostTable

SCHEMA = "specgym-traces"
SCHEMA_VERSION = 1
# Name, type and axes of each array of a trace; the first axis is the one that traces differ in.
ARRAYS: dict[str, tuple[type, str]] = {
    "prompt": (np.int32, "P"),
    "output": (np.int32, "N"),
    "num_proposed": (np.uint8, "ND"),
    "draft_matches": (np.uint8, "ND"),
    "matches": (np.uint8, "NCV"),
    "entropy": (np.float32, "ND"),
    "divergence": (np.float16, "NCVW"),
    "experts": (np.float16, "NCX"),
    "classes": (np.uint8, "T"),
}
LABELS = ("request_id", "category", "split", "finish_reason", "max_new_tokens")


@dataclasses.dataclass(frozen=True)
class Trace:
    """One request, and what every plan would get at each of its positions.

    Position g is where g output tokens are committed. Drafts and verifications are those of plans
    that draft K tokens; a plan that drafts fewer follows by prefix (see ``accepted``).

    Attributes:
        request_id: The request's name.
        category: Its category.
        split: ``train`` or ``held-out``.
        finish_reason: ``eos``, ``stop``, ``length`` or ``context``.
        max_new_tokens: Its token budget, cut to the context.
        prompt: Token ids [P].
        output: Token ids [N], the end included.
        num_proposed: Tokens each drafter proposes when asked for K, [N, D].
        draft_matches: Leading tokens of these that the target's own path has too, [N, D].
        matches: Per chain and level, leading tokens that the level below would say and this level
            too, [N, C, V]; 0 for levels that a chain lacks.
        entropy: Nats of each drafter's first law, [N, D]; 0 for prompt lookup.
        divergence: D_TV of each token proposed to a level, [N, C, V, W]; 0 beyond the first
            rejection.
        experts: Mean unique experts per layer when the target verifies the first j tokens that
            may be proposed to it, [N, C, W + 1]; 0 for dense targets.
        classes: Lexical classes of each token of prompt and output, [T], as bits.
    """

    request_id: str
    category: str
    split: str
    finish_reason: str
    max_new_tokens: int
    prompt: np.ndarray
    output: np.ndarray
    num_proposed: np.ndarray
    draft_matches: np.ndarray
    matches: np.ndarray
    entropy: np.ndarray
    divergence: np.ndarray
    experts: np.ndarray
    classes: np.ndarray

    def __len__(self) -> int:
        return len(self.output)

    @property
    def key(self) -> str:
        """What the trace is called in messages."""
        return f"trace {self.request_id!r}"


def accepted_per_level(
    matches: Sequence[int] | np.ndarray, num_drafted: int | np.ndarray
) -> tuple[list[Any], list[Any]]:
    """Tokens proposed to and accepted by each verifier when this many are drafted.

    With a the match of the drafts with the first verifier's own path and b the match of that path
    with the next verifier's, the next accepts min(b, min(a, K) + 1). Ours; exact under greedy
    decoding.

    Args:
        matches: Of a chain, one entry per verifier: of one position, or of all, [V, N].
        num_drafted: At most what the trace was recorded with; of one position, or of all, [N].
    """
    proposed: list[Any] = []
    accepted: list[Any] = []
    offered = num_drafted
    for match in matches:
        proposed.append(offered)
        accepted.append(np.minimum(offered, match))
        offered = accepted[-1] + 1
    return proposed, accepted


@dataclasses.dataclass(frozen=True)
class TraceSet:
    """Traces of one pool on one workload, and what forwards cost on the machine they come from.

    Attributes:
        traces: One per request.
        layout: The pool as plain values.
        costs: Seconds of forwards; None as long as none were measured.
        about: Where they come from: pool, fingerprint, machine, exact, workload, versions.
    """

    traces: tuple[Trace, ...]
    layout: Layout
    costs: CostTable | None
    about: dict[str, Any]

    def part(self, split: str) -> TraceSet:
        """The traces of this split: ``train``, ``held-out`` or ``all``.

        Raises:
            ValueError: If the split is unknown or has no trace.
        """
        if split not in ("train", "held-out", "all"):
            raise ValueError(f"split: must be train, held-out or all; got {split!r}")
        chosen = tuple(t for t in self.traces if split in ("all", t.split))
        if not chosen:
            raise ValueError(f"split: no trace is {split!r}; record more requests")
        return dataclasses.replace(self, traces=chosen)


def save_traces(path: Path, traces: TraceSet) -> None:
    """Writes one compressed ``.npz`` file, whole or not at all."""
    header = {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "about": traces.about,
        "layout": traces.layout.as_plain(),
        "labels": [{name: getattr(t, name) for name in LABELS} for t in traces.traces],
        "costs": traces.costs.header() if traces.costs else None,
    }
    arrays: dict[str, np.ndarray] = {"header": np.array(json.dumps(header))}
    for name in ARRAYS:
        parts = [getattr(trace, name) for trace in traces.traces]
        arrays[name] = np.concatenate(parts)
        arrays[f"{name}.ends"] = np.cumsum([len(part) for part in parts], dtype=np.int64)
    if traces.costs:
        arrays |= {f"costs.{name}": array for name, array in traces.costs.arrays().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(beside, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_traces(path: Path) -> TraceSet:
    """The traces of a file.

    Raises:
        ValueError: If it is no such file, is cut short, or is of another version.
    """
    if not path.is_file():
        raise ValueError(f"traces: there is no file {path}; make one with specgym record")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(str(arrays.pop("header")))
    except (zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, OSError, KeyError) as error:
        raise broken(path, f"it is not whole, or was not written by specgym ({error})") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise broken(path, f"it was not written by specgym ({error})") from error
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise broken(path, "it holds something else")
    if header["version"] != SCHEMA_VERSION:
        raise broken(path, f"its version is {header['version']}, this one reads {SCHEMA_VERSION}")
    try:
        return assemble(header, arrays)
    except (KeyError, TypeError, IndexError) as error:
        raise broken(path, f"{error} is missing or out of place") from error
    except ValueError as error:
        raise broken(path, str(error)) from error


def broken(path: Path, why: str) -> ValueError:
    """The error of a file that cannot be read."""
    return ValueError(f"traces: {path} cannot be used: {why}; record it again with specgym record")


def assemble(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> TraceSet:
    """Traces from what a file holds."""
    split: dict[str, list[Any]] = {
        name: np.split(arrays[name], arrays[f"{name}.ends"][:-1]) for name in ARRAYS
    }
    counts = {len(parts) for parts in split.values()}
    if counts != {len(header["labels"])}:
        raise ValueError(f"it has {len(header['labels'])} labels and arrays of {counts} traces")
    traces = tuple(
        Trace(**labels, **{name: parts[index] for name, parts in split.items()})
        for index, labels in enumerate(header["labels"])
    )
    costs = None
    if header["costs"] is not None:
        prefix = "costs."
        own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
        costs = CostTable.restore(header["costs"], own)
    layout = Layout.from_plain(header["layout"])
    for trace in traces:
        check_trace(trace, layout)
    return TraceSet(traces, layout, costs, header["about"])


def check_trace(trace: Trace, layout: Layout) -> None:
    """Refuses a trace whose arrays do not go together.

    Raises:
        ValueError: If the shape or the type of an array is wrong.
    """
    sizes = {
        "P": len(trace.prompt),
        "N": len(trace.output),
        "T": len(trace.prompt) + len(trace.output),
        "D": len(layout.drafters),
        "C": len(layout.speculative_chains),
        "V": layout.max_verifiers,
        "W": layout.max_proposed,
        "X": layout.max_proposed + 1,
    }
    for name, (kind, axes) in ARRAYS.items():
        array, wanted = getattr(trace, name), tuple(sizes[axis] for axis in axes)
        if array.shape != wanted or array.dtype != kind:
            raise ValueError(
                f"{name} of {trace.key}: must be {np.dtype(kind)} of shape {wanted}; got "
                f"{array.dtype} of shape {array.shape}"
            )
