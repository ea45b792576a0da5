"""``specgym bench peers``: our engine against transformers, vLLM, llama.cpp and the byte floor.

Same weights, precision, prompts and numbers of tokens; llama.cpp always reads bf16, and so does
the byte floor. Every contestant decodes one prompt after the other in turn, and memory is read
between them. Ours runs eagerly, with ``exact=False`` but where exact mode itself is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specgym.engine.pool import DEFAULT_K_VALUES, ModelPool
from specgym.engine.pools.loading import load_pool, parse_pool
from specgym.engine.pools.sources import LoadedModel, load_source
from specgym.engine.types import Plan
from specgym.envs.workloads import get_workload
from specgym.runs.bench.bandwidth import MemoryReader
from specgym.runs.bench.command import Bench
from specgym.runs.bench.configs import NO_MIXTURE, PeersBench
from specgym.runs.making import DTYPES
from specgym.runs.peers.byte_floor import ByteFloor, weight_bytes
from specgym.runs.peers.contestants import (
    Contestant,
    OurDecoder,
    Prompt,
    TransformersDecoder,
    load_assistant,
    lookup_options,
    run_rounds,
)
from specgym.runs.peers.environments import RECIPES, PeerError
from specgym.runs.peers.ratios import (
    AIMS,
    ASSISTED,
    EXACT,
    LOOKUP,
    OURS,
    PLAIN,
    TRANSFORMERS,
    dense_ratios,
    mixture_ratios,
    name_of,
    rows_of,
)
from specgym.runs.peers.table import show_peers
from specgym.runs.peers.workers import WorkerSettings, start_workers
from specgym.runs.results import describe_machine


def weights_dtype(config: PeersBench) -> torch.dtype:
    """The type of the weights."""
    return DTYPES[config.dtype]


def precision(config: PeersBench) -> str:
    """Its name."""
    return str(weights_dtype(config)).removeprefix("torch.")


def bench_peers(config: PeersBench, console: Console) -> dict[str, Any]:
    """Rows, ratios and facts of ``specgym bench peers``; what a missing peer was for is left out.

    Raises:
        ValueError: If a pool cannot be read, or a prompt does not fit a context.
    """
    if config.mixture != NO_MIXTURE:
        parse_pool(config.mixture)  # refuse it before minutes of timing
    report: dict[str, Any] = {
        "settings": {**dataclasses.asdict(config), "json": None, "precision": precision(config)},
        "machine": describe_machine(torch.device("cpu")),
        "rows": [],
        "ratios": {},
        "aims": {name: f"{sign} {value}" for name, (sign, value) in AIMS.items()},
        "versions": {},
        "absent": {},
    }
    bench_dense(config, report, console)
    if config.mixture != NO_MIXTURE:
        bench_mixture(config, report, console)
    return report


def bench_dense(config: PeersBench, report: dict[str, Any], console: Console) -> None:
    """Fills in the dense pool's rows and ratios."""
    console.print(f"{config.pool}: loading")
    pool = bench_pool(config, config.pool)
    prompts = bench_prompts(config, pool)
    plain = OurDecoder(pool, Plan((pool.target,), 0), config.new_tokens)
    contestants = our_contestants(config, pool, plain, report["absent"])
    reference = load_reference(config, config.pool)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specgym-peers-")))
        if TRANSFORMERS in config.peers:
            contestants += their_contestants(config, pool, reference, report["absent"])
        names = [name for name in config.peers if name in RECIPES]
        source = parse_pool(config.pool)["target"]
        longest = max(map(len, prompts)) + config.new_tokens
        shared = WorkerSettings(source, reference.model, longest, config.new_tokens, scratch)
        contestants += start_workers(names, shared, report, stack, console)
        console.print(f"{config.pool}: {len(prompts)} prompts, {config.repeats} repeats")
        reader, absent = MemoryReader(), report["absent"]
        runs = run_rounds(contestants, prompts, config.repeats, absent, console, reader)
    report["rows"] += rows_of(config.pool, contestants, runs, config.new_tokens)
    floor = ByteFloor(weight_bytes(pool.model(pool.target)), reader.rate)
    iteration = statistics.median(plain.iteration_seconds)
    report["byte_floor"] = {
        "bytes": floor.num_bytes,
        "bytes_per_second": floor.bandwidth,
        "seconds": floor.seconds,
        "iteration_seconds": iteration,
    }
    report["ratios"] |= dense_ratios(runs) | {"over_byte_floor": iteration / floor.seconds}


