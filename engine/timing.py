"""Clocks that time forwards and iterations, and the baseline that utility is measured against."""

from __future__ import annotations

import abc
import dataclasses
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

SECONDS_PER_PARAMETER = 1e-10  # scale of the counting clock only; no measurement
TICKS_PER_SECOND = 2**40  # of the counting clock; a power of two, so that floats add up exactly


class Clock(abc.ABC):
    """Where seconds come from; a clock of one's own says ``now`` and what a forward charges."""

    deterministic = True

    @abc.abstractmethod
    def now(self) -> float:
        """Seconds since some fixed moment; work issued before is finished."""

    @abc.abstractmethod
    def charge(self, member_cost: float, num_rows: int) -> None:
        """Tells the clock that a member's forward of ``num_rows`` rows ran."""

    def stamp(self) -> Any:
        """A mark at this point of the work, for ``between``; never waits for the device."""
        return self.now()

    def between(self, first: Any, last: Any) -> float:
        """Seconds from one mark to another."""
        return last - first

    def skip(self, seconds: float) -> None:  # noqa: B027 (a modelled clock has nothing to skip)
        """Takes out time that just went into setting up, once and for all: captures."""


@dataclasses.dataclass(frozen=True)
class DeviceMark:
    """A moment in the device's queue of work.

    Attributes:
        event: The recorded event.
        skipped: Seconds the clock had skipped by then.
    """

    event: Any
    skipped: float


class WallClock(Clock):
    """Real time, synchronised with the device so that asynchronous kernels are counted.

    Forwards inside an iteration are timed by events in the device's queue, which nobody waits
    for: only ``now``, at the iteration's borders, does.
    """

    deterministic = False

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)
        self.synchronizes = self.device.type == "cuda"
        self.skipped = 0.0

    def now(self) -> float:
        """Seconds of the performance counter, after the device has finished its work."""
        if self.synchronizes:
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - self.skipped

    def charge(self, member_cost: float, num_rows: int) -> None:
        """Nothing: real time passes by itself."""

    def stamp(self) -> Any:
        """An event on CUDA, the time elsewhere."""
        if not self.synchronizes:
            return time.perf_counter() - self.skipped
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return DeviceMark(event, self.skipped)

    def between(self, first: Any, last: Any) -> float:
        """Seconds between two stamps, without what was skipped between them.

        Behind the iteration's border the device has passed them, and nobody waits.
        """
        if not self.synchronizes:
            return last - first
        last.event.synchronize()
        return first.event.elapsed_time(last.event) / 1e3 - (last.skipped - first.skipped)

    def skip(self, seconds: float) -> None:
        """Turns the clock back."""
        self.skipped += seconds


class CountingClock(Clock):
    """Deterministic time: every forward costs what a simple model of it says.

    A forward of n rows costs ``member_cost * (1 + per_row * (n - 1))`` seconds in whole ticks: sums
    and differences are exact, so results depend on the decisions alone, not on what the clock
    showed at the start. For tests, checkers and reproducible training runs.

    Args:
        per_row: Relative cost of each row after the first.
    """

    deterministic = True

    def __init__(self, per_row: float = 0.05):
        self.per_row = per_row
        self.seconds = 0.0

    def now(self) -> float:
        """Seconds charged so far."""
        return self.seconds

    def charge(self, member_cost: float, num_rows: int) -> None:
        """Adds the modelled cost of a forward, at least a tick."""
        seconds = member_cost * (1.0 + self.per_row * (num_rows - 1))
        self.seconds += max(round(seconds * TICKS_PER_SECOND), 1) / TICKS_PER_SECOND


class Baseline:
    """Seconds of an iteration without speculation, by attended KV length.

    Samples go into buckets of KV length; a bucket's estimate is the median of its latest samples,
    so that a hiccup of the machine cannot move it. One baseline is shared by all controllers
    that are compared, which makes it the same for everyone.

    Args:
        every: Iterations after which the baseline is due for a new probe.
        num_samples: Forwards of one probe.
        bucket: Width of a bucket in KV slots.
        window: Latest samples of a bucket that count.
    """

    def __init__(self, every: int = 100, num_samples: int = 3, bucket: int = 64, window: int = 15):
        self.every = every
        self.num_samples = num_samples
        self.bucket = bucket
        self.num_steps = 0
        self.window = window
        self.samples: dict[int, list[float]] = {}
        self.medians: dict[int, float] = {}

    def is_due(self, kv_length: int) -> bool:
        """Whether a probe is wanted: an unknown bucket, or ``every`` iterations since the last."""
        return kv_length // self.bucket not in self.samples or self.num_steps >= self.every

    def count_step(self) -> None:
        """Counts one iteration towards the next probe."""
        self.num_steps += 1

    def add(self, kv_length: int, seconds: list[float]) -> None:
        """Takes the samples of one probe at this KV length."""
        bucket = kv_length // self.bucket
        self.restore({bucket: (self.samples.get(bucket, []) + seconds)[-self.window :]})
        self.num_steps = 0

    def restore(self, samples: Mapping[int, list[float]]) -> None:
        """Takes these as the buckets' samples: what ``samples`` of another baseline holds."""
        self.samples.update(samples)
        self.medians |= {bucket: statistics.median(samples[bucket]) for bucket in samples}

    def seconds(self, kv_length: int) -> float:
        """The baseline at this KV length: its bucket's median, else the nearest bucket's."""
        assert self.medians, "the baseline was asked for before its first probe"
        wanted = kv_length // self.bucket
        if wanted in self.medians:
            return self.medians[wanted]
        return self.medians[min(self.medians, key=lambda bucket: abs(bucket - wanted))]
