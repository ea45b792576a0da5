"""Settings that commands share; imported without torch, so that help is quick."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

# The engine's own constants, spelled out; a test compares them.
K_VALUES = (1, 2, 3, 4, 6)
MIXTURE_POOL = "smollm2-moe"
DEFAULT_CONTROLLER = "test-and-set"


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """Which models run, and where.

    Attributes:
        pool: ``smollm2``, ``smollm2-moe``, ``smollm2-moe:experts=16:top-k=4``, a recipe such as
            ``llama-3`` (``specgym pool list``), or ``"draft=PATH,target=PATH"`` with local folders
            or hub ids.
        chains: Legal chains such as ``ngram>target``; all by default.
        k_values: Numbers of drafted tokens that plans may ask for.
        device: Where the models run.
        dtype: Type of the weights; ``auto`` is bfloat16.
        exact: Fixed shapes: the output equals plain decoding bit for bit, whatever the plans.
        graphs: Replay captured CUDA graphs where the device has them.
        compile: On CUDA, compile the lean forwards with torch.compile: tens of seconds per shape.
    """

    pool: str = "smollm2"
    chains: tuple[str, ...] = ()
    k_values: tuple[int, ...] = K_VALUES
    device: str = "cpu"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    exact: bool = True
    graphs: bool = True
    compile: bool = False


@dataclasses.dataclass(frozen=True)
class EnvSettings(PoolSettings):
    """What is decoded.

    Attributes:
        workload: A category, a mix such as ``code+math``, ``all-3``, ``all-4``, ``all`` or
            ``phases``.
        prompts: JSONL file with prompts of your own (HumanEval, GSM8K, MT-Bench form).
        skip_too_long: Leave out prompts that do not fit the target's context, and say how many; by
            default they are refused.
        max_new_tokens: Token budget of a request.
        clock: ``wall`` measures; ``counting`` models time, for tests.
        seed: Picks the requests.
    """

    workload: str = "all-4"
    prompts: Path | None = None
    skip_too_long: bool = False
    max_new_tokens: int = 128
    clock: Literal["wall", "counting"] = "wall"
    seed: int = 0
