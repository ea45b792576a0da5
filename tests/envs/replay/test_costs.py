"""The cost table: known seconds are found again, through drift, noise and thin cells."""

import numpy as np
import pytest

from specgym.engine.members.traits import MODEL
from specgym.envs.pool_spec import Layout
from specgym.envs.replay.costs import (
    CostTable,
    MeasuredForward,
    MeasuredIteration,
    fit_costs,
    predict,
)

CHAIN = ("small", "target")
LAYOUT = Layout(
    target="target",
    chains=(CHAIN,),
    k_values=(1, 2, 4),
    window=8,
    context_limits={"small": 512, "target": 512},
    traits={"small": MODEL, "target": MODEL},
    experts_per_token=2,
)


def verify_seconds(tokens, experts):
    return 0.010 + 0.001 * tokens + 0.002 * experts


def iteration(rng, k, kv_length=256, drift=1.0, noise=0.0, first=False):
    """A made iteration: known costs, times drift and noise."""
    factor = drift * float(np.exp(noise * rng.normal()))
    experts = 2.0 + float(rng.integers(0, 3)) * k / 4

    def forward(role, tokens, seconds, experts=0.0, is_prefill=False):
        member = "target" if role == "verify" else "small"
        return MeasuredForward(member, role, tokens, experts, seconds * factor, is_prefill)

    forwards = [forward("catchup", 50, 0.02 + 50e-4, is_prefill=True)] if first else []
    forwards += [forward("draft", 2, 0.005)] * (k > 0)
    forwards += [forward("guess", 1, 0.003)] * (k - 1)
    forwards.append(forward("verify", 1 + k, verify_seconds(1 + k, experts), experts))
    seconds = sum(f.seconds for f in forwards) + (0.0005 + 0.0001 * k) * factor
    baseline = (verify_seconds(1, 2.0) + 0.0005) * drift
    chain = CHAIN if k else ("target",)
    return MeasuredIteration(chain, k, kv_length, seconds, baseline, tuple(forwards))


def many(rng, count=600, noise=0.0, drifts=(1.0,)):
    return [
        iteration(
            rng, int(k), drift=drifts[i * len(drifts) // count], noise=noise, first=i % 40 == 0
        )
        for i, k in enumerate(rng.choice([0, 1, 2, 4], size=count))
    ]


def test_known_costs_are_found_again():
    table = fit_costs(LAYOUT, many(np.random.default_rng(0)))
    found = table.forward_seconds("target", "verify", np.array([1, 2, 5]), 0, 2.5)
    assert found == pytest.approx(verify_seconds(np.array([1, 2, 5]), 2.5), rel=1e-3)
    assert table.forward_seconds("small", "draft", 2, 0) == pytest.approx(0.005)
    assert table.forward_seconds("small", "guess", 1, 0) == pytest.approx(0.003)
    assert table.overhead_seconds(CHAIN, 4) == pytest.approx(0.0009)
    assert table.prefill_seconds("small", 50) == pytest.approx(0.025)


@pytest.mark.parametrize("drifts", [(1.0, 2.0), (0.5, 1.0, 3.0)])
def test_drift_of_the_machine_is_taken_out(drifts):
    """Every iteration is scaled by its own baseline: ratios stay what they were."""
    rng = np.random.default_rng(1)
    table, steady = fit_costs(LAYOUT, many(rng, drifts=drifts)), fit_costs(LAYOUT, many(rng))
    for tokens in (1, 2, 5):
        pair = [
            float(t.forward_seconds("target", "verify", tokens, 0, 2.5))
            / float(t.forward_seconds("target", "verify", 1, 0, 2.0))
            for t in (table, steady)
        ]
        assert pair[0] == pytest.approx(pair[1], rel=0.01)


def test_spread_is_the_noise_and_outliers_move_nothing():
    rng = np.random.default_rng(2)
    iterations = many(rng, 3000, noise=0.05)
    hiccups = [iteration(rng, 2, drift=1.0) for _ in range(40)]
    for slow in hiccups:
        forwards = tuple(
            MeasuredForward(f.member, f.role, f.num_tokens, f.experts, f.seconds * 30, f.is_prefill)
            for f in slow.forwards
        )
        seconds = sum(f.seconds for f in forwards) + 0.0007
        iterations.append(
            MeasuredIteration(slow.chain, 2, 256, seconds, slow.baseline_seconds, forwards)
        )
    table = fit_costs(LAYOUT, iterations)
    assert table.spread[1, 2] == pytest.approx(0.05, rel=0.25)
    assert table.forward_seconds("small", "guess", 1, 0) == pytest.approx(0.003, rel=0.03)


def test_cells_without_samples_borrow_from_the_nearest():
    rng = np.random.default_rng(3)
    iterations = many(rng) + [iteration(rng, 0, kv_length=384) for _ in range(9)]
    table = fit_costs(LAYOUT, iterations)
    assert table.kv_lengths.tolist() == [256, 384]
    near = table.forward_seconds("target", "verify", 5, 1, 2.5)
    assert near == pytest.approx(verify_seconds(5, 2.5), rel=1e-3)
    assert table.forward_seconds("small", "catchup", 8, 0) > 0  # never seen: as a draft costs
    assert table.bucket(300) == 0
    assert table.bucket(10_000) == 1


def test_a_prediction_is_the_sum_of_its_parts():
    rng = np.random.default_rng(4)
    table = fit_costs(LAYOUT, many(rng))
    for k in (0, 1, 4):
        made = iteration(rng, k, first=k == 4)
        assert predict(table, made) == pytest.approx(made.seconds, rel=0.01)


def test_a_table_is_its_header_and_arrays():
    table = fit_costs(LAYOUT, many(np.random.default_rng(5)))
    again = CostTable.restore(table.header(), table.arrays())
    assert again.members == ("target", "small")
    assert again.chains == (("target",), CHAIN)
    for name, array in table.arrays().items():
        np.testing.assert_array_equal(array, again.arrays()[name])
