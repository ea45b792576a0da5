"""Text out of a pool under a controller: for scripts, for transformers, for the terminal."""
