"""From request records to ``results.json`` and the table: ratios of sums, with intervals."""

from __future__ import annotations

import collections
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers

from specgym.engine.types import NO_SPECULATION_NAME
from specgym.runs.disk import writing
from specgym.runs.loop import RequestRecord
from specgym.runs.tables import NumberTable

NUM_RESAMPLES = 2000
SCHEMA = 1


class Timed(Protocol):
    """Tokens that were decoded, and the seconds they took."""

    @property
    def tokens(self) -> int:
        """Their number."""
        ...

    @property
    def seconds(self) -> float:
        """Wall seconds."""
        ...


def speedup(baseline: Sequence[Timed], records: Sequence[Timed]) -> float:
    """Seconds of the baseline over seconds of a controller, pooled over requests.

    Of seconds per token: on the same tokens that is a ratio of sums; where a near-tie made a text
    shorter it pays nothing.
    """
    return seconds_per_token(baseline) / seconds_per_token(records)


def request_speedups(baseline: Sequence[Timed], records: Sequence[Timed]) -> list[float]:
    """The speed-up of every request by itself."""
    return [speedup([a], [b]) for a, b in zip(baseline, records, strict=True)]


def bootstrap(
    baseline: Sequence[Timed], records: Sequence[Timed], seed: int = 0
) -> tuple[float, float]:
    """A 95 % interval of the speed-up by resampling requests (percentile bootstrap)."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(records), size=(NUM_RESAMPLES, len(records)))
    per_token = []
    for each in (baseline, records):
        seconds, tokens = np.array([[r.seconds, r.tokens] for r in each]).T
        per_token.append(seconds[picks].sum(axis=1) / tokens[picks].sum(axis=1))
    ratios = per_token[0] / per_token[1]
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def seconds_per_token(records: Sequence[Timed]) -> float:
    """Pooled seconds of a token."""
    return sum(r.seconds for r in records) / sum(r.tokens for r in records)


def summarize(
    none: Sequence[RequestRecord],
    fast: Sequence[RequestRecord],
    records: Sequence[RequestRecord],
) -> dict[str, Any]:
    """A controller's entry of ``results.json``.

    Args:
        none: No speculation, in the mode that is compared.
        fast: No speculation in ``exact=False``. Its text may differ in near-ties, so the speed-up
            over it is of seconds per token.
        records: The controller's, on the same requests.
    """
    per_request = np.array(request_speedups(none, records))
    steps = [step for record in records for step in record.steps]
    end_to_end = [sum(r.seconds + r.prefill_seconds for r in each) for each in (none, records)]
    return {
        "speedup": speedup(none, records),
        "ci95": list(bootstrap(none, records)),
        "request_speedup": {
            "p5": float(np.percentile(per_request, 5)),
            "median": float(np.median(per_request)),
            "worst": float(per_request.min()),
        },
        "tokens": sum(r.tokens for r in records),
        "seconds": sum(r.seconds for r in records),
        "iterations": len(steps),
        "speedup_vs_fast": seconds_per_token(fast) / seconds_per_token(records),
        "end_to_end_speedup": end_to_end[0] / end_to_end[1],
        "share_k0": {
            "chosen": sum(step["action"] == 0 for step in steps) / len(steps),
            "executed": sum(step["executed_action"] == 0 for step in steps) / len(steps),
        },
        "share_chains": {
            chain: count / len(steps)
            for chain, count in collections.Counter(step["chain"] for step in steps).items()
        },
        "mean_accepted": sum(step["accepted"] for step in steps) / len(steps),
        "controller_seconds": sum(step["controller_seconds"] for step in steps),
    }


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on, with the models on this device."""
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor_name() -> str:
    """The processor's name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def results_table(results: Mapping[str, Any]) -> NumberTable:
    """The head-to-head table for the terminal, within 80 columns."""
    title = f"{results['pool']} on {results['workload']}: speed-up over no speculation"
    numbers = ("total", "95 % CI", "median", "worst", "vs fast", "K=0", "acc.", "ms")
    table = NumberTable(title, ("controller",), numbers)
    entries = results["controllers"]
    for name in sorted(entries, key=lambda each: -entries[each]["speedup"]):
        entry = entries[name]
        request = entry["request_speedup"]
        milliseconds = 1e3 * entry["controller_seconds"] / entry["iterations"]
        table.add_row(
            name,
            f"{entry['speedup']:.3f}",
            f"{entry['ci95'][0]:.2f}-{entry['ci95'][1]:.2f}",
            f"{request['median']:.2f}",
            f"{request['worst']:.2f}",
            f"{entry['speedup_vs_fast']:.3f}",
            f"{entry['share_k0']['executed']:.0%}",
            f"{entry['mean_accepted']:.2f}",
            f"{milliseconds:.2f}",
        )
    return table


def chains_table(results: Mapping[str, Any], chains: Sequence[tuple[str, ...]]) -> NumberTable:
    """Each controller's share of iterations per chain that ran; the target is implied."""
    title = "share of iterations per chain"
    target = chains[0][-1:]
    columns = [target, *chains]
    numbers = [">".join(chain[:-1]) or NO_SPECULATION_NAME for chain in columns]
    table = NumberTable(title, ("controller",), numbers)
    entries = results["controllers"]
    for name in sorted(entries, key=lambda each: -entries[each]["speedup"]):
        shares = entries[name]["share_chains"]
        table.add_row(name, *(f"{shares.get('>'.join(chain), 0.0):.0%}" for chain in columns))
    return table


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that a reader sees the old file or the new one, never a part.

    Raises:
        DiskFullError: If the disk is full.
    """
    temporary = path.with_name(path.name + ".tmp")
    text = json.dumps(value, indent=2) + "\n"
    with writing(path):
        try:
            temporary.write_text(text)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
