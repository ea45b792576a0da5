"""``specgym bench drafters``: how often a drafter's first token is the target's, and its cost."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import track

from specgym.engine.decoding import decode_step, start
from specgym.engine.drafting import draft
from specgym.engine.member_runs import Meter
from specgym.engine.pool import ModelPool
from specgym.engine.state import DecodeState
from specgym.engine.timing import WallClock
from specgym.engine.types import DecodeRequest, Plan
from specgym.envs.prompt_room import describe_skipped, keep_fitting
from specgym.envs.workloads import Request, get_workload, load_prompts
from specgym.runs.bench.bandwidth import MemoryReader
from specgym.runs.bench.command import Bench
from specgym.runs.bench.configs import DrafterBench
from specgym.runs.bench.measuring import row
from specgym.runs.making import make_pool
from specgym.runs.peers.byte_floor import ByteFloor, weight_bytes
from specgym.runs.results import describe_machine
from specgym.runs.tables import NumberTable


@dataclasses.dataclass
class Tally:
    """What one drafter did along the texts of one category."""

    positions: int = 0
    proposed: int = 0
    agreed: int = 0


def bench_drafters(config: DrafterBench, console: Console) -> dict[str, Any]:
    """Rows of agreement per drafter and category, and ratios of seconds to the target's.

    At every position of the target's greedy text each drafter drafts one token after the same
    committed tokens; it agrees where that is the target's next one. Where prompt lookup proposes
    nothing it does not agree. Memory is read in front of every request, for the byte floors.
    """
    pool = make_pool(config)
    known = known_requests(config)
    fitting = keep_fitting(known, pool, skip_too_long=config.skip_too_long)
    num_skipped = len(known) - len(fitting)
    if num_skipped:
        console.print(describe_skipped(num_skipped))
    requests = chosen_requests(config, fitting)
    drafters = list(dict.fromkeys(name for chain in pool.chains for name in chain[:-1]))
    tallies = {(name, r.category): Tally() for r in requests for name in drafters}
    seconds: dict[str, list[float]] = {name: [] for name in pool.members}
    reader = MemoryReader()
    for request in track(requests, "drafting along the target's texts", console=console):
        reader()
        follow(pool, request, config, tallies, seconds)
    categories = list(dict.fromkeys(r.category for r in requests))
    rows = agreement_rows(tallies)
    return {
        "rows": rows,
        "ratios": {
            **{f"{name}_agreement": statistics.mean(agreements(rows, name)) for name in drafters},
            **forward_ratios(pool, seconds, reader.rate),
        },
        "forwards": forward_rows(seconds, reader),
        "categories": categories,
        "skipped_prompts": num_skipped,
        "pool": pool.name,
        "machine": describe_machine(pool.model(pool.target).device),
    }


def agreement_rows(tallies: Mapping[tuple[str, str], Tally]) -> list[dict[str, Any]]:
    """One row per drafter and category: shares of the positions."""
    return [
        {
            "name": f"{name}, {category}",
            "drafter": name,
            "category": category,
            "agreement": tally.agreed / tally.positions,
            "proposed": tally.proposed / tally.positions,
            "positions": tally.positions,
        }
        for (name, category), tally in tallies.items()
    ]


def forward_ratios(
    pool: ModelPool, seconds: Mapping[str, Sequence[float]], bandwidth: float
) -> dict[str, float]:
    """Every drafter's median seconds of a forward, over the target's and over its byte floor.

    The floor is a CPU's: elsewhere it is left out.
    """
    medians = {name: statistics.median(values) for name, values in seconds.items() if values}
    plain = medians.pop(pool.target)
    ratios = {f"{name}_over_target_seconds": median / plain for name, median in medians.items()}
    if pool.model(pool.target).device.type == "cpu":
        for name, median in medians.items():
            floor = ByteFloor(weight_bytes(pool.neural(name)), bandwidth)
            ratios[f"{name}_over_byte_floor"] = median / floor.seconds
    return ratios


def forward_rows(
    seconds: Mapping[str, Sequence[float]], reader: MemoryReader
) -> list[dict[str, Any]]:
    """Milliseconds of each member's forward of one token, and what memory gave beside them."""
    rows = [
        row(name, [1e3 * each for each in values], "ms")
        for name, values in seconds.items()
        if values
    ]
    return [*rows, row("memory, read", [rate / 1e9 for rate in reader.rates], "GB/s")]


def known_requests(config: DrafterBench) -> list[Request]:
    """All prompts there are.

    Raises:
        ValueError: If a file cannot be read.
    """
    if config.prompts:
        return [request for path in config.prompts for request in load_prompts(path)]
    return list(get_workload("all", split="held-out").requests)


def chosen_requests(config: DrafterBench, known: Sequence[Request]) -> list[Request]:
    """The first prompts of each category.

    Raises:
        ValueError: If there is none of a category that was asked for.
    """
    there = list(dict.fromkeys(request.category for request in known))
    missing = [category for category in config.categories if category not in there]
    if missing:
        raise ValueError(
            f"categories: there is no prompt of {missing[0]!r}; there are {', '.join(there)}"
        )
    return [
        request
        for category in config.categories or there
        for request in [r for r in known if r.category == category][: config.limit]
    ]


def follow(
    pool: ModelPool,
    request: Request,
    config: DrafterBench,
    tallies: dict[tuple[str, str], Tally],
    seconds: dict[str, list[float]],
) -> None:
    """Decodes a request plainly; in front of every token each drafter drafts one."""
    clock = WallClock(pool.model(pool.target).device)
    asked = DecodeRequest(pool.encode(request.prompt), config.new_tokens)
    state = start(pool, [asked], clock, exact=config.exact)
    plain = Plan((pool.target,), 0)
    while not state.is_finished:
        drafted = {
            name: first_token(pool, state, name, clock, seconds[name])
            for name, category in tallies
            if category == request.category
        }
        step = decode_step(pool, state, plain, clock)
        seconds[pool.target].append(step.forwards[-1].seconds)
        for name, token in drafted.items():
            tally = tallies[name, request.category]
            tally.positions += 1
            tally.proposed += token is not None
            tally.agreed += token == step.tokens[0][0]


def first_token(
    pool: ModelPool, state: DecodeState, name: str, clock: WallClock, seconds: list[float]
) -> int | None:
    """The token a drafter proposes next, if any; a forward without catch-up is timed.

    A text that has outgrown the drafter's context gets none.
    """
    if len(state.tokens[0]) + 1 > pool.members[name].context_limit:
        return None
    meter = Meter(clock)
    proposals, _ = draft(state, Plan((name, pool.target), 1), meter)
    seconds += [cost.seconds for cost in meter.costs if not cost.num_catchup]
    tokens = proposals[0].tokens
    return tokens[0] if tokens else None


def show_drafters(report: dict[str, Any]) -> None:
    """Prints the table and the ratios of a report."""
    title = "agreement of the first drafted token along the target's greedy text"
    table = NumberTable(title, ("drafter",), (*report["categories"], "mean"))
    for name in dict.fromkeys(each["drafter"] for each in report["rows"]):
        cells = agreements(report["rows"], name)
        table.add_row(name, *(f"{each:.3f}" for each in (*cells, statistics.mean(cells))))
    console = Console()
    console.print(table)
    for name, ratio in report["ratios"].items():
        console.print(f"{name}: {ratio:.4f}")


def agreements(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A drafter's agreement in every category."""
    return [float(each["agreement"]) for each in rows if each["drafter"] == name]


BENCH = Bench(DrafterBench, bench_drafters, show_drafters)
