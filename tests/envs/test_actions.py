import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specgym.engine.decoding import feasible_plan
from specgym.engine.state import DecodeState
from specgym.engine.types import DecodeRequest, Plan
from specgym.envs.actions import ActionTable
from specgym.envs.pool_spec import Layout


@pytest.fixture(scope="module")
def pools(pool, variant):
    """Pools whose members differ in context, and whose K values go past the window of 8."""
    return [
        pool,
        variant({"target": 40, "mid": 24, "draft": 32}),
        variant({"target": 64, "draft": 16}, k_values=(1, 5, 12)),
    ]


def state_of(pool, rows):
    """A state with these (prompt length, budget, generated) rows; nothing is computed."""
    requests = [DecodeRequest((3,) * length, budget) for length, budget, _ in rows]
    state = DecodeState(pool, requests, exact=True)
    for row, (_, _, generated) in enumerate(rows):
        state.tokens[row] += [4] * min(generated, state.budgets[row])
        if state.num_remaining(row) == 0:
            state.finish_reasons[row] = "length"
    return state


ROWS = st.tuples(st.integers(1, 39), st.integers(1, 40), st.integers(0, 39))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(index=st.integers(0, 2), rows=st.lists(ROWS, min_size=1, max_size=3))
def test_the_mask_is_the_rule_of_the_engine_for_every_plan(pools, index, rows):
    pool = pools[index]
    state = state_of(pool, rows)
    table = ActionTable(Layout.of(pool))
    mask = table.mask(state)
    assert mask.dtype == bool
    assert mask.shape == (len(table),)
    if state.is_finished:
        assert np.flatnonzero(mask).tolist() == [0]
        return
    runs = [feasible_plan(pool, state, plan)[0] == plan for plan in table.plans]
    assert mask.tolist() == runs == [table.allows(state, i) for i in range(len(table))]


def test_index_0_is_no_speculation_and_the_rest_is_every_chain_with_every_k(pool):
    table = ActionTable(Layout.of(pool))
    assert table.names[0] == "none"
    assert table.plans[0] == Plan(("target",), 0)
    wanted = [(chain, k) for chain in pool.chains for k in (1, 2, 3, 4, 6)]
    assert table.arrays() == [(("target",), 0), *wanted]
    assert len(set(table.names)) == len(table) == 1 + 6 * 5
    assert [table.index(plan) for plan in table.plans] == list(range(len(table)))
    assert {"ngram@4", "draft>mid@2"} <= set(table.names)


def test_a_k_larger_than_the_budget_is_masked_and_verifiers_count(variant):
    pool = variant(k_values=(2, 3, 6, 8), chains=[("draft", "target"), ("draft", "mid", "target")])
    table = ActionTable(Layout.of(pool))
    allowed = [table.names[a] for a in np.flatnonzero(table.mask(state_of(pool, [(5, 4, 0)])))]
    assert allowed == ["none", "draft@2", "draft@3", "draft>mid@2"]
    last = table.mask(state_of(pool, [(5, 4, 3)]))
    assert np.flatnonzero(last).tolist() == [0]


def test_a_chain_is_masked_once_any_of_its_members_is_out_of_context(variant):
    pool = variant({"mid": 20})
    table = ActionTable(Layout.of(pool))
    short = table.mask(state_of(pool, [(10, 100, 0)]))
    assert short.all()
    long = table.mask(state_of(pool, [(18, 100, 0)]))
    for name, (chain, k), allowed in zip(table.names, table.arrays(), long, strict=True):
        emitted = k + len(chain) - 1
        assert allowed == ("mid" not in chain or 18 + emitted <= 20), name
    assert not table.mask(state_of(pool, [(20, 100, 0)]))[table.names.index("mid@1")]
