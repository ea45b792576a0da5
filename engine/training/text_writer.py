"""Continuous batching for making training data: rows that finish are refilled at once.

Speed over many prompts, not latency of one: every step is one forward of all rows, one token
each, over static buffers in which row r's token at position p lies in slot p. Not bit-exact
across batches; what it writes is training data, never an output that must be lossless.

Legend: B rows, T tokens, G key/value heads, D head size, S slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch

from specgym.engine.forward.lean_llama import LeanLlama


@dataclasses.dataclass
class Job:
    """One text to be written: what it starts with, how it goes on, when it ends.

    Attributes:
        prompt: Token ids it starts with.
        max_new_tokens: Token budget.
        temperature: 0 is greedy.
        is_done: Looks at the new tokens and says whether they are enough.
        payload: What the caller wants back with the text.
        output: The new tokens.
        features: The target's features behind the prompt's and the new tokens, as blocks [n, F].
    """

    prompt: list[int]
    max_new_tokens: int
    temperature: float
    is_done: Callable[[list[int]], bool]
    payload: object = None
    output: list[int] = dataclasses.field(default_factory=list)
    features: list[torch.Tensor] = dataclasses.field(default_factory=list)


class RaggedKV:
    """Static keys and values of B rows, each at its own length."""

    def __init__(self, model: LeanLlama, num_rows: int, num_slots: int, dtype: torch.dtype):
        shape = (num_rows, model.num_kv_heads, num_slots, model.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in model.layers]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in model.layers]
        self.rows = torch.arange(num_rows)
        self.positions = torch.zeros(num_rows, dtype=torch.long)
        self.length = 1

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one token of every row, [B, G, 1, D]; returns what the rows attend to."""
        self.keys[index][self.rows, :, self.positions] = keys[:, :, 0]
        self.values[index][self.rows, :, self.positions] = values[:, :, 0]
        return self.keys[index][:, :, : self.length], self.values[index][:, :, : self.length]

    def row(self, index: int, start: int) -> RowKV:
        """A view for the prefill of one row from a slot on."""
        return RowKV(self, index, start)


class RowKV:
    """One row of a ``RaggedKV`` while it is prefilled."""

    def __init__(self, owner: RaggedKV, row: int, start: int):
        self.owner, self.row, self.start = owner, row, start

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes a window [1, G, T, D]; returns all the row holds."""
        stop = self.start + keys.shape[2]
        row = slice(self.row, self.row + 1)
        self.owner.keys[index][row, :, self.start : stop] = keys
        self.owner.values[index][row, :, self.start : stop] = values
        return self.owner.keys[index][row, :, :stop], self.owner.values[index][row, :, :stop]


class Prefixes:
    """Keys, values and features of prompt beginnings that many jobs share."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], tuple[list, list, torch.Tensor]] = {}

    def longest(self, prompt: list[int]) -> tuple[int, ...]:
        """The longest known beginning that leaves a token of the prompt to be fed."""
        fitting = [p for p in self.known if len(p) < len(prompt) and p == tuple(prompt[: len(p)])]
        return max(fitting, key=len, default=())


