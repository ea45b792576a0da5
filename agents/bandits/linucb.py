"""LinUCB on the observation: two ridge regressions per plan, of tokens and of relative cost."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specgym.baselines.checks import check_choice, check_count, check_range
from specgym.baselines.estimates.outcomes import is_sound
from specgym.baselines.plans import Plan, charged_action, check_plans, check_state, plan_name

LARGEST = 5.0  # standardised observations are clipped to it


class LinUCB:
    """Linear upper confidence bounds over all plans, for a ratio of tokens to seconds.

    An arm's expected tokens and its expected cost (seconds over the baseline's, catch-up included)
    are linear in the standardised observation x and a constant. The allowed arm runs whose tokens -
    rate * cost + exploration * sqrt(x' A^-1 x) is largest; A is the arm's ridge * I + sum of x x'.
    The rate is tokens per cost so far: more tokens at that rate is what raises it (Dinkelbach's
    step for a ratio). The regressions and the width are Li et al.'s disjoint model; the rate and
    that two quantities are regressed on are ours.

    The first `num_warm_up` iterations take the arms in turn and fix mean and scale of the
    observations, the same for all arms; what they taught is kept.

    An iteration counts for the plan that ran (see `charged_action`).

    Args:
        plans: the plan table, indexed by action.
        exploration: weight of the width, in tokens.
        ridge: pull of the regressions to zero.
        num_warm_up: iterations that standardise; at least 2.
        scope: whether what was learned survives a request: `stream` or `request`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: Li, Chu, Langford and Schapire, "A contextual-bandit approach to personalized news
        article recommendation" (2010), Alg. 1; Dinkelbach, "On nonlinear fractional programming"
        (1967).
    """

    needs_divergence = False

    def __init__(
        self,
        plans: Sequence[Plan],
        exploration: float = 0.3,
        ridge: float = 10.0,
        num_warm_up: int = 52,
        scope: str = "stream",
    ) -> None:
        self._plans = check_plans(plans)
        self._exploration = check_range("exploration", exploration, 0.0, 1e6)
        self._ridge = check_range("ridge", ridge, 1e-6, 1e6)
        self._num_warm_up = check_count("num_warm_up", num_warm_up, 2)
        self._scope = check_choice("scope", scope, ("request", "stream"))
        self._seen = np.zeros(0)
        self._sums = np.zeros(2)
        self._samples: list[tuple[list[float], int, float, float]] = []
        self._inverse: np.ndarray | None = None

    def begin(self, request: Mapping[str, Any]) -> None:
        """Forgets what it knows where the scope is the request."""
        if self._scope == "request":
            self._forget()

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the allowed arm of the largest bound; while warming up the next in turn."""
        self._seen = np.asarray(observation, dtype=np.float64)
        if self._inverse is None:
            turn = (np.arange(len(mask)) + len(self._samples)) % len(mask)
            return int(turn[np.asarray(mask)[turn].argmax()])
        x = self._standardised(self._seen)
        widths = np.sqrt(np.maximum((self._inverse @ x) @ x, 0.0))
        scores = (self._tokens - self._rate() * self._costs) @ x + self._bonus(widths)
        return int(np.where(mask, scores, -np.inf).argmax())

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Adds an iteration to the regressions of the arm that it counts for."""
        if not is_sound(info) or not len(self._seen):
            return
        arm = charged_action(action, info)
        tokens, cost = float(info["tokens"]), info["iter_seconds"] / info["baseline_seconds"]
        self._sums += (tokens, cost)
        if self._inverse is not None:
            self._learn(self._standardised(self._seen), arm, tokens, cost)
            return
        self._samples.append((self._seen.tolist(), arm, tokens, float(cost)))
        if len(self._samples) == self._num_warm_up:
            self._standardise()

    def state_dict(self) -> dict[str, Any]:
        """Returns the regressions, the standardisation and what the warm-up collected."""
        arrays = self._arrays() if self._inverse is not None else {}
        return {
            "plans": [plan_name(plan) for plan in self._plans],
            "sums": self._sums.tolist(),
            "seen": self._seen.tolist(),
            "samples": [list(sample) for sample in self._samples],
            **{name: array.tolist() for name, array in arrays.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores all of it."""
        check_state(state, self._plans)
        self._forget()
        self._sums = np.array(state["sums"])
        self._seen = np.array(state["seen"])
        self._samples = [(list(x), arm, tokens, cost) for x, arm, tokens, cost in state["samples"]]
        if "inverse" in state:
            self._inverse = np.array(state["inverse"])
            self._tokens, self._costs = np.array(state["tokens"]), np.array(state["costs"])
            self._mean, self._scale = np.array(state["mean"]), np.array(state["scale"])

    def _arrays(self) -> dict[str, np.ndarray]:
        assert self._inverse is not None
        return {
            "inverse": self._inverse,
            "tokens": self._tokens,
            "costs": self._costs,
            "mean": self._mean,
            "scale": self._scale,
        }

    def _bonus(self, widths: np.ndarray) -> np.ndarray:
        """What is added to every plan's score: the width of its confidence."""
        return self._exploration * widths

    def _rate(self) -> float:
        tokens, cost = self._sums.tolist()
        return tokens / cost if cost > 0.0 else 1.0

    def _standardised(self, observation: np.ndarray) -> np.ndarray:
        x = np.ones(len(observation) + 1)
        x[:-1] = ((observation - self._mean) / self._scale).clip(-LARGEST, LARGEST)
        return x

    def _standardise(self) -> None:
        """Fixes mean and scale, and learns from what was collected."""
        seen = np.array([sample[0] for sample in self._samples])
        spread = seen.std(axis=0)
        self._mean, self._scale = seen.mean(axis=0), np.where(spread > 1e-6, spread, 1.0)
        arms, width = len(self._plans), seen.shape[1] + 1
        self._inverse = np.tile(np.eye(width) / self._ridge, (arms, 1, 1))
        self._tokens, self._costs = np.zeros((arms, width)), np.zeros((arms, width))
        for observation, arm, tokens, cost in self._samples:
            self._learn(self._standardised(np.array(observation)), arm, tokens, cost)
        self._samples = []

    def _learn(self, x: np.ndarray, arm: int, tokens: float, cost: float) -> None:
        """Takes one outcome in, by recursive least squares (Sherman and Morrison's update)."""
        assert self._inverse is not None
        inverse = self._inverse[arm]
        moved = inverse @ x
        gain = moved / (1.0 + x @ moved)
        self._tokens[arm] += gain * (tokens - self._tokens[arm] @ x)
        self._costs[arm] += gain * (cost - self._costs[arm] @ x)
        inverse -= np.outer(gain, moved)

    def _forget(self) -> None:
        self._sums = np.zeros(2)
        self._samples = []
        self._inverse = None
