"""Who decodes in which row of a batch: requests that start together, end apart, and follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specgym.engine.decoding import start
from specgym.engine.joining import join
from specgym.engine.pool import ModelPool
from specgym.engine.state import DecodeState
from specgym.engine.timing import Clock
from specgym.engine.types import DecodeRequest, SamplingParams, StepResult
from specgym.envs.workloads import Request, Workload


class Rows:
    """The rows of one environment's batch, and the stream of requests that fills them.

    Args:
        pool: The pool that decodes.
        workload: Where requests come from: a row has room for the longest of its prompts.
        size: Rows.
        max_new_tokens: Token budget of a request.
        sampling: How logits become tokens.
        stop: Strings that end a request.
    """

    def __init__(
        self,
        pool: ModelPool,
        workload: Workload,
        size: int,
        max_new_tokens: int,
        sampling: SamplingParams,
        stop: tuple[str, ...],
    ):
        self.pool = pool
        self.size = size
        self.max_new_tokens, self.sampling, self.stop = max_new_tokens, sampling, stop
        self.longest_prompt = 0
        if size > 1:
            self.longest_prompt = max(len(pool.encode(r.prompt)) for r in workload.requests)
        self.holders: list[Request] = []

    def decode_request(self, request: Request | DecodeRequest) -> DecodeRequest:
        """A request as the engine takes it: a text gets the environment's settings."""
        if isinstance(request, DecodeRequest):
            return request
        prompt = self.pool.encode(request.prompt)
        return DecodeRequest(prompt, self.max_new_tokens, self.sampling, stop=self.stop)

    def start(self, stream: Iterator[Request], clock: Clock, exact: bool) -> DecodeState:
        """A state with a request in every row, prefilled."""
        self.holders = [next(stream) for _ in range(self.size)]
        requests = [self.decode_request(holder) for holder in self.holders]
        room = self.longest_prompt + self.max_new_tokens
        limit = self.pool.model(self.pool.target).context_limit
        return start(self.pool, requests, clock, exact=exact, row_tokens=min(room, limit))

    def fill(
        self, state: DecodeState, stream: Iterator[Request], num_left: int, clock: Clock
    ) -> list[dict[str, Any]]:
        """Gives freed rows to the stream's next requests, at most ``num_left``; who has joined."""
        free = [row for row in range(self.size) if not state.is_active(row)]
        joined = []
        for row in free[:num_left]:
            self.holders[row] = next(stream)
            started = clock.now()
            join(self.pool, state, row, self.decode_request(self.holders[row]), clock)
            joined.append(self.describe(state, row) | {"prefill_seconds": clock.now() - started})
        return joined

    def describe(self, state: DecodeState, row: int) -> dict[str, Any]:
        """What is known of a row's request when it begins."""
        return {
            "row": row,
            "request_id": self.holders[row].id,
            "num_prompt": len(state.requests[row].prompt),
            "max_new_tokens": state.budgets[row],
        }

    def ends(self, state: DecodeState, result: StepResult) -> list[dict[str, Any]]:
        """The requests that ended in a step, with their token ids."""
        return [
            {
                "row": row,
                "request_id": self.holders[row].id,
                "finish_reason": state.finish_reasons[row],
                "output": state.output(row),
            }
            for row, tokens in enumerate(result.tokens)
            if tokens and not state.is_active(row)
        ]
