"""``specgym bench gpu``: captured forwards on a GPU give the eager results, in less time.

Random weights of realistic shape, so that it runs where no others are at hand. ``make gpu-check``.
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

from specgym.engine.decoding import decode_step, start
from specgym.engine.forward.capture import EagerCapture, accelerate
from specgym.engine.forward.graphs import GraphRunner
from specgym.engine.members.model import ModelMember
from specgym.engine.pool import ModelPool
from specgym.engine.testing import decode, random_plans
from specgym.engine.timing import WallClock
from specgym.engine.types import DecodeRequest, Plan
from specgym.runs.bench.command import Bench
from specgym.runs.bench.configs import GpuBench
from specgym.runs.bench.gpu_models import (
    DENSE,
    MIXTURE,
    TINY_DENSE,
    TINY_MIXTURE,
    Shape,
    fit,
    make_pool,
)
from specgym.runs.bench.measuring import alternate
from specgym.runs.results import describe_machine
from specgym.runs.tables import NumberTable

NO_DEVICE = 3  # exit status where there is no CUDA device
HOPPER = (9, 0)  # from here on a grouped product does not wait for the device
WIDTHS = (1, 2, 4, 8)
TOLERANCE = 0.05  # of the largest logit; in bfloat16 the last bit is 0.4 % of a number
BANDWIDTH_BYTES = {"cuda": 1 << 31, "cpu": 1 << 24}


def bench_gpu(config: GpuBench, console: Console) -> dict[str, Any]:
    """Checks (name, passed, detail), and rows of milliseconds by model and window.

    Raises:
        SystemExit: With status 3 where a CUDA device is asked for and there is none.
    """
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        console.print("bench gpu: no CUDA device here, so there is nothing to check on it.")
        raise SystemExit(NO_DEVICE)
    started = time.perf_counter()
    report: dict[str, Any] = {"machine": describe_machine(device), "checks": [], "rows": []}
    report["bandwidth"] = bandwidth(device)
    shapes = (TINY_DENSE, TINY_MIXTURE) if config.tiny else (DENSE, MIXTURE)
    for shape in shapes:
        bench_shape(config, fit(shape, device), report, console)
    report["seconds"] = time.perf_counter() - started
    report["failed"] = [check["name"] for check in report["checks"] if not check["passed"]]
    return report


def bench_shape(config: GpuBench, shape: Shape, report: dict[str, Any], console: Console) -> None:
    """Adds one pool's checks and rows to the report."""
    positions = config.context + config.new_tokens + 128
    pool = make_pool(shape, positions, torch.device(config.device), config.seed)
    capture(pool)
    console.print(f"{pool.name}: graphs against eager forwards")
    checks = [check_logits(config, pool, exact) for exact in (True, False)]
    console.print(f"{pool.name}: every chain against plain decoding, {config.new_tokens} tokens")
    checks += [check_chain(config, pool, chain) for chain in pool.chains]
    checks += [check_waits(config, pool), check_captured(pool)]
    report["checks"] += [{**check, "name": f"{pool.name}: {check['name']}"} for check in checks]
    console.print(f"{pool.name}: timing, {config.repeats} repeats")
    report["rows"] += bench_widths(config, pool, report["bandwidth"])
    report["rows"].append(bench_plain(config, pool))


def capture(pool: ModelPool) -> None:
    """Gives the pool's models captured forwards; a CPU's are run eagerly, but kept like graphs."""
    if pool.model(pool.target).device.type == "cuda":
        accelerate(pool.members.values())
        return
    models = [pool.model(n) for n, m in pool.members.items() if m.traits.can_verify]
    for member in models:
        if member.experts is None:
            member.graphs = GraphRunner(member, EagerCapture())


def check(name: str, passed: bool, detail: str) -> dict[str, Any]:
    """One check of the report."""
    return {"name": name, "passed": passed, "detail": detail}


