"""``specgym bench moe``: what verifying costs a mixture, and which static K pays where.

The table behind Figures 4 and 5 of Cascade (arXiv 2506.20675), on this machine's clock.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from specgym.engine.decoding import decode_step, start
from specgym.engine.members.model import ModelMember
from specgym.engine.pool import ModelPool
from specgym.engine.pools.loading import load_pool, parse_pool
from specgym.engine.timing import WallClock
from specgym.engine.types import DecodeRequest, Plan
from specgym.envs.workloads import Request, get_workload
from specgym.runs.bench.bandwidth import MemoryReader
from specgym.runs.bench.command import Bench
from specgym.runs.bench.configs import MoeBench
from specgym.runs.bench.experts import OURS, THEIRS, bench_experts
from specgym.runs.bench.measuring import alternate, row
from specgym.runs.bench.moe_plot import plot_moe, show_moe
from specgym.runs.making import DTYPES
from specgym.runs.peers.byte_floor import ByteFloor, weight_bytes
from specgym.runs.results import bootstrap, describe_machine, speedup

NUM_VERIFIED = tuple(range(1, 9))
FLOOR_ITERATIONS = 8  # of a timed run of plain decoding
STATIC_K = tuple(range(1, 8))
DEFAULT_DRAFTERS = ("ngram", "eagle")
CONTEXT = 96  # tokens in front of the timed windows


def bench_moe(config: MoeBench, console: Console) -> dict[str, Any]:
    """Rows and ratios of ``specgym bench moe``.

    Raises:
        ValueError: If the pool's target is no mixture of experts.
    """
    console.print("experts alone: ours against transformers' own")
    source, dtype = parse_pool(config.mixture)["target"], DTYPES[config.dtype]
    experts = bench_experts(source, dtype, config.device, NUM_VERIFIED, config.repeats)
    console.print("loading both pools")
    pools = {"dense": static_pool(config, config.dense), "moe": static_pool(config, config.mixture)}
    console.print(f"forwards of {NUM_VERIFIED[0]} to {NUM_VERIFIED[-1]} tokens")
    forwards = bench_forwards(config, pools)
    console.print("plain iterations of the mixture beside its byte floor")
    iterations, over_floor = bench_floor(config, pools["moe"])
    utilities = bench_utility(config, pools, console)
    return {
        "rows": [*forwards, *experts, *iterations, *utilities],
        "ratios": {
            **over_floor,
            "moe_4_over_1": median_of(forwards, "moe", 4) / median_of(forwards, "moe", 1),
            "dense_4_over_1": median_of(forwards, "dense", 4) / median_of(forwards, "dense", 1),
            "dispatch_over_transformers": statistics.geometric_mean(
                median_of(experts, THEIRS, n) / median_of(experts, OURS, n) for n in NUM_VERIFIED
            ),
        },
        "pools": {name: pool.name for name, pool in pools.items()},
        "machine": describe_machine(pools["moe"].model(pools["moe"].target).device),
    }


def static_pool(config: MoeBench, spec: str) -> ModelPool:
    """A pool that can draft up to the largest static K."""
    chains = [tuple(chain.split(">")) for chain in config.chains] or None
    dtype = DTYPES[config.dtype]
    return load_pool(
        spec,
        k_values=STATIC_K,
        chains=chains,
        device=config.device,
        dtype=dtype,
        graphs=config.graphs,
        compiled=config.compile,
    )


def median_of(rows: Sequence[dict[str, Any]], target: str, num_tokens: int) -> float:
    """The median of the row of this target and number of tokens."""
    found = [r for r in rows if r["target"] == target and r["tokens"] == num_tokens]
    assert len(found) == 1
    return float(found[0]["median"])


def sample_text(pool: ModelPool, num_tokens: int) -> list[int]:
    """Token ids of ordinary text: the first built-in prompts one after the other."""
    text: list[int] = []
    for request in get_workload("all").requests:
        text += pool.tokenizer.encode(request.prompt + "\n\n", add_special_tokens=False)
        if len(text) >= num_tokens:
            break
    assert len(text) >= num_tokens
    return text[:num_tokens]


def bench_forwards(config: MoeBench, pools: dict[str, ModelPool]) -> list[dict[str, Any]]:
    """Rows of milliseconds and unique experts per target and number of tokens verified."""
    text = sample_text(pools["moe"], CONTEXT + NUM_VERIFIED[-1])
    experts: dict[tuple[str, int], list[float]] = {}
    runs = {}
    for name, pool in pools.items():
        member = pool.model(pool.target)
        for num_tokens in NUM_VERIFIED:
            loads = experts.setdefault((name, num_tokens), [])
            runs[name, num_tokens] = timed_forward(config, pool, member, text, num_tokens, loads)
    seconds = alternate(runs, config.repeats)
    rows = []
    for (name, num_tokens), values in seconds.items():
        shape = pools[name].model(pools[name].target).experts
        entry = row(f"{name}, {num_tokens} tokens", [1e3 * each for each in values], "ms")
        entry |= {"target": name, "tokens": num_tokens}
        if shape is not None:
            entry["unique_experts"] = statistics.mean(experts[name, num_tokens])
            entry["expected_unique"] = shape.expected_unique(num_tokens)
        rows.append(entry)
    return rows


def timed_forward(
    config: MoeBench,
    pool: ModelPool,
    member: ModelMember,
    text: list[int],
    num_tokens: int,
    loads: list[float],
) -> Callable[[], float]:
    """A forward of so many tokens of a text, at another place each time; it returns seconds."""
    clock = WallClock(member.device)
    length = CONTEXT + pool.window
    memory = member.new_memory(1, length, length if config.exact else None)
    member.forward(memory, [text[:CONTEXT]], need_logits=False)
    width = pool.window if config.exact else None

    def run() -> float:
        first = memory.num_valid(0)
        fed = [text[first : first + num_tokens]]
        started = clock.now()
        member.forward(memory, fed, width)
        seconds = clock.now() - started
        if member.unique_experts:
            loads.append(statistics.mean(member.unique_experts))
        memory.keep([max(first - 3, CONTEXT // 2)])
        return seconds

    return run


def bench_floor(config: MoeBench, pool: ModelPool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Plain iterations of the mixture, alternated with reads of memory, over its byte floor.

    The floor is a CPU's: elsewhere there is none.
    """
    target = pool.model(pool.target)
    if target.device.type != "cpu":
        return [], {}
    reader = MemoryReader()
    runs: dict[str, Callable[[], float]] = {
        "iteration": plain_iterations(config, pool),
        "memory": reader,
    }
    seconds = alternate(runs, config.repeats)["iteration"]
    floor = ByteFloor(weight_bytes(target), reader.rate)
    rows = [
        row("moe, plain iteration", [1e3 * each for each in seconds], "ms"),
        row("memory, read", [rate / 1e9 for rate in reader.rates], "GB/s"),
    ]
    return rows, {"moe_over_byte_floor": statistics.median(seconds) / floor.seconds}


