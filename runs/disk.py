"""A full disk, told as one sentence: which file could not be written."""

from __future__ import annotations

import contextlib
import errno
import shutil
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
    except (OSError, RuntimeError) as error:
        if not is_full(error, path):
            raise
        raise DiskFullError(f"{path}: cannot be written, for the disk is full") from error


def is_full(error: OSError | RuntimeError, path: Path) -> bool:
    """Whether an error in writing a file says that the disk is full; torch's does not say why."""
    if isinstance(error, OSError):
        return error.errno in FULL
    if type(error) is not RuntimeError:  # ours are of kinds of their own
        return False
    home = next(folder for folder in path.absolute().parents if folder.is_dir())
    return shutil.disk_usage(home).free < LITTLE_BYTES
