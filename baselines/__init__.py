"""Hand-coded controllers: no speculation, static, random, SpecRouter, test-and-set.

Each follows the controllers' protocol: `begin(request)`, `act(observation, mask) -> int`,
`observe(action, reward, info)`, `state_dict()`, `load_state_dict(state)`. They are built from the
plan table alone and know neither the engine nor the environment, so that a server may drive them.

What they are measured against, on recorded requests of which everything is known, is in
`problem` (the tables), `oracle`, `references` (greedy and fixed plans) and `regret`.
"""

from specgym.baselines.specrouter import SpecRouter
from specgym.baselines.static import NoSpeculation, Random, Static
from specgym.baselines.test_and_set import TestAndSet

__all__ = ["NoSpeculation", "Random", "SpecRouter", "Static", "TestAndSet"]
