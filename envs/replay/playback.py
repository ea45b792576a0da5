"""One request played back: what the engine would return for each plan, from the tables."""

from __future__ import annotations

import dataclasses

from specgym.engine.member_runs import PREFILL_CHUNK
from specgym.engine.types import ForwardCost, Plan, StepResult
from specgym.envs.replay.library import TraceLibrary
from specgym.envs.replay.traces import Trace


@dataclasses.dataclass(frozen=True)
class Factors:
    """Factors on the recorded seconds: of the target, of all other members, of everything."""

    target: float = 1.0
    drafters: float = 1.0
    noise: float = 1.0


class Playback:
    """A request on its way through its tables.

    Args:
        library: The tables.
    """

    def __init__(self, library: TraceLibrary):
        self.library = library
        self.columns = library.columns
        self.followers = library.layout.followers
        self.begin(0)

    def begin(self, request: int) -> None:
        """Goes to the start of a request."""
        self.request = request
        self.row = int(self.library.starts[request])
        self.output = self.trace.output.tolist()
        self.lags: list[int | None] = [None] * len(self.followers)  # None: never used

    @property
    def trace(self) -> Trace:
        """The request's trace."""
        return self.library.traces[self.request]

    @property
    def num_generated(self) -> int:
        """Output tokens so far."""
        return self.row - int(self.library.starts[self.request])

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.trace.prompt) + self.num_generated

    @property
    def kv_length(self) -> int:
        """Slots that the target attends to in the next iteration; fixed in exact mode."""
        first = self.library.starts[self.request]
        fixed = int(self.columns["kv_length"][first])
        return fixed if self.library.exact else self.num_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.row == self.library.ends[self.request]

    @property
    def feature_lags(self) -> list[int]:
        """Tokens that each follower is behind the text; all but the last where never used."""
        behind = self.num_tokens - 1
        return [behind if lag is None else lag for lag in self.lags]

    def baseline_seconds(self, factors: Factors) -> float:
        """Seconds of no speculation here."""
        recorded = float(self.columns["baseline"][self.row])
        return recorded + (factors.target - 1.0) * float(
            self.columns["target_seconds"][self.row, 0]
        )

    def play(self, action: int, factors: Factors, measure_divergence: bool) -> StepResult:
        """One iteration: what it did and what it cost."""
        columns, here = self.columns, (self.row, action)
        plans = self.library.table.plans
        asked, executed = plans[action], plans[columns["executed"][here]]
        levels = executed.num_verifiers
        proposed = tuple(columns["proposed"][here][:levels].tolist())
        forwards = self.forwards(action, executed, proposed, factors)
        overhead = float(columns["overhead_seconds"][here]) * factors.noise
        num_generated, num_tokens = self.num_generated, int(columns["tokens"][here])
        self.follow(action, num_tokens)
        self.row += num_tokens
        divergence = {}
        if measure_divergence:
            distances = columns["divergence"][here].tolist()
            pairs = zip(executed.chain[:-1], executed.chain[1:], strict=True)
            divergence = {f"{a}>{b}": distances[level] for level, (a, b) in enumerate(pairs)}
        return StepResult(
            asked=asked,
            executed=executed,
            reason="no_proposal" if asked != executed else "",
            tokens=(tuple(self.output[num_generated : num_generated + num_tokens]),),
            proposed_per_level=proposed,
            accepted_per_level=tuple(columns["accepted"][here][:levels].tolist()),
            seconds=overhead + sum([cost.seconds for cost in forwards]),
            forwards=tuple(forwards),
            divergence=divergence,
            draft_entropy=float(columns["entropy"][here]),
            finish_reasons=(self.trace.finish_reason if self.is_finished else None,),
        )

    def follow(self, action: int, num_tokens: int) -> None:
        """Has every follower lag as it does after the iteration."""
        uses, after = (self.columns[name][self.row, action] for name in ("uses", "lag_after"))
        self.lags = [
            int(after[index]) if used else None if lag is None else lag + num_tokens
            for index, (lag, used) in enumerate(zip(self.lags, uses.tolist(), strict=True))
        ]

    def forwards(
        self, action: int, executed: Plan, proposed: tuple[int, ...], factors: Factors
    ) -> list[ForwardCost]:
        """Every forward of an iteration in order, with its share of the iteration's seconds."""
        here, costs = (self.row, action), []
        drafters = factors.drafters * factors.noise
        if executed.k and executed.chain[0] in self.followers:
            seconds = float(self.columns["draft_seconds"][here]) / proposed[0] * drafters
            costs += self.caught_up(action, executed.chain[0], "draft", 0, seconds, drafters)
            stays = self.library.layout.traits[executed.chain[0]].keeps_drafts
            rows = self.width(1) if stays else 1  # what is dropped again has no fixed width
            again = ForwardCost(executed.chain[0], "draft", 1, rows, 0, seconds)
            costs += [again] * (proposed[0] - 1)
        middle = executed.chain[1:-1]
        if middle:
            seconds = float(self.columns["middle_seconds"][here]) / len(middle) * drafters
            for name, extra in zip(middle, proposed, strict=False):
                costs += self.caught_up(action, name, "verify", extra, seconds, drafters)
        num_fed = 1 + (proposed[-1] if proposed else 0)
        seconds = float(self.columns["target_seconds"][here]) * factors.target * factors.noise
        per_token = self.library.layout.experts_per_token
        experts = (float(self.columns["experts"][here]) * per_token,) if per_token else ()
        target = executed.chain[-1]
        costs.append(
            ForwardCost(target, "verify", num_fed, self.width(num_fed), 0, seconds, experts)
        )
        return costs

    def caught_up(
        self, action: int, name: str, role: str, extra: int, seconds: float, factor: float
    ) -> list[ForwardCost]:
        """A follower's first forward of an iteration, and before it those that catch it up.

        The seconds of the lag go to the forwards before where there are some, by their tokens.
        """
        index = self.followers.index(name)
        lag = self.lags[index]
        pending = 1 + (self.num_generated if lag is None else lag)
        late = float(self.library.catchup[self.request, action, index, pending - 1]) * factor
        before: list[ForwardCost] = []
        if lag is None:
            prefill = float(self.library.prefill[self.request, index]) * factor
            before, late = self.prefill(name, prefill, late)
        fed = []
        window = self.library.layout.window
        while pending > 1 and pending + extra > window:
            fed.append(min(self.catchup_size, pending - 1))
            pending -= fed[-1]
        before += [
            ForwardCost(name, "catchup", n, self.width(n), n, late * n / sum(fed)) for n in fed
        ]
        total = pending + extra
        seconds += 0.0 if fed else late
        first = ForwardCost(name, role, total, self.width(total), pending - 1, seconds)
        return [*before, first]

    def prefill(self, name: str, seconds: float, late: float) -> tuple[list[ForwardCost], float]:
        """A follower's forwards over the prompt, and the seconds of its lag with what is left.

        All but the prompt's last token; a head has no position for the first one.
        """
        first = self.library.layout.traits[name].first_position
        num_left = len(self.trace.prompt) - 1 - first
        if num_left < 1:
            return [], late + seconds
        costs = []
        for start in range(0, num_left, PREFILL_CHUNK):
            count = min(PREFILL_CHUNK, num_left - start)
            share = seconds * count / num_left
            costs.append(ForwardCost(name, "catchup", count, count, count, share))
        return costs, late

    @property
    def catchup_size(self) -> int:
        """The most tokens of a catch-up forward."""
        return self.library.layout.window if self.library.exact else PREFILL_CHUNK

    def width(self, num_tokens: int) -> int:
        """Rows of a forward that is fed this many tokens."""
        return self.library.layout.window if self.library.exact else num_tokens
