"""Cross-validation on recorded requests: each is judged by an agent that never saw it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from rich.console import Console

from specgym.envs.replay.traces import TraceSet
from specgym.runs.pool.build_watcher import make_bar
from specgym.runs.train.configs import ReplayConfig
from specgym.runs.train.offline import find_agent
from specgym.runs.train.training_set import ReplayTraining


def make_folds(traces: TraceSet, judged: Sequence[str], num_folds: int) -> Iterator[TraceSet]:
    """All traces, time after time: every n-th of the judged is held out, the rest is trained on.

    Args:
        traces: All that may be trained on or judged.
        judged: Ids of the requests to judge.
        num_folds: n; each judged request is held out once.

    Raises:
        ValueError: If a fold would be empty.
    """
    if not 2 <= num_folds <= len(judged):
        raise ValueError(
            f"folds: must be from 2 to the {len(judged)} requests to judge; got {num_folds}"
        )
    for number in range(num_folds):
        held_out = set(judged[number::num_folds])
        yield dataclasses.replace(
            traces,
            traces=tuple(
                dataclasses.replace(
                    trace, split="held-out" if trace.request_id in held_out else "train"
                )
                for trace in traces.traces
            ),
        )


def cross_validate(
    settings: ReplayConfig, folds: Sequence[TraceSet], on_fold: Callable[[], None]
) -> dict[str, tuple[float, float]]:
    """Seconds of no speculation and of an agent, trained afresh for each fold, by request.

    Args:
        settings: Of the agent.
        folds: As of ``make_folds``; fewer of them judge fewer requests.
        on_fold: Is called after each.
    """
    judge = find_agent(settings.agent).judge
    seconds: dict[str, tuple[float, float]] = {}
    for traces in folds:
        training = ReplayTraining(settings, traces)
        names = [trace.request_id for trace in training.held_out.traces]
        pairs = zip(training.none_seconds(), judge(training), strict=True)
        seconds |= dict(zip(names, ((float(a), float(b)) for a, b in pairs), strict=True))
        on_fold()
    return seconds


def estimate_causal(
    agent: str, folds: Sequence[TraceSet], judged: Sequence[str], seed: int, console: Console
) -> np.ndarray:
    """What a causal policy can reach, seconds on each judged request, [R].

    The clairvoyant oracle knows the future, so it says little about how good a controller can be.
    Here an agent learns from all requests but those of a fold, the held-out ones included, and is
    judged on the fold's: more to learn from than a policy may have that is to be compared on
    held-out requests. It is a reached value: the best causal policy is not below it.

    Args:
        agent: What learns.
        folds: As of ``make_folds``; together they judge all of ``judged``.
        judged: Ids of the requests.
        seed: Of the trainings.
        console: Where the bar is.
    """
    settings = dataclasses.replace(find_agent(agent).settings, seed=seed)
    with make_bar("estimating the best causal policy", "folds", console) as bar:
        task = bar.add_task("", total=len(folds), note="")
        seconds = cross_validate(settings, folds, lambda: bar.advance(task))
    return np.array([seconds[name][1] for name in judged])
