"""Test-and-set on utilities that are stated per plan."""

import itertools

import numpy as np
import pytest

from specgym.baselines import TestAndSet
from specgym.baselines.plans import plan_name

OBSERVATION = np.zeros(1, dtype=np.float32)


def runs_of(actions):
    """Returns (action, how many in a row)."""
    return [(action, len(list(group))) for action, group in itertools.groupby(actions)]


def play(controller, plans, utilities, num_steps, mask=None, begins=True):
    """Lets a controller run where every iteration of a plan has a stated utility.

    Args:
        utilities: by plan name; changed while running where it is a function of the step.
    """
    mask = np.ones(len(plans), dtype=bool) if mask is None else mask
    if begins:
        controller.begin({"request_id": "r", "num_prompt": 1, "max_new_tokens": num_steps})
    actions = []
    for _ in range(num_steps):
        action = controller.act(OBSERVATION, mask)
        controller.observe(action, 0.0, info_of(plans, action, utilities))
        actions.append(action)
    return actions


def info_of(plans, action, utilities, **changes):
    """Returns an info whose utility is the stated one, at two seconds of baseline."""
    utility = utilities.get(plan_name(plans[action]), 1.0)
    info = {
        "tokens": 3,
        "drafted": plans[action][1],
        "executed_action": action,
        "reason": "",
        "iter_seconds": 3 * 2.0 / utility,
        "draft_seconds": 0.0,
        "catchup_seconds": 0.0,
        "baseline_seconds": 2.0,
        "forwards": [
            {"member": "target", "role": "verify", "num_tokens": plans[action][1] + 1, "seconds": 1}
        ],
    }
    return {**info, **changes}


def test_climbs_and_sets_the_best(ngram_plans):
    utilities = {"ngram@1": 1.2, "ngram@2": 1.5, "ngram@3": 1.2}
    actions = play(TestAndSet(ngram_plans), ngram_plans, utilities, 28)
    assert runs_of(actions) == [(1, 4), (2, 4), (3, 4), (2, 16)]


def test_next_test_starts_from_the_best(ngram_plans):
    utilities = {"ngram@1": 1.0, "ngram@2": 1.5, "ngram@3": 1.2, "ngram@4": 1.0}
    controller = TestAndSet(ngram_plans)
    play(controller, ngram_plans, utilities, 28)
    actions = play(controller, ngram_plans, utilities, 28, begins=False)
    assert runs_of(actions) == [(2, 4), (3, 4), (1, 4), (2, 16)]


def test_at_most_four_trials(ngram_plans):
    utilities = {f"ngram@{k}": 1.0 + 0.3 * k for k in (1, 2, 3, 4, 6)}
    actions = play(TestAndSet(ngram_plans), ngram_plans, utilities, 32)
    assert runs_of(actions) == [(1, 4), (2, 4), (3, 4), (4, 20)]


def test_early_exit_and_back_off(ngram_plans):
    actions = play(TestAndSet(ngram_plans), ngram_plans, {"ngram@1": 0.9}, 4 * 7 + 16 * 95)
    expected = [16, 32, 64, 128, 256, 512, 512]
    assert runs_of(actions) == [run for zeros in expected for run in ((1, 4), (0, zeros))]


def test_early_exit_holds_even_where_another_k_did_better(ngram_plans):
    controller = TestAndSet(ngram_plans)
    play(controller, ngram_plans, {"ngram@1": 1.2, "ngram@2": 1.5, "ngram@3": 1.2}, 28)
    utilities = {"ngram@3": 1.2, "ngram@2": 1.4, "ngram@1": 0.9}
    actions = play(controller, ngram_plans, utilities, 28, begins=False)
    assert runs_of(actions) == [(2, 4), (3, 4), (1, 4), (0, 16)]


def test_no_trial_worth_it_is_no_speculation(ngram_plans):
    controller = TestAndSet(ngram_plans)
    play(controller, ngram_plans, {"ngram@1": 1.2, "ngram@2": 1.5, "ngram@3": 1.2}, 28)
    utilities = {"ngram@2": 0.95, "ngram@1": 1.0, "ngram@3": 0.95}
    utilities["ngram@1"] = 0.99
    actions = play(controller, ngram_plans, utilities, 24, begins=False)
    assert runs_of(actions) == [(2, 4), (1, 4), (0, 16)]


