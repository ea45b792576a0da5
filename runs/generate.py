"""``specgym generate``: text out of any pool with any controller, streamed."""

from __future__ import annotations

import dataclasses
import sys

from rich.console import Console

from specgym.engine.types import SamplingParams
from specgym.runs.api import Engine
from specgym.runs.session import DEFAULT_CONTROLLER
from specgym.runs.settings import PoolSettings, make_pool


@dataclasses.dataclass(frozen=True)
class GenerateConfig(PoolSettings):
    """Writes text for a prompt, as it is decoded.

    Attributes:
        prompt: The user's turn; ``-`` reads standard input.
        controller: Who picks the plans, for example ``none``, ``static:ngram@4`` or ``ucb``.
        max_new_tokens: Token budget.
        temperature: 0 is greedy.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens with this mass.
        seed: Seeds sampling and the controller.
        stop: Strings that end the text; they are not part of it.
        stats: Print tokens per second and the speed-up, to standard error.
    """

    prompt: str = "-"
    controller: str = DEFAULT_CONTROLLER
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stats: bool = True


def generate(config: GenerateConfig, console: Console) -> None:
    """Streams the text to standard output.

    Raises:
        ValueError: If the prompt is empty or a setting is refused.
        StepError: If the engine failed.
    """
    sampling = SamplingParams(config.temperature, config.top_k, config.top_p, config.seed)
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
    if not prompt.strip():
        raise ValueError("prompt: must not be empty or blank; give --prompt TEXT")
    stream = Engine(make_pool(config), exact=config.exact).stream(
        prompt,
        controller=config.controller,
        max_new_tokens=config.max_new_tokens,
        sampling=sampling,
        stop=config.stop,
    )
    for piece in stream:
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    result = stream.result
    if config.stats:
        console.print(
            f"{len(result.tokens)} tokens in {result.num_iterations} iterations, "
            f"{result.tokens_per_second:.1f} tokens/s, {result.speedup:.2f}x no speculation; "
            f"ended by {result.finish_reason}"
        )
