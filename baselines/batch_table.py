"""K by batch size: the static schedules of serving engines, and one fitted to recordings."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specgym.baselines.checks import check_count, check_range
from specgym.baselines.estimates.outcomes import Outcome
from specgym.baselines.ladder import Ladder
from specgym.baselines.online import OnlineController
from specgym.baselines.plans import Plan
from specgym.baselines.spelling import parse_ranges

Ranges = tuple[tuple[int, int | None, int], ...]  # (first, last or None, k), ascending
DEFAULT = "1-4@4+5-16@2+17-32@1+33-@0"  # ours: vLLM and TensorRT-LLM ship no table


class BatchTable(OnlineController):
    """One chain, with K looked up by the number of rows that decode.

    From vLLM: ranges of batch sizes with a K each; a gap keeps the K before it, sizes above the
    last range keep its K, and K is at most the chain's largest. From TensorRT-LLM: a schedule of K
    up to a batch size ends with K = 0 (write `33-@0`); and a gate turns speculation off for good
    when the mean tokens of an iteration over the last `gate_window` requests are below
    `gate_tokens`.

    Ours: the largest K of the chain that is at most the table's runs. Rows are counted in the last
    iteration, so that a request that joins is seen one step late. A request's end is where `begin`
    is called next, so that in a batch the gate's window counts the requests that joined.

    Args:
        plans: the plan table, indexed by action.
        chain: the chain, such as `ngram`; None takes the table's first.
        table: ranges such as `1-4@4+5-16@2+17-@0`; see `fit_table`.
        gate_window: requests that the gate looks back over.
        gate_tokens: tokens per iteration below which speculation ends; 0 for no gate.

    Raises:
        ValueError: a hyper-parameter is out of range, or the table has no such chain.

    Source: vLLM, `num_speculative_tokens_per_batch_size`; TensorRT-LLM, `draft_len_schedule`,
        `acceptance_window` and `acceptance_length_threshold`.
    """

    kept = ("num_rows", "is_off", "recent", "request")

    def __init__(
        self,
        plans: Sequence[Plan],
        chain: str | None = None,
        table: str = DEFAULT,
        gate_window: int = 10,
        gate_tokens: float = 0.0,
    ) -> None:
        super().__init__(plans, "stream")
        self._ladder = Ladder(self._plans, chain)
        self._ranges = parse_ranges("table", table)
        self._gate_window = check_count("gate_window", gate_window, 1)
        self._gate_tokens = check_range("gate_tokens", gate_tokens, 0.0, 1e6)
        self._forget()

    def _forget(self) -> None:
        self._num_rows = 1
        self._is_off = False
        self._recent: list[list[float]] = []  # tokens and iterations of finished requests
        self._request: list[float] = [0.0, 0]

    def begin(self, request: Mapping[str, Any]) -> None:
        """Closes the books of the request before, and of speculation where the gate shuts."""
        if self._request[1]:
            self._recent.append(self._request)
            del self._recent[: -self._gate_window]
            self._request = [0.0, 0]
        if len(self._recent) == self._gate_window:
            tokens, iterations = (sum(column) for column in zip(*self._recent, strict=True))
            self._is_off = self._is_off or tokens < self._gate_tokens * iterations

    def act(self, observation: np.ndarray, mask: np.ndarray) -> int:
        """Returns the plan of the table's K, or the chain's largest smaller one that is allowed."""
        k = 0 if self._is_off else look_up(self._ranges, self._num_rows)
        return self._ladder.action(k, mask)

    def _learn(self, outcome: Outcome) -> None:
        self._num_rows = outcome.num_rows
        if outcome.action > 0:
            self._request = [self._request[0] + outcome.tokens, self._request[1] + 1]


def look_up(ranges: Ranges, num_rows: int) -> int:
    """Returns the K of the last range that begins at or below the batch size; 0 below the first.

    Source: vLLM: a gap keeps the K before it, and the tail keeps the last.
    """
    return next((k for first, _, k in reversed(ranges) if first <= num_rows), 0)


def fit_table(
    num_rows: Sequence[int], k: Sequence[int], tokens: Sequence[float], seconds: Sequence[float]
) -> str:
    """Returns the table that does best on recorded iterations, as the option `table` takes it.

    At every batch size that was recorded the K of most tokens per second, a ratio of sums. Sizes
    next to each other with the same K share a range; a size that was not recorded keeps the K
    before it.

    Args:
        num_rows: rows of each iteration.
        k: K that ran in it.
        tokens: tokens that it emitted, over all rows.
        seconds: its seconds.

    Raises:
        ValueError: there is no iteration, or the columns have different lengths.

    Source: the "best static table" that vLLM's users are told to measure; the fit is ours.
    """
    if not len(num_rows) or len({len(num_rows), len(k), len(tokens), len(seconds)}) > 1:
        raise ValueError("num_rows, k, tokens and seconds must be of one length, at least 1")
    sums: dict[int, dict[int, list[float]]] = {}
    for rows, length, emitted, taken in zip(num_rows, k, tokens, seconds, strict=True):
        totals = sums.setdefault(int(rows), {}).setdefault(int(length), [0.0, 0.0])
        totals[0] += float(emitted)
        totals[1] += float(taken)
    starts: dict[int, int] = {}
    for rows, by_k in sorted(sums.items()):
        best = fastest(by_k)
        if not starts or [*starts.values()][-1] != best:
            starts[rows if starts else 1] = best
    return spell(starts)


def fastest(sums_by_k: Mapping[int, Sequence[float]]) -> int:
    """Returns the K of most tokens per second; the smaller one of equals.

    Args:
        sums_by_k: tokens and seconds by K.
    """
    return max(sorted(sums_by_k), key=lambda k: sums_by_k[k][0] / sums_by_k[k][1])


def spell(starts: Mapping[int, int]) -> str:
    """Returns the table, as the option takes it, of the K from each batch size on."""
    lasts = [*(str(after - 1) for after in [*starts][1:]), ""]
    return "+".join(
        f"{first}-{last}@{k}" for (first, k), last in zip(starts.items(), lasts, strict=True)
    )
