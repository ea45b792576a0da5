"""Pools and workloads from settings."""

from __future__ import annotations

import torch

from specgym.engine.pool import ModelPool
from specgym.engine.pools.loading import load_pool
from specgym.envs.prompt_room import fit_workload
from specgym.envs.workloads import Split, Workload, get_workload
from specgym.runs.settings import EnvSettings, PoolSettings

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}


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
