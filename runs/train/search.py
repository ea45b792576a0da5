"""``specgym search``: settings of an agent that learns from traces, judged on training requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from specgym.envs.replay.traces import load_traces
from specgym.runs.configs import SearchConfig
from specgym.runs.pool.build_watcher import make_bar
from specgym.runs.replay import interval, paired, resamples
from specgym.runs.results import write_json
from specgym.runs.tables import NumberTable
from specgym.runs.train.candidates import CANDIDATES, changed
from specgym.runs.train.configs import ReplayConfig
from specgym.runs.train.cross_validation import cross_validate, make_folds
from specgym.runs.train.offline import find_agent

RECIPE = "as it is"


def search(config: SearchConfig, console: Console) -> dict[str, Any]:
    """Judges every candidate, prints the table and returns the figures.

    Raises:
        ValueError: If settings or the traces are refused.
    """
    settings = find_agent(config.agent).settings
    base = dataclasses.replace(settings, traces=config.traces, seed=config.seed)
    wanted = config.candidates or CANDIDATES[config.agent]
    candidates = {RECIPE: base} | {text: changed(base, text) for text in wanted}
    traces = load_traces(config.traces).part("train")
    names = [trace.request_id for trace in traces.traces]
    folds = list(make_folds(traces, names, config.folds))[: config.num_judged or config.folds]
    bar = make_bar(f"search {config.agent}", "trainings", console)
    task = bar.add_task("", total=len(candidates) * len(folds), note="")
    seconds = {}
    with bar:
        for name, each in candidates.items():
            seconds[name] = cross_validate(each, folds, lambda: bar.advance(task))
            none, taken = np.array(list(seconds[name].values())).T
            note = f"{name}: {none.sum() / taken.sum():.4f}"
            bar.update(task, note=note)
            if not console.is_terminal:
                console.print(f"search {config.agent}: {note}")
    figures = summarize(config, candidates, seconds)
    Console().print(table_of(figures))
    print(f"best: {figures['best']}")
    if config.json is not None:
        write_json(config.json, figures)
    return figures


def summarize(
    config: SearchConfig,
    candidates: Mapping[str, ReplayConfig],
    seconds: Mapping[str, Mapping[str, tuple[float, float]]],
) -> dict[str, Any]:
    """Each candidate's speed-up, and its lead over the agent's own settings, request by request.

    Args:
        config: Settings.
        candidates: By name.
        seconds: By candidate and request, those of no speculation and those taken.
    """
    arrays = {name: np.array(list(of.values())).T for name, of in seconds.items()}
    none, own = arrays[RECIPE]
    picks = resamples(len(none), config.seed)
    rows = [
        {
            "name": name,
            "speedup": float(none.sum() / taken.sum()),
            "ci95": interval(none, taken, picks),
            "minus_own": paired(none, taken, own, picks),
            "seconds": taken.tolist(),
        }
        for name, (_, taken) in arrays.items()
    ]
    return {
        "agent": config.agent,
        "traces": config.traces.name,
        "folds": config.folds,
        "requests": list(seconds[RECIPE]),
        "rows": rows,
        "best": max(rows, key=lambda row: row["speedup"])["name"],
    }


def table_of(figures: Mapping[str, Any]) -> NumberTable:
    """The table for the terminal, best first."""
    title = (
        f"{figures['agent']} on {len(figures['requests'])} training requests of "
        f"{figures['traces']}, each judged by a training without it: speed-up"
    )
    numbers = ("speed-up", "95 % CI", "lead over its own settings")
    table = NumberTable(title, ("settings",), numbers)
    rows: Sequence[Mapping[str, Any]] = figures["rows"]
    for row in sorted(rows, key=lambda each: -each["speedup"]):
        low, high = row["minus_own"]["ci95"]
        lead = f"{row['minus_own']['difference']:+.3f} ({low:+.3f} {high:+.3f})"
        table.add_row(
            row["name"],
            f"{row['speedup']:.3f}",
            f"{row['ci95'][0]:.2f}-{row['ci95'][1]:.2f}",
            "" if row["name"] == RECIPE else lead,
        )
    return table
