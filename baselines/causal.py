"""What a causal policy can reach: fitted policy iteration, judged on requests it was not fitted to.

The clairvoyant oracle knows the future, so it says little about how good a controller can be. This
estimate is of one that sees the observation alone. It is a reached value, from below.

Legend: n visits, A actions, R requests, H units.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from specgym.baselines.checks import check_count, check_range
from specgym.baselines.visits import Visits, values_of

LARGEST = 5.0  # standardised observations are clipped to it
UNIT_INPUTS = 3  # entries of the observation that a random unit looks at


@dataclasses.dataclass(frozen=True)
class CausalConfig:
    """Settings of the estimate.

    Attributes:
        num_folds: Parts of the requests; each is judged by a fit to the others.
        num_rounds: Rounds of policy iteration.
        num_units: Random tanh units beside the observation itself.
        ridge: Pull of the regression to zero, per visit.
        num_resamples: Resamples of the requests for the interval.
        seed: Of folds, units and resamples.
    """

    num_folds: int = 5
    num_rounds: int = 5
    num_units: int = 300
    ridge: float = 0.01
    num_resamples: int = 2000
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("causal.num_folds", self.num_folds, 2)
        for field in ("num_rounds", "num_units", "num_resamples"):
            check_count(f"causal.{field}", getattr(self, field), 1)
        check_range("causal.ridge", self.ridge, 1e-9, 1e9)


@dataclasses.dataclass(frozen=True, eq=False)
class CausalEstimate:
    """What the fitted policies take on requests that they were not fitted to.

    Attributes:
        none: float64[R], seconds of no speculation.
        seconds: float64[R], seconds of the fitted policies.
        low: 2.5th percentile of `speedup` over resampled requests.
        high: 97.5th percentile.
    """

    none: np.ndarray
    seconds: np.ndarray
    low: float
    high: float

    @property
    def speedup(self) -> float:
        """Seconds of no speculation over those of the policies, in total."""
        return float(self.none.sum() / self.seconds.sum())


def estimate_causal(visits: Visits, config: CausalConfig = CausalConfig()) -> CausalEstimate:
    """Returns the score of the best causal policy, as far as a regression can find it.

    Every action's seconds to go are regressed on random features of the observation by ridge
    regression, the best action is taken for the policy, and its own seconds to go are regressed
    on next. Seconds are those of `values_of`: exact on the visits, with followers lagging as they
    did at them.

    Args:
        visits: of all requests, with exploration, best under a policy that is about as good.
        config: settings.

    Raises:
        ValueError: there are fewer requests than folds, or one without a visit.

    Source: fitted Q iteration, Ernst, Geurts and Wehenkel (2005), with policy evaluation on the
        recorded requests in place of its bootstrap; random features after Rahimi and Recht (2008).
    """
    num_requests = len(visits.lengths)
    if num_requests < config.num_folds or len(np.unique(visits.request)) < num_requests:
        raise ValueError(
            f"visits must be to every one of at least {config.num_folds} requests, got visits to "
            f"{len(np.unique(visits.request))} of {num_requests}; visit more, or take fewer folds"
        )
    rng = np.random.default_rng(config.seed)
    order = rng.permutation(num_requests)
    features = random_features(visits.observations, config.num_units, rng)
    actions = np.zeros(len(visits), dtype=np.int64)
    none = values_of(visits, actions)[:, 0]
    for fold in range(config.num_folds):
        judged = np.isin(visits.request, order[fold :: config.num_folds])
        fitted = visits.at(np.flatnonzero(~judged))
        weights = fit_values(fitted, features[~judged], config)
        actions[judged] = best_actions(features[judged], weights, visits.allowed[judged])
    seconds = values_of(visits, actions)[:, 0]
    drawn = rng.integers(num_requests, size=(config.num_resamples, num_requests))
    ratios = none[drawn].sum(axis=1) / seconds[drawn].sum(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return CausalEstimate(none, seconds, float(low), float(high))


def random_features(
    observations: np.ndarray, num_units: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns standardised observations, random tanh units of them and a one, [n, F + H + 1]."""
    spread = observations.std(axis=0)
    x = (observations - observations.mean(axis=0)) / np.where(spread > 1e-6, spread, 1.0)
    x = x.clip(-LARGEST, LARGEST)
    directions = rng.normal(size=(x.shape[1], num_units))
    ranks = rng.random(size=directions.shape).argsort(axis=0)
    directions[ranks >= UNIT_INPUTS] = 0.0
    units = np.tanh(x @ directions + rng.normal(size=num_units))
    return np.concatenate([x, units, np.ones((len(x), 1))], axis=1)


def fit_values(visits: Visits, features: np.ndarray, config: CausalConfig) -> np.ndarray:
    """Returns the weights of each action's seconds to go over the mean's, [F + H + 1, A]."""
    gram = features.T @ features + config.ridge * len(features) * np.eye(features.shape[1])
    actions = np.zeros(len(visits), dtype=np.int64)
    weights = np.zeros((features.shape[1], visits.num_actions))
    for _ in range(config.num_rounds):
        costs = visits.action_values(values_of(visits, actions))
        costs -= costs[:, :1]  # against no speculation, which is always allowed
        costs[~visits.allowed] = 0.0
        weights = np.linalg.solve(gram, features.T @ costs)
        actions = best_actions(features, weights, visits.allowed)
    return weights


def best_actions(features: np.ndarray, weights: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """Returns the allowed actions of the fewest predicted seconds, int64[n]."""
    return np.where(allowed, features @ weights, np.inf).argmin(axis=1)
