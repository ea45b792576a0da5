"""SmartSpec's goodput: the K whose expected tokens per predicted second are most, by load."""

from collections.abc import Sequence

import numpy as np

from specgym.baselines.checks import check_choice, check_count
from specgym.baselines.estimates.least_squares import LeastSquares
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.estimates.probing import Probing
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan, group_by_chain, num_positions

RIDGE = 1e-3  # of the cost model, in samples; ours
CONTEXT_UNIT, ROWS_UNIT, K_UNIT = 1024.0, 8.0, 4.0  # scales of the cost model's features; ours


class Goodput(OnlineController):
    """Before every iteration argmax over k of B E(k) / T(k), no speculation among the candidates.

    From the paper: alpha is a moving average of accepted over proposed tokens; E(k) = (1 -
    alpha^(k+1)) / (1 - alpha); the target's seconds are linear in context and batched tokens,
    B (k + 1), and those of k draft forwards likewise, so that T(k) = a0 + a1 C + a2 B (k + 1) +
    k (b0 + b1 C + b2 B). Ours:

    - Every chain has its alpha and its T, and all of them compete. With verifiers in between E
      counts the tokens that they may add.
    - T is fitted on line by ridge regression, not profiled beforehand; T(0) is the environment's
      baseline. `Probing` measures each chain at the start, and again after a while.
    - alpha is a ratio of sums over the last `window` iterations of the chain. Proposed is what
      was asked for: a drafter that proposes fewer tokens has them rejected.
    - `rate="judged"` counts only tokens that were judged: those after the first rejection never
      were, and counting them as rejected, as the paper's alpha does, makes E too small for
      large K.

    The batch size is the one of the last iteration: a request that joins is seen one step late.

    Args:
        plans: the plan table, indexed by action.
        rate: what acceptance is out of: `proposed` (the paper's) or `judged` tokens.
        window: iterations of a chain that alpha is taken over.
        profile_iterations: iterations that each chain is tried for at the start.
        probe_every: iterations from one probe to the next; None for no probes.
        scope: whether what was learned survives a request: `stream` or `request`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: SmartSpec / TurboSpec, arXiv 2406.14066, its goodput and its cost model.
    """

    kept = ("acceptances", "alphas", "cost_model", "probing", "load", "unit")

    def __init__(
        self,
        plans: Sequence[Plan],
        rate: str = "proposed",
        window: int = 20,
        profile_iterations: int = 4,
        probe_every: int | None = 64,
        scope: str = "stream",
    ) -> None:
        super().__init__(plans, scope)
        self._rate = check_choice("rate", rate, ("proposed", "judged"))
        self._window = check_count("window", window, 1)
        self._trying = (profile_iterations, probe_every)
        self._chains = group_by_chain(self._plans)
        self._names = [">".join(chain) for chain, _ in self._plans]
        self._forget()

    def _forget(self) -> None:
        names = [">".join(chain) for chain in self._chains]
        self._acceptances: dict[str, list[list[float]]] = {name: [] for name in names}
        self._alphas = dict.fromkeys(names, 0.0)
        self._cost_model = {name: LeastSquares(6, RIDGE) for name in names}
        self._probing = Probing(self._chains, len(self._plans), *self._trying)
        self._load = [0, 1, 1.0]  # context, rows, seconds without speculation
        self._unit = 0.0  # seconds that costs are measured in

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the plan to profile or to probe, else the allowed one of most goodput."""
        allowed = mask.tolist()
        tried = self._probing.due(allowed)
        if tried is not None:
            return tried
        best, most = 0, 1.0 / self._load[2]
        for chain, actions in self._chains.items():
            alpha, (fixed, per_k) = self._alphas[">".join(chain)], self._seconds(chain)
            for action in actions:
                k = self._plans[action][1]
                tokens = expected_tokens(alpha, k + len(chain) - 2)
                seconds = fixed + per_k * k
                if allowed[action] and seconds > 0.0 and tokens / seconds > most:
                    best, most = action, tokens / seconds
        return best

    def _learn(self, outcome: Outcome) -> None:
        self._unit = self._unit or outcome.baseline_seconds
        baseline = outcome.baseline_seconds / self._unit
        self._load = [outcome.context, outcome.num_rows, baseline]
        self._probing.note(outcome.action)
        if outcome.action == 0:
            return
        name = self._names[outcome.action]
        cost = (outcome.cost - outcome.catchup) * baseline
        self._cost_model[name].add(self._features(self._plans[outcome.action][1]), cost)
        if not outcome.is_last:
            asked = num_positions(self._plans[outcome.action])
            judged = min(asked, outcome.accepted + 1.0)
            recent = self._acceptances[name]
            recent.append([outcome.accepted, judged if self._rate == "judged" else asked])
            del recent[: -self._window]
            self._alphas[name] = sum([m for m, _ in recent]) / sum([n for _, n in recent])

    def _seconds(self, chain: tuple[str, ...]) -> tuple[float, float]:
        """Predicted seconds of a chain at the load seen last, and more of them for each K.

        A chain that never ran has none, and is left out.
        """
        model = self._cost_model[">".join(chain)]
        fixed = model.predict(self._features(0))
        return fixed, model.predict(self._features(1)) - fixed

    def _features(self, k: int) -> tuple[float, ...]:
        """What the seconds of a K are linear in, at the load seen last."""
        context, rows, _ = self._load
        length, width, drafts = context / CONTEXT_UNIT, rows / ROWS_UNIT, k / K_UNIT
        return (1.0, length, width * (k + 1), drafts, drafts * length, drafts * width)


def expected_tokens(alpha: float, k: int) -> float:
    """Returns E(k) = 1 + alpha + ... + alpha^k."""
    return k + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (k + 1)) / (1.0 - alpha)


def best_length(alpha: float, seconds: Sequence[float]) -> int:
    """Returns the k of most goodput E(k) / T(k).

    Args:
        alpha: acceptance rate of a token.
        seconds: T(k) for k = 0, 1, ...
    """
    return max(range(len(seconds)), key=lambda k: expected_tokens(alpha, k) / seconds[k])
