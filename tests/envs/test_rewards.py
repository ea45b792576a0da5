import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgym.envs.rewards import (
    REWARDS,
    get_reward,
    log_utility,
    net_utility,
    paced_utility,
    utility,
)

MEASURED = st.tuples(st.integers(1, 16), st.floats(1e-4, 10.0), st.floats(1e-4, 10.0))


def speculation_table(num_positions, seed):
    """Tokens and cost (in units of t_base) of K = 0..4 at every position of a fixed output.

    Every speculative iteration costs more than a plain one, and not all of them are worth it.
    """
    rng = np.random.default_rng(seed)
    runs = rng.geometric(0.4, num_positions) - 1  # tokens the drafter gets right from here
    row_cost = rng.uniform(0.1, 0.5)
    return [
        [(min(min(k, run) + 1, num_positions - i), 1.0 + row_cost * k) for k in range(5)]
        for i, run in enumerate(runs)
    ]


def best_policy(table, value):
    """The plans, from the start to the end, whose values have the largest undiscounted sum."""

    @cache
    def best(position):
        if position == len(table):
            return 0.0, ()
        options = []
        for plan, (tokens, seconds) in enumerate(table[position]):
            rest, plans = best(position + tokens)
            options.append((value(tokens, seconds) + rest, (plan, *plans)))
        return max(options, key=lambda option: option[0])

    return best(0)[1]


def seconds_of(table, plans):
    """What running these plans costs."""
    position = total = 0
    for plan in plans:
        tokens, seconds = table[position][plan]
        position, total = position + tokens, total + seconds
    assert position == len(table)
    return total


def least_seconds(table):
    return seconds_of(table, best_policy(table, lambda tokens, seconds: -seconds))


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_of_net_utility_takes_the_least_time(seed):
    table = speculation_table(40, seed)
    plans = best_policy(table, lambda tokens, seconds: net_utility(tokens, seconds, 1.0))
    assert seconds_of(table, plans) == pytest.approx(least_seconds(table))
    assert seconds_of(table, plans) < 0.95 * len(table)  # speculating pays on every one of these


@pytest.mark.parametrize("seed", range(20))
def test_the_undiscounted_optimum_of_raw_utility_never_speculates(seed):
    table = speculation_table(40, seed)
    plans = best_policy(table, lambda tokens, seconds: utility(tokens, seconds, 1.0))
    assert set(plans) == {0}
    assert seconds_of(table, plans) > 1.05 * least_seconds(table)


def test_the_undiscounted_optimum_of_log_utility_is_not_the_fastest_either():
    # Two iterations of utility 1.5 beat one of utility 2 that emits the same tokens.
    table = [[(2, 2 / 1.5), (4, 2.0)], [(1, 1.0)], [(2, 2 / 1.5)], [(1, 1.0)]]
    plans = best_policy(table, lambda tokens, seconds: log_utility(tokens, seconds, 1.0))
    assert plans == (0, 0)
    assert seconds_of(table, plans) > least_seconds(table) == 2.0


def test_a_bandit_on_utility_finds_the_fastest_plan_and_on_net_utility_it_may_not():
    arms = {"short": (2, 1.2), "long": (6, 4.5)}  # the same at every position
    fastest = max(arms, key=lambda name: arms[name][0] / arms[name][1])
    assert max(arms, key=lambda name: utility(*arms[name], 1.0)) == fastest == "short"
    assert max(arms, key=lambda name: net_utility(*arms[name], 1.0)) == "long"


@settings(derandomize=True)
@given(MEASURED)
def test_net_utility_is_utility_minus_one_weighted_by_relative_time(measured):
    tokens, seconds, baseline = measured
    weighted = (utility(tokens, seconds, baseline) - 1.0) * seconds / baseline
    assert net_utility(tokens, seconds, baseline) == pytest.approx(weighted, rel=1e-6, abs=1e-6)


@settings(derandomize=True)
@given(st.lists(MEASURED, min_size=1), st.floats(1e-3, 10.0))
def test_the_sum_of_net_utility_is_the_time_saved(iterations, baseline):
    total = math.fsum(net_utility(tokens, seconds, baseline) for tokens, seconds, _ in iterations)
    tokens = sum(tokens for tokens, _, _ in iterations)
    seconds = math.fsum(seconds for _, seconds, _ in iterations)
    saved = (tokens * baseline - seconds) / baseline
    assert total == pytest.approx(saved, rel=1e-9, abs=1e-6)


@settings(derandomize=True)
@given(MEASURED)
def test_all_rewards_agree_on_what_breaks_even(measured):
    tokens, seconds, baseline = measured
    u = utility(tokens, seconds, baseline)
    if abs(u - 1.0) < 1e-9:
        return
    assert (log_utility(*measured) > 0) == (net_utility(*measured) > 0) == (u > 1)


def test_break_even_is_one_for_utility_and_nought_for_the_others():
    assert (utility(3, 6.0, 2.0), log_utility(3, 6.0, 2.0), net_utility(3, 6.0, 2.0)) == (1, 0, 0)


def test_rewards_go_by_name_and_an_unknown_name_lists_them():
    assert {name: get_reward(name) for name in REWARDS} == REWARDS
    with pytest.raises(ValueError, match=r"reward: no reward 'speed'.*net_utility.*log_utility"):
        get_reward("speed")


@pytest.mark.parametrize("pace", [0.3, 1.0, 2.0])
def test_paced_utility_has_the_best_policies_of_net_utility(pace):
    table = speculation_table(40, seed=5)
    paced = get_reward(paced_utility(pace))
    plans = best_policy(table, lambda tokens, seconds: paced(tokens, seconds, 1.0))
    assert seconds_of(table, plans) == pytest.approx(least_seconds(table))


def test_at_its_own_pace_nothing_is_gained():
    assert paced_utility(0.5)(4, 2.0, 1.0) == 0.0
    assert paced_utility(1.0)(4, 2.0, 1.0) == net_utility(4, 2.0, 1.0)
    with pytest.raises(ValueError, match="pace: must be above 0"):
        paced_utility(0.0)
