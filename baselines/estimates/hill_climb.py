"""A hill climb over the rungs of a ladder, one noisy trial per rung."""

from collections.abc import Mapping
from typing import Any


class HillClimb:
    """Which rung to try next, and when to stop.

    From the paper: keep the direction while utility rises, turn round when it falls; stop when
    two successive trials differ by less than the tolerance, when a local maximum was passed, or
    when the climb comes to K = 0, which lies below the lowest rung and needs no trial. Ours: the
    step is one rung; the first step goes up where the first trial paid (utility >= 1), else down,
    and away from the end of the ladder; a rise is measured from the best trial so far, to which
    turning round leads back.

    Args:
        num_rungs: length of the ladder; rung 0 is the lowest.
        start: the rung tried first.
        tolerance: relative difference below which two successive trials count as equal.

    Source: Cascade, arXiv 2506.20675.
    """

    def __init__(self, num_rungs: int, start: int, tolerance: float) -> None:
        assert 0 <= start < num_rungs
        self._num_rungs = num_rungs
        self._start = start
        self._tolerance = tolerance
        self.rung: int | None = start  # the rung to try next; None when the climb is over
        self._top: tuple[int, float] | None = None  # the best trial: rung, utility
        self._last = 0.0
        self._direction = 1
        self._turned = False

    def record(self, utility: float) -> None:
        """Takes in the utility of the trial at `rung`, and moves on."""
        assert self.rung is not None
        last, top, rung = self._last, self._top, self.rung
        self._last = utility
        if top is None:
            self._top = (rung, utility)
            at_top = rung == self._num_rungs - 1
            self._direction = -1 if at_top or utility < 1.0 else 1
            self._turned = at_top
            self._step_from(rung)
        elif abs(utility - last) < self._tolerance * last:
            self.rung = None
        elif utility > top[1]:
            self._top = (rung, utility)
            self._step_from(rung)
        elif self._turned or top[0] != self._start:
            self.rung = None  # both neighbours of the top are lower: a local maximum
        else:
            self._direction, self._turned = -self._direction, True
            self._step_from(top[0])

    def _step_from(self, rung: int) -> None:
        following = rung + self._direction
        self.rung = following if 0 <= following < self._num_rungs else None

    def state_dict(self) -> dict[str, Any]:
        """Returns where the climb stands."""
        return {
            "num_rungs": self._num_rungs,
            "start": self._start,
            "rung": self.rung,
            "top": None if self._top is None else list(self._top),
            "last": self._last,
            "direction": self._direction,
            "turned": self._turned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores where the climb stood."""
        self._num_rungs, self._start = state["num_rungs"], state["start"]
        self.rung = state["rung"]
        self._top = None if state["top"] is None else (state["top"][0], state["top"][1])
        self._last = state["last"]
        self._direction, self._turned = state["direction"], state["turned"]
