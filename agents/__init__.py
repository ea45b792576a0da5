"""Controllers that learn: bandits, and what is trained with stable-baselines3.

Importing the package imports neither torch nor stable-baselines3. `docs/controllers.md` says what
each does.
"""

from specgym.agents.bandits.beta_thompson import BetaThompson
from specgym.agents.bandits.discounted_ucb import DiscountedUCB
from specgym.agents.bandits.exp3_spec import EXP3Spec
from specgym.agents.bandits.gaussian_thompson import GaussianThompson
from specgym.agents.bandits.hedge_spec import HedgeSpec
from specgym.agents.bandits.lints import LinTS
from specgym.agents.bandits.linucb import LinUCB
from specgym.agents.bandits.nightjar import Nightjar
from specgym.agents.bandits.sliding_ucb import SlidingUCB
from specgym.agents.bandits.thompson import Thompson
from specgym.agents.bandits.ucb import UCB
from specgym.agents.bandits.ucb_spec import UCBSpec
from specgym.agents.bandits.ucb_tuned import UCBTuned

__all__ = [
    "UCB",
    "BetaThompson",
    "DiscountedUCB",
    "EXP3Spec",
    "GaussianThompson",
    "HedgeSpec",
    "LinTS",
    "LinUCB",
    "Nightjar",
    "SlidingUCB",
    "Thompson",
    "UCBSpec",
    "UCBTuned",
]
