"""``specgym record``: what every plan would get at every position, and what forwards cost."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from specgym.engine.forward.linears import NUMERICS
from specgym.engine.pool import ModelPool
from specgym.engine.timing import Baseline
from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.pool_spec import Layout
from specgym.envs.prompt_room import describe_skipped
from specgym.envs.replay.costs import MeasuredForward, MeasuredIteration, fit_costs
from specgym.envs.replay.recording import Recorder
from specgym.envs.replay.traces import SCHEMA_VERSION, Trace, TraceSet, load_traces, save_traces
from specgym.envs.workloads import Request, Split, Workload, get_workload
from specgym.runs.compare import MismatchError
from specgym.runs.configs import RecordConfig
from specgym.runs.disk import writing
from specgym.runs.making import make_pool, make_workload
from specgym.runs.pool.build_watcher import make_bar
from specgym.runs.results import describe_machine, write_json
from specgym.runs.run_folder import as_plain, kept_in, one_writer
from specgym.runs.traces.check import check_fit, check_traces, describe, table_of
from specgym.runs.traces.random_plans import measured, walk_request

HELD_OUT_EVERY = 3
NOT_SETTINGS = ("out", "check", "costs", "check_requests", "json", "overwrite")
SPLITS: tuple[Split, Split] = ("train", "held-out")


def record(config: RecordConfig, console: Console) -> Path:
    """Records, goes on with a stopped recording, measures costs again, or checks; the file.

    Raises:
        ValueError: If settings are refused, or a file or a stopped recording is in the way.
        StepError: If the engine failed.
        MismatchError: If a check finds counts that differ.
    """
    if config.check or config.costs:
        traces = load_traces(config.path)
        pool = make_pool(config)
        check_fit(traces, pool)
        requests = known_requests(config, traces)
        session = Recording(config, pool, console)
        if config.check:
            check(config, traces, session.env, requests, console)
        else:
            measure_again(session, traces, requests)
    else:
        refuse_replacing(config)
        record_all(Recording(config, make_pool(config), console))
    return config.path


def measure_again(session: Recording, traces: TraceSet, requests: list[Request]) -> None:
    """Measures the costs of a recorded file again."""
    with writer(session.config, "make room, and give the same command again"):
        costs = fit_costs(session.layout, list(session.measure(requests)))
        save(session.config.path, dataclasses.replace(traces, costs=costs))
    session.console.print(f"costs measured again: {session.config.path}")


def record_all(session: Recording) -> None:
    """Records, or goes on with a stopped recording.

    Raises:
        ValueError: If the file is there, or a stopped recording of other settings is in the way.
    """
    path, console = session.config.path, session.console
    if session.num_skipped:
        console.print(describe_skipped(session.num_skipped))
    with writer(session.config, kept_in(session.folder)):
        refuse_replacing(session.config)  # it may have come while the pool was loaded
        try:
            traces = session.run()
        except KeyboardInterrupt:
            console.print(f"stopped; the same command goes on from {session.folder}")
            raise
        save(path, traces)
        console.print(
            f"{len(traces.traces)} requests, {sum(map(len, traces.traces))} tokens, "
            f"{session.seconds() / 60:.1f} minutes, {path.stat().st_size / 1e6:.1f} MB: {path}"
        )
        shutil.rmtree(session.folder)


def refuse_replacing(config: RecordConfig) -> None:
    """Refuses a file that is there, unless it may be replaced.

    Raises:
        ValueError: If it is there.
    """
    if config.path.exists() and not config.overwrite:
        raise ValueError(f"out: {config.path} is there; choose another --out, or --overwrite it")


def writer(config: RecordConfig, way_out: str) -> AbstractContextManager[None]:
    """Makes this process the only one that writes the file and its parts."""
    lock = config.path.with_name(f"{config.path.name}.lock")
    return one_writer(config.path, lock, way_out, option="--out")


def save(path: Path, traces: TraceSet) -> None:
    """Writes traces.

    Raises:
        DiskFullError: If the disk is full.
    """
    with writing(path):
        save_traces(path, traces)


def check(
    config: RecordConfig,
    traces: TraceSet,
    env: SpecDecodeEnv,
    requests: list[Request],
    console: Console,
) -> None:
    """Checks traces against the live engine, and prints and writes what was found.

    Raises:
        MismatchError: If a count differs.
    """
    chosen = requests[: config.check_requests or None]
    figures = check_traces(traces, env, chosen, config.seed, console)
    if config.json:
        write_json(config.json, figures)
    output = Console()
    output.print(table_of(figures))
    output.print(describe(figures))
    if figures["different"]:
        raise MismatchError(
            f"{figures['different']} counts differ from the live engine's, the first (recorded, "
            f"seen): {figures['first_difference']}"
        )


def known_requests(config: RecordConfig, traces: TraceSet) -> list[Request]:
    """The requests behind traces, in their order.

    Raises:
        ValueError: If the workload lacks one, or its text or budget is not what was recorded.
    """
    workload = get_workload(config.workload, prompts=config.prompts)
    known = {request.id: request for request in workload.requests}
    for trace in traces.traces:
        if trace.request_id not in known:
            raise ValueError(
                f"workload: it has no request {trace.request_id!r}, which is in the file; name the "
                f"workload and prompts that were recorded ({traces.about['workload']})"
            )
    for name in ("max_new_tokens", "exact"):
        if traces.about[name] != getattr(config, name):
            raise ValueError(
                f"{name}: the file was recorded with {traces.about[name]}, not "
                f"{getattr(config, name)}; give the same"
            )
    return [known[trace.request_id] for trace in traces.traces]


class Recording:
    """A recording on its way: parts in a folder beside the file, one per request.

    Args:
        config: Settings.
        pool: The members.
        console: Where progress is shown.
    """

    def __init__(self, config: RecordConfig, pool: ModelPool, console: Console):
        self.config, self.pool, self.console = config, pool, console
        self.folder = config.path.with_name(f"{config.path.name}.parts")
        self.parts = {split: make_workload(config, pool, split) for split in SPLITS}
        self.num_skipped = sum(part.num_skipped for part in self.parts.values())
        self.env = SpecDecodeEnv(
            pool,
            self.parts["train"],  # its own stream is not asked for: requests are given
            max_new_tokens=config.max_new_tokens,
            exact=config.exact,
            clock=config.clock,
            baseline=Baseline(every=8, window=3),  # close by: the machine's speed wanders
        )
        self.layout = Layout.of(pool)
        self.requests = choose(config, self.parts)
        self.recorder = Recorder(pool, config.exact, self.env.clock)

    def about(self) -> dict[str, Any]:
        """Where the traces come from."""
        settings = {k: v for k, v in as_plain(self.config).items() if k not in NOT_SETTINGS}
        return settings | {
            "schema_version": SCHEMA_VERSION,
            "skipped_prompts": self.num_skipped,
            "numerics": NUMERICS,
            "fingerprints": self.pool.fingerprints,
            "machine": describe_machine(self.pool.model(self.pool.target).device),
            "specgym": importlib.metadata.version("specgym"),
        }

    def open_folder(self) -> None:
        """Makes the parts' folder, or goes on with the one there.

        Raises:
            ValueError: If it was begun with other settings or on other weights.
        """
        path, about = self.folder / "about.json", self.about()
        if path.exists():
            before = json.loads(path.read_text())
            differing = [key for key in about if before.get(key) != about[key]]
            if differing and not self.config.overwrite:
                key = differing[0]
                raise ValueError(
                    f"{key}: the stopped recording in {self.folder} was begun with "
                    f"{before.get(key)!r}, now it is {about[key]!r}; finish it as it was begun, or "
                    f"--overwrite it"
                )
            if differing:
                shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, about)

    def run(self) -> TraceSet:
        """Records what is missing and measures costs."""
        self.open_folder()
        with make_bar("recording", "requests", self.console) as bar:
            task = bar.add_task("", total=len(self.requests), note="")
            traces = []
            for index, (request, split) in enumerate(self.requests):
                traces.append(self.one(index, request, split))
                bar.update(task, completed=index + 1, note=f"{request.id}")
                if not self.console.is_terminal:
                    self.console.print(f"recorded {index + 1}/{len(self.requests)}: {request.id}")
        iterations = list(self.measure([request for request, _ in self.requests]))
        costs = fit_costs(self.layout, iterations)
        return TraceSet(tuple(traces), self.layout, costs, self.about())

    def one(self, index: int, request: Request, split: str) -> Trace:
        """A request's trace, from its part where there is one."""
        path = self.folder / f"{index:05d}.npz"
        if path.exists():
            return load_traces(path).traces[0]
        started = time.perf_counter()
        trace = self.recorder.record(request, self.env.rows.decode_request(request), split)
        about = {"seconds": time.perf_counter() - started}
        save(path, TraceSet((trace,), self.layout, None, about))
        return trace

    def seconds(self) -> float:
        """Seconds that the recorded requests took so far, over all runs of the command."""
        parts = sorted(self.folder.glob("*.npz"))
        return sum(float(load_traces(path).about["seconds"]) for path in parts)

    def measure(self, requests: list[Request]) -> Iterator[MeasuredIteration]:
        """Iterations under random plans, from parts where there are some."""
        rng = np.random.default_rng(self.config.seed)
        order = rng.permutation(len(requests))
        with make_bar("measuring costs", "iterations", self.console) as bar:
            task = bar.add_task("", total=self.config.cost_steps, note="")
            done = rounds = 0
            while done < self.config.cost_steps:
                request = requests[order[rounds % len(order)]]
                path = self.folder / f"costs-{rounds:05d}.json"
                if path.exists():
                    iterations = [restore(i) for i in json.loads(path.read_text())]
                else:
                    walk_rng = np.random.default_rng([self.config.seed, rounds])
                    begun, infos = walk_request(self.env, request, walk_rng)
                    iterations = measured(self.layout, begun, infos)
                    if self.folder.exists():
                        write_json(path, [dataclasses.asdict(i) for i in iterations])
                yield from iterations
                done += len(iterations)
                rounds += 1
                bar.update(task, completed=min(done, self.config.cost_steps))


def choose(config: RecordConfig, parts: Mapping[Split, Workload]) -> list[tuple[Request, Split]]:
    """The requests to record with their split: every third is held out.

    Raises:
        ValueError: If there are fewer.
    """
    num_held = config.num_requests // HELD_OUT_EVERY
    wanted: dict[Split, int] = {"train": config.num_requests - num_held, "held-out": num_held}
    for split, workload in parts.items():
        if wanted[split] > len(workload.requests):
            raise ValueError(
                f"num_requests: the workload has {len(workload.requests)} {split} requests, "
                f"{config.num_requests} need {wanted[split]}; ask for fewer, or give more --prompts"
            )
    chosen = {split: list(parts[split].select(wanted[split], config.seed)) for split in parts}
    is_held = [index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for index in range(config.num_requests)]
    splits = [SPLITS[each] for each in is_held]
    return [(chosen[split].pop(0), split) for split in splits]


def restore(plain: dict[str, Any]) -> MeasuredIteration:
    """An iteration from JSON values."""
    forwards = tuple(MeasuredForward(**forward) for forward in plain["forwards"])
    return MeasuredIteration(**{**plain, "chain": tuple(plain["chain"]), "forwards": forwards})
