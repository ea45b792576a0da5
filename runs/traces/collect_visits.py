"""Visits of recorded requests: a vectorised replay walked through, every action looked at."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specgym.baselines.hindsight.visits import Visits, join_visits
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.outlook import outlook
from specgym.envs.replay.vector_replay import VectorReplay

# Actions [B] for observations [B, F] and masks [B, A].
Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]


def collect_visits(
    library: TraceLibrary,
    choose: Choose,
    num_rows: int,
    num_steps: int,
    exploration: tuple[float, ...],
    seed: int,
) -> Visits:
    """The states that a policy visits, with exploration, on the library's requests.

    Args:
        library: The requests.
        choose: The policy.
        num_rows: Requests that are decoded at once.
        num_steps: Iterations of each row.
        exploration: Shares of random allowed actions; rows take them in turn.
        seed: Of the order of requests and of exploration.
    """
    env = VectorReplay(library, num_envs=num_rows)
    observations = env.reset(seed)
    rng = np.random.default_rng(seed)
    shares = np.resize(exploration, num_rows)
    lengths = np.array([len(trace) for trace in library.traces])
    parts = []
    for _ in range(num_steps):
        masks = env.action_masks()
        playback = env.playback
        seconds, tokens = outlook(playback)
        position = playback.at - library.starts[playback.request]
        parts.append(
            Visits(
                observations.copy(),
                masks,
                seconds,
                tokens,
                playback.request.copy(),
                position,
                lengths,
            )
        )
        actions = choose(observations, masks)
        explored = np.flatnonzero(rng.random(num_rows) < shares)
        scores = rng.random((len(explored), masks.shape[1])) * masks[explored]
        actions[explored] = scores.argmax(axis=1)
        observations = env.step(actions)[0]
    return join_visits(parts)
