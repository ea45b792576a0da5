"""What controllers estimate: acceptance, seconds and expected tokens."""