def test_re_enabling_resets_the_back_off(ngram_plans):
    controller = TestAndSet(ngram_plans)
    bad, good = {"ngram@1": 0.9}, {"ngram@1": 1.5}
    play(controller, ngram_plans, bad, 20 + 36)
    actions = play(controller, ngram_plans, good, 4 + 4 + 16, begins=False)
    assert runs_of(actions) == [(1, 4), (2, 4), (1, 16)]
    actions = play(controller, ngram_plans, bad, 20, begins=False)
    assert runs_of(actions) == [(1, 4), (0, 16)]


def test_a_request_starts_with_a_test_and_its_own_back_off(ngram_plans):
    controller = TestAndSet(ngram_plans)
    play(controller, ngram_plans, {"ngram@1": 0.9}, 20 + 10)
    actions = play(controller, ngram_plans, {"ngram@1": 0.9}, 20)
    assert runs_of(actions) == [(1, 4), (0, 16)]


@pytest.mark.parametrize(("scope", "start"), [("stream", 2), ("request", 1)])
def test_scope_of_the_best_plan(ngram_plans, scope, start):
    controller = TestAndSet(ngram_plans, scope=scope)
    play(controller, ngram_plans, {"ngram@1": 1.2, "ngram@2": 1.5, "ngram@3": 1.2}, 15)
    assert play(controller, ngram_plans, {}, 1) == [start]


def test_an_unfinished_trial_is_dropped_at_the_end_of_a_request(ngram_plans):
    controller = TestAndSet(ngram_plans)
    play(controller, ngram_plans, {"ngram@1": 0.1}, 3)
    actions = play(controller, ngram_plans, {"ngram@1": 1.5, "ngram@2": 1.0}, 9)
    assert runs_of(actions) == [(1, 4), (2, 4), (1, 1)]


def test_k_max(ngram_plans):
    utilities = {f"ngram@{k}": 1.0 + 0.3 * k for k in (1, 2, 3, 4, 6)}
    actions = play(TestAndSet(ngram_plans, k_max=2), ngram_plans, utilities, 24)
    assert runs_of(actions) == [(1, 4), (2, 20)]


def test_a_trial_leaves_out_catch_up(ngram_plans):
    controller = TestAndSet(ngram_plans, max_trials=1)
    controller.begin({})
    for _ in range(4):
        action = controller.act(OBSERVATION, np.ones(6, dtype=bool))
        late = info_of(ngram_plans, action, {"ngram@1": 0.5}, catchup_seconds=8.0)  # of 12
        controller.observe(action, 0.0, late)
    assert controller.act(OBSERVATION, np.ones(6, dtype=bool)) == 1


@pytest.mark.parametrize(("reason", "length"), [("budget", 4), ("no_proposal", 3)])
def test_only_iterations_of_the_plan_count_for_a_trial(ngram_plans, reason, length):
    controller = TestAndSet(ngram_plans)
    controller.begin({})
    controller.act(OBSERVATION, np.ones(6, dtype=bool))
    turned_down = info_of(ngram_plans, 0, {}, reason=reason)
    controller.observe(1, 0.0, turned_down)
    utilities = {"ngram@1": 1.2, "ngram@2": 1.5}
    actions = play(controller, ngram_plans, utilities, length + 1, begins=False)
    assert runs_of(actions) == [(1, length), (2, 1)]


def test_own_baseline_is_measured_at_k_zero_and_refreshed(ngram_plans):
    controller = TestAndSet(ngram_plans, own_baseline=True, baseline_refresh=40)
    # The environment's probe says 2 seconds, K = 0 takes 6: the controller's own t0 counts.
    utilities = {"none": 1.0, "ngram@1": 0.5, "ngram@2": 0.5}
    actions = play(controller, ngram_plans, utilities, 4 + 8 + 16 + 8 + 16 + 4 + 1)
    test_and_set = [(1, 4), (2, 4), (1, 16)]
    assert runs_of(actions) == [(0, 4), *test_and_set[:2], (1, 20), (2, 4), (1, 16), (0, 4), (1, 1)]


