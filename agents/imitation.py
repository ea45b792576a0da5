"""Imitation: a policy fitted to what every action would cost, first by the oracle, then by itself.

The oracle's action values say what to do for one who sees the future. A policy that does not is
better off with its own: the seconds left after an action when the policy itself goes on. Recorded
requests give both for every action at every visited state, so that nothing is sampled but states.

Legend: n visits, F features, A actions, R requests, B states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from specgym.agents.cost_networks import Costs, add_networks, fit_network
from specgym.agents.policy import Policy
from specgym.agents.sb3_settings import ImitationConfig
from specgym.baselines.hindsight.visits import Visits, join_visits, values_of
from specgym.baselines.plans import Plan

# Actions [B] for observations [B, F] and masks [B, A].
Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]
CLIP = 5.0


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """What a policy is over: plans, features and the version of the features' table."""

    plans: Sequence[Plan]
    features: Sequence[str]
    features_version: int


@dataclasses.dataclass(frozen=True, eq=False)
class Fitted:
    """What a round fitted.

    Attributes:
        networks: Policies of one network each.
        judged_by: The network that was not fitted to a request but judged on it, [R].
    """

    networks: Sequence[Policy]
    judged_by: np.ndarray

    @property
    def policy(self) -> Policy:
        """All networks as one, of their mean scores."""
        layers = add_networks([network.layers for network in self.networks])
        return dataclasses.replace(self.networks[0], layers=layers)

    def unseen_actions(self, visits: Visits) -> np.ndarray:
        """At each visit the action of the network that was not fitted to its request, [n]."""
        judge, actions = self.judged_by[visits.request], np.zeros(len(visits), dtype=np.int64)
        for number, network in enumerate(self.networks):
            rows = np.flatnonzero(judge == number)
            actions[rows] = greedy(network)(visits.observations[rows], visits.allowed[rows])
        return actions


def train_imitation(
    collect: Callable[[Choose, int], Visits],
    table: Table,
    config: ImitationConfig = ImitationConfig(),  # noqa: B008 (frozen)
    seed: int = 0,
    on_round: Callable[[int, Policy], None] = lambda number, policy: None,
) -> Policy:
    """The policy after all rounds; the same for the same seed.

    Round by round it collects visits under the policy so far, adds them to those of the rounds
    before (DAgger), and fits to the values of every action there: the best in hindsight at first,
    then what the policy so far takes from there on (policy iteration). On a request that it was
    fitted to a policy knows too well what comes, and takes less than it would elsewhere; so there
    the network decides that was not fitted to it. At first no speculation runs.

    Args:
        collect: Makes visits to the training requests under a policy, given a round's number; it
            explores by itself.
        table: What the policy is over.
        config: Settings.
        seed: Of weights, of the order of visits, and of who is judged on which requests.
        on_round: Takes each round's number and policy.

    Source: Ross, Gordon and Bagnell, "A reduction of imitation learning and structured prediction
        to no-regret online learning" (2011); Ross and Bagnell, "Reinforcement and imitation
        learning via interactive no-regret learning" (2014) for the costs to go. The rest is ours.
    """
    choose: Choose = no_speculation
    fitted: Fitted | None = None
    rounds: list[Visits] = []
    for number in range(config.num_rounds):
        rounds = [*rounds, collect(choose, number)][-config.kept_rounds :]
        visits = join_visits(rounds)
        actions = None
        if number >= config.oracle_rounds:
            actions = fitted.unseen_actions(visits) if fitted else np.zeros(len(visits), np.int64)
        costs = relative_costs(visits, values_of(visits, actions))
        fitted = fit_networks(visits, costs, table, config, seed * 1000 + number)
        choose = greedy(fitted.policy)
        on_round(number, fitted.policy)
    assert fitted is not None
    return fitted.policy


def no_speculation(observations: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Action 0 everywhere."""
    return np.zeros(len(observations), dtype=np.int64)


def greedy(policy: Policy) -> Choose:
    """The choice of the allowed action of largest score."""

    def choose(observations: np.ndarray, masks: np.ndarray) -> np.ndarray:
        return np.where(masks, policy.scores(observations), -np.inf).argmax(axis=1)

    return choose


def relative_costs(visits: Visits, values: np.ndarray) -> np.ndarray:
    """Each action's cost over the best one's, in units of plain iterations, float32 [n, A]."""
    costs = visits.action_values(values)
    costs -= costs.min(axis=1, keepdims=True)
    return (costs / visits.seconds[:, 0].mean()).astype(np.float32)


def fit_networks(
    visits: Visits, costs: np.ndarray, table: Table, config: ImitationConfig, seed: int
) -> Fitted:
    """Networks, each fitted to all requests but those it is judged on."""
    mean, scale = visits.observations.mean(axis=0), visits.observations.std(axis=0)
    scale = np.where(scale > 1e-6, scale, 1.0)
    inputs = ((visits.observations - mean) / scale).clip(-CLIP, CLIP).astype(np.float32)
    data = Costs(inputs, costs)
    requests = np.random.default_rng(seed).permutation(len(visits.lengths))
    judged_by = np.empty(len(requests), dtype=np.int64)
    judged_by[requests] = np.arange(len(requests)) % config.num_networks
    judge = judged_by[visits.request]
    networks: list[Policy] = []
    for number in range(config.num_networks):
        seen, unseen = np.flatnonzero(judge != number), np.flatnonzero(judge == number)
        layers = fit_network(data.at(seen), data.at(unseen), config.fit, seed + number)
        networks.append(
            Policy(
                plans=tuple(table.plans),
                features=tuple(table.features),
                features_version=table.features_version,
                mean=mean,
                scale=scale,
                clip=CLIP,
                layers=layers,
            )
        )
    return Fitted(networks, judged_by)
