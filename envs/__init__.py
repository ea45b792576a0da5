"""The environments. Importing this registers them.

``specgym/SpecDecode-v0`` decodes on a live engine, ``specgym/Replay-v0`` replays recorded traces.
"""

import gymnasium as gym

from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.replay import ReplayEnv

__all__ = ["ReplayEnv", "SpecDecodeEnv"]

gym.register(
    id="specgym/SpecDecode-v0",
    entry_point="specgym.envs.decode:SpecDecodeEnv",
    nondeterministic=True,  # rewards are measured seconds
)
gym.register(id="specgym/Replay-v0", entry_point="specgym.envs.replay:ReplayEnv")
