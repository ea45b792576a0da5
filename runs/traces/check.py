"""``specgym record --check``: recorded tables against the live engine under random plans."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from specgym.engine.pool import ModelPool
from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.pool_spec import Layout
from specgym.envs.replay.replay_env import ReplayEnv
from specgym.envs.replay.traces import TraceSet
from specgym.envs.workloads import Request
from specgym.runs.pool.build_watcher import make_bar
from specgym.runs.results import SCHEMA, describe_machine
from specgym.runs.tables import NumberTable
from specgym.runs.traces.random_plans import walk_request

# What must be equal in every iteration.
COUNTS = (
    "tokens",
    "executed_action",
    "reason",
    "proposed_per_level",
    "accepted_per_level",
    "finish_reason",
)


def check_fit(traces: TraceSet, pool: ModelPool) -> None:
    """Refuses traces of another pool.

    Raises:
        ValueError: If members, weights, chains or K values differ.
    """
    layout = Layout.of(pool)
    if layout.as_plain() != traces.layout.as_plain():
        raise ValueError(
            f"traces: they were recorded with chains {chains_of(traces.layout)} and K "
            f"{traces.layout.k_values}, the pool has {chains_of(layout)} and {layout.k_values}; "
            f"load the pool as it was recorded"
        )
    for name, fingerprint in pool.fingerprints.items():
        recorded = traces.about["fingerprints"].get(name)
        if recorded != fingerprint:
            raise ValueError(
                f"traces: member {name!r} had the weights {recorded} when they were recorded, now "
                f"it has {fingerprint}; record them again on this pool"
            )


def chains_of(layout: Layout) -> str:
    """A layout's chains for a message."""
    return ", ".join(">".join(chain) for chain in layout.chains)


@dataclasses.dataclass
class Found:
    """What a check found: per iteration, and per request.

    Attributes:
        different: Iterations whose counts differ from the table's.
        ratios: Per executed plan, (predicted, measured) seconds over the baseline's.
        totals: Per request, predicted and measured seconds over the baseline's, summed.
    """

    different: list[dict[str, Any]]
    ratios: dict[str, list[tuple[float, float]]]
    totals: list[tuple[float, float]]


def check_traces(
    traces: TraceSet, env: SpecDecodeEnv, requests: Sequence[Request], seed: int, console: Console
) -> dict[str, Any]:
    """Drives the live engine with random plans, and returns how far the traces are from it.

    Args:
        traces: What was recorded, with costs.
        env: The live environment.
        requests: Requests that were recorded.
        seed: Draws the plans.
        console: Where progress is shown.

    Raises:
        ValueError: If the traces have no costs.
        StepError: If the engine failed.
    """
    if traces.costs is None:
        raise ValueError("traces: no costs were measured; run specgym record --costs on the file")
    found, recorded = Found([], defaultdict(list), []), ReplayEnv(traces)
    with make_bar("checking", "requests", console) as bar:
        task = bar.add_task("", total=len(requests), note="")
        for index, request in enumerate(requests):
            rng = np.random.default_rng([seed, index, 1])
            check_request(env, recorded, request, rng, found)
            bar.update(task, completed=index + 1)
    machine = describe_machine(env.pool.model(env.pool.target).device)
    return summarize(found) | {"schema": SCHEMA, "machine": machine}


def check_request(
    env: SpecDecodeEnv,
    recorded: ReplayEnv,
    request: Request,
    rng: np.random.Generator,
    found: Found,
) -> None:
    """Walks one request under random plans, and the recorded one beside it step by step."""
    recorded.reset(options={"request": request})
    predicted_total = measured_total = 0.0
    for info in walk_request(env, request, rng)[1]:
        expected = recorded.step(info["asked_action"])[-1]
        difference = {
            key: (expected[key], info[key]) for key in COUNTS if expected[key] != info[key]
        }
        if difference:
            at = info["context_len"] - info["tokens"]
            found.different.append({"request": request.id, "context_len": at} | difference)
            return
        pair = tuple(each["iter_seconds"] / each["baseline_seconds"] for each in (expected, info))
        found.ratios[env.action_names[info["executed_action"]]].append(pair)
        predicted_total += pair[0]
        measured_total += pair[1]
    found.totals.append((predicted_total, measured_total))


def summarize(found: Found) -> dict[str, Any]:
    """The check's figures: counts, error and bias by plan, error by request."""
    plans = {}
    for name, pairs in found.ratios.items():
        errors = np.array([predicted / seen - 1.0 for predicted, seen in pairs])
        sums = np.sum(pairs, axis=0)
        plans[name] = {
            "iterations": len(pairs),
            "median_absolute_error": float(np.median(np.abs(errors))),
            "bias": float(sums[0] / sums[1] - 1.0),
        }
    totals = np.array(found.totals).reshape(-1, 2)
    request_errors = np.abs(totals[:, 0] / totals[:, 1] - 1.0)
    return {
        "iterations": sum(map(len, found.ratios.values())) + len(found.different),
        "different": len(found.different),
        "first_difference": found.different[0] if found.different else None,
        "plans": plans,
        "worst_plan_error": max((p["median_absolute_error"] for p in plans.values()), default=0.0),
        "total_error": float(totals[:, 0].sum() / max(totals[:, 1].sum(), 1e-12) - 1.0),
        "median_request_error": float(np.median(request_errors)) if len(totals) else 0.0,
        "worst_request_error": float(request_errors.max()) if len(totals) else 0.0,
    }


def table_of(figures: Mapping[str, Any]) -> NumberTable:
    """The table by plan."""
    title = "predicted t / t_base against measured"
    numbers = ("iterations", "median |error|", "bias")
    table = NumberTable(title, ("plan",), numbers)
    for name, plan in sorted(figures["plans"].items()):
        values: Sequence[str] = (
            str(plan["iterations"]),
            f"{plan['median_absolute_error']:.1%}",
            f"{plan['bias']:+.1%}",
        )
        table.add_row(name, *values)
    return table


def describe(figures: Mapping[str, Any]) -> str:
    """The line under the table."""
    same = figures["iterations"] - figures["different"]
    return (
        f"counts equal in {same} of {figures['iterations']} iterations; seconds over a request: "
        f"median error {figures['median_request_error']:.1%}, worst "
        f"{figures['worst_request_error']:.1%}, over all {figures['total_error']:+.1%}"
    )
