"""A decoder on paper: acceptance rates and forward seconds in, the environment's info out."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from specgym.baselines.hindsight.problem import DecisionProblem
from specgym.baselines.plans import Plan


class PaperDecoder:
    """Iterations as the environment reports them, drawn from stated rates.

    Args:
        plans: the plan table.
        alphas: acceptance rate by pair, such as `{"ngram>target": 0.5}`.
        seconds: forward seconds by member; n-gram drafts without forwards.
        per_token: share of a forward's seconds that each token after the first adds.
        hit_rate: probability that the n-gram drafter proposes anything.
        seed: seed of the draws.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        alphas: Mapping[str, float],
        seconds: Mapping[str, float],
        per_token: float = 0.0,
        hit_rate: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.plans = tuple(plans)
        self.alphas = dict(alphas)
        self.seconds = dict(seconds)
        self.per_token = per_token
        self.hit_rate = hit_rate
        self.rng = random.Random(seed)

    def step(self, action: int, mask: np.ndarray | None = None) -> dict[str, Any]:
        """Returns the info of one iteration under the action."""
        reason = "" if mask is None or mask[action] else "masked"
        executed = 0 if reason else action
        drafter, k = self.plans[executed][0][0], self.plans[executed][1]
        if k and drafter == "ngram" and self.rng.random() >= self.hit_rate:
            executed, reason = 0, "no_proposal"
        chain, k = self.plans[executed]
        forwards = []
        if k and drafter != "ngram":
            forwards = [self.forward(drafter, "draft", 1) for _ in range(k)]
        passed, proposed, accepted = k, [], []
        for proposer, verifier in pairwise(chain):
            forwards.append(self.forward(verifier, "verify", passed + 1))
            proposed.append(passed)
            accepted.append(self.count(self.alphas[f"{proposer}>{verifier}"], passed))
            passed = accepted[-1] + 1
        if not k:
            forwards.append(self.forward(chain[-1], "verify", 1))
            passed = 1
        return self.info(executed, reason, forwards, passed, proposed, accepted)

    def batch_step(self, action: int, num_rows: int) -> dict[str, Any]:
        """Returns the info of one iteration of several rows, which take as long as one."""
        steps = [self.step(action) for _ in range(num_rows)]
        longest = max(steps, key=lambda info: len(info["accepted_per_level"]))
        levels = range(len(longest["accepted_per_level"]))
        sums = {
            name: [sum(s[name][level] for s in steps if s[name]) for level in levels]
            for name in ("accepted_per_level", "proposed_per_level")
        }
        return {
            **longest,
            **sums,
            "tokens": sum(each["tokens"] for each in steps),
            "drafted": sum(each["drafted"] for each in steps),
            "baseline_seconds": self.seconds["target"] / num_rows,
            "num_active": num_rows,
        }

    def info(
        self,
        executed: int,
        reason: str,
        forwards: list[dict[str, Any]],
        tokens: int,
        proposed: list[int],
        accepted: list[int],
    ) -> dict[str, Any]:
        """Returns the info of an iteration that emitted `tokens`."""
        chain, k = self.plans[executed]
        seconds = sum(forward["seconds"] for forward in forwards)
        return {
            "tokens": tokens,
            "drafted": proposed[0] if proposed else 0,
            "accepted": accepted[-1] if accepted else 0,
            "proposed_per_level": proposed,
            "accepted_per_level": accepted,
            "chain": ">".join(chain),
            "k": k,
            "executed_action": executed,
            "reason": reason,
            "iter_seconds": seconds,
            "draft_seconds": sum(f["seconds"] for f in forwards if f["role"] == "draft"),
            "verify_seconds": sum(f["seconds"] for f in forwards if f["role"] == "verify"),
            "catchup_seconds": 0.0,
            "baseline_seconds": self.seconds["target"],
            "forwards": forwards,
            "divergence": {
                f"{proposer}>{verifier}": 1.0 - self.alphas[f"{proposer}>{verifier}"]
                for proposer, verifier in pairwise(chain)
            },
            "finish_reason": None,
        }

    def forward(self, member: str, role: str, num_tokens: int) -> dict[str, Any]:
        """Returns the description of one forward."""
        seconds = self.seconds[member] * (1.0 + self.per_token * (num_tokens - 1))
        return {
            "member": member,
            "role": role,
            "num_tokens": num_tokens,
            "num_rows": 8,
            "num_catchup": 0,
            "seconds": seconds,
        }

    def count(self, alpha: float, num_proposed: int) -> int:
        """Returns how many of the proposed tokens are accepted."""
        num_accepted = 0
        while num_accepted < num_proposed and self.rng.random() < alpha:
            num_accepted += 1
        return num_accepted


