"""HedgeSpec: NormalHedge over plans, on what each of them would have yielded."""

import math
from collections.abc import Sequence

import numpy as np

from specgym.baselines.checks import check_choice, check_count
from specgym.baselines.online import OnlineController
from specgym.baselines.outcomes import Outcome
from specgym.baselines.plan_model import PlanModel
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
        self._regrets = np.zeros(len(self._plans))
        self._weights = np.ones(len(self._plans))
        self._is_new = [True] * len(self._plans)

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns an expert not played yet, else one drawn from the weights; 0 if none may run."""
        experts = [expert for expert in self._experts if mask[expert]]
        fresh = next((expert for expert in experts if self._is_new[expert]), None)
        if fresh is not None or not experts:
            return fresh or 0
        cumulated = self._weights[experts].cumsum()
        if cumulated[-1] <= 0.0:
            cumulated = np.arange(1.0, len(experts) + 1.0)
        drawn = cumulated.searchsorted(self._rng.random() * cumulated[-1], side="right")
        return experts[min(int(drawn), len(experts) - 1)]

    def _learn(self, outcome: Outcome) -> None:
        self._model.add(outcome)
        self._is_new[outcome.action] = False
        known = [expert for expert in self._experts if not self._is_new[expert]]
        total = self._weights[known].sum()
        if total > 0.0:
            rewards = self._rewards(known)
            self._regrets[known] += rewards - self._weights[known] @ rewards / total
            self._weights[self._experts] = normal_hedge(self._regrets[self._experts])

    def _rewards(self, experts: Sequence[int]) -> np.ndarray:
        """What experts that were played before would have yielded, in 0..1."""
        if self._reward == "utility":
            yields = self._model.utilities()
        else:
            yields = [tokens - 1.0 for tokens in self._model.tokens()]
        return np.array([yields[expert] for expert in experts]) / self._scale


def by_k(plans: Sequence[Plan]) -> list[tuple[int, Plan]]:
    """Returns the plans with their actions, in order of K."""
    return sorted(enumerate(plans), key=lambda pair: pair[1][1])


def normal_hedge(regrets: np.ndarray) -> np.ndarray:
    """Returns NormalHedge's weights, which sum to 1.

    With u = 1 / (2 c), ln mean exp(u [R]+^2) = 1 is solved for u by Newton's steps from the right,
    where the left side, convex and rising, is at least 1: at u = (1 + ln A) / max [R]+^2.

    Source: Chaudhuri, Freund and Hsu 2009; the solver is ours.
    """
    positive = np.maximum(regrets, 0.0)
    largest = float(positive.max())
    if largest <= 0.0:
        return np.full(len(regrets), 1.0 / len(regrets))
    squares = (positive / largest) ** 2  # in units of the largest, which u is then in, too
    u = 1.0 + math.log(len(regrets))
    for _ in range(NEWTON_STEPS):
        powers = np.exp(u * (squares - 1.0))
        total = float(powers.sum())
        excess = u + math.log(total / len(regrets)) - 1.0
        u -= excess * total / float(powers @ squares)
        if abs(excess) < 1e-10:
            break
    weights = positive * np.exp(u * (squares - 1.0))
    result: np.ndarray = weights / weights.sum()
    return result
