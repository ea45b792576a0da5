"""``specgym bench batch``: what batching gains, and what speculation adds at every batch size.

The shape of SpecRouter's Table 2 (arXiv 2505.07680): speed-up over plain decoding at the same
batch of a two-level chain, a three-level chain and the scheduled one.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from specgym.engine.pool import ModelPool
from specgym.engine.timing import Baseline
from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.workloads import Workload, get_workload
from specgym.runs.bench.command import Bench
from specgym.runs.bench.configs import BatchBench
from specgym.runs.bench.measuring import alternate, row
from specgym.runs.controllers import make_controller
from specgym.runs.loop import DIVERGENCE_EVERY, StepError
from specgym.runs.making import make_pool
from specgym.runs.results import describe_machine
from specgym.runs.tables import NumberTable

PLAIN, SCHEDULED = "plain", "scheduled"
ENDLESS = 10**9  # requests of an episode: rows never run dry


def bench_batch(config: BatchBench, console: Console) -> dict[str, Any]:
    """Rows and ratios of ``specgym bench batch``.

    All runs are alternated, those of different batch sizes too.

    Raises:
        ValueError: If the pool has no plan of a name that was asked for.
        StepError: If the engine failed.
    """
    pool = make_pool(config)
    modes = controllers_of(config, pool)
    workload = chosen_workload(config, pool)
    if workload.num_skipped:
        console.print(f"{workload.num_skipped} prompts are longer, and left out")
    baselines = {size: Baseline() for size in config.sizes}
    num_runs = len(config.sizes) * len(modes) * (config.repeats + 1)
    counter = itertools.count(1)
    runs: dict[tuple[int, str], Callable[[], float]] = {}
    for size, (mode, spec) in itertools.product(config.sizes, modes.items()):
        run = Contestant(config, pool, workload, size, spec, baselines[size])
        name = f"{mode}, batch {size}"
        runs[size, mode] = announced(run, name, counter, num_runs, console)
    console.print(f"batches of {', '.join(map(str, config.sizes))}: {', '.join(modes)}")
    seconds = alternate(runs, config.repeats)
    rows = [
        row(f"{mode}, batch {size}", [1.0 / each for each in values], "tok/s")
        | {"batch": size, "mode": mode, "controller": modes[mode]}
        for (size, mode), values in seconds.items()
    ]
    for each in rows:
        pairs = zip(
            seconds[each["batch"], PLAIN], seconds[each["batch"], each["mode"]], strict=True
        )
        each["speedup"] = statistics.median(plain / ours for plain, ours in pairs)
    return {
        "rows": rows,
        "ratios": ratios_of(rows),
        "pool": pool.name,
        "exact": config.exact,
        "skipped_prompts": workload.num_skipped,
        "machine": describe_machine(pool.model(pool.target).device),
    }


def announced(
    run: Callable[[], float], name: str, counter: Iterator[int], num_runs: int, console: Console
) -> Callable[[], float]:
    """A run that says when it is done, and how many there are; seconds per token."""

    def call() -> float:
        seconds = run()
        console.print(f"run {next(counter)} of {num_runs}: {name}, {1.0 / seconds:.1f} tok/s")
        return seconds

    return call


def chosen_workload(config: BatchBench, pool: ModelPool) -> Workload:
    """The workload's requests whose prompts are not too long.

    Raises:
        ValueError: If there are none.
    """
    workload = get_workload(config.workload, prompts=config.prompts)
    longest = min(config.prompt_tokens, pool.model(pool.target).context_limit - 1)
    groups = tuple(
        tuple(r for r in group if len(pool.encode(r.prompt)) <= longest)
        for group in workload.groups
    )
    if not any(groups):
        raise ValueError(
            f"prompt_tokens: no prompt of {config.workload!r} has {longest} tokens or fewer; allow "
            f"more, or give shorter ones"
        )
    num_skipped = len(workload.requests) - sum(map(len, groups))
    return dataclasses.replace(
        workload, groups=tuple(filter(None, groups)), num_skipped=num_skipped
    )


def controllers_of(config: BatchBench, pool: ModelPool) -> dict[str, str]:
    """The controller of every mode, by the mode's name.

    Raises:
        ValueError: If a plan that was asked for is not in the pool, or has other levels.
    """
    modes = {PLAIN: "none"}
    for num_levels, name, asked in (
        (2, "two-level", config.two_level),
        (3, "three-level", config.three_level),
    ):
        plan = find_plan(pool, num_levels, asked)
        if plan:
            modes[name] = f"static:{plan}"
    return modes | {SCHEDULED: config.scheduler}


def find_plan(pool: ModelPool, num_levels: int, asked: str) -> str:
    """The plan asked for, else the pool's first chain of so many levels; empty if it has none.

    Raises:
        ValueError: If there is no plan of that name, or it has other levels.
    """
    if asked:
        plan = pool.plan(asked)
        if len(plan.chain) != num_levels:
            raise ValueError(
                f"plan {asked!r}: must have {num_levels} levels, the target among them; "
                f"it has {len(plan.chain)}"
            )
        return asked
    k = pool.k_values[len(pool.k_values) // 2]
    plans = [p for p in pool.plans() if len(p.chain) == num_levels and p.k == k]
    return plans[0].name if plans else ""


class Contestant:
    """One controller at one batch size. Its rows run on from call to call, and what it learns too.

    Args:
        config: The bench.
        pool: The members.
        workload: Requests; a row that ends goes to the next one.
        size: Rows.
        spec: The controller.
        baseline: Shared by the controllers of this batch size.
    """

    def __init__(
        self,
        config: BatchBench,
        pool: ModelPool,
        workload: Workload,
        size: int,
        spec: str,
        baseline: Baseline,
    ):
        self.config, self.size = config, size
        self.env = SpecDecodeEnv(
            pool,
            workload,
            max_new_tokens=config.request_tokens,
            num_requests=ENDLESS,
            batch_size=size,
            exact=config.exact,
            baseline=baseline,
        )
        features = [feature.name for feature in self.env.features]
        self.controller = make_controller(spec, self.env.plans, features, config.seed)
        self.drafts = spec != "none"
        self.observation: np.ndarray | None = None

    def __call__(self) -> float:
        """Seconds per token of the next tokens of all rows.

        Prefills of the target are not in it, nor are the drafters' of the first prompts: every
        chain runs once before. Drafters' prefills of later requests are.
        """
        if self.observation is None:
            self.start()
        self.env.resume()  # others ran in between
        tokens, seconds = 0, 0.0
        while tokens < self.config.new_tokens * self.size:
            assert self.observation is not None
            action = self.controller.act(self.observation, self.mask)
            reward, info = self.step(action)
            self.controller.observe(action, reward, info)
            self.begin(info)
            tokens += info["tokens"]
            seconds += info["total_seconds"]
        return seconds / tokens

    def start(self) -> None:
        """Prefills the first requests, of all members that are used."""
        every = DIVERGENCE_EVERY if self.controller.needs_divergence else 0
        options = {"divergence_every": every}
        self.observation, info = self.env.reset(seed=self.config.seed, options=options)
        self.begin(info)
        for action in self.first_actions():
            _, info = self.step(action)
            self.begin(info)

    def first_actions(self) -> list[int]:
        """No speculation, and where there are drafters every chain with its smallest K."""
        first = {chain: action for action, (chain, _) in reversed([*enumerate(self.env.plans)])}
        return list(first.values()) if self.drafts else [0]

    def step(self, action: int) -> tuple[float, dict[str, Any]]:
        """Reward and ``info`` of a step.

        Raises:
            StepError: If the engine failed.
        """
        self.observation, reward, _, _, info = self.env.step(action)
        if "error" in info:
            raise StepError(f"batch {self.size}: {info['error']}")
        self.mask = info["action_mask"]
        return reward, info

    def begin(self, info: dict[str, Any]) -> None:
        """Tells the controller of requests that begin."""
        alone = [info] if "num_prompt" in info else [info.get("next_request")]
        for request in info.get("next_requests", alone):
            if request is not None:
                keys = ("request_id", "num_prompt", "max_new_tokens")
                self.controller.begin({key: request[key] for key in keys})


def ratios_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Plain decoding at the batch sizes over batch 1, and the best speed-up of every mode."""
    plain = {each["batch"]: each["median"] for each in rows if each["mode"] == PLAIN}
    ratios = {
        f"batch{size}_over_1": plain[size] / plain[1] for size in plain if 1 in plain and size > 1
    }
    for each in rows:
        if each["mode"] != PLAIN:
            name = f"{each['mode'].replace('-', '_')}_speedup_at_{each['batch']}"
            ratios[name] = each["speedup"]
    return ratios


