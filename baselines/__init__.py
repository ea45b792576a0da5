"""Hand-coded controllers: fixed plans, the rules of papers and engines, and what goes around them.

Each follows the controllers' protocol: `begin(request)`, `act(observation, mask) -> int`,
`observe(action, reward, info)`, `state_dict()`, `load_state_dict(state)`. They are built from the
plan table alone and know neither the engine nor the environment, so that a server may drive them.
`docs/controllers.md` says what each does. What those share that learn from outcomes is in `online`,
`outcomes`, `position_counts`, `plan_costs`, `plan_model` and `probing`.

What they are measured against, on recorded requests of which everything is known, is in
`problem` (the tables), `oracle`, `references` (greedy and fixed plans) and `regret`.
"""

from specgym.baselines.batch_table import BatchTable
from specgym.baselines.cascade import TestAndSet
from specgym.baselines.censored_ema import CensoredEMA
from specgym.baselines.ema_tiers import EMATiers
from specgym.baselines.goodput import Goodput
from specgym.baselines.heuristic import Heuristic
from specgym.baselines.hold import Hold
from specgym.baselines.marginal_cost import MarginalCost
from specgym.baselines.restart import Restart
from specgym.baselines.specrouter import SpecRouter
from specgym.baselines.static import NoSpeculation, Random, Static
from specgym.baselines.throughput_aware import ThroughputAware

__all__ = [
    "BatchTable",
    "CensoredEMA",
    "EMATiers",
    "Goodput",
    "Heuristic",
    "Hold",
    "MarginalCost",
    "NoSpeculation",
    "Random",
    "Restart",
    "SpecRouter",
    "Static",
    "TestAndSet",
    "ThroughputAware",
]