NGRAM = ("ngram", "target")
SMALL = ("small", "target")
LONG = ("small", "mid", "target")
K_VALUES = (1, 2, 3, 4, 6)
ALPHAS = {"ngram>target": 0.5, "small>target": 0.6, "small>mid": 0.7, "mid>target": 0.8}
SECONDS = {"small": 0.1, "mid": 0.3, "target": 1.0}


@pytest.fixture(scope="session")
def ngram_plans() -> list[Plan]:
    """No speculation, then one n-gram chain with the default K values: action i has rung i."""
    return [(("target",), 0), *((NGRAM, k) for k in K_VALUES)]


@pytest.fixture(scope="session")
def all_plans() -> list[Plan]:
    """No speculation, then an n-gram chain, a model chain and a chain of three."""
    return [(("target",), 0), *((chain, k) for chain in (NGRAM, SMALL, LONG) for k in K_VALUES)]


@pytest.fixture(scope="session")
def make_decoder() -> Callable[..., PaperDecoder]:
    """Returns a maker of paper decoders; rates and seconds have defaults."""

    def make(
        plans: Sequence[Plan],
        alphas: Mapping[str, float] = ALPHAS,
        seconds: Mapping[str, float] = SECONDS,
        per_token: float = 0.0,
        hit_rate: float = 1.0,
        seed: int = 0,
    ) -> PaperDecoder:
        return PaperDecoder(plans, alphas, seconds, per_token, hit_rate, seed)

    return make


@pytest.fixture(scope="session")
def drive() -> Callable[..., list[int]]:
    """Returns a loop that lets a controller decode a request, and gives its actions."""

    def loop(
        controller: Any, decoder: PaperDecoder, num_steps: int, begins: bool = True
    ) -> list[int]:
        mask = np.ones(len(decoder.plans), dtype=bool)
        observation = np.zeros(3, dtype=np.float32)
        if begins:
            controller.begin({"request_id": "r", "num_prompt": 5, "max_new_tokens": num_steps})
        actions = []
        for _ in range(num_steps):
            action = controller.act(observation, mask)
            controller.observe(action, 0.0, decoder.step(action, mask))
            actions.append(action)
        return actions

    return loop


def random_problem(
    seed: int, num_positions: int = 6, num_actions: int = 5, num_followers: int = 2
) -> DecisionProblem:
    """Returns a request whose tables are drawn; some actions share their catch-up costs."""
    rng = np.random.default_rng(seed)
    table = (num_positions, num_actions)
    left = num_positions - np.arange(num_positions)[:, None]
    tokens = np.minimum(rng.integers(1, 5, table), left)
    tokens[:, 0] = 1
    uses = rng.random((*table, num_followers)) < 0.5
    uses[:, 0] = False
    allowed = rng.random(table) < 0.8
    allowed[:, 0] = True
    lags = rng.integers(0, tokens[..., None], (*table, num_followers))
    catchup = rng.uniform(-0.2, 1.0, (2, num_followers, num_positions + 1))
    return DecisionProblem(
        tokens=tokens.astype(np.uint8),
        seconds=rng.uniform(0.5, 2.0, table),
        allowed=allowed,
        uses=uses,
        lag_after=lags.astype(np.int16),
        catchup=catchup[rng.integers(0, 2, num_actions)],
        prefill=rng.uniform(0.0, 1.0, num_followers),
        baseline=rng.uniform(0.5, 2.0, num_positions),
        name=f"request {seed}",
    )


@pytest.fixture
def draw_problem() -> Callable[..., DecisionProblem]:
    """What draws a decision problem from a seed."""
    return random_problem


@pytest.fixture
def worked_problem() -> DecisionProblem:
    """Four tokens, three plans, two followers; small enough to work out by hand."""
    uses = np.zeros((4, 3, 2), dtype=bool)
    uses[:, 1, 0] = True
    uses[:, 2, :] = True
    allowed = np.ones((4, 3), dtype=bool)
    allowed[3, 1:] = False
    lag_after = np.zeros((4, 3, 2), dtype=np.int16)
    lag_after[:, 2, 1] = 1
    return DecisionProblem(
        tokens=np.array([[1, 2, 3], [1, 1, 3], [1, 2, 2], [1, 1, 1]]),
        seconds=np.array([[1.0, 1.5, 2.0]] * 4),
        allowed=allowed,
        uses=uses,
        lag_after=lag_after,
        catchup=np.arange(4) * np.array([0.0, 0.1, 0.25])[:, None, None] * np.ones((3, 2, 1)),
        prefill=np.array([0.5, 0.75]),
        baseline=np.ones(4),
    )
