"""The threads that run compiled forwards together, and where their code is kept.

Threads wait for work by looking for a fraction of a millisecond, offering the processor to others
between looks, and then sleep until they are woken; so an idle engine costs nothing, and two
processes that share processors take turns. (Threads that spin slowed each other 10 to 80 times.)
"""

from __future__ import annotations

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

from specgym.engine.compiled.interpreter import run
from specgym.engine.compiled.memory import (
    fetch_add,
    offer_processor,
    read_shared,
    write_shared,
)
from specgym.engine.compiled.processor import PROCESSOR
from specgym.engine.sources import cache_folder

logger = logging.getLogger(__name__)
LOOKS = 3000  # an idle thread takes, each behind an offer of its processor, before it sleeps
LINE = 64  # bytes of a cache line
# Words that a team shares, each in a line of its own; the first two are the barrier's.
ARRIVED, ROUND, SEQUENCE, JOB, NUM_THREADS, NUM_LINES = range(6)
SIGNATURE = "int64(int64, int64, int64, int64)"


def enter(team, thread, seen, job):
    """Run a job as a team's first thread, or jobs as another until there is none for a while.

    Returns the number of the last job that was there; another thread's caller sleeps until the
    next.
    """
    idle = 0
    while idle < LOOKS:
        takes_part = True
        if thread > 0:
            sequence = read_shared(team + LINE * SEQUENCE)
            if sequence == seen:
                offer_processor()
                idle += 1
                continue
            seen, idle = sequence, 0
            takes_part = thread < read_shared(team + LINE * NUM_THREADS)
            job = read_shared(team + LINE * JOB)
        if takes_part:
            run(job, team, thread)
        if thread == 0:
            break
    return seen


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

    _locator_classes = [SourceLocator]  # noqa: RUF012


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
        if found is None:
            print(f"specgym: compiling for {PROCESSOR}, once: about 20 seconds", file=sys.stderr)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep compiled code for the next process, where that can be."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            logger.warning("compiled code cannot be kept in %s: %s", self.cache_path, error)


@functools.cache
def compiled_entry() -> Callable[[int, int, int, int], int]:
    """The compiled ``enter``; from the cache, else compiled now."""
    function: Any = njit(nogil=True)(enter)
    function._cache = CodeCache(enter)
    function.compile(SIGNATURE)
    function.disable_compile()
    return function


class Team:
    """The threads of this process that run forwards; made by ``get_team``."""

    def __init__(self) -> None:
        self.enter = compiled_entry()
        self.memory = allocate(NUM_LINES * LINE)
        self.words = self.memory.view(np.int64)
        self.address = self.memory.ctypes.data
        self.lock = threading.Lock()  # one forward at a time
        self.waking = threading.Condition()
        self.num_asleep = 0
        self.num_started = 1

    def run(self, job: int, num_threads: int) -> None:
        """Run a job with this many threads, the caller's among them."""
        with self.lock:
            if num_threads == 1:
                self.words[LINE // 8 * NUM_THREADS] = 1
                self.enter(self.address, 0, 0, job)
                return
            while self.num_started < num_threads:
                self.start_thread()
            self.publish(job, num_threads)
            self.enter(self.address, 0, 0, job)

    def publish(self, job: int, num_threads: int) -> None:
        """Let the other threads see a job, and wake those that sleep."""
        self.words[LINE // 8 * JOB] = job
        self.words[LINE // 8 * NUM_THREADS] = num_threads
        with self.waking:  # a lock orders these writes on every processor
            self.words[LINE // 8 * SEQUENCE] += 1
            if self.num_asleep:
                self.waking.notify_all()

    def start_thread(self) -> None:
        """Start one more thread; it ends with the process."""
        thread, seen = self.num_started, int(self.words[LINE // 8 * SEQUENCE])
        arguments = (thread, seen)
        threading.Thread(target=self.serve, args=arguments, daemon=True, name="specgym").start()
        self.num_started += 1

    def serve(self, thread: int, seen: int) -> None:
        """Run jobs, and sleep where there is none."""
        while True:
            seen = self.enter(self.address, thread, seen, 0)
            with self.waking:
                self.num_asleep += 1
                while int(self.words[LINE // 8 * SEQUENCE]) == seen:
                    self.waking.wait()
                self.num_asleep -= 1


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
