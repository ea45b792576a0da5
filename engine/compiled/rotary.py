"""Rotary factors that are the same bits on every processor.

Sines come from float64 additions and multiplications alone, which every processor rounds alike;
libraries' own differ in the last place from one instruction set to another.

Legend: S positions, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

QUARTER_HIGH = 1.5707963267341256  # pi / 2 in 33 bits: small multiples are exact
QUARTER_LOW = 6.077100506506192e-11
STATIC_TYPES = {"default", "linear", "llama3", "yarn"}  # factors depend on the position alone


def frequencies(rotary: Any) -> np.ndarray:
    """The inverse frequencies of transformers' rotary embedding, float32 [D / 2].

    The plain ones are computed anew, since a library's power may differ between processors.
    """
    given = rotary.inv_freq.detach().float().cpu().numpy()
    parameters = getattr(rotary.config, "rope_parameters", None) or {}
    theta = parameters.get("rope_theta", getattr(rotary.config, "rope_theta", None))
    if getattr(rotary, "rope_type", "default") != "default" or theta is None:
        return given
    size = 2 * len(given)
    exact = [1.0 / theta ** (2 * i / size) for i in range(len(given))]
    own = np.array(exact, dtype=np.float32)
    return own if np.allclose(own, given, rtol=1e-6, atol=0.0) else given


def make_table(rotary: Any, num_positions: int) -> np.ndarray:
    """Cosines and sines of positions from 0 on, float32 [S, 2, D / 2]."""
    steps = np.arange(num_positions, dtype=np.float32)
    angles = (steps[:, None] * frequencies(rotary)).astype(np.float64)
    cosines, sines = cosine_and_sine(angles)
    table = np.stack([cosines, sines], axis=1) * float(getattr(rotary, "attention_scaling", 1.0))
    return np.ascontiguousarray(table, dtype=np.float32)


def cosine_and_sine(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of angles >= 0 up to some millions, float64, within 1e-13."""
    quarters = np.floor(angles / (math.pi / 2) + 0.5)
    rest = (angles - quarters * QUARTER_HIGH) - quarters * QUARTER_LOW
    square = rest * rest
    sine, cosine = np.zeros_like(rest), np.zeros_like(rest)
    for n in range(8, -1, -1):  # Taylor series to rest**17
        sign = -1.0 if n % 2 else 1.0
        sine = sine * square + sign / math.factorial(2 * n + 1)
        cosine = cosine * square + sign / math.factorial(2 * n)
    sine = sine * rest
    turn = quarters.astype(np.int64) % 4
    cosines = np.select([turn == 0, turn == 1, turn == 2], [cosine, -sine, -cosine], sine)
    sines = np.select([turn == 0, turn == 1, turn == 2], [sine, cosine, -sine], -cosine)
    return cosines, sines


def is_static(rotary: Any) -> bool:
    """Whether the factors depend on the position alone (not on how long a text is)."""
    has_one_set = isinstance(getattr(rotary, "inv_freq", None), torch.Tensor)
    return has_one_set and rotary.rope_type in STATIC_TYPES
