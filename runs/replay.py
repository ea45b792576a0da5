"""``specgym replay``: controllers on recorded traces, measured against what is possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from specgym.baselines.hindsight.oracle import greedy_policy, solve_oracle
from specgym.baselines.hindsight.problem import DecisionProblem, rollout
from specgym.baselines.hindsight.references import (
    References,
    best_fixed,
    check_ordering,
    fixed_seconds,
)
from specgym.baselines.hindsight.regret import headroom_share, regret
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.replay_env import ReplayEnv
from specgym.envs.replay.traces import Trace, TraceSet, load_traces
from specgym.envs.workloads import Request
from specgym.runs.configs import ReplayConfig
from specgym.runs.controllers import make_controller
from specgym.runs.loop import Controller, begin_request, run_steps
from specgym.runs.pool.build_watcher import make_bar
from specgym.runs.results import NUM_RESAMPLES, SCHEMA, write_json
from specgym.runs.tables import NumberTable
from specgym.runs.traces.yardstick import make_problem
from specgym.runs.train.cross_validation import estimate_causal, make_folds
from specgym.runs.train.offline import find_agent

BEST_FIXED = "best fixed, training"
HINDSIGHT = "best fixed, hindsight"
PER_REQUEST = "best fixed, each"
GREEDY, ORACLE = "greedy oracle", "oracle"
CAUSAL = "best causal, estimated"


def replay(config: ReplayConfig, console: Console) -> dict[str, Any]:
    """Plays the controllers, prints the table and returns the figures.

    Raises:
        ValueError: If settings, the file or a controller are refused.
    """
    traces = load_traces(config.traces)
    names = [trace.request_id for trace in traces.part(config.split).traces]
    folds = list(make_folds(traces, names, config.causal_folds)) if config.causal_folds else []
    find_agent(config.causal_agent)  # refused before what takes long
    played = {name: play_split(traces, name, config) for name in config.controllers}
    arena = Arena(traces, config)
    with make_bar("solving the oracle", "requests", console) as bar:
        task = bar.add_task("", total=len(arena.traces), note="")
        for index, trace in enumerate(arena.traces):
            arena.add(trace, {name: actions[index] for name, actions in played.items()})
            bar.update(task, completed=index + 1)
    if folds:
        arena.estimates[CAUSAL] = estimate_causal(
            config.causal_agent, folds, names, config.seed, console
        )
    figures = arena.figures()
    if config.json:
        write_json(config.json, figures)
    output = Console()
    output.print(table_of(figures))
    output.print(describe(figures))
    return figures


def play_split(traces: TraceSet, name: str, config: ReplayConfig) -> list[list[int]]:
    """Actions of a controller on each request of the split, in the file's order.

    Raises:
        ValueError: If there is no such controller.
    """
    part = ReplayEnv(TraceLibrary(traces, config.split))
    features = [feature.name for feature in part.features]
    controller = make_controller(name, part.plans, features, config.seed, pool_of(traces))
    if config.warm_requests:
        training = ReplayEnv(TraceLibrary(traces, "train"))
        rng = np.random.default_rng(config.seed)
        order = rng.permutation(len(training.library))[: config.warm_requests]
        for index in order:
            play(training, controller, training.library.traces[index])
    return [play(part, controller, trace) for trace in part.library.traces]


def pool_of(traces: TraceSet) -> str:
    """The name of the pool that was recorded."""
    return str(traces.about["pool"])


def play(env: ReplayEnv, controller: Controller, trace: Trace) -> list[int]:
    """Actions of a controller on one request."""
    request = Request(trace.request_id, "", trace.category)
    observation, info = begin_request(env, controller, request)
    return [action for action, _, _ in run_steps(env, controller, observation, info)]


class Arena:
    """Controllers and references on the same requests, one request at a time.

    Args:
        traces: What was recorded.
        config: Settings.
    """

    def __init__(self, traces: TraceSet, config: ReplayConfig):
        self.config, self.recorded = config, traces
        self.names = [plan.name for plan in traces.layout.plans()]
        self.traces = traces.part(config.split).traces
        training = [self.problem(trace) for trace in traces.traces if trace.split == "train"]
        chosen_on = training or [self.problem(trace) for trace in self.traces]
        self.best_fixed = best_fixed(np.stack([fixed_seconds(problem) for problem in chosen_on]))
        self.seconds: dict[str, list[float]] = {name: [] for name in config.controllers}
        self.losses: dict[str, list[np.ndarray]] = {name: [] for name in config.controllers}
        self.rows: list[dict[str, Any]] = []
        self.estimates: dict[str, np.ndarray] = {}

    def problem(self, trace: Trace) -> DecisionProblem:
        """A trace as a decision problem."""
        return make_problem(self.recorded, trace, self.recorded.layout.k_values)

    def add(self, trace: Trace, played: Mapping[str, Sequence[int]]) -> None:
        """Takes a request in: what each controller did, and what was possible."""
        problem = self.problem(trace)
        result, oracle = solve_oracle(problem, self.config.max_states)
        for name, actions in played.items():
            path = rollout(problem, list(actions))
            self.seconds[name].append(path.total_seconds)
            self.losses[name].append(regret(oracle, path).step_seconds / problem.baseline[0])
        self.rows.append(
            {
                "name": trace.request_id,
                "category": trace.category,
                "fixed": fixed_seconds(problem),
                "greedy": rollout(problem, greedy_policy(problem)).total_seconds,
                "lower": result.lower,
                "oracle": result.seconds,
                "is_exact": result.is_exact,
            }
        )

    def references(self) -> References:
        """The references on all requests, their ordering checked."""
        columns = {key: [row[key] for row in self.rows] for key in self.rows[0]}
        references = References(
            names=tuple(columns["name"]),
            fixed=np.stack(columns["fixed"]),
            greedy=np.array(columns["greedy"]),
            lower=np.array(columns["lower"]),
            oracle=np.array(columns["oracle"]),
            is_exact=np.array(columns["is_exact"]),
        )
        check_ordering(references)
        return references

    def figures(self) -> dict[str, Any]:
        """Everything that was found."""
        references = self.references()
        none, fixed = references.no_speculation, references.fixed[:, self.best_fixed]
        entries = {
            BEST_FIXED: fixed,
            HINDSIGHT: references.best_fixed,
            PER_REQUEST: references.best_per_request,
            GREEDY: references.greedy,
            ORACLE: references.oracle,
            **self.estimates,
        }
        controllers = {name: np.array(seconds) for name, seconds in self.seconds.items()}
        fastest = min(controllers, key=lambda name: controllers[name].sum())
        subject = self.config.subject or fastest
        picks = resamples(len(none), self.config.seed)
        table = {}
        for name, seconds in (controllers | entries).items():
            table[name] = {
                "speedup": float(none.sum() / seconds.sum()),
                "ci95": interval(none, seconds, picks),
                "headroom_share": headroom_share(
                    float(seconds.sum()), float(fixed.sum()), float(references.oracle.sum())
                ),
                "subject_minus_this": paired(none, controllers[subject], seconds, picks),
                "seconds": seconds.tolist(),
            }
            if name in controllers:
                table[name]["regret"] = regret_figures(self.losses[name])
        plans = references.best_fixed_by([row["category"] for row in self.rows])
        return {
            "schema": SCHEMA,
            "pool": pool_of(self.recorded),
            "split": self.config.split,
            "requests": list(references.names),
            "subject": subject,
            "warm_requests": self.config.warm_requests,
            "best_fixed_plan": self.names[self.best_fixed],
            "best_fixed_plan_in_hindsight": self.names[references.best_fixed_plan],
            "best_fixed_plan_by_category": {str(k): self.names[v] for k, v in plans.items()},
            "oracle_is_exact": bool(references.is_exact.all()),
            "oracle_lower_bound": float(none.sum() / references.lower.sum()),
            "entries": table,
        }


def resamples(count: int, seed: int) -> np.ndarray:
    """Requests drawn with replacement, [resamples, count]."""
    return np.random.default_rng(seed).integers(count, size=(NUM_RESAMPLES, count))


def interval(none: np.ndarray, seconds: np.ndarray, picks: np.ndarray) -> list[float]:
    """A 95 % interval of the speed-up, by resampling requests."""
    ratios = none[picks].sum(axis=1) / seconds[picks].sum(axis=1)
    return np.percentile(ratios, [2.5, 97.5]).tolist()


def paired(
    none: np.ndarray, subject: np.ndarray, other: np.ndarray, picks: np.ndarray
) -> dict[str, Any]:
    """The subject's speed-up less another's on the same requests, with a 95 % interval."""
    total = none[picks].sum(axis=1)
    differences = total / subject[picks].sum(axis=1) - total / other[picks].sum(axis=1)
    return {
        "difference": float(none.sum() / subject.sum() - none.sum() / other.sum()),
        "ci95": np.percentile(differences, [2.5, 97.5]).tolist(),
    }


def regret_figures(losses: Sequence[np.ndarray]) -> dict[str, Any]:
    """Regret against the oracle, in iterations without speculation.

    ``cumulative`` is its growth over a request, tenth by tenth, mean over requests.
    """
    tenths = np.linspace(0.1, 1.0, 10)
    curves = [
        np.concatenate([[0.0], each.cumsum()])[np.ceil(tenths * len(each)).astype(int)]
        for each in losses
    ]
    return {
        "per_step": float(sum(each.sum() for each in losses) / sum(map(len, losses))),
        "per_request": float(np.mean([each.sum() for each in losses])),
        "cumulative": np.mean(curves, axis=0).tolist(),
    }


def table_of(figures: Mapping[str, Any]) -> NumberTable:
    """The table for the terminal, fastest first."""
    title = (
        f"{figures['pool']}, {len(figures['requests'])} {figures['split']} requests replayed: "
        f"speed-up over no speculation"
    )
    numbers = ("total", "95 % CI", "share", "regret", "subject - this")
    table = NumberTable(title, ("controller",), numbers)
    entries = figures["entries"]
    for name in sorted(entries, key=lambda each: -entries[each]["speedup"]):
        entry = entries[name]
        difference, (low, high) = (entry["subject_minus_this"][k] for k in ("difference", "ci95"))
        table.add_row(
            name,
            f"{entry['speedup']:.3f}",
            f"{entry['ci95'][0]:.2f}-{entry['ci95'][1]:.2f}",
            f"{entry['headroom_share']:.0%}",
            f"{entry['regret']['per_step']:.3f}" if "regret" in entry else "",
            "" if name == figures["subject"] else f"{difference:+.2f} ({low:+.2f} {high:+.2f})",
        )
    return table


def describe(figures: Mapping[str, Any]) -> str:
    """The lines under the table."""
    exact = "exact" if figures["oracle_is_exact"] else "the best decoding found; bound "
    bound = "" if figures["oracle_is_exact"] else f"{figures['oracle_lower_bound']:.3f}"
    return (
        f"subject: {figures['subject']}; best fixed plan on training requests "
        f"{figures['best_fixed_plan']}, in hindsight {figures['best_fixed_plan_in_hindsight']}; "
        f"oracle {exact}{bound}\n"
        f"share: of the way from the best fixed plan (training) to the oracle; regret: iterations "
        f"without speculation lost per step"
    )
