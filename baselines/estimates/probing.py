"""When a controller that predicts must try a plan all the same."""

from collections.abc import Mapping, Sequence
from typing import Any

from specgym.baselines.checks import check_count


class Probing:
    """Runs every chain at the start, and from time to time the plan longest not run.

    At the start each chain runs for `profile_iterations` iterations, in turn with the largest and
    the smallest K that is allowed. Later every `probe_every`-th iteration goes to the plan longest
    not run (the chain first, then its K): a chain whose estimate is bad would otherwise never be
    measured again.

    Args:
        actions_by_chain: the candidates of every chain, in order of K.
        num_actions: plans of the table.
        profile_iterations: iterations that each chain is tried for at the start.
        probe_every: iterations from one probe to the next; None for no probes.

    Raises:
        ValueError: a number of iterations is out of range.

    Source: ours; SGLang and SmartSpec profile before they serve, SpecRouter in "a profiling pass".
    """

    def __init__(
        self,
        actions_by_chain: Mapping[tuple[str, ...], Sequence[int]],
        num_actions: int,
        profile_iterations: int,
        probe_every: int | None,
    ) -> None:
        self._groups = list(actions_by_chain.values())
        self._group_of = {a: group for group, actions in enumerate(self._groups) for a in actions}
        check_count("profile_iterations", profile_iterations, 1)
        self._profile_left = [profile_iterations] * len(self._groups)
        self._probe_every = (
            None if probe_every is None else check_count("probe_every", probe_every, 2)
        )
        self._last_run = [-1] * num_actions
        self._num_iterations = 0

    def due(self, allowed: Sequence[bool]) -> int | None:
        """Returns the action to profile or to probe now; None where there is nothing to try."""
        for actions, left in zip(self._groups, self._profile_left, strict=True):
            options = [action for action in actions if allowed[action]] if left else []
            if options:
                return options[-1] if left % 2 == 0 else options[0]
        every = self._probe_every
        if every is not None and self._num_iterations % every == every - 1:
            return self._stalest(allowed)
        return None

    def note(self, action: int) -> None:
        """Notes the action that an iteration counts for."""
        group = self._group_of.get(action)
        if group is not None:
            self._profile_left[group] = max(0, self._profile_left[group] - 1)
        self._last_run[action] = self._num_iterations
        self._num_iterations += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns what is left of the profile, and when each plan last ran."""
        return {
            "profile_left": list(self._profile_left),
            "last_run": list(self._last_run),
            "num_iterations": self._num_iterations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the profile and the last runs."""
        self._profile_left = list(state["profile_left"])
        self._last_run = list(state["last_run"])
        self._num_iterations = state["num_iterations"]

    def _stalest(self, allowed: Sequence[bool]) -> int | None:
        """The allowed plan longest not run, by its chain first."""
        ages = [
            (max(self._last_run[a] for a in actions), self._last_run[action], action)
            for actions in self._groups
            for action in actions
            if allowed[action]
        ]
        return min(ages)[-1] if ages else None
