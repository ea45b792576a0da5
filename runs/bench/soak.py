"""``specgym bench soak``: many requests through one engine; memory must stay flat.

A tiny random pool, short requests of changing length, a random plan in every iteration, greedy
and sampled, and now and then one that is dropped in mid-text. What leaks, leaks per request.
"""

from __future__ import annotations

import gc
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specgym.engine.pool import ModelPool
from specgym.engine.testing import tiny_pool
from specgym.engine.types import DecodeRequest, SamplingParams
from specgym.runs.bench.command import Bench
from specgym.runs.bench.configs import SoakBench
from specgym.runs.loop import StepError
from specgym.runs.results import describe_machine
from specgym.runs.text.session import Session

STATM = Path("/proc/self/statm")
WARM_UP_SHARE = 0.1
DROP_EVERY = 10


def bench_soak(config: SoakBench, console: Console) -> dict[str, Any]:
    """Rows of (requests, resident MB, faults) and the growth after the warm-up in percent.

    The warm-up is the first tenth. Growth is of the last row over the first one after it.
    """
    pool = tiny_pool(config.seed, max_position_embeddings=256)
    session = Session(pool, "random", exact=False, seed=config.seed)
    every = max(config.num_requests // config.num_reports, 1)
    rows: list[dict[str, Any]] = []
    faults: list[str] = []
    num_tokens, started = 0, time.perf_counter()
    for index, request in enumerate(requests(config, pool), 1):
        try:
            num_tokens += run(session, request, is_dropped=index % DROP_EVERY == 0)
        except StepError as error:
            faults.append(str(error))
            console.print(f"request {index}: {error}")
        if index % every == 0 or index == config.num_requests:
            gc.collect()
            rows.append({"requests": index, "resident_mb": resident_bytes() / 1e6})
            console.print(f"{index} requests, {rows[-1]['resident_mb']:.1f} MB resident")
    warm = [row for row in rows if row["requests"] >= WARM_UP_SHARE * config.num_requests]
    growth = 100.0 * (rows[-1]["resident_mb"] / warm[0]["resident_mb"] - 1.0)
    return {
        "machine": describe_machine(torch.device("cpu")),
        "rows": rows,
        "faults": faults,
        "num_tokens": num_tokens,
        "seconds": time.perf_counter() - started,
        "ratios": {"memory_growth": growth, "num_faults": len(faults)},
    }


def requests(config: SoakBench, pool: ModelPool) -> Iterator[DecodeRequest]:
    """Requests of random prompts, lengths and temperatures."""
    rng = random.Random(config.seed)
    vocab = range(pool.model(pool.target).vocab_size)
    for index in range(config.num_requests):
        prompt = rng.choices(vocab, k=rng.randint(1, config.max_prompt_tokens))
        sampling = SamplingParams(temperature=rng.choice((0.0, 1.0)), seed=index)
        yield DecodeRequest(tuple(prompt), rng.randint(1, config.max_new_tokens), sampling)


def run(session: Session, request: DecodeRequest, *, is_dropped: bool) -> int:
    """Tokens decoded for a request; one that is dropped ends after its first iteration."""
    num_tokens = 0
    for tokens, _ in session.steps(request):
        num_tokens += len(tokens)
        if is_dropped:
            break
    return num_tokens


def resident_bytes() -> int:
    """Memory of this process that is in RAM; the peak where the system does not tell the rest."""
    if STATM.is_file():
        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def show_soak(report: dict[str, Any]) -> None:
    """Prints what the soak came to."""
    last, ratios = report["rows"][-1], report["ratios"]
    print(
        f"{last['requests']} requests, {report['num_tokens']} tokens in {report['seconds']:.0f} s; "
        f"{last['resident_mb']:.1f} MB resident at the end"
    )
    print(f"memory_growth: {ratios['memory_growth']:.2f} %")
    print(f"num_faults: {ratios['num_faults']}")


BENCH = Bench(SoakBench, bench_soak, show_soak)
