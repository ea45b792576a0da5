"""``specgym generate``: text out of any pool with any controller, streamed."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from specgym.engine.types import SamplingParams
from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.workloads import Request, Workload
from specgym.runs.controllers import make_controller
from specgym.runs.loop import begin_request, run_steps
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
        stop: Strings that end the text.
        stats: Print tokens per second and the plans used, to standard error.
    """

    prompt: str = "-"
    controller: str = "test-and-set"
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
    text = sys.stdin.read() if config.prompt == "-" else config.prompt
    if not text.strip():
        raise ValueError("prompt: must not be empty or blank; give --prompt TEXT")
    request = Request("prompt", text, "custom")
    env = SpecDecodeEnv(
        make_pool(config),
        Workload("prompt", ((request,),)),
        max_new_tokens=config.max_new_tokens,
        exact=config.exact,
        sampling=sampling,
        stop=config.stop,
    )
    infos = []
    for piece, info in stream(env, config.controller, config.seed):
        sys.stdout.write(piece)
        sys.stdout.flush()
        infos.append(info)
    print()
    if config.stats:
        tokens = sum(info["tokens"] for info in infos)
        seconds = sum(info["total_seconds"] for info in infos)
        baseline = sum(info["tokens"] * info["baseline_seconds"] for info in infos)
        console.print(
            f"{tokens} tokens in {len(infos)} iterations, {tokens / seconds:.1f} tokens/s, "
            f"{baseline / seconds:.2f}x no speculation; ended by {infos[-1]['finish_reason']}"
        )


def stream(env: SpecDecodeEnv, spec: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each iteration's new text and ``info``.

    Only whole characters are given out: a token may end inside one.

    Raises:
        StepError: If the engine failed.
    """
    controller = make_controller(spec, env.plans, [f.name for f in env.features], seed)
    observation, begun = begin_request(env, controller, env.workload.requests[0])
    tokenizer, shown = env.pool.tokenizer, 0
    for _, _, info in run_steps(env, controller, observation, begun):
        assert env.state is not None
        tokens, done = env.state.output(), env.state.is_finished
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        whole = len(text) if done or not text.endswith("\ufffd") else len(text) - 1
        yield text[shown:whole], info
        shown = max(shown, whole)
