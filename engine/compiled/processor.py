"""Which processor forwards are compiled for: this one, or an older one that it can stand in for.

``SPECGYM_CPU=x86-64-v3`` (an LLVM name of a processor) compiles as if for that one: what a machine
with wider registers does, with those of AVX2. It must be set before the engine is imported, and
the processor at hand must have what is asked for. Results are the same bits either way.
"""

from __future__ import annotations

import os
from typing import Any

import llvmlite.binding as llvm
from numba.core import config

VARIABLE = "SPECGYM_CPU"


def choose() -> str:
    """Have numba compile for the chosen processor; returns its LLVM name."""
    name = os.environ.get(VARIABLE, "")
    if name:
        settings: Any = config
        settings.CPU_NAME, settings.CPU_FEATURES = name, ""
    return name or llvm.get_host_cpu_name()


def has_wide_registers() -> bool:
    """Whether there are 32 registers of 512 bits (AVX-512) on the chosen processor."""
    if os.environ.get(VARIABLE):
        return PROCESSOR in ("x86-64-v4", "skylake-avx512", "cascadelake", "icelake-server")
    return bool(llvm.get_host_cpu_features().get("avx512f"))


PROCESSOR = choose()
