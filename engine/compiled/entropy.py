"""The entropy of laws behind logits, by one thread and in two passes.

torch's own log-softmax wakes all of its threads, which then go on looking for work for
milliseconds, on the processors that the next forward needs: a small drafter took twice as long.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types as numba_types

from specgym.engine.compiled.team import compiled_function
from specgym.engine.compiled.vectors import (
    LANES,
    add,
    exp,
    larger,
    largest_lane,
    load,
    load_f32,
    multiply,
    splat,
    subtract,
    sum_lanes,
)

types: Any = numba_types  # what it calls is overloaded beyond what its stubs say
LOWEST = -3.0e38
LEAST = -1e4  # a token of no mass has a log of minus infinity, and 0 times that is not a number


def measure_entropy(logits, count):
    """Return the entropy in nats of the law behind float32 logits."""
    whole = count - count % LANES
    top = splat(types.float32(LOWEST))
    for i in range(0, whole, LANES):
        top = larger(load(logits + 4 * i), top)
    largest = largest_lane(top)
    for i in range(whole, count):
        largest = max(largest, load_f32(logits + 4 * i))
    shift, least = splat(largest), splat(types.float32(LEAST))
    masses, moments = splat(types.float32(0.0)), splat(types.float32(0.0))
    for i in range(0, whole, LANES):
        scores = larger(subtract(load(logits + 4 * i), shift), least)
        mass = exp(scores)
        masses = add(masses, mass)
        moments = add(moments, multiply(mass, scores))
    total, moment = types.float64(sum_lanes(masses)), types.float64(sum_lanes(moments))
    for i in range(whole, count):
        score = max(load_f32(logits + 4 * i) - largest, LEAST)
        mass = math.exp(score)
        total += mass
        moment += mass * score
    return math.log(total) - moment / total


def mean_entropy(logits: np.ndarray) -> float:
    """Mean entropy in nats of the laws behind float32 logits [..., V], at temperature 1."""
    rows = np.ascontiguousarray(logits, np.float32).reshape(-1, logits.shape[-1])
    measure = compiled_function(measure_entropy, "float64(int64, int64)")
    first, step, count = rows.ctypes.data, rows.strides[0], rows.shape[1]
    return sum(measure(first + step * row, count) for row in range(len(rows))) / len(rows)
