"""Thousands of replays as Gymnasium's vector environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from specgym.envs.replay.vector_replay import VectorReplay


class ReplayVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """``VectorReplay`` as ``gymnasium.make_vec("specgym/Replay-v0", num_envs=1024)`` makes it.

    Row i under ``reset(seed=s)`` is ``ReplayEnv`` under seed s + i. A row whose episode has ended
    begins its next one in the same step: the observation is the new episode's first,
    ``infos["final_obs"]`` has the last one of the old, and ``infos["final_info"]`` its ``episode``
    (return ``r``, length ``l`` and ``seconds``) and ``request_id``. ``infos["action_mask"]`` says
    which actions can run, [B, A] bool; a masked one that comes all the same runs as no speculation.
    Rewards are float64, [B].

    Args:
        num_envs: Rows, B.
        arguments: As of ``VectorReplay``.

    Raises:
        ValueError: If an argument is out of range, or the traces cannot be used.
    """

    metadata = {  # noqa: RUF012 (gymnasium's form)
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(self, num_envs: int = 1, **arguments: Any):
        self.replay = VectorReplay(num_envs=num_envs, **arguments)
        self.num_envs = self.replay.num_envs
        self.single_observation_space = self.replay.observation_space
        self.single_action_space = self.replay.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode in every row; a seed begins their streams anew.

        Raises:
            ValueError: If the seed is no whole number of 0 or more, or there are options.
        """
        if options:
            raise ValueError(f"options: there are none for all rows at once; got {options!r}")
        observations = self.replay.reset(seed)
        super().reset(seed=seed)
        return observations, self.masks()

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Plays one iteration in every row.

        Args:
            actions: One per row, [B].

        Returns:
            Observations [B, F], rewards [B], terminations [B], truncations [B], and infos.

        Raises:
            ValueError: If an action is out of range, or ``reset`` was never called.
        """
        observations, rewards, ends, rows = self.replay.step(actions)
        infos, truncated = self.masks(), np.zeros(self.num_envs, dtype=bool)
        for row in np.flatnonzero(ends).tolist():
            last = dict(rows[row])
            truncated[row] = last.pop("TimeLimit.truncated")
            ended = {"final_obs": last.pop("terminal_observation"), "final_info": last}
            infos = self._add_info(infos, ended, row)
        return observations, rewards.astype(np.float64), ends & ~truncated, truncated, infos

    def masks(self) -> dict[str, Any]:
        """The infos that every row has."""
        return {
            "action_mask": self.replay.action_masks(),
            "_action_mask": np.ones(self.num_envs, dtype=bool),
        }

    @property
    def action_names(self) -> tuple[str, ...]:
        """Name of every action."""
        return self.replay.action_names
