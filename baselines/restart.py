"""Change detection: a controller starts afresh when acceptance is no longer what it was."""

from collections.abc import Mapping, Sequence
from typing import Any

from specgym.baselines.checks import check_choice, check_count, check_range
from specgym.baselines.estimates.change_detection import CUSUM, GLR, Detector
from specgym.baselines.estimates.outcomes import read_outcome
from specgym.baselines.plans import Plan, num_positions
from specgym.baselines.wrapped import Inner, Wrapped

SURVIVES = ("cost_model", "seconds", "rng")  # of a state: costs did not change; draws go on


class Restart(Wrapped):
    """Watches acceptance plan by plan, and on an alarm has the controller inside forget.

    GLR-UCB restarts its arm statistics when a Bernoulli GLR test on an arm's rewards alarms. Ours:
    any controller may be inside; the numbers are accepted over drafted tokens of an iteration, one
    detector per plan, so that a change of which plans run is no alarm; no speculation accepts
    nothing and is not watched. Forgetting is going back to the state in which the controller was
    handed over, except for its cost model, where its state has one under such a name.

    Args:
        plans: the plan table, indexed by action.
        inner: the controller inside.
        detector: `glr` or `cusum`.
        delta: probability of a false alarm, of `glr`.
        window: iterations of a plan that `glr` looks at.
        shift: change of acceptance that `cusum` looks for.
        threshold: accumulated acceptance that is an alarm to `cusum`.

    Raises:
        ValueError: a hyper-parameter is out of range.

    Source: Besson, Kaufmann, Maillard and Seznec (2022), GLR-UCB with global restarts. Nobody has
        published it for speculation, as far as found.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        inner: Inner,
        detector: str = "glr",
        delta: float = 0.01,
        window: int = 200,
        shift: float = 0.2,
        threshold: float = 4.0,
    ) -> None:
        super().__init__(plans, inner)
        self._kind = check_choice("detector", detector, ("glr", "cusum"))
        self._delta = check_range("delta", delta, 1e-12, 1.0)
        self._window = check_count("window", window, 2)
        self._shift = check_range("shift", shift, 0.0, 1.0)
        self._threshold = check_range("threshold", threshold, 1e-6, 1e6)
        self._fresh = inner.state_dict()
        self._detectors = self._make_detectors()
        self.num_restarts = 0

    def observe(self, action: int, reward: float, info: Mapping[str, Any]) -> None:
        """Tells the controller inside of the step, then has it forget where the plan changed."""
        super().observe(action, reward, info)
        outcome = read_outcome(action, info)
        asked = num_positions(self._plans[outcome.action]) if outcome else 0
        if outcome is None or asked == 0 or outcome.is_last:
            return
        share = min(outcome.accepted / asked, 1.0)
        if self._detectors[outcome.action].add(share):
            now = self._inner.state_dict()
            self._inner.load_state_dict(renewed(self._fresh, now))
            self._detectors = self._make_detectors()
            self.num_restarts += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns what the detectors saw, and what the controller inside has learned."""
        detectors = [detector.state_dict() for detector in self._detectors]
        return super().state_dict() | {"detectors": detectors, "num_restarts": self.num_restarts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what the detectors saw, and what the controller inside had learned."""
        super().load_state_dict(state)
        for detector, saved in zip(self._detectors, state["detectors"], strict=True):
            detector.load_state_dict(saved)
        self.num_restarts = state["num_restarts"]

    def _make_detectors(self) -> list[Detector]:
        if self._kind == "glr":
            return [GLR(self._delta, self._window) for _ in self._plans]
        return [CUSUM(self._shift, self._threshold) for _ in self._plans]


def renewed(fresh: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fresh state with what survives taken from the present one, at any depth."""
    state = {}
    for key, value in fresh.items():
        present = now.get(key)
        if key in SURVIVES and key in now:
            state[key] = present
        elif isinstance(value, Mapping) and isinstance(present, Mapping):
            state[key] = renewed(value, present)
        else:
            state[key] = value
    return state
