"""A full disk, told as one sentence: which file could not be written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
LITTLE_BYTES = 1 << 16  # what counts as nothing left where a library hides the system's error


class DiskFullError(OSError):
    """A file that could not be written for want of room."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names the file where the disk is full: the error of a write does not.

    Raises:
        DiskFullError: If the disk is full; the innermost of nested files is named.
    """
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if not is_full(error, path):
            raise
        raise DiskFullError(f"{path}: cannot be written, for the disk is full") from error


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """Spares the traceback of a thread that finds the disk full: its owner is told, and tells."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if getattr(arguments.exc_value, "errno", None) not in FULL:
            before(arguments)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def is_full(error: Exception, path: Path) -> bool:
    """Whether an error in writing a file says that the disk is full.

    The system's has a number, that of safetensors its words, and torch's does not say why.
    """
    if isinstance(error, OSError):
        return error.errno in FULL
    if type(error) is not RuntimeError:
        return os.strerror(errno.ENOSPC) in str(error)
    home = next(folder for folder in path.absolute().parents if folder.is_dir())
    return shutil.disk_usage(home).free < LITTLE_BYTES
