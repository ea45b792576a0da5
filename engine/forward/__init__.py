"""How one member computes: masked cache, fused layers, experts, captured graphs."""
