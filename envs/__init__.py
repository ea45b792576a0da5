"""The environments. Importing this registers them: ``specgym/SpecDecode-v0``."""

import gymnasium as gym

from specgym.envs.decode import SpecDecodeEnv

__all__ = ["SpecDecodeEnv"]

gym.register(
    id="specgym/SpecDecode-v0",
    entry_point="specgym.envs.decode:SpecDecodeEnv",
    nondeterministic=True,  # rewards are measured seconds
)
