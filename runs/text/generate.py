"""``specgym generate``: text out of any pool with any controller, streamed."""

from __future__ import annotations

import sys

from rich.console import Console

from specgym.engine.types import SamplingParams
from specgym.runs.configs import GenerateConfig
from specgym.runs.making import make_pool
from specgym.runs.text.engine_api import Engine


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
