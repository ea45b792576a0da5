"""Nightjar: blocks, the price of turning on, and contexts."""

import numpy as np
import pytest

from specgym.agents.bandits.nightjar import Nightjar, advance, switch_loss

PLANS = [(("target",), 0), *((("small", "target"), k) for k in (1, 2, 4))]
ALL = np.ones(len(PLANS), dtype=bool)
OBSERVATION = np.zeros(1)


def test_blocks_double():
    block, ends = [1, 0], []
    for number in range(1, 40):
        advance(block)
        if block[1] == 0:
            ends.append(number)
    assert ends == [1, 3, 7, 15, 31]


def test_explorations_of_a_block_of_eight_are_harmonic():
    assert sum(1 / b for b in range(1, 9)) == pytest.approx(2.7179, abs=5e-5)
    rng = np.random.default_rng(0)
    explored = [sum(rng.random() * (over + 1) < 1.0 for over in range(8)) for _ in range(20_000)]
    assert np.mean(explored) == pytest.approx(2.7179, abs=0.03)


@pytest.mark.parametrize(("price", "turns_on"), [(0.02, True), (0.05, False)])
def test_the_price_of_turning_on_by_hand(price, turns_on):
    assert switch_loss(0.98, 2, False, 0.02) == pytest.approx(0.99)
    assert switch_loss(0.98, 2, False, 0.05) == pytest.approx(1.005)
    assert (switch_loss(0.98, 2, False, price) < switch_loss(1.0, 0, False, price)) == turns_on
    assert switch_loss(0.98, 2, True, price) == 0.98


def run(controller, make_info, costs, num_steps, rows=1):
    """Plays arms that emit two tokens at these costs; the actions."""
    actions = []
    for _ in range(num_steps):
        actions.append(controller.act(OBSERVATION, ALL))
        info = make_info(actions[-1], 1, cost=costs[actions[-1]], rows=rows)
        controller.observe(actions[-1], 0.0, info)
    return actions


def test_an_arm_runs_for_a_bin(make_info):
    actions = run(Nightjar(PLANS, bin_size=5), make_info, [1.0, 0.9, 0.8, 0.7], 300)
    assert all(len(set(actions[start : start + 5])) == 1 for start in range(0, 300, 5))


def test_finds_the_arm_of_least_loss(make_info):
    actions = run(Nightjar(PLANS), make_info, [1.0, 0.9, 0.6, 0.8], 5000)
    assert actions[2000:].count(2) > 0.9 * 3000


def test_explorations_grow_with_the_square_of_the_logarithm(make_info):
    """A block of n bins explores H_n of them, and blocks double."""
    actions = run(Nightjar(PLANS, bin_size=1), make_info, [1.0, 0.9, 0.6, 0.8], 8191)
    others = sum(action != 2 for action in actions)
    expected = sum(sum(1 / b for b in range(1, 2**j + 1)) for j in range(13))
    assert others < 1.5 * expected


def test_batch_sizes_are_contexts_of_their_own(make_info):
    controller = Nightjar(PLANS)
    for _ in range(30):
        run(controller, make_info, [1.0, 0.8, 0.6, 0.5], 100, rows=1)
        run(controller, make_info, [1.0, 1.5, 2.0, 4.0], 100, rows=32)
    small = run(controller, make_info, [1.0, 0.8, 0.6, 0.5], 100, rows=1)
    large = run(controller, make_info, [1.0, 1.5, 2.0, 4.0], 100, rows=32)
    assert small[10:].count(3) > 60
    assert large[10:].count(0) > 60


def test_the_price_is_measured(make_info):
    controller = Nightjar(PLANS)
    for _ in range(60):
        controller.observe(0, 0.0, make_info(0, 0))
        controller.observe(2, 0.0, make_info(2, 1, cost=1.5, catchup=0.4))
        controller.observe(2, 0.0, make_info(2, 1, cost=1.5, catchup=0.1))  # it was on
    assert controller.state_dict()["price"] == pytest.approx(0.4, abs=1e-4)


@pytest.mark.parametrize(("field", "value"), [("bin_size", 0), ("switch_cost", -1.0), ("seed", -1)])
def test_bad_values_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        Nightjar(PLANS, **{field: value})
