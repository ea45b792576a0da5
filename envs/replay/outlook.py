"""What every action would do from where each row of a vectorised replay stands."""

from __future__ import annotations

import numpy as np

from specgym.envs.replay.vector_playback import VectorPlayback

SECONDS = ("draft_seconds", "middle_seconds", "target_seconds", "overhead_seconds")


def outlook(playback: VectorPlayback) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and tokens of every action's iteration in every row, [B, A] each, without noise.

    Catch-up and first uses are charged as the row's followers lag now. Only what is allowed means
    something.
    """
    library, at, request = playback.library, playback.at, playback.request
    columns = library.columns
    seconds = sum((columns[name][at] for name in SECONDS), np.zeros(()))
    uses, actions = columns["uses"][at], np.arange(playback.num_actions)
    for follower in range(uses.shape[2]):
        lags = playback.lags[:, follower, None]
        late = library.catchup[request[:, None], actions, follower, lags]
        first = library.prefill[request, follower] * ~playback.used[:, follower]
        seconds += uses[:, :, follower] * (late + first[:, None])
    return seconds, columns["tokens"][at].astype(np.int64)
