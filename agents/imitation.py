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

from specgym.agents.cost_networks import Costs, FitConfig, Layers, add_networks, fit_network
from specgym.agents.policy import Policy
from specgym.baselines.checks import check_count
from specgym.baselines.plans import Plan
from specgym.baselines.visits import Visits, join_visits, values_of

# Actions [B] for observations [B, F] and masks [B, A].
Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]
CLIP = 5.0
JUDGE_EVERY = 4  # a network is judged on every fourth request, and fitted to the others


@dataclasses.dataclass(frozen=True)
class ImitationConfig:
    """Settings of a training.

    Attributes:
        oracle_rounds: Rounds of visiting states and fitting to the oracle's values.
        own_rounds: Rounds after them, of fitting to the policy's own values.
        num_networks: Networks that a round fits, each judged on other requests.
        added_rounds: Last rounds whose networks make up the policy: their scores are added.
        kept_rounds: Last rounds whose visits a fit uses.
        fit: Settings of each fit.
    """

    oracle_rounds: int = 1
    own_rounds: int = 4
    num_networks: int = 2
    added_rounds: int = 4
    kept_rounds: int = 3
    fit: FitConfig = FitConfig()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        check_count("imitation.oracle_rounds", self.oracle_rounds, 0)
        check_count("imitation.own_rounds", self.own_rounds, 0)
        for field in ("num_networks", "added_rounds", "kept_rounds"):
            check_count(f"imitation.{field}", getattr(self, field), 1)
        if self.num_rounds < 1:
            raise ValueError("imitation.oracle_rounds and own_rounds: one of them must be >= 1")

    @property
    def num_rounds(self) -> int:
        """All rounds."""
        return self.oracle_rounds + self.own_rounds


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """What a policy is over: plans, features and the version of the features' table."""

    plans: Sequence[Plan]
    features: Sequence[str]
    features_version: int


@dataclasses.dataclass(frozen=True, eq=False)
class Scaling:
    """How observations are standardised, the same in all rounds.

    Attributes:
        mean: Subtracted, [F].
        scale: Divided by, [F].
    """

    mean: np.ndarray
    scale: np.ndarray

    def inputs(self, observations: np.ndarray) -> np.ndarray:
        """Standardised observations, float32 [n, F]."""
        standardised = (observations - self.mean) / self.scale
        return standardised.clip(-CLIP, CLIP).astype(np.float32)


def train_imitation(
    collect: Callable[[Choose, int], Visits],
    table: Table,
    config: ImitationConfig = ImitationConfig(),
    seed: int = 0,
    on_round: Callable[[int, Policy], None] = lambda number, policy: None,
) -> Policy:
    """The policy after all rounds; the same for the same seed.

    Round by round it collects visits under the policy so far, adds them to those of the rounds
    before (DAgger), and fits to the values of every action there: the best in hindsight at first,
    then what the policy so far takes from there on (policy iteration). At first no speculation
    runs.

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
    rounds: list[Visits] = []
    networks: list[Layers] = []
    scaling: Scaling | None = None
    for number in range(config.num_rounds):
        rounds = [*rounds, collect(choose, number)][-config.kept_rounds :]
        visits = join_visits(rounds)
        scaling = scaling or scaling_of(visits)
        is_own = number >= config.oracle_rounds
        actions = choose(visits.observations, visits.allowed) if is_own else None
        costs = Costs(
            scaling.inputs(visits.observations), relative_costs(visits, values_of(visits, actions))
        )
        if number == config.oracle_rounds:
            networks = []  # those that the oracle advised
        networks += fit_networks(visits, costs, config, seed * 1000 + number)
        networks = networks[-config.added_rounds * config.num_networks :]
        policy = make_policy(table, scaling, networks)
        choose = greedy(policy)
        on_round(number, policy)
    return policy


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


def scaling_of(visits: Visits) -> Scaling:
    """Mean and spread of the visits' observations; a spread of one where nothing varies."""
    spread = visits.observations.std(axis=0)
    return Scaling(visits.observations.mean(axis=0), np.where(spread > 1e-6, spread, 1.0))


def fit_networks(visits: Visits, costs: Costs, config: ImitationConfig, seed: int) -> list[Layers]:
    """Networks, each fitted to the visits of all requests but those that it is judged on."""
    requests = np.random.default_rng(seed).permutation(len(visits.lengths))
    networks = []
    for number in range(config.num_networks):
        is_judge = np.isin(visits.request, requests[number % JUDGE_EVERY :: JUDGE_EVERY])
        train, judge = costs.at(np.flatnonzero(~is_judge)), costs.at(np.flatnonzero(is_judge))
        networks.append(fit_network(train, judge, config.fit, seed + number))
    return networks


def make_policy(table: Table, scaling: Scaling, networks: Sequence[Layers]) -> Policy:
    """The policy of the networks' mean scores."""
    return Policy(
        plans=tuple(table.plans),
        features=tuple(table.features),
        features_version=table.features_version,
        mean=scaling.mean,
        scale=scaling.scale,
        clip=CLIP,
        layers=add_networks(networks),
    )
