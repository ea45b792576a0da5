"""The plan table: names, look-up, checks, whose outcome an iteration is."""

import pytest

from specgym.baselines.plans import (
    charged_action,
    check_plans,
    check_state,
    find_plan,
    plan_name,
)

NONE = (("target",), 0)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (NONE, "none"),
        ((("ngram", "target"), 4), "ngram@4"),
        ((("small", "mid", "target"), 2), "small>mid@2"),
    ],
)
def test_name(plan, name):
    assert plan_name(plan) == name


def test_find(all_plans):
    assert find_plan(all_plans, "none") == 0
    assert all_plans[find_plan(all_plans, "small>mid@3")] == (("small", "mid", "target"), 3)


def test_unknown_name_lists_the_names(ngram_plans):
    with pytest.raises(ValueError, match=r"none, ngram@1, .*ngram@6, got 'ngram@5'"):
        find_plan(ngram_plans, "ngram@5")


@pytest.mark.parametrize(
    "plans",
    [
        [],
        [(("ngram", "target"), 1)],
        [(("target",), 1)],
        [NONE, (("ngram", "target"), 0)],
        [NONE, (("target",), 0)],
        [NONE, (("ngram", "other"), 1)],
        [NONE, (("ngram", "target"), 1), (("ngram", "target"), 1)],
    ],
)
def test_bad_table_is_refused(plans):
    with pytest.raises(ValueError, match=r"plans\[\d\] must"):
        check_plans(plans)


def test_lists_become_tuples():
    assert check_plans([[["target"], 0], [["ngram", "target"], 2]]) == (
        NONE,
        (("ngram", "target"), 2),
    )


@pytest.mark.parametrize(
    ("reason", "executed", "charged"),
    [("", 3, 3), ("masked", 0, 0), ("budget", 0, 0), ("context", 0, 0), ("no_proposal", 0, 3)],
)
def test_charged_action(reason, executed, charged):
    assert charged_action(3, {"reason": reason, "executed_action": executed}) == charged


def test_state_of_another_table_is_refused(ngram_plans, all_plans):
    state = {"plans": [plan_name(plan) for plan in all_plans]}
    check_state(state, all_plans)
    with pytest.raises(ValueError, match="state must come from a controller over the plans none"):
        check_state(state, ngram_plans)
