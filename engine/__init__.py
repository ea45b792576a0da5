"""The decoder: members, chains, masked KV cache and lossless staged verification."""

from specgym.engine.decoding import DecodeRequest, DecodeState, decode_step, probe_baseline, start
from specgym.engine.joining import join
from specgym.engine.members import ModelMember, NGramMember
from specgym.engine.pool import ModelPool, load_pool
from specgym.engine.timing import Baseline, CountingClock, WallClock
from specgym.engine.types import EngineFault, Plan, SamplingParams, StepResult

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
