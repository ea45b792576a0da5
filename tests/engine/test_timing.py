"""Clocks and the baseline."""

import statistics
import time

import pytest
import torch

from specgym.engine.decoding import decode_step, start
from specgym.engine.forward.capture import EagerCapture
from specgym.engine.forward.graphs import GraphRunner
from specgym.engine.testing import random_plans, tiny_pool
from specgym.engine.timing import Baseline, Clock, CountingClock, WallClock
from specgym.engine.types import DecodeRequest, Plan


def timeline(pool, seed, clock):
    """When every step of a request ended."""
    state, ends = start(pool, [DecodeRequest((1, 2, 1), 40)], clock), []
    plans = random_plans(pool, seed)
    while not state.is_finished:
        decode_step(pool, state, plans(state), clock)
        ends.append(clock.now())
    return ends


def test_counting_clock_is_deterministic_and_depends_on_the_decisions():
    pool = tiny_pool()
    first, again = timeline(pool, 1, CountingClock()), timeline(tiny_pool(), 1, CountingClock())
    assert first == again
    assert first == sorted(first)
    assert first[0] > 0
    assert timeline(pool, 2, CountingClock()) != first


def test_counting_clock_charges_each_row_after_the_first_in_part():
    clock = CountingClock(per_row=0.1)
    clock.charge(2.0, 1)
    assert clock.now() == pytest.approx(2.0)
    clock.charge(2.0, 8)
    assert clock.now() == pytest.approx(2.0 + 2.0 * 1.7)


def test_a_smaller_member_costs_less_on_the_counting_clock():
    pool, clock = tiny_pool(noise=(0.1,)), CountingClock()
    pool.model("draft").num_active_parameters //= 10
    state = start(pool, [DecodeRequest((1, 2, 1), 40)], clock)
    result = decode_step(pool, state, Plan(("draft", "target"), 1), clock)
    drafted, verified = result.role_seconds["draft"], result.role_seconds["verify"]
    assert drafted == pytest.approx(verified / 10, rel=0.2)


def test_wall_clock_goes_with_real_time_and_charges_nothing():
    clock = WallClock()
    before = clock.now()
    clock.charge(1e9, 8)
    time.sleep(0.01)
    assert 0.01 <= clock.now() - before < 1e6
    assert not clock.deterministic
    assert not clock.synchronizes
    assert WallClock("cuda:0").synchronizes


def test_baseline_is_the_median_of_the_buckets_samples():
    baseline = Baseline(bucket=64)
    baseline.add(70, [3.0, 1.0, 100.0])
    assert baseline.seconds(70) == 3.0
    assert baseline.seconds(64) == baseline.seconds(127) == 3.0
    baseline.add(127, [2.0, 2.0])
    assert baseline.seconds(100) == statistics.median([3.0, 1.0, 100.0, 2.0, 2.0])


def test_baseline_forgets_all_but_the_latest_samples():
    baseline = Baseline(window=4)
    baseline.add(10, [9.0, 9.0, 9.0])
    baseline.add(10, [1.0, 2.0, 3.0, 4.0])
    assert baseline.seconds(10) == 2.5


def test_baseline_of_an_unknown_length_is_the_nearest_buckets():
    baseline = Baseline(bucket=64)
    baseline.add(0, [1.0])
    baseline.add(640, [5.0])
    assert baseline.seconds(130) == 1.0
    assert baseline.seconds(500) == 5.0
    assert baseline.seconds(10_000) == 5.0


def test_baseline_is_due_in_a_new_bucket_and_after_so_many_steps():
    baseline = Baseline(every=3, bucket=64)
    assert baseline.is_due(10)
    assert baseline.is_due(10)  # asking does not make it known
    baseline.add(10, [1.0])
    assert not baseline.is_due(63)
    assert baseline.is_due(64)
    for _ in range(2):
        baseline.count_step()
    assert not baseline.is_due(10)
    baseline.count_step()
    assert baseline.is_due(10)
    baseline.add(10, [1.0])
    assert not baseline.is_due(10)


def test_baseline_before_its_first_probe_is_our_fault():
    baseline = Baseline()
    baseline.is_due(10)
    with pytest.raises(AssertionError, match="before its first probe"):
        baseline.seconds(10)


def test_a_clock_of_ones_own_says_the_time_and_stamps_with_it():
    class Ticking(Clock):
        seconds = 0.0

        def now(self):
            return self.seconds

        def charge(self, member_cost, num_rows):
            self.seconds += num_rows

    clock = Ticking()
    first = clock.stamp()
    clock.charge(1.0, 8)
    clock.skip(3.0)  # what is modelled has nothing to skip
    assert clock.between(first, clock.stamp()) == 8.0
    with pytest.raises(TypeError, match="abstract"):
        Clock()


def test_skipped_seconds_have_not_been():
    clock = WallClock()
    before, first = clock.now(), clock.stamp()
    clock.skip(1000.0)
    assert -1000.0 <= clock.now() - before < -900.0
    assert -1000.0 <= clock.between(first, clock.stamp()) < -900.0


class FakeEvent:
    """A device's event that shows the time of a scripted device, in milliseconds."""

    device_time = 0.0
    waits = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        assert stream == "the stream"
        self.time = FakeEvent.device_time

    def synchronize(self):
        FakeEvent.waits += 1

    def elapsed_time(self, other):
        return other.time - self.time


def test_on_cuda_events_time_forwards_and_only_the_borders_wait(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream")
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock = WallClock("cuda")
    first = clock.stamp()
    FakeEvent.device_time = 2500.0
    clock.skip(1.0)
    last = clock.stamp()
    assert not waits
    assert FakeEvent.waits == 0
    assert clock.between(first, last) == pytest.approx(1.5)
    clock.now()
    assert len(waits) == 1


def test_a_capture_is_in_no_iterations_seconds():
    """Seconds that a member says it spent on setting up are taken off the clock."""

    def capture(forward, inputs):
        member.setup_seconds += 1000.0
        return EagerCapture()(forward, inputs)

    pool, clock = tiny_pool(noise=()), WallClock()
    member = pool.model("target")
    state = start(pool, [DecodeRequest((1, 2, 1), 8)], clock)
    member.graphs = GraphRunner(member, capture)
    result = decode_step(pool, state, Plan(("target",), 0), clock)
    assert -1000.0 <= result.seconds < -900.0
    assert -1000.0 <= result.forwards[0].seconds < -900.0
