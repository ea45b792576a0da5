"""Checks of what environments are made with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specgym.engine.checks import check_whole
from specgym.engine.pool import ModelPool
from specgym.engine.timing import Baseline
from specgym.engine.types import SamplingParams
from specgym.envs.workloads import Workload


def check_counts(max_new_tokens: Any, num_requests: Any, batch_size: Any) -> tuple[int, int, int]:
    """Token budget, requests of an episode (by default as many as rows), and rows.

    Raises:
        ValueError: If one is no whole number, or out of range.
    """
    max_new_tokens = check_whole("max_new_tokens", max_new_tokens, 1)
    batch_size = check_whole("batch_size", batch_size, 1)
    if num_requests is None:
        num_requests = batch_size
    num_requests = check_whole("num_requests", num_requests, 1)
    if batch_size > num_requests:
        raise ValueError(
            f"batch_size: must be in 1..num_requests = {num_requests}; got {batch_size}"
        )
    return max_new_tokens, num_requests, batch_size


def check_kinds(pool: Any, workload: Any, sampling: Any, baseline: Any) -> None:
    """Refuses objects of another kind.

    Raises:
        ValueError: If one is.
    """
    rules = {
        "pool": (pool, (ModelPool, str), "a ModelPool, or a spec such as 'smollm2'"),
        "workload": (workload, (Workload, str), "a Workload, or a name such as 'code+math'"),
        "sampling": (sampling, (SamplingParams,), "SamplingParams(...)"),
        "baseline": (baseline, (Baseline, type(None)), "a Baseline, or None to make one"),
    }
    for field, (value, kinds, rule) in rules.items():
        if not isinstance(value, kinds):
            raise ValueError(f"{field}: must be {rule}; got {value!r}")


def check_k_values(k_values: Any) -> tuple[int, ...]:
    """K values as ints.

    Raises:
        ValueError: If they are no whole numbers of 1 or more, or there is none.
    """
    if not isinstance(k_values, Sequence | range) and not hasattr(k_values, "tolist"):
        raise ValueError(f"k_values: must be a list of whole numbers >= 1; got {k_values!r}")
    return tuple(check_whole("k_values", each, 1, "each of them") for each in k_values)


def check_chains(chains: Any) -> list[tuple[str, ...]]:
    """Chains as members' names, of texts such as ``ngram>target``.

    Raises:
        ValueError: If they are no list of such texts.
    """
    is_list = isinstance(chains, Sequence) and not isinstance(chains, str)
    if not is_list or not all(isinstance(chain, str) for chain in chains):
        raise ValueError(f"chains: must be a list of texts such as 'ngram>target'; got {chains!r}")
    return [tuple(chain.split(">")) for chain in chains]
