"""The protocol every controller follows, and the loop that runs one over a request."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from specgym.engine.types import DecodeRequest
from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.replay.replay_env import ReplayEnv
from specgym.envs.workloads import Request

DIVERGENCE_EVERY = 16  # uses of a chain between two measurements of D_TV; about 0.1 ms a step


class StepError(RuntimeError):
    """An engine fault that ended a request."""


class Controller(Protocol):
    """What picks a plan before every iteration.

    A controller never sees the environment, so that a server which owns the loop can drive it:
    it calls ``act`` before and ``observe`` after each iteration.
    """

    needs_divergence: bool

    def begin(self, request: Mapping[str, Any]) -> None:
        """A new request starts: ``request_id``, ``num_prompt``, ``max_new_tokens``."""
        ...

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """The action to run, one that the mask allows."""
        ...

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """What came of it."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything learned."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores everything learned."""
        ...


@dataclasses.dataclass
class RequestRecord:
    """What one controller did on one request.

    Attributes:
        request_id: The request.
        category: Its category.
        prefill_seconds: Seconds of the target's prefill, not part of ``seconds``.
        seconds: Wall seconds from the end of the prefill to the last token.
        output: Token ids.
        steps: One plain dictionary per iteration, as written to ``steps.jsonl``.
    """

    request_id: str
    category: str
    prefill_seconds: float
    seconds: float = 0.0
    output: list[int] = dataclasses.field(default_factory=list)
    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens decoded."""
        return len(self.output)

    def total(self, key: str) -> float:
        """Sum of a step's entry over the request."""
        return sum(step[key] for step in self.steps)


STEP_KEYS = (
    "tokens",
    "drafted",
    "accepted",
    "accepted_per_level",
    "proposed_per_level",
    "chain",
    "k",
    "executed_action",
    "reason",
    "iter_seconds",
    "draft_seconds",
    "verify_seconds",
    "catchup_seconds",
    "baseline_seconds",
    "controller_seconds",
    "total_seconds",
    "utility",
    "divergence",
    "kv_len",
    "context_len",
    "unique_experts",
    "finish_reason",
)


def begin_request(
    env: SpecDecodeEnv | ReplayEnv, controller: Controller, request: Request | DecodeRequest
) -> tuple[np.ndarray, dict[str, Any]]:
    """Resets the environment to a request, as the controller needs it; the reset's return."""
    every = DIVERGENCE_EVERY if controller.needs_divergence else 0
    observation, info = env.reset(options={"request": request, "divergence_every": every})
    controller.begin({key: info[key] for key in ("request_id", "num_prompt", "max_new_tokens")})
    return observation, info


def run_steps(
    env: SpecDecodeEnv | ReplayEnv,
    controller: Controller,
    observation: np.ndarray,
    info: dict[str, Any],
) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """Action, reward and ``info`` of every step until the episode ends.

    Raises:
        StepError: If the engine failed in some step.
    """
    done = False
    while not done:
        action = controller.act(observation, info["action_mask"])
        observation, reward, terminated, truncated, info = env.step(action)
        if "error" in info:
            raise StepError(f"request {info['request_id']!r}: {info['error']}")
        controller.observe(action, reward, info)
        done = terminated or truncated
        yield action, reward, info


def run_request(env: SpecDecodeEnv, controller: Controller, request: Request) -> RequestRecord:
    """Decodes one request under a controller.

    Raises:
        StepError: If the engine failed in some step.
    """
    observation, begun = begin_request(env, controller, request)
    record = RequestRecord(request.id, request.category, begun["prefill_seconds"])
    for action, reward, info in run_steps(env, controller, observation, begun):
        record.steps.append({"action": action, "reward": reward} | take(info))
    record.seconds = record.total("total_seconds")
    record.output = info["output"]
    return record


def take(info: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a step's ``info`` that are kept."""
    return {key: info[key] for key in STEP_KEYS}
