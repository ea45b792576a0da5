"""Thousands of replays in numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from specgym.engine.checks import check_whole
from specgym.envs.replay.disturbances import CostFactors, Disturbance, check_disturbance
from specgym.envs.replay.library import TraceLibrary, make_library
from specgym.envs.replay.request_order import Deck, Order, check_stream
from specgym.envs.replay.traces import TraceSet
from specgym.envs.replay.vector_observer import VectorObserver
from specgym.envs.replay.vector_playback import VectorFactors, VectorPlayback
from specgym.envs.rewards import Reward, get_reward


class VectorReplay:
    """Many ``ReplayEnv`` stepped at once; row i under seed s is ``ReplayEnv`` under seed s + i.

    That holds but for noise and drift, which come from one random stream for all rows. Finished
    rows go on with their next episode by themselves. Only the ``info`` of an episode's last step
    holds anything: ``terminal_observation``, ``episode`` (its return ``r``, length ``l`` and
    ``seconds``), ``request_id`` and ``TimeLimit.truncated``.

    Args:
        traces: As of ``ReplayEnv``; so are the others that are not explained.
        num_envs: Rows.
        split: Not beside a library.
        k_values: Not beside a library.
        num_requests: Requests of an episode.
        reward: Name of the reward, or a function of tokens, seconds and baseline seconds.
        order: ``permuted`` or ``recorded``.
        disturbance: What happens to costs.
        forget_after: Requests after which a row forgets its statistics, as a stream that begins
            anew; None never does.

    Raises:
        ValueError: If an argument is out of range, or the traces cannot be used.
    """

    def __init__(
        self,
        traces: TraceLibrary | TraceSet | Path | str,
        num_envs: int = 64,
        split: str = "all",
        k_values: Sequence[int] | None = None,
        num_requests: int = 1,
        reward: str | Reward = "net_utility",
        order: Order = "permuted",
        disturbance: Disturbance = Disturbance(),  # noqa: B008 (frozen)
        forget_after: int | None = None,
    ):
        self.num_envs = check_whole("num_envs", num_envs, 1)
        if forget_after is not None:
            forget_after = check_whole("forget_after", forget_after, 1, "None never forgets")
        self.library = make_library(traces, split, k_values)
        self.num_requests = check_stream(num_requests, order)
        self.order, self.forget_after = order, forget_after
        self.disturbance = check_disturbance(disturbance)
        self.reward_of = get_reward(reward)
        self.observer = VectorObserver(self.library.layout, self.num_envs)
        self.features = self.observer.features
        self.observation_space = gym.spaces.Box(
            self.observer.low, self.observer.high, dtype=np.float32
        )
        self.action_space = gym.spaces.Discrete(len(self.library.table))
        self.playback = VectorPlayback(self.library, self.num_envs)
        self.num_left = np.zeros(self.num_envs, dtype=np.int64)
        self.num_begun = np.zeros(self.num_envs, dtype=np.int64)
        self.returns = np.zeros(self.num_envs)
        self.seconds = np.zeros(self.num_envs)
        self.lengths = np.zeros(self.num_envs, dtype=np.int64)
        self.decks: list[Deck] = []

    @property
    def plans(self) -> Sequence[tuple[tuple[str, ...], int]]:
        """(chain, K) of every action."""
        return self.library.table.arrays()

    @property
    def action_names(self) -> tuple[str, ...]:
        """Name of every action."""
        return self.library.table.names

    def action_masks(self) -> np.ndarray:
        """Which actions can run now in every row, [B, A] bool."""
        return self.playback.allowed()

    def reset(self, seed: int | None = None) -> np.ndarray:
        """Starts an episode in every row; the observations, [B, F].

        Args:
            seed: Begins the streams anew and forgets all statistics; None goes on with them.
        """
        if seed is not None:
            seed = check_whole("seed", seed, 0)
            self.restart([seed + row for row in range(self.num_envs)])
        elif not self.decks:
            self.restart([None] * self.num_envs)
        self.start_episodes(range(self.num_envs))
        return self.observer.observe(*self.playback.observed())

    def restart(self, seeds: Sequence[int | None]) -> None:
        """Begins every row's stream anew, and forgets all statistics."""
        generators = [np.random.default_rng(seed) for seed in seeds]
        noise = [int(generator.integers(2**63)) for generator in generators]
        self.factors = CostFactors(self.disturbance, self.num_envs, np.random.default_rng(noise))
        self.decks = [Deck(len(self.library), self.order, rng) for rng in generators]
        self.num_begun[:] = 0
        self.observer.clear()

    def start_episodes(self, rows: Iterable[int]) -> None:
        """Starts an episode in these rows."""
        rows = np.array(rows, dtype=np.int64)
        self.num_left[rows] = self.num_requests
        self.returns[rows] = 0.0
        self.seconds[rows] = 0.0
        self.lengths[rows] = 0
        self.begin(rows)

    def begin(self, rows: np.ndarray) -> None:
        """Goes to the start of the streams' next requests in these rows."""
        self.playback.begin(rows, np.array([next(self.decks[row]) for row in rows.tolist()], int))
        if self.forget_after is not None:
            self.observer.clear(rows[self.num_begun[rows] % self.forget_after == 0])
        for row in () if self.factors.is_quiet else rows.tolist():
            self.factors.begin(row, int(self.num_begun[row]))
        self.num_begun[rows] += 1
        self.num_left[rows] -= 1

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Plays one iteration in every row.

        Args:
            actions: One per row, [B].

        Returns:
            Observations [B, F], rewards [B], ends [B], and infos; see the class for the last.

        Raises:
            ValueError: If an action is out of range, or ``reset`` was never called.
        """
        actions = self.check(actions)
        playback = self.playback
        cells = playback.at * playback.num_actions + actions
        run = np.where(self.library.allowed.reshape(-1)[cells], actions, 0)
        done, seconds, baseline = playback.play(run, self.costs(run))
        self.factors.advance()
        self.observer.update(done)
        rewards = self.reward_of(done.tokens, seconds, baseline)
        self.returns += rewards
        self.seconds += seconds
        self.lengths += 1
        over = playback.finished()
        is_last = self.num_left[over] == 0
        self.begin(over[~is_last])
        observations = self.observer.observe(*playback.observed())
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        ends = np.zeros(self.num_envs, dtype=bool)
        last = over[is_last]
        if len(last):
            ends[last] = True
            self.conclude(last, observations, infos)
        return observations, rewards.astype(np.float32), ends, infos

    def check(self, actions: np.ndarray) -> np.ndarray:
        """The actions as whole numbers.

        Raises:
            ValueError: If one is out of range, or no episode has begun.
        """
        if not self.decks:
            raise ValueError("step: no episode has begun; call reset()")
        actions, count = np.asarray(actions, dtype=np.int64), len(self.library.table)
        if actions.shape != (self.num_envs,) or not ((actions >= 0) & (actions < count)).all():
            raise ValueError(
                f"actions: must be {self.num_envs} of 0..{count - 1}; got {actions.tolist()}"
            )
        return actions

    def costs(self, actions: np.ndarray) -> VectorFactors:
        """Factors on costs now, with noise."""
        if self.factors.is_quiet:
            ones = np.ones(1)
            return VectorFactors(ones, ones, ones)
        spread = self.library.columns["spread"][self.playback.at, actions]
        return VectorFactors(*self.factors.factors(), self.factors.noise(spread))

    def conclude(
        self, rows: np.ndarray, observations: np.ndarray, infos: list[dict[str, Any]]
    ) -> None:
        """Tells of the episodes that ended in these rows, and starts their next ones."""
        library, requests = self.library, self.playback.request[rows]
        for row, request in zip(rows.tolist(), requests.tolist(), strict=True):
            infos[row] = {
                "terminal_observation": observations[row].copy(),
                "episode": {
                    "r": float(self.returns[row]),
                    "l": int(self.lengths[row]),
                    "seconds": float(self.seconds[row]),
                },
                "request_id": library.traces[request].request_id,
                "TimeLimit.truncated": not library.is_terminal[request],
            }
        self.start_episodes(rows)
        observations[rows] = self.observer.observe(*self.playback.observed(), rows)
