"""Networks fitted to costs of which the best choice is known, and several as one."""

import itertools

import numpy as np
import pytest
import torch

from specgym.agents.cost_networks import (
    Costs,
    FitConfig,
    add_networks,
    block_diagonal,
    fit_network,
    judged_cost,
    loss_of,
)
from specgym.agents.policy import Policy

QUICK = FitConfig(hidden_sizes=(16,), num_epochs=12, batch_size=64, learning_rate=1e-2)


def make_costs(count=800, seed=0):
    """Action 1 is best where the first input is positive, action 0 elsewhere; never action 2."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(count, 4)).astype(np.float32)
    good = inputs[:, 0] > 0
    costs = np.stack([good, ~good, np.full(count, np.inf)], axis=1).astype(np.float32)
    return Costs(inputs, costs)


def scores(layers, inputs):
    plans = [(("target",), 0), *((("ngram", "target"), k) for k in (1, 2))]
    zeros, ones = np.zeros(4), np.ones(4)
    return Policy(tuple(plans), tuple("abcd"), 1, zeros, ones, 9.0, layers).scores(inputs)


@pytest.mark.parametrize("loss", ["values", "cost"])
def test_finds_the_best_action(loss):
    config = FitConfig(**{**vars(QUICK), "loss": loss})
    judge = make_costs(seed=1)
    layers = fit_network(make_costs(), judge, config, seed=0)
    chosen = scores(layers, judge.inputs)[:, :2].argmax(axis=1)
    assert judge.costs[np.arange(len(chosen)), chosen].mean() < 0.05


def test_same_seed_same_network():
    runs = [fit_network(make_costs(), make_costs(seed=1), QUICK, seed=3) for _ in range(2)]
    for (weight, bias), (other, other_bias) in zip(*runs, strict=True):
        assert np.array_equal(weight, other)
        assert np.array_equal(bias, other_bias)


def test_leaves_the_global_random_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    fit_network(make_costs(50), make_costs(50), QUICK, seed=0)
    assert torch.rand(1) == expected


def test_what_is_not_allowed_has_no_part_in_the_loss():
    costs = torch.tensor([[0.0, 1.0, torch.inf]])
    for loss in ("values", "cost"):
        config = FitConfig(loss=loss)
        low = loss_of(torch.tensor([[0.3, -0.2, 0.0]]), costs, config)
        assert torch.isfinite(low)
        assert low == loss_of(torch.tensor([[0.3, -0.2, 50.0]]), costs, config)


def test_judged_by_the_best_allowed_score():
    costs = Costs(np.zeros((1, 2), np.float32), np.array([[0.5, 0.0, np.inf]], np.float32))
    layer = torch.nn.Linear(2, 3)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([1.0, 0.0, 9.0]))
    assert judged_cost(torch.nn.Sequential(layer), costs) == 0.5


@pytest.mark.parametrize("hidden_sizes", [(5,), (5, 7), (5, 7, 3)])
def test_sum_of_networks_is_their_mean(hidden_sizes):
    rng = np.random.default_rng(0)
    sizes = (4, *hidden_sizes, 3)
    networks = [
        tuple((rng.normal(size=(b, a)), rng.normal(size=b)) for a, b in itertools.pairwise(sizes))
        for _ in range(3)
    ]
    inputs = rng.normal(size=(6, 4)).astype(np.float32)
    mean = np.mean([scores(layers, inputs) for layers in networks], axis=0)
    assert scores(add_networks(networks), inputs) == pytest.approx(mean, abs=1e-5)


def test_blocks_lie_on_the_diagonal():
    found = block_diagonal([np.full((1, 2), 3.0), np.full((2, 1), 4.0)])
    assert found.tolist() == [[3, 3, 0], [0, 0, 4], [0, 0, 4]]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss", "hinge"),
        ("hidden_sizes", ()),
        ("hidden_sizes", (0,)),
        ("num_epochs", 0),
        ("dropout", 1.0),
        ("learning_rate", -1.0),
    ],
)
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"fit.{field}"):
        FitConfig(**{field: value})
