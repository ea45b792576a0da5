"""Bandits over plans: indices, posteriors, exponential weights."""
