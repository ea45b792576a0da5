"""What was possible: recorded requests as decision problems, the oracle, regret."""