def plain_iterations(config: MoeBench, pool: ModelPool) -> Callable[[], float]:
    """A run of a few plain iterations after the same text each time; it returns their median."""
    clock, none = WallClock(pool.model(pool.target).device), Plan((pool.target,), 0)
    text = tuple(sample_text(pool, CONTEXT))
    request = DecodeRequest(text, FLOOR_ITERATIONS, eos_ids=frozenset())

    def run() -> float:
        state, seconds = start(pool, [request], clock, exact=config.exact), []
        while not state.is_finished:
            seconds.append(decode_step(pool, state, none, clock).seconds)
        return statistics.median(seconds)

    return run


def bench_utility(
    config: MoeBench, pools: dict[str, ModelPool], console: Console
) -> list[dict[str, Any]]:
    """Rows of the utility of every static K, per target, workload and drafter.

    Utility is tokens per second over those of K = 0 on the same requests, alternated.
    """
    rows = []
    for target, pool in pools.items():
        plans = static_plans(pool, config.drafters)
        for workload in config.workloads:
            console.print(f"static K on {target}: {workload}")
            decoded: dict[Plan, list[StaticRequest]] = {plan: [] for plan in plans}
            requests = get_workload(workload).select(config.requests, seed=0)
            for plan in plans[:: STATIC_K[-1]]:
                decode_static(pool, plan, requests[0], config)  # warms up
            for index, request in enumerate(requests):
                shift = index * len(plans) // len(requests)
                for plan in plans[shift:] + plans[:shift]:
                    decoded[plan].append(decode_static(pool, plan, request, config))
            rows += utility_rows(target, workload, decoded)
    return rows


