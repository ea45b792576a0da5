"""TensorBoard's tags about a mixture's experts."""

import pytest

from specgym.engine.forward.experts import ExpertShape
from specgym.runs.tensorboard import LAYOUT, step_scalars

STEP = {
    "tokens": 1,
    "total_seconds": 1.0,
    "iter_seconds": 0.1,
    "baseline_seconds": 0.1,
    "chain": "target",
    "k": 0,
    "accepted": 0,
    "executed_action": 0,
    "draft_seconds": 0.0,
    "verify_seconds": 0.1,
    "controller_seconds": 0.0,
    "proposed_per_level": [],
    "unique_experts": 1.0,
}
STAGED = STEP | {"chain": "a>b>target", "proposed_per_level": [4, 2], "unique_experts": 1.75}
MIXTURE_TAGS = {"moe/unique_experts", "moe/expected_unique"}


def test_a_dense_target_has_no_such_tags():
    assert not MIXTURE_TAGS & step_scalars([STEP]).keys()


def test_unique_experts_are_absolute_and_expected_ones_go_by_what_the_target_was_fed():
    shape = ExpertShape(8, 2)
    scalars = step_scalars([STEP, STAGED], shape)
    assert scalars["moe/unique_experts"] == pytest.approx((2.0 + 3.5) / 2)
    expected = (shape.expected_unique(1) + shape.expected_unique(3)) / 2
    assert scalars["moe/expected_unique"] == pytest.approx(expected)
    assert expected < (2 + 6) / 2


def test_the_layout_shows_them_in_one_chart():
    charts = [set(tags) for group in LAYOUT.values() for _, tags in group.values()]
    assert MIXTURE_TAGS in charts
