"""Random plans on the live engine: what costs are measured on, and what traces are checked by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specgym.envs.decode import SpecDecodeEnv
from specgym.envs.pool_spec import Layout
from specgym.envs.replay.costs import MeasuredForward, MeasuredIteration
from specgym.envs.workloads import Request
from specgym.runs.loop import StepError

KEEP = 0.6  # probability that a plan runs again: drafters are caught up as often as they lag


def walk_request(
    env: SpecDecodeEnv, request: Request, rng: np.random.Generator
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Decodes a request under plans drawn at random; the ``info`` of the reset and of every step.

    Raises:
        StepError: If the engine failed.
    """
    _, begun = env.reset(options={"request": request})
    infos: list[dict[str, Any]] = []
    action, mask, done = 0, begun["action_mask"], False
    while not done:
        if rng.random() >= KEEP or not mask[action]:
            action = int(rng.choice(np.flatnonzero(mask)))
        _, _, terminated, truncated, info = env.step(action)
        if "error" in info:
            raise StepError(f"request {request.id!r}: {info['error']}")
        infos.append(info)
        mask, done = info["action_mask"], terminated or truncated
    return begun, infos


def measured(
    layout: Layout, begun: Mapping[str, Any], infos: Sequence[Mapping[str, Any]]
) -> list[MeasuredIteration]:
    """A walk's iterations as the cost table takes them.

    A member's first forwards of a request are its prefill, up to the prompt's last token but one;
    a head has no position for the first token.
    """
    to_prefill = {
        name: begun["num_prompt"] - 1 - layout.traits[name].first_position
        for name in layout.followers
    }
    iterations = []
    for info in infos:
        forwards: list[MeasuredForward] = []
        for forward in info["forwards"]:
            left = to_prefill.get(forward["member"], 0)
            if left > 0:
                to_prefill[forward["member"]] = left - forward["num_tokens"]
            is_guess = any(f.role == "draft" for f in forwards) and forward["role"] == "draft"
            role = "guess" if is_guess else forward["role"]
            forwards.append(describe(forward, role, is_prefill=left > 0))
        iterations.append(
            MeasuredIteration(
                chain=tuple(info["chain"].split(">")),
                num_drafted=info["drafted"],
                kv_length=info["kv_len"],
                seconds=info["iter_seconds"],
                baseline_seconds=info["baseline_seconds"],
                forwards=tuple(forwards),
            )
        )
    return iterations


def describe(forward: Mapping[str, Any], role: str, is_prefill: bool) -> MeasuredForward:
    """A forward of ``info``, under the role that its cost goes by."""
    experts = forward["unique_experts"]
    return MeasuredForward(
        member=forward["member"],
        role=role,
        num_tokens=forward["num_tokens"],
        experts=float(np.mean(experts)) if experts else 0.0,
        seconds=forward["seconds"],
        is_prefill=is_prefill,
    )
