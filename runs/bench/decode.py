"""``specgym bench decode``: plain decoding against its peers, and what the environment adds."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from specgym.engine.decoding import start
from specgym.engine.members.model import ModelMember
from specgym.engine.pool import ModelPool
from specgym.engine.pools.loading import parse_pool
from specgym.engine.pools.sources import load_source
from specgym.engine.timing import Baseline, WallClock
from specgym.engine.types import DecodeRequest, Plan
from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.workloads import Request, Workload, get_workload
from specgym.runs.bench.bandwidth import MemoryReader
from specgym.runs.bench.command import Bench
from specgym.runs.bench.configs import DecodeBench
from specgym.runs.bench.measuring import alternate, ratio_of_medians, row, show_rows
from specgym.runs.controllers import FACTORIES, make_controller
from specgym.runs.loop import run_request
from specgym.runs.making import make_pool
from specgym.runs.peers.byte_floor import ByteFloor, weight_bytes
from specgym.runs.peers.contestants import Decode, OurDecoder, Prompt, TransformersDecoder
from specgym.runs.results import describe_machine


def bench_decode(config: DecodeBench, console: Console) -> dict[str, Any]:
    """Rows and ratios of ``specgym bench decode``; stopped, those of the sections it has done."""
    pool = make_pool(config)
    request = get_workload("chat").requests[1]
    report: dict[str, Any] = {
        "rows": [],
        "ratios": {},
        "machine": describe_machine(pool.model(pool.target).device),
    }
    try:
        for measure in (measure_plain, measure_environment, measure_bookkeeping):
            rows, ratios = measure(config, pool, request, console)
            report["rows"] += rows
            report["ratios"] |= ratios
    except KeyboardInterrupt:
        report["stopped"] = True
    return report


def measure_plain(
    config: DecodeBench, pool: ModelPool, request: Request, console: Console
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Plain decoding by transformers' generate and by ours, fast and exact, and the byte floor."""
    console.print(f"plain decoding, {config.new_tokens} tokens, {config.repeats} repeats")
    target, prompt = pool.model(pool.target), pool.encode(request.prompt)
    source = parse_pool(config.pool)["target"]
    reference = load_source(source, dtype=target.dtype, device=config.device).model
    none, num_tokens = Plan((pool.target,), 0), config.new_tokens
    ours = {name: OurDecoder(pool, none, num_tokens, name == "exact") for name in ("fast", "exact")}
    theirs = TransformersDecoder(reference, num_tokens)
    decoders: dict[str, Decode] = {"transformers": theirs, **ours}
    runs = {name: functools.partial(seconds_of, each, prompt) for name, each in decoders.items()}
    reader = MemoryReader()
    seconds = alternate({**runs, "memory": reader}, config.repeats)
    rows = [row(name, [num_tokens / each for each in seconds[name]], "tok/s") for name in runs]
    ratios = {
        "plain_over_transformers": ratio_of_medians(seconds, "transformers", "fast"),
        "exact_over_fast": ratio_of_medians(seconds, "exact", "fast"),
    }
    if target.device.type == "cpu":  # another device has a memory of its own
        iterations = ours["fast"].iteration_seconds
        floor = ByteFloor(weight_bytes(target), reader.rate)
        ratios["over_byte_floor"] = statistics.median(iterations) / floor.seconds
        rows.append(row("plain iteration, fast", milliseconds(iterations), "ms"))
        rows += [row("memory, read", [rate / 1e9 for rate in reader.rates], "GB/s")]
    return rows, ratios


def seconds_of(decode: Decode, prompt: Prompt) -> float:
    """Seconds of a whole request."""
    return decode(prompt)[1]


def milliseconds(seconds: Sequence[float]) -> list[float]:
    """Seconds as milliseconds."""
    return [1e3 * each for each in seconds]


def measure_environment(
    config: DecodeBench, pool: ModelPool, request: Request, console: Console
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A bare loop over the model and the environment at K = 0, in pairs."""
    console.print(f"K = 0 through the environment, {config.pairs} pairs")
    bare = bench_bare(config, pool, request)
    pairs = zip(bare["environment, K = 0"], bare["bare loop"], strict=True)
    rows = [row(name, milliseconds(values), "ms/tok") for name, values in bare.items()]
    return rows, {"k0_over_bare": statistics.median(ours / theirs for ours, theirs in pairs)}


def measure_bookkeeping(
    config: DecodeBench, pool: ModelPool, request: Request, console: Console
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Every hand-coded controller's and the environment's share of an iteration."""
    console.print("bookkeeping of every hand-coded controller")
    shares = bench_bookkeeping(config, pool)
    rows = [row(f"bookkeeping: {name}", [100 * share], "%") for name, share in shares.items()]
    return rows, {"bookkeeping_share": max(shares.values())}


def bench_bare(config: DecodeBench, pool: ModelPool, request: Request) -> dict[str, list[float]]:
    """Seconds per token without prefill: a bare loop over the member, and the environment."""
    target = pool.model(pool.target)
    prompt = pool.encode(request.prompt)
    clock = WallClock(target.device)
    env = SpecDecodeEnv(
        pool,
        Workload("one", ((request,),)),
        max_new_tokens=config.pair_tokens,
        exact=config.exact,
        baseline=Baseline(every=10**9),
    )
    none = make_controller("none", env.plans, [], 0)
    num_tokens = run_request(env, none, request).tokens  # fewer than asked where the text ends

    def bare() -> float:
        decode_request = DecodeRequest(prompt, config.pair_tokens)
        state = start(pool, [decode_request], clock, exact=config.exact)
        window = pool.window if config.exact else None
        started = clock.now()
        bare_loop(target, state.memories[target.name], prompt[-1], num_tokens, window)
        return (clock.now() - started) / num_tokens

    def environment() -> float:
        return run_request(env, none, request).seconds / num_tokens

    return alternate({"bare loop": bare, "environment, K = 0": environment}, config.pairs)


def bare_loop(
    member: ModelMember, memory: Any, token: int, num_tokens: int, window: int | None
) -> None:
    """The least that decodes: forward, argmax, next."""
    for _ in range(num_tokens):
        logits = member.forward(memory, [[token]], window)
        assert logits is not None
        token = int(logits[0, 0].numpy().argmax())  # ten times as fast as torch's


def bench_bookkeeping(config: DecodeBench, pool: ModelPool) -> dict[str, float]:
    """Per hand-coded controller, its own and the environment's share of an iteration.

    That is all seconds that are not the engine's iteration, over the iterations' seconds.
    """
    shares = {}
    requests = get_workload("all-4").select(4, seed=0)
    given = Workload("given", (requests,))
    for name in FACTORIES:
        env = SpecDecodeEnv(pool, given, max_new_tokens=96, exact=config.exact)
        features = [feature.name for feature in env.features]
        controller = make_controller(name, env.plans, features, 0)
        records = [run_request(env, controller, request) for request in requests]
        engine = sum(record.total("iter_seconds") for record in records)
        shares[name] = sum(record.seconds for record in records) / engine - 1.0
    return shares


BENCH = Bench(DecodeBench, bench_decode, show_rows)
