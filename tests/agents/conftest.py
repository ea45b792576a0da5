"""A small policy of random weights."""

import numpy as np
import pytest

from specgym.agents.policy import Policy

PLANS = (
    (("target",), 0),
    *((("ngram", "target"), k) for k in (1, 2, 4)),
    *((("draft", "mid", "target"), k) for k in (1, 2, 4)),
)
FEATURES = ("a", "b", "c[ngram>target]", "d", "e")


@pytest.fixture
def make_policy():
    """Makes a policy of two layers; arguments can be changed."""

    def make(**changes):
        rng = np.random.default_rng(0)
        sizes = ((8, len(FEATURES)), (len(PLANS), 8))
        settings = {
            "plans": PLANS,
            "features": FEATURES,
            "features_version": 2,
            "mean": rng.normal(size=len(FEATURES)),
            "scale": rng.uniform(0.5, 2.0, len(FEATURES)),
            "clip": 3.0,
            "layers": tuple((rng.normal(size=size), rng.normal(size=size[0])) for size in sizes),
            "about": {"algorithm": "none"},
        }
        return Policy(**settings | changes)

    return make
