"""The threads that run compiled forwards together, and where their code is kept.

Threads wait for work by looking for a fraction of a millisecond, then sleep until they are woken.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

from specgym.engine.cache_folder import cache_folder
from specgym.engine.compiled.interpreter import run
from specgym.engine.compiled.memory import LINE, announce, read_shared, wait_while, write_shared
from specgym.engine.compiled.processor import PROCESSOR

logger = logging.getLogger(__name__)
IDLE_LOOKS = 200_000  # of a thread without work before it sleeps: some 0.2 milliseconds
# Lines of the memory a team shares, a word each; behind ROUND and NEWS stand their sleepers.
# NEWS is the number of a job times MAX_THREADS, plus how many threads take part in it.
ARRIVED, ROUND, _, NEWS, _, JOB, NUM_LINES = range(7)
MAX_THREADS = 1024
SIGNATURE = "void(int64, int64, int64, int64)"


def enter(team, thread, argument, num_threads):
    """Run a job as a team's first thread; as another run all that come, for ever.

    ``argument`` is the job; for another thread the news that it starts from.
    """
    job = argument
    news = argument
    while True:
        if thread > 0:
            wait_while(team + LINE * NEWS, news, IDLE_LOOKS)
            news = read_shared(team + LINE * NEWS)
            job = read_shared(team + LINE * JOB)
            num_threads = news % MAX_THREADS
        elif num_threads > 1:
            news = read_shared(team + LINE * NEWS)
            write_shared(team + LINE * JOB, job)
            announce(team + LINE * NEWS, (news // MAX_THREADS + 1) * MAX_THREADS + num_threads)
        if thread < num_threads:
            run(job, team, thread)
        if thread == 0:
            break


class SourceLocator(_CacheLocator):
    """Keeps compiled code beside the weights, good for exactly these sources and this processor."""

    def __init__(self, py_file: str):
        self._py_file = py_file

    def get_cache_path(self) -> str:
        """The folder."""
        return str(cache_folder() / "compiled")

    def get_source_stamp(self) -> str:
        """Hash of every file the code is made from."""
        digest = hashlib.sha256(PROCESSOR.encode())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        return digest.hexdigest()

    def get_disambiguator(self) -> str:
        """Tells processors apart."""
        return PROCESSOR

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> SourceLocator:
        """A locator for any function."""
        return cls(py_file)


class CodeImpl(CompileResultCacheImpl):
    """Numba's cache of compiled code in our folder."""

    _locator_classes: list[Any] = [SourceLocator]  # noqa: RUF012


@functools.cache
def say_once(line: str) -> None:
    """Print a line, the first time."""
    print(line, file=sys.stderr)


class CodeCache(FunctionCache):
    """A cache that a read-only, full or damaged folder does not hinder: code is compiled anew."""

    _impl_class = CodeImpl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code; None, after saying that it is compiled now, where there is none."""
        try:
            found = super().load_overload(sig, target_context)
        except Exception as error:
            logger.warning("compiled code in %s cannot be read: %s", self.cache_path, error)
            found = None
            with contextlib.suppress(OSError):
                self.flush()
        if found is None:
            say_once(f"specgym: compiling for {PROCESSOR}, once: about 20 seconds")
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep compiled code for the next process, where that can be."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            logger.warning("compiled code cannot be kept in %s: %s", self.cache_path, error)


@functools.cache
def compiled_function(python: Callable[..., Any], signature: str) -> Callable[..., Any]:
    """A function of this package, compiled for one signature; from the cache, else compiled now."""
    function: Any = njit(nogil=True)(python)
    function._cache = CodeCache(python)
    function.compile(signature)
    function.disable_compile()
    return function


class Team:
    """The threads of this process that run forwards; made by ``get_team``."""

    def __init__(self) -> None:
        self.enter = compiled_function(enter, SIGNATURE)
        self.memory = allocate(NUM_LINES * LINE)
        self.address = self.memory.ctypes.data
        self.lock = threading.Lock()  # one forward at a time
        self.num_started = 1

    def run(self, job: int, num_threads: int) -> None:
        """Run a job with this many threads, the caller's among them."""
        with self.lock:
            while self.num_started < num_threads:
                self.start_thread()
            self.enter(self.address, 0, job, num_threads)

    def start_thread(self) -> None:
        """Start one more thread, which ends with the process."""
        news = int(self.memory.view(np.int64)[LINE // 8 * NEWS])
        arguments = (self.address, self.num_started, news, 0)
        threading.Thread(target=self.enter, args=arguments, daemon=True, name="specgym").start()
        self.num_started += 1


def allocate(num_bytes: int) -> np.ndarray:
    """Zeros, uint8 [num_bytes], from the start of a cache line on."""
    whole = np.zeros(num_bytes + LINE, dtype=np.uint8)
    first = -whole.ctypes.data % LINE
    return whole[first : first + num_bytes]


@functools.cache
def get_team() -> Team:
    """The team of this process."""
    return Team()


# A child process has none of its parent's threads: it gets a team of its own.
os.register_at_fork(after_in_child=get_team.cache_clear)
