"""Controllers that learn: bandits, and what is trained with stable-baselines3.

Importing the package imports neither torch nor stable-baselines3.
"""

from specgym.agents.linucb import LinUCB
from specgym.agents.ucb import UCB

__all__ = ["UCB", "LinUCB"]
