"""Settings of trainings on recorded traces; imported without torch, so that help is quick."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from specgym.agents.sb3_settings import (
    ImitationConfig,
    PolicyGradient,
    QLearning,
    dqn_recipe,
    maskable_ppo_recipe,
    ppo_recipe,
)


@dataclasses.dataclass(frozen=True)
class ReplayConfig:
    """Trains an agent on recorded traces.

    Attributes:
        agent: What learns.
        env: ``replay``: recorded traces.
        traces: File of ``specgym record``; its held-out requests are measured on, never fitted on.
        k_values: Numbers of drafted tokens that plans may ask for; all recorded ones by default.
        seed: Of weights, actions and the order of requests.
        name: Name of the run, a folder under ``runs``; a stopped run of this name goes on. By
            default the agent and the traces.
        runs: Folder of all runs.
        overwrite: Replace a finished run of this name.
    """

    agent: str = "maskable-ppo"
    env: Literal["replay"] = "replay"
    traces: Path = Path("traces/smollm2-moe.npz")
    k_values: tuple[int, ...] = ()
    seed: int = 0
    name: str = ""
    runs: Path = Path("runs")
    overwrite: bool = False

    @property
    def run_name(self) -> str:
        """Name of the run."""
        return self.name or f"{self.agent}-{self.traces.stem}"


@dataclasses.dataclass(frozen=True)
class NetworkConfig(ReplayConfig):
    """Trains a network on recorded traces.

    Attributes:
        validate_every: Every n-th training request is not fitted on but chooses the best policy.
        num_evaluations: Times that it is measured on the way, and saved.
    """

    validate_every: int = 5
    num_evaluations: int = 20

    def __post_init__(self) -> None:
        if self.validate_every < 2:
            raise ValueError(f"validate_every: must be >= 2; got {self.validate_every}")
        if self.num_evaluations < 1:
            raise ValueError(f"num_evaluations: must be >= 1; got {self.num_evaluations}")


@dataclasses.dataclass(frozen=True)
class PolicyGradientConfig(NetworkConfig):
    """Trains PPO or MaskablePPO on recorded traces.

    Attributes:
        recipe: The learner's settings.
    """

    recipe: PolicyGradient = maskable_ppo_recipe()  # noqa: RUF009 (frozen)


@dataclasses.dataclass(frozen=True)
class QLearningConfig(NetworkConfig):
    """Trains DQN on recorded traces.

    Attributes:
        recipe: The learner's settings.
    """

    recipe: QLearning = dqn_recipe()  # noqa: RUF009 (frozen)


@dataclasses.dataclass(frozen=True)
class ImitationTraining(ReplayConfig):
    """Fits a policy to what every action costs on recorded traces. Begun anew when it was stopped.

    Attributes:
        recipe: The learner's settings.
        num_rows: Requests that are decoded at once to visit states.
        num_steps: Iterations of each row in a round.
        exploration: Shares of random actions; rows take them in turn.
    """

    recipe: ImitationConfig = ImitationConfig()  # noqa: RUF009 (frozen)
    num_rows: int = 192
    num_steps: int = 120
    exploration: tuple[float, ...] = (0.0, 0.1, 0.3, 1.0)

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.num_steps < 1:
            raise ValueError(
                f"num_rows and num_steps: must be >= 1; got {self.num_rows} and {self.num_steps}"
            )
        if not self.exploration or not all(0.0 <= share <= 1.0 for share in self.exploration):
            raise ValueError(f"exploration: must be shares from 0 to 1; got {self.exploration}")


@dataclasses.dataclass(frozen=True)
class BanditConfig(ReplayConfig):
    """Lets a bandit play recorded traces, and saves what it knows then.

    Attributes:
        options: Its options, as in ``compare``: ``scope=request:exploration=0.2``.
        num_passes: Times that it plays all training requests.
    """

    options: str = ""
    num_passes: int = 3

    def __post_init__(self) -> None:
        if self.num_passes < 1:
            raise ValueError(f"num_passes: must be >= 1; got {self.num_passes}")

    @property
    def spec(self) -> str:
        """The bandit as ``compare`` names it."""
        return f"{self.agent}:{self.options}" if self.options else self.agent


SETTINGS: dict[str, ReplayConfig] = {
    settings.agent: settings
    for settings in (
        PolicyGradientConfig("ppo", recipe=ppo_recipe()),
        PolicyGradientConfig("maskable-ppo", recipe=maskable_ppo_recipe()),
        QLearningConfig("dqn", recipe=dqn_recipe()),
        ImitationTraining("imitation"),
        BanditConfig("ucb"),
        BanditConfig("linucb"),
    )
}


def find_settings(agent: str) -> ReplayConfig:
    """The settings to start from of the agent of this name.

    Raises:
        ValueError: If no such agent learns from traces.
    """
    if agent not in SETTINGS:
        raise ValueError(
            f"agent: no agent {agent!r} learns from traces; there are {', '.join(SETTINGS)}"
        )
    return SETTINGS[agent]