def prompt_of(config: GpuBench, pool: ModelPool, length: int) -> tuple[int, ...]:
    """A random prompt with a repetition in it, so that lookup finds something."""
    generator = torch.Generator().manual_seed(config.seed)
    vocab = pool.model(pool.target).vocab_size
    half = torch.randint(0, vocab, (-(-length // 2),), generator=generator).tolist()
    return tuple((half * 2)[:length])


def check_logits(config: GpuBench, pool: ModelPool, exact: bool) -> dict[str, Any]:
    """Whether the target's logits are the eager ones, over windows of several widths."""
    member, runner = pool.model(pool.target), pool.model(pool.target).graphs
    prompt = prompt_of(config, pool, config.context)
    slots = -(-(config.context + 64) // 64) * 64
    results = []
    for graphs in (None, runner):
        member.graphs = graphs
        memory = member.new_memory(1, slots, slots if exact else None)
        member.forward(memory, [prompt], need_logits=False)
        logits = []
        for width in WIDTHS * 2:
            window = member.forward(memory, [prompt[:width]], pool.window if exact else None)
            assert window is not None
            logits.append(window[0, :width].float())
        results.append(torch.cat(logits))
    member.graphs = runner
    worst = float((results[0] - results[1]).abs().max() / results[0].abs().max())
    bits = "the same bits" if torch.equal(*results) else f"off by {worst:.1e} of the largest logit"
    mode = "exact" if exact else "fast"
    return check(f"graph equals eager ({mode})", worst <= TOLERANCE, bits)


def check_chain(config: GpuBench, pool: ModelPool, chain: tuple[str, ...]) -> dict[str, Any]:
    """Whether a chain with a random K at each step gives plain decoding's tokens, exact mode."""
    request = DecodeRequest(prompt_of(config, pool, 32), config.new_tokens)
    plain, _ = decode(pool, [request])
    plans = [plan for plan in pool.plans() if plan.chain in (chain, (pool.target,))]
    pick = random_plans(pool, config.seed, plans)
    state, results = decode(pool, [request], pick)
    pairs = zip(plain.output(), state.output(), strict=True)
    wrong = [index for index, (a, b) in enumerate(pairs) if a != b]
    accepted = sum(result.num_accepted for result in results)
    drafted = sum(result.num_drafted for result in results)
    detail = f"{accepted} of {drafted} drafted tokens accepted"
    if wrong:
        detail = f"differs from token {wrong[0]} on"
    return check(f"lossless: {'>'.join(chain)}", not wrong, detail)


def check_waits(config: GpuBench, pool: ModelPool) -> dict[str, Any]:
    """How often an iteration waits for the device, as torch counts it: once per reading level."""
    plan = pool.plan("draft@4")
    state = start(pool, [DecodeRequest(prompt_of(config, pool, 32), 64)], WallClock(config.device))
    for _ in range(3):  # the first ones prefill and capture
        decode_step(pool, state, plan, WallClock(config.device))
    on_cuda = torch.device(config.device).type == "cuda"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if on_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            decode_step(pool, state, plan, WallClock(config.device))
        finally:
            if on_cuda:
                torch.cuda.set_sync_debug_mode("default")
    waits = sum("called a synchronizing" in str(each.message) for each in caught)
    # Drafted tokens, their entropy, the verifier's tokens; a mixture's loads, once per forward.
    allowed = 3 + (0 if pool.model(pool.target).experts is None else plan.k + 1)
    return check("host waits in an iteration", waits <= allowed, f"{waits}, at most {allowed}")


def check_captured(pool: ModelPool) -> dict[str, Any]:
    """Whether the target's forwards were captured; before Hopper a mixture's cannot be."""
    member = pool.model(pool.target)
    reason = "" if member.graphs is None else member.graphs.reason
    on_cuda = member.device.type == "cuda"
    excused = not on_cuda or (
        member.experts is not None and torch.cuda.get_device_capability(member.device) < HOPPER
    )
    passed = excused or (member.graphs is not None and not reason)
    return check("captured", passed, reason or ("yes" if on_cuda else "a dry run: eager"))


def bench_widths(config: GpuBench, pool: ModelPool, bandwidth: float) -> list[dict[str, Any]]:
    """Milliseconds of the target's forward by window, eager and captured, and the byte floor."""
    member, rows = pool.model(pool.target), []
    prompt = prompt_of(config, pool, config.context)
    memory, clock = member.new_memory(1, config.context + 64), WallClock(member.device)
    member.forward(memory, [prompt], need_logits=False)
    runner = member.graphs

    def timed(graphs: GraphRunner | None, width: int) -> float:
        member.graphs = graphs
        started = clock.now()
        logits = member.forward(memory, [prompt[:width]])
        assert logits is not None
        logits.max(dim=-1).indices.tolist()
        seconds = clock.now() - started
        memory.keep([config.context])
        return seconds

    for width in WIDTHS:
        runs: dict[str, Callable[[], float]] = {
            "eager": functools.partial(timed, None, width),
            "graph": functools.partial(timed, runner, width),
        }
        medians = {n: statistics.median(v) for n, v in alternate(runs, config.repeats).items()}
        floor = bytes_read(member) / bandwidth
        rows.append(
            {
                "model": pool.name,
                "what": f"forward of {width}",
                "eager_ms": 1e3 * medians["eager"],
                "graph_ms": 1e3 * medians["graph"],
                "floor_ms": 1e3 * floor,
            }
        )
    member.graphs = runner
    return rows


def bytes_read(member: ModelMember) -> float:
    """Bytes of weights that the last forward had to read: of experts, those it visited."""
    if member.experts is None:
        return member.num_bytes
    size = member.num_bytes / member.num_parameters
    idle_share = 1.0 - member.experts.experts_per_token / member.experts.num_experts
    in_experts = (member.num_parameters - member.num_active_parameters) / idle_share
    visited = statistics.mean(member.unique_experts) / member.experts.num_experts
    return size * (member.num_parameters - in_experts * (1.0 - visited))


def bench_plain(config: GpuBench, pool: ModelPool) -> dict[str, Any]:
    """Milliseconds per token of plain decoding in fast mode, eager and captured."""
    member, runner = pool.model(pool.target), pool.model(pool.target).graphs
    request = DecodeRequest(prompt_of(config, pool, 32), config.new_tokens)
    clock, plan = WallClock(config.device), Plan((pool.target,), 0)

    def run(graphs: GraphRunner | None) -> float:
        member.graphs = graphs
        state = start(pool, [request], clock, exact=False)
        started = clock.now()
        while not state.is_finished:
            decode_step(pool, state, plan, clock)
        return (clock.now() - started) / config.new_tokens

    seconds = alternate({"eager": lambda: run(None), "graph": lambda: run(runner)}, 3)
    member.graphs = runner
    return {
        "model": pool.name,
        "what": "plain decoding, a token",
        "eager_ms": 1e3 * statistics.median(seconds["eager"]),
        "graph_ms": 1e3 * statistics.median(seconds["graph"]),
        "floor_ms": None,
    }


def bandwidth(device: torch.device) -> float:
    """Bytes per second at which the device copies, reads and writes counted."""
    block = torch.zeros(BANDWIDTH_BYTES[device.type], dtype=torch.uint8, device=device)
    clock, seconds, place = WallClock(device), [], torch.empty_like(block)
    for _ in range(7):
        started = clock.now()
        place.copy_(block)
        seconds.append(clock.now() - started)
    return 2 * len(block) / statistics.median(seconds)


def show_gpu(report: dict[str, Any]) -> None:
    """Prints checks and times."""
    console = Console()
    checks = NumberTable(None, ("check", "passed", "detail"))
    for each in report["checks"]:
        checks.add_row(each["name"], "yes" if each["passed"] else "NO", each["detail"])
    times = NumberTable(None, ("model", "what"), ("eager ms", "graph ms", "byte floor ms"))
    for row in report["rows"]:
        numbers = (row["eager_ms"], row["graph_ms"], row["floor_ms"])
        texts = ["-" if number is None else f"{number:.3f}" for number in numbers]
        times.add_row(row["model"], row["what"], *texts)
    console.print(checks)
    console.print(times)
    console.print(
        f"{report['machine']['device']}: {report['bandwidth'] / 1e9:.0f} GB/s by copying; "
        f"{report['seconds']:.0f} s in all"
    )


BENCH = Bench(GpuBench, bench_gpu, show_gpu)
