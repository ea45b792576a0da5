"""What policies are measured by on recorded requests: no speculation, fixed plans, the oracle.

Legend: R requests, A actions, B rows, F features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from specgym.baselines.hindsight.oracle import solve_oracle
from specgym.baselines.hindsight.problem import DecisionProblem
from specgym.baselines.hindsight.regret import headroom_share
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.outcomes import make_tables
from specgym.envs.replay.traces import Trace, TraceSet
from specgym.envs.replay.vector_playback import VectorFactors, VectorPlayback
from specgym.envs.replay.vector_replay import VectorReplay

# Actions [B] for observations [B, F] and masks [B, A].
Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]
MAX_STATES = 100_000  # brackets the oracle within half a percent in a second a request


@dataclasses.dataclass(frozen=True, eq=False)
class Yardstick:
    """Seconds of references on R requests.

    Attributes:
        names: The requests.
        fixed: Every plan throughout, [R, A].
        plan: The fixed plan to beat, chosen on other requests.
        oracle: The best decoding that is known, [R].
    """

    names: tuple[str, ...]
    fixed: np.ndarray
    plan: int
    oracle: np.ndarray

    def speedup(self, seconds: np.ndarray) -> float:
        """No speculation's seconds over these, [R], a ratio of sums."""
        return float(self.fixed[:, 0].sum() / seconds.sum())

    def share(self, seconds: np.ndarray) -> float:
        """Share of the headroom between the fixed plan and the oracle; NaN where there is none."""
        best = float(self.fixed[:, self.plan].sum())
        return headroom_share(float(seconds.sum()), best, float(self.oracle.sum()))


def make_yardstick(
    traces: TraceSet, library: TraceLibrary, plan: int, show: Callable[[str], None]
) -> Yardstick:
    """The yardstick of a library's requests.

    Args:
        traces: Where the library comes from.
        library: The requests and plans.
        plan: The fixed plan to beat.
        show: Is told how far it is.
    """
    oracle = []
    for index, trace in enumerate(library.traces):
        show(f"oracle {index + 1}/{len(library)}")
        result, _ = solve_oracle(make_problem(traces, trace, library.layout.k_values), MAX_STATES)
        oracle.append(result.seconds)
    names = tuple(trace.request_id for trace in library.traces)
    return Yardstick(names, fixed_seconds(library), plan, np.array(oracle))


def make_problem(traces: TraceSet, trace: Trace, k_values: tuple[int, ...]) -> DecisionProblem:
    """The decision problem of a trace under plans that draft these numbers of tokens."""
    assert traces.costs is not None
    tables = make_tables(trace, traces.layout, traces.costs, k_values, traces.about["exact"])
    names = [f.name for f in dataclasses.fields(DecisionProblem) if f.name != "name"]
    arrays = {name: getattr(tables, name) for name in names}
    return DecisionProblem(**arrays, name=trace.request_id)


def fixed_seconds(library: TraceLibrary) -> np.ndarray:
    """Seconds of every plan throughout every request, [R, A]; action 0 where it may not run."""
    count, num_actions = len(library), len(library.table)
    requests, actions = np.divmod(np.arange(count * num_actions), num_actions)
    playback = VectorPlayback(library, len(requests))
    playback.begin(np.arange(len(requests)), requests)
    ones, total = np.ones(1), np.zeros(len(requests))
    rows, factors = np.arange(len(requests)), VectorFactors(ones, ones, ones)
    while (playback.at < library.ends[requests]).any():
        allowed = playback.allowed()[rows, actions]
        with np.errstate(invalid="ignore"):  # rows at their end do nothing in no time
            total += playback.play(np.where(allowed, actions, 0), factors)[1]
    return total.reshape(count, num_actions)


def play(library: TraceLibrary, choose: Choose, num_rows: int = 4, seed: int = 0) -> np.ndarray:
    """Seconds of a policy on each request, [R]: the mean over streams of all requests.

    Every stream begins without statistics and has the requests in an order of its own.

    Args:
        library: The requests.
        choose: The policy.
        num_rows: Streams.
        seed: Of the orders.
    """
    venv = VectorReplay(library, num_rows)
    observations = venv.reset(seed)
    index = {trace.request_id: number for number, trace in enumerate(library.traces)}
    seconds = np.full((num_rows, len(library)), np.nan)
    while np.isnan(seconds).any():
        observations, _, ends, infos = venv.step(choose(observations, venv.action_masks()))
        for row in np.flatnonzero(ends).tolist():
            request = index[infos[row]["request_id"]]
            if np.isnan(seconds[row, request]):  # a row that is done goes on till all are
                seconds[row, request] = infos[row]["episode"]["seconds"]
    return seconds.mean(axis=0)


def split_requests(traces: TraceSet, every: int) -> tuple[TraceSet, TraceSet]:
    """Traces to fit on, and every n-th of them to choose among policies by.

    Raises:
        ValueError: If either part would be empty.
    """
    fit = tuple(t for index, t in enumerate(traces.traces) if index % every != every - 1)
    rest = tuple(t for index, t in enumerate(traces.traces) if index % every == every - 1)
    if not rest or not fit:
        raise ValueError(
            f"traces: {len(traces.traces)} training requests cannot be split into those to fit on "
            f"and every {every}th to choose by; record more"
        )
    return dataclasses.replace(traces, traces=fit), dataclasses.replace(traces, traces=rest)


def argmax_of(scores: Callable[[np.ndarray], np.ndarray]) -> Choose:
    """The policy that takes the allowed action of largest score."""

    def choose(observations: np.ndarray, masks: np.ndarray) -> np.ndarray:
        return np.where(masks, scores(observations), -np.inf).argmax(axis=1)

    return choose
