"""K by batch size: tables as engines read them, and one fitted to recordings."""

import numpy as np
import pytest

from specgym.baselines.batch_table import BatchTable, fit_table, look_up
from specgym.baselines.spelling import parse_list, parse_ranges

PLANS = [(("target",), 0), *((("eagle", "target"), k) for k in (1, 2, 4, 8))]
ALL = np.ones(len(PLANS), dtype=bool)


def test_a_gap_keeps_the_k_before_it():
    table = parse_ranges("table", "1-2@4+5-8@1")
    assert table == ((1, 2, 4), (5, 8, 1))
    assert [look_up(table, rows) for rows in range(1, 9)] == [4, 4, 4, 4, 1, 1, 1, 1]
    assert look_up(table, 99) == 1


def test_a_single_size_and_an_open_end():
    assert parse_ranges("table", "1@8+2-@0") == ((1, 1, 8), (2, None, 0))


@pytest.mark.parametrize(
    "text", ["", "4", "1-2", "@4", "2-1@4", "0-1@4", "1-4@2+3-5@1", "1-@4+5-@1", "1-2@x", "a-2@1"]
)
def test_other_tables_are_refused(text):
    with pytest.raises(ValueError, match="table must be ranges"):
        BatchTable(PLANS, table=text)


def test_lists():
    assert parse_list("tiers", "1+3+5") == (1, 3, 5)
    assert parse_list("tiers", 4) == (4,)
    with pytest.raises(ValueError, match="tiers must be whole numbers joined by"):
        parse_list("tiers", "1+x")


@pytest.mark.parametrize(("rows", "k"), [(1, 4), (4, 4), (5, 2), (17, 1), (33, 0), (500, 0)])
def test_k_follows_the_rows_of_the_last_iteration(make_info, rows, k):
    controller = BatchTable(PLANS)
    controller.observe(0, 0.0, make_info(0, rows=rows))
    assert PLANS[controller.act(np.zeros(1), ALL)][1] == k


def test_k_is_at_most_what_the_chain_has():
    assert BatchTable(PLANS, table="1-@6").act(np.zeros(1), ALL) == 3
    assert BatchTable(PLANS, table="1-@99").act(np.zeros(1), ALL) == 4


@pytest.mark.parametrize(("accepted", "k"), [(0, 0), (3, 4)])
def test_the_gate_shuts_for_good(make_info, accepted, k):
    controller = BatchTable(PLANS, gate_window=3, gate_tokens=2.0)
    for _ in range(3):
        controller.begin({})
        controller.observe(3, 0.0, make_info(3, accepted))
    assert PLANS[controller.act(np.zeros(1), ALL)][1] == 4  # not before the third request ended
    controller.begin({})
    for _ in range(5):
        controller.observe(3, 0.0, make_info(3, 4))
        controller.begin({})
    assert PLANS[controller.act(np.zeros(1), ALL)][1] == k


def test_the_fitted_table_is_the_best_static_one():
    rng = np.random.default_rng(0)
    rows = rng.choice([1, 2, 4, 8, 16], 4000)
    k = rng.choice([0, 1, 2, 4], 4000)
    tokens = rows * (1 + np.minimum(k, rng.integers(0, 4, 4000)))
    seconds = 1.0 + 0.1 * rows * k
    table = parse_ranges("table", fit_table(rows, k, tokens, seconds))
    for size in (1, 2, 4, 8, 16):
        rates = {}
        for each in (0, 1, 2, 4):
            here = (rows == size) & (k == each)
            rates[each] = tokens[here].sum() / seconds[here].sum()
        assert look_up(table, size) == max(rates, key=rates.get)


def test_a_fitted_table_by_hand():
    rows, k = [1, 1, 2, 2, 8, 8], [4, 0, 4, 0, 4, 0]
    tokens, seconds = [3, 1, 6, 2, 24, 8], [2.0, 1.0, 2.5, 1.0, 5.0, 1.0]
    assert fit_table(rows, k, tokens, seconds) == "1-7@4+8-@0"
    assert fit_table([4], [2], [3], [1.0]) == "1-@2"
    assert fit_table([4, 9], [2, 2], [3, 3], [1.0, 1.0]) == "1-@2"
    assert fit_table([2, 4, 9], [3, 3, 1], [3, 3, 3], [1.0, 1.0, 1.0]) == "1-8@3+9-@1"
    with pytest.raises(ValueError, match="of one length"):
        fit_table([1], [2, 3], [3], [1.0])
