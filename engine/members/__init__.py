"""What can stand in a chain: a model, a head on the target, or a lookup in the text."""
