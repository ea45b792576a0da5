"""What ``specgym bench peers`` times: a prompt's greedy continuation, by us and by each peer."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import nn

from specgym.engine.decoding import decode_step, start
from specgym.engine.forward.lean_llama import widen
from specgym.engine.pool import ModelPool
from specgym.engine.pools.checkpoints import quiet_transformers
from specgym.engine.pools.drafters import drafter_folder
from specgym.engine.pools.sources import LoadedModel, load_source
from specgym.engine.pools.student_files import holds_student
from specgym.engine.pools.students import load_student
from specgym.engine.timing import WallClock
from specgym.engine.types import DecodeRequest, Plan
from specgym.runs.peers.environments import PeerError

Prompt = tuple[int, ...]
Decode = Callable[[Prompt], tuple[list[int], float]]  # tokens and seconds of a prompt


@dataclasses.dataclass(frozen=True)
class Run:
    """One timed continuation.

    Attributes:
        prompt: Index of its prompt.
        tokens: What was decoded.
        seconds: Of the whole request, prompt included.
    """

    prompt: int
    tokens: list[int]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One way to decode a prompt.

    Attributes:
        name: What it is called in the table.
        peer: Who decodes: ``specgym``, ``transformers``, ``vllm`` or ``llama-cpp``.
        precision: Of the weights.
        decode: Tokens and seconds of a prompt.
    """

    name: str
    peer: str
    precision: str
    decode: Decode


def run_rounds(
    contestants: Sequence[Contestant],
    prompts: Sequence[Prompt],
    repeats: int,
    absent: dict[str, str],
    console: Console,
    measure_machine: Callable[[], object] = lambda: None,
) -> dict[str, list[Run]]:
    """Every contestant's runs by name, alternated in rotated order so that drift hits all alike.

    Each goes once before, unmeasured. One that fails is left out from then on.

    Args:
        contestants: Who decodes.
        prompts: What is decoded, in turn.
        repeats: Rounds of all prompts.
        absent: Gets the reason for each that failed.
        console: Shows progress.
        measure_machine: Called in front of every round.
    """
    runs: dict[str, list[Run]] = {each.name: [] for each in contestants}
    rounds = [None, *(index for _ in range(repeats) for index in range(len(prompts)))]
    for count, index in enumerate(rounds):
        console.print(f"warm-up of {len(runs)}" if index is None else f"round {count}")
        measure_machine()
        shift = count % len(contestants)
        for each in (*contestants[shift:], *contestants[:shift]):
            if each.name not in runs:
                continue
            try:
                tokens, seconds = each.decode(prompts[index or 0])
            except PeerError as error:
                absent[each.name] = str(error)
                del runs[each.name]
            else:
                if index is not None:
                    runs[each.name].append(Run(index, tokens, seconds))
    return runs


def total_seconds(runs: Sequence[Run]) -> float:
    """Seconds of all prompts: the sum over prompts of the median over repeats."""
    by_prompt: dict[int, list[float]] = {}
    for run in runs:
        by_prompt.setdefault(run.prompt, []).append(run.seconds)
    return sum(map(statistics.median, by_prompt.values()))


def equal_share(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """Share of tokens that are ours at the same place of the same prompt's text."""
    first = {run.prompt: run.tokens for run in reversed(ours)}
    pairs = [pair for run in theirs for pair in zip(first[run.prompt], run.tokens, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


class OurDecoder:
    """Our engine under one plan, without an end of text.

    Args:
        pool: The members.
        plan: What every iteration runs.
        new_tokens: Tokens per prompt.
        exact: Fixed shapes.
    """

    def __init__(self, pool: ModelPool, plan: Plan, new_tokens: int, exact: bool = False):
        pool.check(plan)
        self.pool, self.plan = pool, plan
        self.new_tokens, self.exact = new_tokens, exact
        self.clock = WallClock(pool.model(pool.target).device)
        self.iteration_seconds: list[float] = []

    def __call__(self, prompt: Prompt) -> tuple[list[int], float]:
        """Tokens and seconds of a prompt."""
        started = self.clock.now()
        request = DecodeRequest(prompt, self.new_tokens, eos_ids=frozenset())
        state = start(self.pool, [request], self.clock, exact=self.exact)
        while not state.is_finished:
            step = decode_step(self.pool, state, self.plan, self.clock)
            self.iteration_seconds.append(step.seconds)
        return state.output(), self.clock.now() - started


class TransformersDecoder:
    """transformers' own generate, without an end of text.

    Args:
        model: The transformers model, untouched by any member of a pool.
        new_tokens: Tokens per prompt.
        options: Of generate: what makes it speculate.
    """

    def __init__(self, model: Any, new_tokens: int, **options: Any):
        self.model, self.new_tokens, self.options = model, new_tokens, options
        # Told to suppress an end of text, generate would edit every row of logits; told that there
        # is none, it has nothing to do.
        model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def __call__(self, prompt: Prompt) -> tuple[list[int], float]:
        """Tokens and seconds of a prompt."""
        tokens = torch.tensor([prompt], device=self.model.device)
        clock = WallClock(self.model.device)
        started = clock.now()
        with quiet_transformers(bars=False):  # it warns of what itself does with an assistant
            output = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=self.new_tokens,
                do_sample=False,
                pad_token_id=0,
                **self.options,
            )
        seconds = clock.now() - started
        return output[0, len(prompt) :].tolist(), seconds


class WideHead(nn.Module):
    """A trimmed head whose logits cover the target's vocabulary, as our engine spreads them."""

    draft_ids: torch.Tensor

    def __init__(self, head: nn.Linear, draft_ids: torch.Tensor, vocab_size: int):
        super().__init__()
        self.head, self.vocab_size = head, vocab_size
        self.register_buffer("draft_ids", draft_ids.to(head.weight.device))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., vocab_size], minus infinity where the head has no row."""
        return widen(self.head(states), self.draft_ids, self.vocab_size)


def load_assistant(source: str, target: LoadedModel, k: int) -> Any:
    """A pool's drafter as an assistant of transformers' generate: always ``k`` tokens.

    Raises:
        PeerError: If it is no model of its own.
    """
    folder = drafter_folder(source)
    if folder is None:
        model = load_source(source, dtype=target.model.dtype, device="cpu").model
    elif holds_student(str(folder)):
        student = load_student(folder, (target.dense or target).model, target.model.dtype)
        model, vocab_size = student.model, target.model.config.vocab_size
        model.lm_head = WideHead(model.lm_head, student.draft_ids, vocab_size)
    else:
        raise PeerError(f"{source} is a head on the target, transformers takes a whole model")
    model.generation_config.num_assistant_tokens = k
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0  # else it stops when in doubt
    return model


def lookup_options(pool: ModelPool, k: int) -> dict[str, int]:
    """What makes generate look prompts up with the pool's own window."""
    longest = max(member.traits.max_ngram for member in pool.members.values())
    return {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": longest}
