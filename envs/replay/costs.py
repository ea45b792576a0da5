"""What forwards cost: a table fitted to iterations that were measured on the live engine.

Seconds drift with the machine, so every measured iteration is scaled by its own baseline to the
baseline's median over all: the table is of one moment, and ratios are what it is for.

Legend: M members, R roles, T tokens fed (index 0 is one token), B buckets of KV length.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specgym.envs.pool_spec import Layout

# A drafter's first forward of an iteration eats what is pending, its others one guess each.
ROLES = ("draft", "guess", "verify", "catchup")
BUCKET = 64  # slots: KV lengths of exact mode are multiples of it
OUTLYING = 6.0  # median deviations from the median
FEW = 5  # samples below which a cell borrows from its neighbours
ARRAYS = (
    "kv_lengths",
    "baseline",
    "seconds",
    "experts",
    "seconds_per_expert",
    "prefill",
    "overhead",
    "spread",
)


@dataclasses.dataclass(frozen=True)
class MeasuredForward:
    """One forward: who, what for, how many tokens, mean unique experts per layer, seconds."""

    member: str
    role: str
    num_tokens: int
    experts: float
    seconds: float
    is_prefill: bool = False


@dataclasses.dataclass(frozen=True)
class MeasuredIteration:
    """One iteration of the live engine.

    Attributes:
        chain: The chain that ran.
        num_drafted: Tokens that were drafted.
        kv_length: Slots that the target attended to.
        seconds: Of the iteration.
        baseline_seconds: Of no speculation, as probed around that time.
        forwards: Every forward.
    """

    chain: tuple[str, ...]
    num_drafted: int
    kv_length: int
    seconds: float
    baseline_seconds: float
    forwards: tuple[MeasuredForward, ...]


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Seconds of forwards and of what is around them.

    Attributes:
        members: Names, in the order of the arrays' first axis.
        chains: Chains, the target alone first, in the order of ``overhead`` and ``spread``.
        kv_lengths: KV length of each bucket, ascending, [B].
        baseline: Seconds of no speculation as the environment probes them, [B].
        seconds: Mean seconds of a forward, hiccups pulled in, [M, R, T, B].
        experts: Mean unique experts per layer behind them, [M, R, T, B].
        seconds_per_expert: What one more unique expert in every layer costs, [M].
        prefill: Seconds of a drafter's prefill: constant, and per token, [M, 2].
        overhead: Seconds of an iteration outside its forwards: constant, and per drafted token,
            [chains, 2].
        spread: Standard deviation of log(measured / predicted) by drafted tokens, [chains, K + 1].
    """

    members: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]
    kv_lengths: np.ndarray
    baseline: np.ndarray
    seconds: np.ndarray
    experts: np.ndarray
    seconds_per_expert: np.ndarray
    prefill: np.ndarray
    overhead: np.ndarray
    spread: np.ndarray

    def header(self) -> dict[str, Any]:
        """What is no array, as JSON values."""
        return {"members": list(self.members), "chains": [list(chain) for chain in self.chains]}

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in ARRAYS}

    @classmethod
    def restore(cls, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> CostTable:
        """The table of a header and its arrays."""
        chains = tuple(tuple(chain) for chain in header["chains"])
        return cls(tuple(header["members"]), chains, **{name: arrays[name] for name in ARRAYS})

    def bucket(self, kv_length: int | np.ndarray) -> np.ndarray:
        """The bucket nearest to a KV length."""
        return np.abs(np.asarray(kv_length)[..., None] - self.kv_lengths).argmin(axis=-1)

    def forward_seconds(
        self,
        member: str,
        role: str,
        num_tokens: int | np.ndarray,
        bucket: int | np.ndarray,
        experts: np.ndarray | float | None = None,
    ) -> np.ndarray:
        """Seconds of forwards.

        Args:
            member: Whose.
            role: ``draft``, ``guess``, ``verify`` or ``catchup``.
            num_tokens: Real tokens fed; more than the window holds cost as a prefill does.
            bucket: Of the KV length.
            experts: Mean unique experts per layer; None takes those of the measurement.
        """
        index, kind = self.members.index(member), ROLES.index(role)
        widest = self.seconds.shape[2]
        tokens = np.asarray(num_tokens)
        cell = (index, kind, np.minimum(tokens, widest) - 1, bucket)
        seconds = self.seconds[cell] + self.prefill[index, 1] * np.maximum(tokens - widest, 0)
        if experts is not None:
            extra = self.seconds_per_expert[index] * (experts - self.experts[cell])
            seconds = np.maximum(seconds + extra, 0.1 * seconds)
        return seconds

    def prefill_seconds(self, member: str, num_tokens: int) -> float:
        """Seconds of a drafter's first look at a prompt; none where there is nothing to see."""
        if num_tokens < 1:
            return 0.0
        constant, per_token = self.prefill[self.members.index(member)]
        return float(constant + per_token * num_tokens)

    def overhead_seconds(self, chain: tuple[str, ...], num_drafted: int | np.ndarray) -> np.ndarray:
        """Seconds of an iteration outside its forwards."""
        constant, per_token = self.overhead[self.chains.index(chain)]
        return constant + per_token * np.asarray(num_drafted)


def fit_costs(layout: Layout, iterations: Sequence[MeasuredIteration]) -> CostTable:
    """The table of measured iterations.

    Raises:
        ValueError: If no iteration ran without speculation, or a member never ran.
    """
    scaled = at_one_moment(iterations)
    kv_lengths = np.unique([floor(iteration.kv_length) for iteration in iterations])
    members = (layout.target, *layout.followers)
    chains = ((layout.target,), *layout.speculative_chains)
    shape = (len(members), len(ROLES), layout.window, len(kv_lengths))
    table = CostTable(
        members=members,
        chains=chains,
        kv_lengths=kv_lengths,
        baseline=np.zeros(len(kv_lengths)),
        seconds=np.zeros(shape),
        experts=np.zeros(shape),
        seconds_per_expert=np.zeros(len(members)),
        prefill=np.zeros((len(members), 2)),
        overhead=np.zeros((len(chains), 2)),
        spread=np.zeros((len(chains), max(layout.k_values) + 1)),
    )
    for iteration in scaled:  # at one moment there is one baseline for each KV length
        table.baseline[table.bucket(floor(iteration.kv_length))] = iteration.baseline_seconds
    cells = gather(table, scaled)
    for index, name in enumerate(members):
        fill_member(table, index, cells)
        prefills = [f for i in scaled for f in i.forwards if f.is_prefill and f.member == name]
        table.prefill[index] = line([f.num_tokens for f in prefills], [f.seconds for f in prefills])
    for index, chain in enumerate(chains):
        own = [i for i in scaled if i.chain == chain]
        rest = [i.seconds - sum(f.seconds for f in i.forwards) for i in own]
        table.overhead[index] = line([i.num_drafted for i in own], rest)
    fill_spread(table, scaled)
    return table


def floor(kv_length: int) -> int:
    """The KV length that stands for a bucket's."""
    return kv_length // BUCKET * BUCKET


def at_one_moment(iterations: Sequence[MeasuredIteration]) -> list[MeasuredIteration]:
    """The iterations as they would have been measured at the median baseline of their KV length."""
    baselines = defaultdict(list)
    for iteration in iterations:
        baselines[iteration.kv_length // BUCKET].append(iteration.baseline_seconds)
    medians = {bucket: float(np.median(values)) for bucket, values in baselines.items()}
    return [
        scale(iteration, medians[iteration.kv_length // BUCKET] / iteration.baseline_seconds)
        for iteration in iterations
    ]


def scale(iteration: MeasuredIteration, factor: float) -> MeasuredIteration:
    """An iteration with all its seconds multiplied."""
    return dataclasses.replace(
        iteration,
        seconds=iteration.seconds * factor,
        baseline_seconds=iteration.baseline_seconds * factor,
        forwards=tuple(
            dataclasses.replace(f, seconds=f.seconds * factor) for f in iteration.forwards
        ),
    )


Cells = dict[tuple[int, int, int, int], list[tuple[float, float]]]


def gather(table: CostTable, iterations: Iterable[MeasuredIteration]) -> Cells:
    """(seconds, experts) of all forwards but prefills, by cell of the table."""
    cells: Cells = defaultdict(list)
    widest = table.seconds.shape[2]
    for iteration in iterations:
        bucket = int(table.bucket(floor(iteration.kv_length)))
        for forward in iteration.forwards:
            if not forward.is_prefill:
                member = table.members.index(forward.member)
                tokens = min(forward.num_tokens, widest) - 1
                cell = (member, ROLES.index(forward.role), tokens, bucket)
                cells[cell].append((forward.seconds, forward.experts))
    return cells


def fill_member(table: CostTable, member: int, cells: Cells) -> None:
    """Fills a member's part of the table: the slope over unique experts, then means."""
    pairs = [
        np.array(samples) - np.median(samples, axis=0)
        for cell, samples in cells.items()
        if cell[0] == member
    ]
    rise = slope(np.concatenate(pairs)) if pairs else 0.0
    table.seconds_per_expert[member] = rise
    for role in range(len(ROLES)):
        for tokens, bucket in np.ndindex(table.seconds.shape[2:]):
            samples = lookup(cells, (member, role, tokens, bucket), table.seconds.shape)
            seconds, experts = np.array(samples).T if samples else (np.zeros(1), np.zeros(1))
            level = steady_mean(seconds - rise * (experts - experts.mean()))
            table.seconds[member, role, tokens, bucket] = level
            table.experts[member, role, tokens, bucket] = experts.mean()


def lookup(
    cells: Cells, cell: tuple[int, int, int, int], shape: Sequence[int]
) -> list[tuple[float, float]]:
    """Samples of a cell; of all KV lengths where it has few, else of the nearest token count.

    A role that a member never had borrows from its other roles: a forward is a forward.
    """
    member, role, tokens, _ = cell
    if len(cells.get(cell, [])) >= FEW:
        return cells[cell]
    for kind in (role, *range(len(ROLES))):
        for nearby in sorted(range(shape[2]), key=lambda other: abs(other - tokens)):
            found = [
                sample
                for other in range(shape[3])
                for sample in cells.get((member, kind, nearby, other), [])
            ]
            if found:
                return found
    return []


def steady_mean(values: np.ndarray) -> float:
    """The mean, values far from the median pulled in: sums must hold, hiccups must not count."""
    centre = np.median(values)
    limit = OUTLYING * np.median(np.abs(values - centre))
    return float(np.clip(values, centre - limit, centre + limit).mean())


def slope(deviations: np.ndarray) -> float:
    """Seconds per unique expert, at least 0, from deviations of (seconds, experts), [n, 2].

    Least squares after the largest tenth of the residuals was left out.
    """
    rise = 0.0
    for _ in range(3):
        residuals = np.abs(deviations[:, 0] - rise * deviations[:, 1])
        seconds, experts = deviations[residuals <= np.percentile(residuals, 90.0) + 1e-12].T
        weight = float((experts**2).sum())
        if weight < 1e-9:
            return 0.0
        rise = max(float((experts * seconds).sum()) / weight, 0.0)
    return rise


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Constant and slope (at least 0) of a line through points, outliers pulled in; zeros if none.

    Least squares, twice: the second time without the largest residuals of the first.
    """
    if not len(x):
        return 0.0, 0.0
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    for _ in range(2):
        centred = xs - xs.mean()
        weight = float((centred**2).sum())
        rise = max(float((centred * ys).sum()) / weight, 0.0) if weight > 1e-9 else 0.0
        constant = steady_mean(ys - rise * xs)
        residuals = np.abs(ys - constant - rise * xs)
        keep = residuals <= OUTLYING * np.median(residuals) + 1e-12
        xs, ys = xs[keep], ys[keep]
    return constant, rise


def fill_spread(table: CostTable, iterations: Sequence[MeasuredIteration]) -> None:
    """Fills in how far measured iterations lie from predicted ones."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for iteration in iterations:
        predicted = predict(table, iteration)
        cell = (table.chains.index(iteration.chain), iteration.num_drafted)
        found[cell].append(np.log(iteration.seconds / predicted))
    everything = [value for values in found.values() for value in values]
    for chain, drafted in np.ndindex(table.spread.shape):
        own = found.get((chain, drafted), [])
        table.spread[chain, drafted] = robust_deviation(own if len(own) >= FEW else everything)


def robust_deviation(values: Sequence[float]) -> float:
    """Standard deviation of a normal law with the values' interquartile range."""
    low, high = np.percentile(values, [25.0, 75.0])
    return float(high - low) / 1.349


def predict(table: CostTable, iteration: MeasuredIteration) -> float:
    """Seconds that the table gives an iteration whose forwards are known."""
    bucket = table.bucket(floor(iteration.kv_length))
    total = float(table.overhead_seconds(iteration.chain, iteration.num_drafted))
    for forward in iteration.forwards:
        if forward.is_prefill:
            total += table.prefill_seconds(forward.member, forward.num_tokens)
        else:
            total += float(
                table.forward_seconds(
                    forward.member,
                    forward.role,
                    forward.num_tokens,
                    bucket,
                    forward.experts,
                )
            )
    return total