def show_batch(report: dict[str, Any]) -> None:
    """Prints the table and what batching gains."""
    console = Console()
    modes = list(dict.fromkeys(each["mode"] for each in report["rows"]))
    title = f"{report['pool']}: speed-up over plain decoding at the same batch"
    table = NumberTable(title, ("batch",), ("plain tok/s", "over batch 1", *modes[1:]))
    by_key = {(each["batch"], each["mode"]): each for each in report["rows"]}
    for size in dict.fromkeys(each["batch"] for each in report["rows"]):
        gain = report["ratios"].get(f"batch{size}_over_1", 1.0)
        speedups = (f"{by_key[size, mode]['speedup']:.2f}" for mode in modes[1:])
        plain = by_key[size, PLAIN]["median"]
        table.add_row(str(size), f"{plain:.1f}", f"{gain:.2f}", *speedups)
    console.print(table)
    for mode in modes[1:]:
        console.print(f"{mode}: {by_key[next(iter(by_key))[0], mode]['controller']}")
    for name, ratio in report["ratios"].items():
        if name.endswith("_over_1"):
            console.print(f"{name}: {ratio:.4f}")


def plot_batch(report: dict[str, Any], path: Path) -> None:
    """Draws tokens per second on the left, speed-up over plain decoding on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for mode in dict.fromkeys(each["mode"] for each in report["rows"]):
        mine = [each for each in report["rows"] if each["mode"] == mode]
        sizes = [each["batch"] for each in mine]
        left.plot(sizes, [each["median"] for each in mine], ".-", label=mode)
        right.plot(sizes, [each["speedup"] for each in mine], ".-", label=mode)
    for place, label in ((left, "tokens per second"), (right, "speed-up over plain decoding")):
        place.set_xscale("log", base=2)
        place.set(xlabel="batch size", ylabel=label, ylim=(0, None))
        place.legend()
    figure.suptitle(report["pool"])
    figure.savefig(path)


BENCH = Bench(BatchBench, bench_batch, show_batch, plot_batch)