class BatchGenerator:
    """Writes the texts of a stream of jobs, B at a time.

    Args:
        model: The target's lean forward.
        num_rows: B.
        num_slots: Longest text, prompt included.
        taps: Layers whose inputs are kept as features, beside the head's input.
        dtype: Type of keys and values.
    """

    def __init__(
        self,
        model: LeanLlama,
        num_rows: int = 32,
        num_slots: int = 768,
        taps: tuple[int, ...] = (),
        dtype: torch.dtype = torch.bfloat16,
    ):
        self.model, self.taps, self.num_slots = model, taps, num_slots
        self.cache = RaggedKV(model, num_rows, num_slots, dtype)
        self.jobs: list[Job | None] = [None] * num_rows
        self.prefixes = Prefixes()
        self.last = torch.zeros(num_rows, dtype=torch.long)
        self.lengths = torch.zeros(num_rows, dtype=torch.long)

    def share(self, prefix: list[int]) -> None:
        """Computes a prompt beginning once for all jobs that start with it.

        Raises:
            ValueError: If it leaves no room for a token.
        """
        self.check_room(prefix)
        if tuple(prefix) in self.prefixes.known:
            return
        assert not any(self.jobs), "share prefixes before the first job"
        features = self.feed(0, prefix, 0)[0]
        row = slice(0, 1)
        keys = [layer[row, :, : len(prefix)].clone() for layer in self.cache.keys]
        values = [layer[row, :, : len(prefix)].clone() for layer in self.cache.values]
        self.prefixes.known[tuple(prefix)] = (keys, values, features)

    @torch.inference_mode()
    def run(self, jobs: Iterator[Job], rng: torch.Generator) -> Iterator[Job]:
        """Finished jobs, in the order they finish; new ones are drawn as rows come free.

        ``jobs`` may depend on what was finished before: it is asked only when a row is free, and
        asked again after a finished job was handed out.
        """
        while True:
            for row, job in enumerate(self.jobs):
                if job is None and (fresh := next(jobs, None)) is not None:
                    self.admit(row, fresh, rng)
            if not any(self.jobs):
                return
            for row, job in enumerate(self.jobs):
                if job is not None and self.is_finished(job):
                    self.jobs[row] = None
                    yield job
            if any(self.jobs):
                self.step(rng)

    def is_finished(self, job: Job) -> bool:
        """Whether a job has all it asked for, or no room is left."""
        full = len(job.prompt) + len(job.output) >= self.num_slots
        return full or len(job.output) >= job.max_new_tokens or job.is_done(job.output)

    def admit(self, row: int, job: Job, rng: torch.Generator) -> None:
        """Prefills a job into a free row and draws its first token.

        Raises:
            ValueError: If the job's prompt leaves no room for a token.
        """
        self.check_room(job.prompt)
        known = self.prefixes.longest(job.prompt)
        if known:
            keys, values, features = self.prefixes.known[known]
            for index in range(len(keys)):
                self.cache.keys[index][row, :, : len(known)] = keys[index]
                self.cache.values[index][row, :, : len(known)] = values[index]
            job.features.append(features)
        features, logits = self.feed(row, job.prompt[len(known) :], len(known))
        job.features.append(features)
        self.jobs[row] = job
        self.lengths[row] = len(job.prompt)
        self.take(row, draw(logits, torch.tensor([job.temperature]), rng)[0])

    def check_room(self, prompt: list[int]) -> None:
        """Refuses a prompt that leaves no room for a token.

        Raises:
            ValueError: If it is empty or fills all slots.
        """
        if not 0 < len(prompt) < self.num_slots:
            raise ValueError(
                f"prompt: must have 1..{self.num_slots - 1} tokens; got {len(prompt)}; "
                f"give more slots, within the target's context"
            )

    def take(self, row: int, token: torch.Tensor) -> None:
        """Appends a drawn token to a row's job; it is fed in the next step."""
        job = self.jobs[row]
        assert job is not None
        job.output.append(int(token))
        self.last[row] = token

    def feed(self, row: int, tokens: list[int], start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Prefills tokens of one row; returns their features [T, F] and the last one's logits."""
        stop = start + len(tokens)
        positions = torch.arange(start, stop)[None]
        visible = torch.arange(stop) <= positions[0, :, None]
        mask = torch.zeros(visible.shape, dtype=self.cache.keys[0].dtype)
        mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)
        states = self.model.states(
            torch.tensor([tokens]),
            positions,
            mask[None, None],
            self.cache.row(row, start),
            self.taps,
        )
        return self.features(states)[0], self.model.head(states[-1][:, -1])

    def features(self, states: list[torch.Tensor]) -> torch.Tensor:
        """Tapped states side by side in the weights' type, [B, T, F]."""
        return torch.cat(states, dim=-1).to(self.model.embedding.dtype)

    def step(self, rng: torch.Generator) -> None:
        """One token more for every row (idle rows compute along)."""
        cache = self.cache
        cache.positions = self.lengths.clamp_max(self.num_slots - 1)
        busy = [row for row, job in enumerate(self.jobs) if job is not None]
        longest = int(self.lengths[busy].max()) + 1
        cache.length = min(-(-longest // 32) * 32, self.num_slots)
        cache.positions = cache.positions.clamp_max(cache.length - 1)
        visible = torch.arange(cache.length) <= cache.positions[:, None]
        mask = torch.zeros(visible.shape, dtype=cache.keys[0].dtype)
        mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)
        states = self.model.states(
            self.last[:, None], cache.positions[:, None], mask[:, None, None], cache, self.taps
        )
        features = self.features(states)[:, 0]
        temperatures = torch.tensor([job.temperature if job else 0.0 for job in self.jobs])
        drawn = draw(self.model.head(states[-1][:, 0]), temperatures, rng)
        for row in busy:
            job = self.jobs[row]
            assert job is not None
            job.features.append(features[row : row + 1].clone())  # not the whole batch
            self.lengths[row] += 1
            self.take(row, drawn[row])


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, rng: torch.Generator, top_k: int = 50
) -> torch.Tensor:
    """One token a row of logits [B, V]: the largest where the temperature is 0, else drawn."""
    best = logits.max(dim=-1).indices
    top_k = min(top_k, logits.shape[-1])
    hot = temperatures > 0
    noise = torch.rand(len(logits), top_k, generator=rng)
    if not bool(hot.any()):
        return best
    values, indices = logits[hot].float().topk(top_k)
    scaled = values / temperatures[hot, None] - (-noise[hot].log()).log()
    best[hot] = indices.gather(1, scaled.argmax(dim=-1, keepdim=True))[:, 0]
    return best
