"""Controllers that learn: bandits, and what is trained with stable-baselines3.

Importing the package imports neither torch nor stable-baselines3. `docs/controllers.md` says what
each does.
"""

from specgym.agents.beta_thompson import BetaThompson
from specgym.agents.discounted_ucb import DiscountedUCB
from specgym.agents.exp3_spec import EXP3Spec
from specgym.agents.gaussian_thompson import GaussianThompson
from specgym.agents.hedge_spec import HedgeSpec
from specgym.agents.lints import LinTS
from specgym.agents.linucb import LinUCB
from specgym.agents.nightjar import Nightjar
from specgym.agents.sliding_ucb import SlidingUCB
from specgym.agents.thompson import Thompson
from specgym.agents.ucb import UCB
from specgym.agents.ucb_spec import UCBSpec
from specgym.agents.ucb_tuned import UCBTuned

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
