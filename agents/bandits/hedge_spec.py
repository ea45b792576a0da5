"""HedgeSpec: NormalHedge over plans, on what each of them would have yielded."""

import math
import operator
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from specgym.baselines.checks import check_choice, check_count
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.estimates.plan_model import PlanModel
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan

NEWTON_STEPS = 12


class HedgeSpec(OnlineController):
    """Draws a plan from NormalHedge's weights; every plan's regret changes in every iteration.

    From the paper: R_j += r_j - sum_i w_i r_i, where r_j is what expert j would have yielded;
    w_j ~ [R_j]+ / c exp([R_j]+^2 / (2 c)), with c such that the mean of exp([R_j]+^2 / (2 c)) is e;
    equal weights while no regret is positive. r is the expected accepted length of a draft.

    The paper scores the drafters that were not played on the tokens that were verified: full
    information, at the price of their forwards. **`info` has no such scores**, so that the price is
    nothing, and so is the news: a plan that shares the played one's chain is judged by the round
    (`PositionCounts`: what a draft of K tells of other K), and a plan of another chain by the last
    `window` rounds in which its own chain ran. That is ours, and weaker than the paper: what a
    chain would do now is only found out by playing it.

    Ours, too: experts are all plans, and r_j is the predicted utility E_j / c_j over K_max + 2, so
    that time counts. `reward="length"` is the paper's: experts are the chains, each with its
    largest K, and r_j is its expected accepted tokens over the most there can be; nothing weighs
    what a chain costs. Every expert is played once at first.

    Args:
        plans: the plan table, indexed by action.
        reward: `utility` or `length`.
        window: rounds of a chain that acceptance is counted over.
        scope: whether regrets survive a request: `stream` or `request`.
        seed: seed of the controller's own generator.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: HedgeSpec, arXiv 2510.20064; Chaudhuri, Freund and Hsu, "A parameter-free hedging
        algorithm" (2009).
    """

    kept = ("model", "regrets", "weights", "is_new", "rng")

    def __init__(
        self,
        plans: Sequence[Plan],
        reward: str = "utility",
        window: int = 20,
        scope: str = "stream",
        seed: int = 0,
    ) -> None:
        super().__init__(plans, scope)
        self._reward = check_choice("reward", reward, ("utility", "length"))
        self._window = check_count("window", window, 1)
        self._rng = np.random.default_rng(check_count("seed", seed, 0))
        self._scale = max(k for _, k in self._plans) + 2.0
        largest = {chain: action for action, (chain, _) in by_k(self._plans)}
        self._experts = list(range(len(self._plans)))
        if self._reward == "length":
            self._experts = list(largest.values())[1:] or [0]
        self._forget()

    def _forget(self) -> None:
        self._model = PlanModel(self._plans, self._window)
        self._regrets = [0.0] * len(self._plans)
        self._weights = [1.0] * len(self._plans)
        self._is_new = [True] * len(self._plans)

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns an expert not played yet, else one drawn from the weights; 0 if none may run."""
        experts = [expert for expert in self._experts if mask[expert]]
        fresh = next((expert for expert in experts if self._is_new[expert]), None)
        if fresh is not None or not experts:
            return fresh or 0
        weights = [self._weights[expert] for expert in experts]
        if not any(weights):
            weights = [1.0] * len(experts)
        place = bisect(list(accumulate(weights)), self._rng.random() * sum(weights))
        return experts[min(place, len(experts) - 1)]

    def _learn(self, outcome: Outcome) -> None:
        self._model.add(outcome)
        self._is_new[outcome.action] = False
        known = [expert for expert in self._experts if not self._is_new[expert]]
        weights = [self._weights[expert] for expert in known]
        if any(weights):
            rewards = self._rewards(known)
            mean = sum(map(operator.mul, weights, rewards)) / sum(weights)
            for expert, reward in zip(known, rewards, strict=True):
                self._regrets[expert] += reward - mean
            drawn = normal_hedge([self._regrets[expert] for expert in self._experts])
            for expert, weight in zip(self._experts, drawn, strict=True):
                self._weights[expert] = weight

    def _rewards(self, experts: Sequence[int]) -> list[float]:
        """What experts that were played before would have yielded, in 0..1."""
        if self._reward == "utility":
            yields = self._model.utilities()
        else:
            yields = [tokens - 1.0 for tokens in self._model.tokens()]
        return [yields[expert] / self._scale for expert in experts]


def by_k(plans: Sequence[Plan]) -> list[tuple[int, Plan]]:
    """Returns the plans with their actions, in order of K."""
    return sorted(enumerate(plans), key=lambda pair: pair[1][1])


def normal_hedge(regrets: Sequence[float]) -> list[float]:
    """Returns NormalHedge's weights, which sum to 1.

    With u = 1 / (2 c), ln mean exp(u [R]+^2) = 1 is solved for u by Newton's steps from the right,
    where the left side, convex and rising, is at least 1: at u = (1 + ln A) / max [R]+^2.

    Source: Chaudhuri, Freund and Hsu 2009; the solver is ours.
    """
    count, largest = len(regrets), max(regrets)
    if largest <= 0.0:
        return [1.0 / count] * count
    shares = [max(regret, 0.0) / largest for regret in regrets]
    squares = [share * share for share in shares if share > 0.0]  # u is in their units, too
    u = 1.0 + math.log(count)
    for _ in range(NEWTON_STEPS):
        powers = [math.exp(u * square) for square in squares]
        total = count - len(squares) + sum(powers)
        excess = math.log(total / count) - 1.0
        u -= excess * total / sum(map(operator.mul, powers, squares))
        if abs(excess) < 1e-10:
            break
    weights = [share * math.exp(u * share * share) for share in shares]
    total = sum(weights)
    return [weight / total for weight in weights]
