"""Training: on the live engine, on recorded traces, cross-validated, searched."""
