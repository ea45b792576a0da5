"""Plans: what is legal, what they are called, and when they fit."""

import dataclasses

import numpy as np
import pytest

from specgym.engine.types import DecodeRequest, ForwardCost, Plan, SamplingParams, StepResult


@pytest.mark.parametrize(
    ("plan", "name", "num_verifiers", "max_tokens"),
    [
        (Plan(("target",), 0), "none", 0, 1),
        (Plan(("ngram", "target"), 4), "ngram@4", 1, 5),
        (Plan(("small", "mid", "target"), 2), "small>mid@2", 2, 4),
        (Plan(("a", "b", "c", "target"), 1), "a>b>c@1", 3, 4),
    ],
)
def test_a_plan_has_a_name_and_emits_k_and_one_token_per_verifier(
    plan, name, num_verifiers, max_tokens
):
    assert plan.name == name
    assert plan.num_verifiers == num_verifiers
    assert plan.max_tokens == max_tokens
    assert plan.without_speculation() == Plan(("target",), 0)


@pytest.mark.parametrize("chain", [("ngram", "target"), ("draft", "mid", "target")])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_plan_fits_where_it_cannot_overrun_what_remains(chain, k):
    plan = Plan(chain, k)
    needed = k + len(chain) - 1
    for remaining in range(12):
        expected = plan if needed <= remaining else Plan(("target",), 0)
        assert plan.fit(remaining) == expected
    assert Plan(("target",), 0).fit(1) == Plan(("target",), 0)


@pytest.mark.parametrize(
    ("chain", "k", "field"),
    [
        ((), 0, "chain"),
        (("a", "a"), 1, "chain"),
        (("target",), 1, "k"),
        (("a", "target"), 0, "k"),
        (("a", "target"), -1, "k"),
    ],
)
def test_plans_that_make_no_sense_are_refused(chain, k, field):
    with pytest.raises(ValueError, match=rf"^plan\.{field}: must"):
        Plan(chain, k)


def test_a_step_result_sums_over_rows_and_levels():
    costs = [
        ForwardCost("draft", "draft", 1, 8, 0, 0.5),
        ForwardCost("draft", "catchup", 8, 8, 8, 0.25),
        ForwardCost("target", "verify", 3, 8, 0, 2.0),
        ForwardCost("draft", "draft", 1, 8, 0, 1.0),
    ]
    plan = Plan(("draft", "mid", "target"), 2)
    result = StepResult(
        asked=plan,
        executed=plan,
        reason="",
        tokens=((1, 2, 3), (), (4,)),
        proposed_per_level=(5, 4),
        accepted_per_level=(3, 2),
        seconds=4.0,
        forwards=tuple(costs),
        divergence={},
        draft_entropy=0.0,
        finish_reasons=(None, "eos", None),
    )
    assert (result.num_tokens, result.num_drafted, result.num_accepted) == (4, 5, 2)
    assert result.role_seconds == {"draft": 1.5, "verify": 2.0, "catchup": 0.25}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_k", 2.5),
        ("top_k", "8"),
        ("top_k", True),
        ("top_k", -1),
        ("top_p", "half"),
        ("top_p", None),
        ("seed", 1.5),
        ("seed", "x"),
        ("seed", 2**64),
    ],
)
def test_sampling_of_another_type_is_refused_with_field_rule_and_value(field, value):
    with pytest.raises(ValueError, match=rf"^{field}: must be a .*; got ") as error:
        SamplingParams(**{field: value})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 2.5),
        ("max_new_tokens", "8"),
        ("max_new_tokens", True),
        ("max_new_tokens", None),
        ("max_new_tokens", -1),
        ("prompt", "text"),
        ("prompt", None),
        ("prompt", (1, 2.0)),
        ("prompt", (True,)),
        ("prompt", 3),
        ("sampling", {"temperature": 1.0}),
        ("eos_ids", "end"),
        ("eos_ids", 2),
        ("stop", None),
        ("stop", "end"),
        ("stop", ("end", 1)),
        ("stop", ("",)),
    ],
)
def test_a_request_of_another_type_is_refused_with_field_rule_and_value(field, value):
    with pytest.raises(ValueError, match=rf"^{field}: must be .*; got ") as error:
        DecodeRequest(**{"prompt": (1,), "max_new_tokens": 4, field: value})
    assert repr(value) in str(error.value)


def test_numbers_of_numpy_become_pythons():
    ours = SamplingParams(np.float32(0.5), np.int64(3), np.float64(0.9), np.uint8(7))
    assert ours == SamplingParams(0.5, 3, 0.9, 7)
    assert [type(value) for value in dataclasses.astuple(ours)] == [float, int, float, int]
    asked = DecodeRequest(np.array([1, 2]), np.int32(5), eos_ids=[np.int64(2)], stop=["a"])
    assert asked == DecodeRequest((1, 2), 5, eos_ids=frozenset({2}), stop=("a",))
    assert {type(token) for token in (*asked.prompt, asked.max_new_tokens)} == {int}
