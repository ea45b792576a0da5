"""``Playback`` in numpy: many requests played back at once.

Legend: B rows (environments), A actions, V levels, M followers, T rows of the library's tables.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.vector_observer import Iterations
from specgym.envs.rewards import utility

COUNTS = ("executed", "tokens", "proposed", "accepted", "experts", "entropy")


@dataclasses.dataclass(frozen=True)
class VectorFactors:
    """Factors on the recorded seconds as of ``Factors``, [B] each."""

    target: np.ndarray
    drafters: np.ndarray
    noise: np.ndarray


class VectorPlayback:
    """Requests on their way through their tables, one per row.

    Args:
        library: The tables.
        num_rows: Rows.

    Attributes:
        request: Each row's request, [B].
        at: Its row of the library's tables, [B].
        lags: Tokens that each follower lags, as if it had eaten the prompt, [B, M].
        used: Whether the request has used it, [B, M].
    """

    def __init__(self, library: TraceLibrary, num_rows: int):
        self.library = library
        self.num_actions = len(library.table)
        followers = len(library.layout.followers)
        self.request = np.zeros(num_rows, dtype=np.int64)
        self.at = np.zeros(num_rows, dtype=np.int64)
        self.lags = np.zeros((num_rows, followers), dtype=np.int64)
        self.used = np.zeros((num_rows, followers), dtype=bool)
        self.cells = {  # [T * A, ...]: one index finds a cell
            name: column.reshape(-1, *column.shape[2:])
            for name, column in library.columns.items()
            if column.ndim > 1
        }
        self.plain_target = library.columns["target_seconds"][:, 0].copy()

    def begin(self, rows: np.ndarray, requests: np.ndarray) -> None:
        """Goes to the start of these requests in these rows."""
        self.request[rows] = requests
        self.at[rows] = self.library.starts[requests]
        self.lags[rows] = 0
        self.used[rows] = False

    def allowed(self) -> np.ndarray:
        """Actions that can run now, [B, A]."""
        return self.library.allowed[self.at]

    def finished(self) -> np.ndarray:
        """Rows whose request has ended."""
        return np.flatnonzero(self.at == self.library.ends[self.request])

    def observed(self) -> tuple[np.ndarray, np.ndarray]:
        """Features of the positions [B, P], and how far each follower is behind the text [B, M]."""
        behind = self.library.num_prompt[self.request, None] - 1
        return self.library.position[self.at], self.lags + behind * ~self.used

    def play(
        self, actions: np.ndarray, factors: VectorFactors
    ) -> tuple[Iterations, np.ndarray, np.ndarray]:
        """One iteration in every row; what it did, its seconds and the baseline's, [B] each."""
        cells = self.at * self.num_actions + actions
        counts = {name: self.cells[name][cells] for name in COUNTS}
        drafters = self.cells["draft_seconds"][cells] + self.cells["middle_seconds"][cells]
        drafters += self.late_seconds(actions, cells)
        seconds = self.cells["overhead_seconds"][cells] + factors.drafters * drafters
        seconds += factors.target * self.cells["target_seconds"][cells]
        seconds *= factors.noise
        baseline = self.library.columns["baseline"][self.at]
        baseline += (factors.target - 1.0) * self.plain_target[self.at]
        tokens = counts["tokens"].astype(np.int64)
        self.follow(cells, tokens)
        self.at += tokens
        done = Iterations(utility=utility(tokens, seconds, baseline), **counts)
        return done, seconds, baseline

    def late_seconds(self, actions: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """Seconds that lags and first uses cost, [B]."""
        library, uses = self.library, self.cells["uses"][cells]
        total = np.zeros(len(actions))
        for follower in range(uses.shape[1]):
            rows = np.flatnonzero(uses[:, follower])
            requests, lags = self.request[rows], self.lags[rows, follower]
            late = library.catchup[requests, actions[rows], follower, lags]
            first = ~self.used[rows, follower]
            total[rows] += late + first * library.prefill[requests, follower]
        return total

    def follow(self, cells: np.ndarray, tokens: np.ndarray) -> None:
        """Has every follower lag as it does after the iteration."""
        uses = self.cells["uses"][cells]
        self.lags += tokens[:, None]
        np.copyto(self.lags, self.cells["lag_after"][cells], where=uses)
        self.used |= uses
