"""The environments. Importing this registers them.

``specgym/SpecDecode-v0`` decodes on a live engine. ``specgym/Replay-v0`` replays recorded traces:
one request at a time with ``gymnasium.make``, thousands at once with ``gymnasium.make_vec``.

``import specgym`` alone registers nothing: ``specgym`` is a namespace, without code of its own that
would load Gymnasium for every command. ``gymnasium.make("specgym.envs:specgym/Replay-v0")`` imports
this by itself.
"""

import gymnasium as gym

from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.replay.replay_env import ReplayEnv
from specgym.envs.replay.vector_env import ReplayVectorEnv

__all__ = ["ReplayEnv", "ReplayVectorEnv", "SpecDecodeEnv"]

gym.register(
    id="specgym/SpecDecode-v0",
    entry_point="specgym.envs.decode:SpecDecodeEnv",
    nondeterministic=True,  # rewards are measured seconds
)
gym.register(
    id="specgym/Replay-v0",
    entry_point="specgym.envs.replay.replay_env:ReplayEnv",
    vector_entry_point="specgym.envs.replay.vector_env:ReplayVectorEnv",
)
