"""A numpy environment of many rows as stable-baselines3 wants it."""

from __future__ import annotations

from typing import Any, Protocol

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import VecEnv


class Rows(Protocol):
    """Many environments stepped at once, which go on with their next episode by themselves."""

    num_envs: int

    @property
    def observation_space(self) -> gym.spaces.Box:
        """Of one row."""
        ...

    @property
    def action_space(self) -> gym.spaces.Discrete:
        """Of one row."""
        ...

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Starts an episode in every row; row i under the seed plus i."""
        ...

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Observations, rewards, ends and infos, the last filled where an episode ended."""
        ...

    def action_masks(self) -> np.ndarray:
        """Which actions can run now in every row, [B, A] bool."""
        ...


class SB3Vector(VecEnv):
    """Rows as a ``VecEnv``; ``env_method("action_masks")`` works, as sb3-contrib calls it.

    Args:
        rows: The environments.
    """

    def __init__(self, rows: Rows):
        self.rows = rows
        self.render_mode = None
        super().__init__(rows.num_envs, rows.observation_space, rows.action_space)

    def action_masks(self) -> np.ndarray:
        """Which actions can run now in every row, [B, A] bool."""
        return self.rows.action_masks()

    def reset(self) -> np.ndarray:
        """Starts an episode in every row; anew from the seed after ``seed()``."""
        observations = self.rows.reset(self._seeds[0])
        self._reset_seeds()
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        """Takes the rows' actions; ``step_wait`` plays them."""
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Observations, rewards, ends and infos of every row."""
        return self.rows.step(self.actions)

    def close(self) -> None:
        """Nothing: there is nothing to give back."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The attribute of this or of the rows, which share it, once per row."""
        owner = self if hasattr(self, attr_name) else self.rows
        return [getattr(owner, attr_name)] * len(self.chosen(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Sets an attribute that the rows have.

        Raises:
            ValueError: If they have none of this name, or only some rows are meant: they share it.
        """
        if not hasattr(self.rows, attr_name):
            raise ValueError(f"set_attr: rows have no {attr_name!r}")
        if len(self.chosen(indices)) != self.num_envs:
            raise ValueError(f"set_attr: rows share {attr_name!r}; set it for all of them")
        setattr(self.rows, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any
    ) -> list[Any]:
        """What ``action_masks()`` says of each row; rows have no other method.

        Raises:
            ValueError: If another method is called.
        """
        if method_name != "action_masks" or method_args or method_kwargs:
            raise ValueError(
                f"env_method: rows have action_masks() alone; got {method_name!r} with "
                f"{len(method_args) + len(method_kwargs)} arguments"
            )
        masks = self.action_masks()
        return [masks[row] for row in self.chosen(indices)]

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        """False for every row: rows are no environments of their own."""
        return [False] * len(self.chosen(indices))

    def chosen(self, indices: Any) -> list[int]:
        """The rows that indices stand for; None stands for all."""
        return list(self._get_indices(indices))
