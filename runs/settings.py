"""Settings that commands share: which pool decodes what."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import torch

from specgym.engine.loading import load_pool
from specgym.engine.pool import DEFAULT_K_VALUES, ModelPool
from specgym.envs.room import fit_workload
from specgym.envs.workloads import Split, Workload, get_workload

DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float32": torch.float32}


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
        dtype: Type of the weights; ``auto`` takes bfloat16 where it is fast.
        exact: Fixed shapes: the output equals plain decoding bit for bit, whatever the plans.
        graphs: Replay captured CUDA graphs where the device has them.
        compile: Compile the lean forwards with torch.compile: tens of seconds per shape.
    """

    pool: str = "smollm2"
    chains: tuple[str, ...] = ()
    k_values: tuple[int, ...] = DEFAULT_K_VALUES
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


def make_pool(settings: PoolSettings) -> ModelPool:
    """The pool of these settings."""
    return load_pool(
        settings.pool,
        k_values=settings.k_values,
        chains=[tuple(chain.split(">")) for chain in settings.chains] or None,
        device=settings.device,
        dtype=DTYPES[settings.dtype],
        graphs=settings.graphs,
        compiled=settings.compile,
    )


def make_workload(settings: EnvSettings, pool: ModelPool, split: Split) -> Workload:
    """The workload of these settings: each of its prompts has room in the target's context.

    Raises:
        ValueError: If there is no such workload, or a prompt is too long and not to be skipped.
    """
    workload = get_workload(settings.workload, prompts=settings.prompts, split=split)
    return fit_workload(workload, pool, skip_too_long=settings.skip_too_long)
