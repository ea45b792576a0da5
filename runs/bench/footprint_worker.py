"""A process that loads a pool and decodes plainly, for ``specgym bench footprint``.

One JSON object per line. First, once the pool is loaded: seconds of imports and of loading, and
resident bytes after each. Then for every request ``{"tokens": N, "seconds": S}`` on standard input
it decodes one text, until it has N tokens or S seconds have gone, and answers with tokens, seconds
without prefill, and resident bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specgym.runs.peers.worker import own_output, say

if TYPE_CHECKING:
    from specgym.engine.pool import ModelPool


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves requests until standard input ends; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pool")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--exact", action="store_true", help="decode in fixed shapes")
    settings = parser.parse_args(arguments)
    answers = own_output()
    started = time.perf_counter()
    from specgym.engine.pools.loading import load_pool  # here, so that imports are timed
    from specgym.runs.bench.soak import resident_bytes
    from specgym.runs.making import DTYPES

    imported, import_bytes = time.perf_counter(), resident_bytes()
    pool = load_pool(settings.pool, dtype=DTYPES[settings.dtype])
    greeting = {
        "import_seconds": imported - started,
        "load_seconds": time.perf_counter() - imported,
        "import_bytes": import_bytes,
        "load_bytes": resident_bytes(),
        "num_parameters": sum(member.num_parameters for member in pool.members.values()),
    }
    say(answers, greeting)
    for line in iter(sys.stdin.readline, ""):
        answer = decode(pool, settings.exact, **json.loads(line))
        say(answers, {**answer, "bytes": resident_bytes()})
    return 0


def decode(pool: ModelPool, exact: bool, tokens: int, seconds: float) -> dict[str, float]:
    """Tokens that were decoded, and the seconds from the end of the prefill on."""
    from specgym.engine.decoding import decode_step, start
    from specgym.engine.timing import WallClock
    from specgym.engine.types import DecodeRequest, Plan
    from specgym.envs.workloads import get_workload

    clock, none = WallClock(pool.model(pool.target).device), Plan((pool.target,), 0)
    prompt = pool.encode(get_workload("chat").requests[1].prompt)
    state = start(pool, [DecodeRequest(prompt, tokens, eos_ids=frozenset())], clock, exact=exact)
    started, count = clock.now(), 0
    while not state.is_finished and clock.now() - started < seconds:
        count += decode_step(pool, state, none, clock).num_tokens
    return {"tokens": count, "seconds": clock.now() - started}


if __name__ == "__main__":
    sys.exit(main())