def bench_mixture(config: PeersBench, report: dict[str, Any], console: Console) -> None:
    """Fills in the mixture's rows and ratios."""
    console.print(f"{config.mixture}: loading")
    pool = bench_pool(config, config.mixture)
    if pool.model(pool.target).experts is None:
        raise ValueError(
            f"mixture: the target of {config.mixture!r} is no mixture of experts; "
            f"name another pool, or {NO_MIXTURE!r}"
        )
    prompts = bench_prompts(config, pool)
    none = Plan((pool.target,), 0)
    contestants = [
        Contestant(name, OURS, precision(config), OurDecoder(pool, none, config.new_tokens, exact))
        for name, exact in ((name_of(OURS, PLAIN), False), (name_of(OURS, EXACT), True))
    ]
    if TRANSFORMERS in config.peers:
        model = load_reference(config, config.mixture).model
        report["settings"]["experts_of_transformers"] = model.config._experts_implementation
        decode = TransformersDecoder(model, config.new_tokens)
        name = name_of(TRANSFORMERS, PLAIN)
        contestants.append(Contestant(name, TRANSFORMERS, precision(config), decode))
    console.print(f"{config.mixture}: {len(prompts)} prompts, {config.mixture_repeats} repeats")
    runs = run_rounds(contestants, prompts, config.mixture_repeats, report["absent"], console)
    report["rows"] += rows_of(config.mixture, contestants, runs, config.new_tokens)
    report["ratios"] |= mixture_ratios(runs)


def bench_pool(config: PeersBench, spec: str) -> ModelPool:
    """A pool that can draft ``k`` tokens."""
    k_values = tuple({*DEFAULT_K_VALUES, config.k})
    return load_pool(spec, k_values=k_values, dtype=weights_dtype(config))


def load_reference(config: PeersBench, spec: str) -> LoadedModel:
    """The target once more, as transformers runs it."""
    return load_source(parse_pool(spec)["target"], dtype=weights_dtype(config), device="cpu")


def bench_prompts(config: PeersBench, pool: ModelPool) -> list[Prompt]:
    """Token ids of the prompts.

    Raises:
        ValueError: If one does not fit the target's context beside the new tokens.
    """
    requests = get_workload("all-4").select(config.prompts, seed=0)
    prompts = [pool.encode(request.prompt) for request in requests]
    room = pool.model(pool.target).context_limit - max(map(len, prompts))
    if config.new_tokens > room:
        raise ValueError(
            f"new_tokens: must be <= {max(room, 0)}, what the longest prompt leaves of the context "
            f"of {config.pool!r}; got {config.new_tokens}"
        )
    return prompts


def our_contestants(
    config: PeersBench, pool: ModelPool, plain: OurDecoder, absent: dict[str, str]
) -> list[Contestant]:
    """Our engine plain, exact, with prompt lookup and with the assistant as drafter."""
    lookup = next(name for name, m in pool.members.items() if m.traits.max_ngram)
    decoders = {
        PLAIN: plain,
        EXACT: OurDecoder(pool, plain.plan, config.new_tokens, exact=True),
        LOOKUP: OurDecoder(pool, Plan((lookup, pool.target), config.k), config.new_tokens),
    }
    if config.assistant in pool.members:
        plan = Plan((config.assistant, pool.target), config.k)
        decoders[ASSISTED] = OurDecoder(pool, plan, config.new_tokens)
    else:
        absent["assistant"] = (
            f"{config.pool} has no member {config.assistant!r}; it has {', '.join(pool.members)}"
        )
    return [
        Contestant(name_of(OURS, mode), OURS, precision(config), decode)
        for mode, decode in decoders.items()
    ]


def their_contestants(
    config: PeersBench, pool: ModelPool, reference: LoadedModel, absent: dict[str, str]
) -> list[Contestant]:
    """transformers' generate plain, with prompt lookup, and with an assistant model."""
    options: dict[str, dict[str, Any]] = {PLAIN: {}, LOOKUP: lookup_options(pool, config.k)}
    if config.assistant in pool.members:
        source = parse_pool(config.pool)[config.assistant]
        try:
            assistant = load_assistant(source, reference, config.k)
            options[ASSISTED] = {"assistant_model": assistant}
        except PeerError as error:
            absent["assistant"] = str(error)
    return [
        Contestant(
            name_of(TRANSFORMERS, mode),
            TRANSFORMERS,
            precision(config),
            TransformersDecoder(reference.model, config.new_tokens, **each),
        )
        for mode, each in options.items()
    ]


BENCH = Bench(PeersBench, bench_peers, show_peers)
