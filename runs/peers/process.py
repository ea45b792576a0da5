"""Worker processes from the side that asks them: one request at a time, on command."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specgym.engine.pools.data_wheel import last_words
from specgym.runs.peers.environments import PeerError

START_SECONDS = 600.0
REQUEST_SECONDS = 300.0


class WorkerProcess:
    """A worker that stays up between requests: a line of JSON for each, and one once it is ready.

    Args:
        command: What starts the worker.
        log: Where its standard error goes.
        variables: Environment variables beside our own.

    Attributes:
        greeting: Its first line.

    Raises:
        PeerError: If it does not start.
    """

    def __init__(self, command: Sequence[str], log: Path, variables: Mapping[str, str]):
        self.log = log
        self.answers: queue.Queue[str | None] = queue.Queue()
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
            )
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()
        try:
            self.greeting = self.answer(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def listen(self) -> None:
        """Puts every line of the worker into the queue, and None when there are no more."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put(None)

    def ask(self, request: dict[str, Any]) -> None:
        """Sends a request; ``answer`` waits for what it says.

        Raises:
            PeerError: If it has ended.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise PeerError(self.obituary()) from error

    def answer(self, seconds: float = REQUEST_SECONDS) -> dict[str, Any]:
        """The worker's next line.

        Raises:
            PeerError: If there is none in time, or it says that something failed.
        """
        try:
            line = self.answers.get(timeout=seconds)
        except queue.Empty:
            raise PeerError(f"it said nothing for {seconds:.0f} s (see {self.log})") from None
        if line is None:
            raise PeerError(self.obituary())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"it failed: {answer['error']} (see {self.log})")
        return answer

    def obituary(self) -> str:
        """What the worker said before it ended."""
        code = self.process.wait(timeout=10)
        words = last_words(self.log.read_text(errors="replace"), code)
        return f"its worker ended: {words} (see {self.log})"

    def close(self) -> None:
        """Ends the worker."""
        self.process.kill()
        self.process.wait()
        self.listener.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # a request that was never read
                stream.close()


class PeerProcess(WorkerProcess):
    """A peer that decodes prompts; it speaks what ``peer_worker`` describes.

    Args: As of ``WorkerProcess``.
    """

    @property
    def version(self) -> str:
        """The peer's version."""
        return str(self.greeting["version"])

    def run(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], float]:
        """The tokens it decodes, and the seconds it took by its own clock.

        Raises:
            PeerError: If it fails, says nothing for minutes, or decodes another number of tokens.
        """
        self.ask({"prompt": list(prompt), "new_tokens": new_tokens})
        answer = self.answer()
        tokens = [int(token) for token in answer["tokens"]]
        if len(tokens) != new_tokens:
            raise PeerError(f"it decoded {len(tokens)} tokens where {new_tokens} were asked for")
        return tokens, float(answer["seconds"])
