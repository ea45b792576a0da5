"""The user's folder for what is fetched, built or compiled once."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return where that is: $SPECGYM_CACHE, else specgym in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("SPECGYM_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specgym"
