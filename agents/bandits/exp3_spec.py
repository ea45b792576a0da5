"""EXP3Spec: exponential weights on importance-weighted losses, for plans that turn against one."""

import math
from collections.abc import Sequence

import numpy as np

from specgym.baselines.checks import check_choice, check_count, check_range
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan, num_positions


class EXP3Spec(OnlineController):
    """Draws arm a with p_a ~ exp(-eta sum of losses / p), eta = sqrt(ln A / (t A)).

    From the paper: the loss of an iteration that emits Y tokens is (L + 1 - Y) / L, divided by the
    probability with which its arm was drawn; L is the longest draft and A the number of arms.
    `loss="cost"` is ours: 1 - U / (L + 1), clipped to 0..1, where U is the iteration's utility, so
    that time counts. So is `mix`, a share of uniform draws (Auer et al.'s EXP3 has one, the paper
    has none).

    Ours, too: p is over the arms that the mask allows; an iteration that counts for another arm
    than was drawn (a server's choice, or a plan turned down) has no probability of its own and
    teaches nothing.

    Args:
        plans: the plan table, indexed by action.
        loss: `tokens` (the paper's) or `cost`.
        mix: share of uniform draws.
        scope: whether losses survive a request: `request` (the paper's) or `stream`.
        seed: seed of the controller's own generator.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: BanditSpec, arXiv 2505.15141, EXP3Spec; Auer, Cesa-Bianchi, Freund and Schapire 2002.
    """

    kept = ("losses", "num_rounds", "drawn", "rng")

    def __init__(
        self,
        plans: Sequence[Plan],
        loss: str = "tokens",
        mix: float = 0.0,
        scope: str = "request",
        seed: int = 0,
    ) -> None:
        super().__init__(plans, scope)
        self._loss = check_choice("loss", loss, ("tokens", "cost"))
        self._mix = check_range("mix", mix, 0.0, 1.0)
        self._rng = np.random.default_rng(check_count("seed", seed, 0))
        self._longest = max(1, *map(num_positions, self._plans))
        self._forget()

    def _forget(self) -> None:
        self._losses = np.zeros(len(self._plans))
        self._num_rounds = 0
        self._drawn: tuple[int, float] = (0, 0.0)  # the arm drawn last, and its probability

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns an arm drawn from the weights of those that the mask allows."""
        eta = learning_rate(self._num_rounds + 1, len(self._plans))
        arms = np.flatnonzero(mask)
        p = weights(self._losses[arms], eta, self._mix)
        drawn = int(p.cumsum().searchsorted(self._rng.random() * p.sum(), side="right"))
        drawn = min(drawn, len(arms) - 1)
        self._drawn = (int(arms[drawn]), float(p[drawn]))
        return int(arms[drawn])

    def _learn(self, outcome: Outcome) -> None:
        self._num_rounds += 1
        arm, probability = self._drawn
        if outcome.action == arm and probability > 0.0:
            self._losses[arm] += self._loss_of(outcome) / probability

    def _loss_of(self, outcome: Outcome) -> float:
        if self._loss == "tokens":
            return (self._longest + 1.0 - outcome.tokens) / self._longest
        utility = outcome.tokens / outcome.cost
        return min(max(1.0 - utility / (self._longest + 1.0), 0.0), 1.0)


def learning_rate(t: int, num_arms: int) -> float:
    """Returns eta = sqrt(ln A / (t A)).

    Source: BanditSpec, arXiv 2505.15141, EXP3Spec.
    """
    return math.sqrt(math.log(num_arms) / (t * num_arms))


def weights(losses: np.ndarray, eta: float, mix: float) -> np.ndarray:
    """Returns the probability of every arm: (1 - mix) softmax(-eta losses) + mix / A."""
    powers = np.exp(-eta * (losses - losses.min()))
    result: np.ndarray = (1.0 - mix) * powers / powers.sum() + mix / len(losses)
    return result
