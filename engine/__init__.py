"""The decoder: members, chains, masked KV cache and lossless staged verification.

``Engine`` and ``hf_generate``, text for users, are found here too. A controller decides in them,
so they are built on the environment and live in ``specgym.runs``; they are looked up when they
are first asked for, and the decoder itself never needs them.
"""

import importlib
from typing import Any

from specgym.engine.decoding import decode_step, probe_baseline, start
from specgym.engine.joining import join
from specgym.engine.members.model import ModelMember
from specgym.engine.members.ngram import NGramMember
from specgym.engine.pool import ModelPool
from specgym.engine.pools.loading import load_pool
from specgym.engine.state import DecodeState
from specgym.engine.timing import Baseline, CountingClock, WallClock
from specgym.engine.types import DecodeRequest, EngineFault, Plan, SamplingParams, StepResult

__all__ = [
    "Baseline",
    "CountingClock",
    "DecodeRequest",
    "DecodeState",
    "EngineFault",
    "ModelMember",
    "ModelPool",
    "NGramMember",
    "Plan",
    "SamplingParams",
    "StepResult",
    "WallClock",
    "decode_step",
    "join",
    "load_pool",
    "probe_baseline",
    "start",
]

USER_API = {"Engine": "specgym.runs.text.engine_api", "hf_generate": "specgym.runs.text.hf"}


def __getattr__(name: str) -> Any:
    """Names of the text API, found where they live."""
    if name not in USER_API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(USER_API[name]), name)