def test_fixed_chain(all_plans):
    controller = TestAndSet(all_plans, chains="fixed", chain="small>target")
    actions = play(controller, all_plans, {"small@1": 1.5, "ngram@1": 9.0}, 100)
    assert {all_plans[action][0] for action in actions} == {("small", "target")}


def test_climb_closes_a_losing_chain_and_goes_on(all_plans):
    plans = [plan for plan in all_plans if len(plan[0]) < 3]
    actions = play(TestAndSet(plans), plans, {"ngram@1": 0.8, "small@1": 1.4, "small@2": 1.1}, 28)
    names = [plan_name(plans[action]) for action, _ in runs_of(actions)]
    assert names == ["ngram@1", "small@1", "small@2", "small@1"]


def test_climb_with_no_chain_worth_it(all_plans):
    utilities = {plan_name(plan): 0.8 for plan in all_plans[1:]}
    actions = play(TestAndSet(all_plans), all_plans, utilities, 28)
    assert runs_of(actions)[-1] == (0, 16)
    assert all(all_plans[action][1] == 1 for action in actions[:12])


def test_ladder_is_ordered_by_predicted_cost(all_plans, make_decoder, drive):
    # A lookup is free, a draft forward of small costs a tenth of the target's.
    controller = TestAndSet(all_plans, max_trials=100, tolerance=0.0)
    decoder = make_decoder(all_plans)
    mask = np.ones(len(all_plans), dtype=bool)
    for action in (3, 8, 13):
        controller.observe(action, 0.0, decoder.step(action))
    controller.begin({})
    ladder = []
    for utility in np.arange(1.0, 2.5, 0.1):
        action = controller.act(OBSERVATION, mask)
        ladder.append(plan_name(all_plans[action]))
        for _ in range(4):
            name = plan_name(all_plans[action])
            controller.observe(action, 0.0, info_of(all_plans, action, {name: utility}))
    assert ladder[:5] == ["ngram@1", "ngram@2", "ngram@3", "ngram@4", "ngram@6"]
    assert ladder.index("small@4") < ladder.index("small>mid@2")


def test_masked_trial_ends_the_test(ngram_plans):
    controller = TestAndSet(ngram_plans)
    play(controller, ngram_plans, {"ngram@1": 1.2}, 4)
    mask = np.array([True, True, False, False, False, False])
    assert runs_of(play(controller, ngram_plans, {}, 16, mask, begins=False)) == [(1, 16)]


def test_no_speculation_alone():
    plans = [(("target",), 0)]
    assert set(play(TestAndSet(plans), plans, {}, 100)) == {0}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("chains", "all", "chains must be one of climb, fixed"),
        ("chain", "ngram>target", 'chain needs chains="fixed"'),
        ("k_max", 0, "k_max must be a whole number >= 1"),
        ("trial_iterations", 0, "trial_iterations must be"),
        ("max_trials", 1.5, "max_trials must be"),
        ("set_iterations", 0, "set_iterations must be"),
        ("max_set_iterations", 15, "max_set_iterations must be a whole number >= 16"),
        ("tolerance", -1.0, "tolerance must be"),
        ("baseline_iterations", 0, "baseline_iterations must be"),
        ("baseline_refresh", 0, "baseline_refresh must be"),
        ("scope", "episode", "scope must be one of request, stream"),
    ],
)
def test_bad_values_are_refused(ngram_plans, field, value, message):
    with pytest.raises(ValueError, match=message):
        TestAndSet(ngram_plans, **{field: value})


def test_unknown_fixed_chain_is_refused(ngram_plans):
    with pytest.raises(ValueError, match="chain must be one of ngram>target, got 'eagle>target'"):
        TestAndSet(ngram_plans, chains="fixed", chain="eagle>target")


def test_k_max_below_the_table_is_refused(ngram_plans):
    plans = [ngram_plans[0], ngram_plans[3]]
    with pytest.raises(ValueError, match=r"k_max must be at least the least K of \[3\], got 2"):
        TestAndSet(plans, k_max=2)
