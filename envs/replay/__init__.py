"""The recorded decision process: traces, their outcomes, and environments that look steps up."""
