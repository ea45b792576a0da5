"""The outlook says what every action takes: as a replay does that then takes it."""

import numpy as np

from specgym.envs.replay.outlook import outlook
from specgym.envs.replay.vector_replay import VectorReplay


def test_outlook_is_what_comes_of_each_action(library):
    env = VectorReplay(library, num_envs=5)
    env.reset(0)
    rng, rows = np.random.default_rng(1), np.arange(5)
    for _ in range(60):
        masks, playback = env.action_masks(), env.playback
        actions = (rng.random(masks.shape) * masks).argmax(axis=1)
        seconds, tokens = outlook(playback)
        baseline = library.columns["baseline"][playback.at]
        rewards = env.step(actions)[1]
        expected = tokens[rows, actions] - seconds[rows, actions] / baseline
        assert np.allclose(rewards, expected, atol=1e-4)
