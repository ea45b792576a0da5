"""What a vectorised replay offers a training: seconds of episodes, forgetting, own rewards."""

import numpy as np
import pytest

from specgym.envs.replay.vector_replay import VectorReplay


def play(venv, num_steps, action=1):
    """Steps with one action; observations and the infos of ended episodes."""
    observations, ended = [venv.reset(0)], []
    for _ in range(num_steps):
        seen, _, ends, infos = venv.step(np.full(venv.num_envs, action))
        observations.append(seen)
        ended += [(row, infos[row]) for row in np.flatnonzero(ends)]
    return np.array(observations), ended


def test_an_episode_tells_its_seconds(library):
    venv = VectorReplay(library, 3, reward=lambda tokens, seconds, baseline: -seconds)
    _, ended = play(venv, 60)
    assert len(ended) > 3
    for _, info in ended:
        assert info["episode"]["seconds"] == pytest.approx(-info["episode"]["r"])


def test_statistics_are_forgotten_after_so_many_requests(library):
    begun = {}
    for forget_after in (None, 2):
        venv = VectorReplay(library, 1, forget_after=forget_after)
        observations, ended = play(venv, 120)
        fresh = observations[0]
        names = [feature.name for feature in venv.features]
        entry = next(i for i, name in enumerate(names) if name.startswith("rounds_since"))
        lengths = np.cumsum([info["episode"]["l"] for _, info in ended])[:4]
        begun[forget_after] = [bool(observations[n][0, entry] == fresh[0, entry]) for n in lengths]
    assert begun == {None: [False] * 4, 2: [False, True, False, True]}


def test_forgetting_needs_a_request(library):
    with pytest.raises(ValueError, match="forget_after: must be a whole number >= 1"):
        VectorReplay(library, 2, forget_after=0)
