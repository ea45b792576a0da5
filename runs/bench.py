"""``specgym bench decode``, and what all benches share: timings side by side in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from rich.console import Console

from specgym.engine.decoding import DecodeRequest, decode_step, start
from specgym.engine.loading import parse_pool
from specgym.engine.members import ModelMember
from specgym.engine.pool import ModelPool
from specgym.engine.sources import load_source
from specgym.engine.timing import Baseline, WallClock
from specgym.engine.types import Plan
from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.workloads import Request, Workload, get_workload
from specgym.runs.bench_configs import DecodeBench
from specgym.runs.controllers import FACTORIES, make_controller
from specgym.runs.loop import run_request
from specgym.runs.making import make_pool
from specgym.runs.results import describe_machine, write_json
from specgym.runs.tables import NumberTable

Key = TypeVar("Key", bound=Hashable)
QUANTILES = ("median", "fastest", "slowest")


def run_decode(config: DecodeBench, console: Console) -> None:
    """Runs ``bench decode``; a stopped one leaves what it has measured."""
    report: dict[str, Any] = {"rows": [], "ratios": {}}
    try:
        bench_decode(config, console, report)
    finally:
        show(report)
        if config.json is not None:
            write_json(config.json, report)


def show(report: dict[str, Any]) -> None:
    """Prints rows and ratios."""
    table = NumberTable(None, ("what",), QUANTILES)
    for row in report["rows"]:
        table.add_row(row["name"], *(f"{row[key]:.4g} {row['unit']}" for key in QUANTILES))
    console = Console()
    console.print(table)
    for name, ratio in report["ratios"].items():
        console.print(f"{name}: {ratio:.4f}")


def row(name: str, values: Sequence[float], unit: str) -> dict[str, Any]:
    """One row of a report."""
    return {
        "name": name,
        "unit": unit,
        "median": statistics.median(values),
        "fastest": min(values),
        "slowest": max(values),
        "values": list(values),
    }


def alternate(runs: dict[Key, Callable[[], float]], repeats: int) -> dict[Key, list[float]]:
    """Seconds of several runs, alternated in rotated order so that drift hits all alike.

    Every run goes once before, unmeasured.
    """
    seconds: dict[Key, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    names = list(runs)
    for index in range(repeats):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(runs[name]())
    return seconds


def bench_decode(config: DecodeBench, console: Console, report: dict[str, Any]) -> None:
    """Fills the rows and ratios of ``specgym bench decode``, section by section."""
    pool = make_pool(config)
    rows, ratios = report["rows"], report["ratios"]
    report["machine"] = describe_machine(pool.model(pool.target).device)
    request = get_workload("chat").requests[1]
    console.print(f"plain decoding, {config.new_tokens} tokens, {config.repeats} repeats")
    plain = bench_plain(config, pool, request)
    rows += [row(name, [config.new_tokens / s for s in v], "tok/s") for name, v in plain.items()]
    ratios["plain_over_transformers"] = ratio_of_medians(plain, "transformers", "fast")
    ratios["exact_over_fast"] = ratio_of_medians(plain, "exact", "fast")
    console.print(f"K = 0 through the environment, {config.pairs} pairs")
    bare = bench_bare(config, pool, request)
    rows += [row(name, [1e3 * s for s in values], "ms/tok") for name, values in bare.items()]
    pairs = zip(bare["environment, K = 0"], bare["bare loop"], strict=True)
    ratios["k0_over_bare"] = statistics.median(ours / theirs for ours, theirs in pairs)
    console.print("bookkeeping of every hand-coded controller")
    shares = bench_bookkeeping(config, pool)
    rows += [row(f"bookkeeping: {name}", [100 * share], "%") for name, share in shares.items()]
    ratios["bookkeeping_share"] = max(shares.values())


def ratio_of_medians(seconds: dict[str, list[float]], over: str, under: str) -> float:
    """Median seconds of one over another's."""
    return statistics.median(seconds[over]) / statistics.median(seconds[under])


def bench_plain(config: DecodeBench, pool: ModelPool, request: Request) -> dict[str, list[float]]:
    """Seconds of plain decoding: transformers' generate, ours fast, ours exact."""
    target = pool.model(pool.target)
    source = parse_pool(config.pool)["target"]
    reference = load_source(source, dtype=target.dtype, device=config.device).model
    prompt = pool.encode(request.prompt)
    tokens = torch.tensor([prompt], device=target.device)
    clock = WallClock(target.device)

    def transformers() -> float:
        started = clock.now()
        with torch.inference_mode():
            reference.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=config.new_tokens,
                min_new_tokens=config.new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return clock.now() - started

    def ours(exact: bool) -> float:
        started = clock.now()
        decode_request = DecodeRequest(prompt, config.new_tokens, eos_ids=frozenset())
        state = start(pool, [decode_request], clock, exact=exact)
        while not state.is_finished:
            decode_step(pool, state, Plan((pool.target,), 0), clock)
        return clock.now() - started

    runs = {"transformers": transformers, "fast": lambda: ours(False), "exact": lambda: ours(True)}
    return alternate(runs, config.repeats)


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
