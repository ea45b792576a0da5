"""Visits of recorded requests: a vectorised replay walked through, every action looked at."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specgym.baselines.visits import Visits, join_visits
from specgym.envs.library import TraceLibrary
from specgym.envs.outlook import outlook
from specgym.envs.vector_replay import VectorReplay

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
    env.seed(seed)
    observations = env.reset()
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
        env.step_async(actions)
        observations = env.step_wait()[0]
    return join_visits(parts)


def decode_all(library: TraceLibrary, choose: Choose, num_rows: int, seed: int) -> np.ndarray:
    """Seconds that a policy takes for each request, the mean over streams, float64 [R].

    Args:
        library: The requests.
        choose: The policy.
        num_rows: Streams, each through all requests in an order of its own.
        seed: Of the orders.
    """
    env = VectorReplay(library, num_envs=num_rows)
    env.seed(seed)
    observations = env.reset()
    rows, total = np.arange(num_rows), np.zeros((num_rows, len(library)))
    num_done = np.zeros(num_rows, dtype=np.int64)
    while (num_done < len(library)).any():
        masks, request = env.action_masks(), env.playback.request.copy()
        actions = np.where(num_done < len(library), choose(observations, masks), 0)
        seconds = outlook(env.playback)[0][rows, actions]
        total[rows, request] += seconds * (num_done < len(library))
        env.step_async(actions)
        observations, _, ends, _ = env.step_wait()
        num_done += ends
    return total.mean(axis=0)
