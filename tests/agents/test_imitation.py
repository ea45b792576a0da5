"""Imitation on requests in which the oracle's advice misleads one who cannot see the future."""

import dataclasses

import numpy as np
import pytest

from specgym.agents import imitation
from specgym.agents.imitation import (
    Fitted,
    ImitationConfig,
    Table,
    fit_networks,
    greedy,
    no_speculation,
    relative_costs,
    train_imitation,
)
from specgym.agents.policy import Policy
from specgym.agents.sb3_settings import FitConfig
from specgym.baselines.hindsight.visits import Visits, values_of

PLANS = ((("target",), 0), (("ngram", "target"), 1))
TABLE = Table(PLANS, ("easy", "noise"), 1)
LENGTH, REQUESTS = 30, 40
FIT = FitConfig(hidden_sizes=(16,), num_epochs=10, batch_size=64, learning_rate=1e-2)


def make_visits(seed, hit_rates=(0.1, 0.9), seconds=1.3):
    """Speculation takes 1.3 s and brings two tokens at a rate that the observation tells."""
    rng = np.random.default_rng(seed)
    count = REQUESTS * LENGTH
    request, position = np.divmod(np.arange(count), LENGTH)
    easy = rng.random(count) < 0.5
    hit = rng.random(count) < np.where(easy, hit_rates[1], hit_rates[0])
    tokens = np.stack([np.ones(count, int), np.minimum(1 + hit, LENGTH - position)], axis=1)
    return Visits(
        observations=np.stack([easy, rng.random(count)], axis=1).astype(np.float32),
        allowed=np.ones((count, 2), bool),
        seconds=np.tile([1.0, seconds], (count, 1)),
        tokens=tokens,
        request=request,
        position=position,
        lengths=np.full(REQUESTS, LENGTH),
    )


def train(config, seed=0, **changes):
    seen = []

    def collect(choose, number):
        seen.append(choose)
        return make_visits(number, **changes)

    policy = train_imitation(collect, TABLE, config, seed)
    return policy, seen


@pytest.mark.parametrize("rounds", [(2, 0), (0, 3), (1, 2)])
def test_speculates_where_it_pays(rounds):
    config = ImitationConfig(*rounds, num_networks=2, fit=FIT)
    policy, seen = train(config)
    states = np.array([[1.0, 0.5], [0.0, 0.5]], np.float32)
    assert greedy(policy)(states, np.ones((2, 2), bool)).tolist() == [1, 0]
    assert greedy(policy)(states, np.array([[True, False]] * 2)).tolist() == [0, 0]
    assert len(seen) == sum(rounds)
    assert seen[0] is no_speculation


def test_own_values_undo_what_the_oracle_advises():
    """At 55 % and 1.5 s it pays to speculate, but not if a token is worth what an oracle takes."""
    rule = {"hit_rates": (0.55, 0.55), "seconds": 1.5}
    fit = FitConfig(hidden_sizes=(4,), num_epochs=6, batch_size=256, dropout=0.0)
    shares = []
    for rounds in ((3, 0), (1, 3)):
        policy, _ = train(ImitationConfig(*rounds, num_networks=2, fit=fit), **rule)
        visits = make_visits(99, **rule)
        shares.append(greedy(policy)(visits.observations, visits.allowed).mean())
    assert shares[0] < 0.3
    assert shares[1] > 0.7


def test_same_seed_same_policy():
    config = ImitationConfig(1, 1, num_networks=2, fit=FIT)
    states = np.random.default_rng(0).random((5, 2)).astype(np.float32)
    first, second, other = (train(config, seed)[0].scores(states) for seed in (0, 0, 1))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_relative_costs_by_hand():
    visits = make_visits(0).at(np.array([0]))
    values = np.zeros((REQUESTS, LENGTH + 1))
    values[0, :3] = [0.0, 2.0, 1.0]
    gained = 1.3 + (1.0 if visits.tokens[0, 1] == 2 else 2.0)
    expected = np.array([3.0, gained]) - min(3.0, gained)
    assert relative_costs(visits, values)[0] == pytest.approx(expected)


def test_a_request_is_played_by_the_network_that_was_not_fitted_to_it():
    """One network always speculates, the other never."""
    zeros, ones = np.zeros(2), np.ones(2)
    networks = [
        Policy(PLANS, TABLE.features, 1, zeros, ones, 5.0, ((np.zeros((2, 2)), bias),))
        for bias in (np.array([0.0, 1.0]), np.array([1.0, 0.0]))
    ]
    judged_by = np.arange(REQUESTS) % 2
    visits = make_visits(0)
    actions = Fitted(networks, judged_by).unseen_actions(visits)
    assert np.array_equal(actions, 1 - judged_by[visits.request])
    barred = dataclasses.replace(visits, allowed=np.tile([True, False], (len(visits), 1)))
    assert not Fitted(networks, judged_by).unseen_actions(barred).any()


def test_every_network_is_judged_on_the_requests_it_was_not_fitted_to(monkeypatch):
    judged = []
    original = imitation.fit_network

    def watched(train, judge, config, seed):
        judged.append((len(train.inputs), len(judge.inputs)))
        return original(train, judge, config, seed)

    monkeypatch.setattr(imitation, "fit_network", watched)
    visits = make_visits(0)
    costs = relative_costs(visits, values_of(visits))
    fitted = fit_networks(visits, costs, TABLE, ImitationConfig(num_networks=4, fit=FIT), 0)
    assert np.bincount(fitted.judged_by).tolist() == [REQUESTS // 4] * 4
    assert judged == [(REQUESTS * LENGTH * 3 // 4, REQUESTS * LENGTH // 4)] * 4
    assert len(fitted.policy.layers[0][1]) == 4 * 16


def test_rounds_are_reported():
    reported = []
    config = ImitationConfig(1, 1, num_networks=2, fit=FIT)
    train_imitation(
        lambda choose, number: make_visits(number),
        TABLE,
        config,
        on_round=lambda number, policy: reported.append((number, policy.plans)),
    )
    assert reported == [(0, PLANS), (1, PLANS)]


def test_learned_policy_is_close_to_the_best():
    policy, _ = train(ImitationConfig(1, 2, num_networks=2, fit=FIT))
    visits = make_visits(99)
    actions = greedy(policy)(visits.observations, visits.allowed)
    by_rule = visits.observations[:, 0].astype(int)
    learned, best = (values_of(visits, a)[:, 0].sum() for a in (actions, by_rule))
    assert learned < best * 1.02


@pytest.mark.parametrize(
    ("field", "value"),
    [("oracle_rounds", -1), ("own_rounds", 1.5), ("num_networks", 1), ("kept_rounds", 0)],
)
def test_bad_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"imitation.{field} must be"):
        ImitationConfig(**{field: value})
    with pytest.raises(ValueError, match="one of them must be >= 1"):
        ImitationConfig(oracle_rounds=0, own_rounds=0)
