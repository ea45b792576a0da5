"""What a member's forward costs, from the forwards that iterations report."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from specgym.baselines.plans import Plan


class ForwardSeconds:
    """Moving averages of every member's forward seconds.

    A verifier has one average per number of tokens fed, because on a mixture of experts, or with
    shapes as they come, a wider window costs more; where shapes are padded the averages simply
    agree. A number never measured is interpolated between the nearest measured ones, and beyond
    them it costs what the nearest does. A drafter has one average over its draft forwards, which
    feed a token each. A drafter that needs no more than one forward however many tokens it
    proposes (prompt lookup) is recognised by that, and charged once. Catch-up forwards are left
    out.

    Args:
        plans: the plan table, indexed by action.
        alpha: weight of a new measurement.

    Source: T_i as a moving average is SpecRouter's (arXiv 2505.07680, Section on scheduling);
        averages per number of tokens, and their interpolation, are ours.
    """

    def __init__(self, plans: Sequence[Plan], alpha: float) -> None:
        self._alpha = alpha
        self._max_tokens = max(1, *(k + len(chain) - 1 for chain, k in plans))
        verifiers = {plans[0][0][0]} | {name for chain, _ in plans for name in chain[1:]}
        self._verify: dict[str, list[float | None]] = {
            name: [None] * (self._max_tokens + 1) for name in sorted(verifiers)
        }
        self._curves: dict[str, list[float]] = {}
        self._draft: dict[str, float] = {}
        self._one_shot: list[str] = []

    def observe(self, plan: Plan, info: Mapping[str, Any]) -> None:
        """Takes in the forwards of one iteration.

        Args:
            plan: the plan whose outcome the iteration is.
            info: the step's info.
        """
        num_drafts = 0
        for forward in info["forwards"]:
            member, role, seconds = forward["member"], forward["role"], forward["seconds"]
            if role == "draft":
                num_drafts += 1
                self._draft[member] = self._blend(self._draft.get(member), seconds)
            if role != "catchup" and member in self._verify:
                self._add(member, forward["num_tokens"], seconds)
        drafter, k = plan[0][0], plan[1]
        if k and num_drafts == 0:
            self._draft[drafter] = self._blend(self._draft.get(drafter), info["draft_seconds"])
        is_one_shot = k > 0 and (num_drafts == 0 or num_drafts < info["drafted"])
        if is_one_shot and drafter not in self._one_shot:
            self._one_shot.append(drafter)

    def anchor(self, member: str, seconds: float) -> None:
        """Takes `seconds` for the member's forward on one token, where none was measured yet."""
        if self._verify[member][1] is None:
            self._add(member, 1, seconds)

    def draft(self, member: str, k: int) -> float | None:
        """Returns the seconds of drafting `k` tokens; None where nothing is known of the member."""
        seconds = self._draft.get(member)
        if seconds is None:
            curve = self.verify(member)
            seconds = None if curve is None else curve[1]
        if seconds is None or member in self._one_shot:
            return seconds
        return k * seconds

    def verify(self, member: str) -> list[float] | None:
        """Returns the seconds of a forward by number of tokens fed; entry 0 repeats entry 1.

        None where nothing is known of the member.
        """
        if member not in self._curves:
            curve = interpolate(self._verify.get(member, []))
            if curve is None:
                drafting = self._draft.get(member)
                return None if drafting is None else [drafting] * (self._max_tokens + 1)
            self._curves[member] = curve
        return self._curves[member]

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages."""
        return {
            "verify": {name: list(row) for name, row in self._verify.items()},
            "draft": dict(self._draft),
            "one_shot": list(self._one_shot),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the averages."""
        self._verify = {name: list(row) for name, row in state["verify"].items()}
        self._draft = dict(state["draft"])
        self._one_shot = list(state["one_shot"])
        self._curves = {}

    def _add(self, member: str, num_tokens: int, seconds: float) -> None:
        if 1 <= num_tokens <= self._max_tokens:
            row = self._verify[member]
            row[num_tokens] = self._blend(row[num_tokens], seconds)
            self._curves.pop(member, None)

    def _blend(self, average: float | None, seconds: float) -> float:
        return seconds if average is None else average + self._alpha * (seconds - average)


def interpolate(row: Sequence[float | None]) -> list[float] | None:
    """Returns the row with its gaps filled in, linearly between neighbours and flat at the ends.

    None where the row holds no value at all.

    Source: ours.
    """
    known = [(index, value) for index, value in enumerate(row) if value is not None]
    if not known:
        return None
    filled = [known[0][1]] * known[0][0]
    for (low, before), (high, after) in pairwise(known):
        slope = (after - before) / (high - low)
        filled += [before + slope * step for step in range(high - low)]
    return filled + [known[-1][1]] * (len(row) - known[-1][0])
