"""The command line and everything that runs controllers on environments."""