def static_plans(pool: ModelPool, drafters: Sequence[str]) -> list[Plan]:
    """No speculation, then every K of each drafter straight in front of the target.

    Raises:
        ValueError: If a drafter that was asked for has no such chain.
    """
    plain, *speculative = (plan for plan in pool.plans() if plan.num_verifiers < 2)
    there = list(dict.fromkeys(plan.chain[0] for plan in speculative))
    unknown = [name for name in drafters if name not in there]
    if unknown:
        raise ValueError(
            f"drafters: {pool.name} has no chain {unknown[0]}>{pool.target}; "
            f"its drafters are {', '.join(there)}"
        )
    wanted = drafters or [name for name in DEFAULT_DRAFTERS if name in there]
    return [plain, *(plan for plan in speculative if plan.chain[0] in wanted)]


@dataclasses.dataclass(frozen=True)
class StaticRequest:
    """What decoding a request under one static plan took.

    Attributes:
        tokens: Tokens decoded.
        seconds: Of all iterations.
        iterations: Their number.
        unique_experts: Mean over iterations of the experts a layer of the target ran; 0 when dense.
    """

    tokens: int
    seconds: float
    iterations: int
    unique_experts: float


def decode_static(pool: ModelPool, plan: Plan, request: Request, config: MoeBench) -> StaticRequest:
    """Decodes a request under one plan."""
    clock = WallClock(pool.model(pool.target).device)
    decode_request = DecodeRequest(pool.encode(request.prompt), config.new_tokens)
    state = start(pool, [decode_request], clock, exact=config.exact)
    steps = []
    while not state.is_finished:
        steps.append(decode_step(pool, state, plan, clock))
    return StaticRequest(
        tokens=sum(step.num_tokens for step in steps),
        seconds=sum(step.seconds for step in steps),
        iterations=len(steps),
        unique_experts=statistics.mean(
            statistics.mean(step.forwards[-1].unique_experts or (0,)) for step in steps
        ),
    )


def utility_rows(
    target: str, workload: str, decoded: dict[Plan, list[StaticRequest]]
) -> list[dict[str, Any]]:
    """One row per drafter and K, with a 95 % interval over requests; K = 0 is each one's first."""
    plain_plan, *speculative = decoded
    plain = decoded[plain_plan]
    rows = []
    for drafter in dict.fromkeys(plan.chain[0] for plan in speculative):
        for plan in (plain_plan, *(each for each in speculative if each.chain[0] == drafter)):
            mine = decoded[plan]
            low, high = bootstrap(plain, mine)
            num_iterations = sum(each.iterations for each in mine)
            rows.append(
                {
                    "name": f"{target}, {workload}: {drafter}@{plan.k}",
                    "unit": "x",
                    "target": target,
                    "workload": workload,
                    "drafter": drafter,
                    "k": plan.k,
                    "utility": speedup(plain, mine),
                    "low": low,
                    "high": high,
                    "tokens_per_iteration": sum(each.tokens for each in mine) / num_iterations,
                    "unique_experts": statistics.mean(each.unique_experts for each in mine),
                }
            )
    return rows


BENCH = Bench(MoeBench, bench_moe, show_moe, plot_moe)
