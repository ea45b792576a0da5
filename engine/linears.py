"""Linear layers over weights in the layouts that a CPU's kernels read fastest.

Speed only, never semantics; whatever cannot be packed is run by torch's own linear.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn import functional as F

logger = logging.getLogger(__name__)
NUMERICS = 2  # raised by every change that moves bits: recordings go by it
FEW_ROWS = 8  # up to here the fp16 layout is the faster one: the default window of exact mode
MAX_HALF = 65504.0  # largest number in fp16
SPLIT = 32768  # entries from which torch splits an operation among threads


def drawn(*shape: int) -> torch.Tensor:
    """Normal numbers from a stream of their own: nobody's seeds are spent on probes."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def probe(what: str, dtype: torch.dtype, pack: Callable, run: Callable) -> bool:
    """Whether a kernel of packed linears is to be had and computes a linear; logs why not."""
    weight, rows = (drawn(size, 64).to(dtype) for size in (32, 2))
    try:
        result = run(rows, pack(weight))
        works = torch.allclose(result.float(), F.linear(rows, weight).float(), atol=0.5)
    except (AttributeError, RuntimeError) as error:
        logger.warning("%s are not to be had here, others are used: %s", what, error)
        return False
    if not works:
        logger.warning("%s give wrong numbers here, others are used", what)
    return works


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this processor and this torch build can pack linears of this type."""
    return dtype == torch.bfloat16 and probe("packed linears", dtype, pack_many, run_many)


@functools.cache
def half_works() -> bool:
    """Whether they can also be packed in fp16, for windows of few rows."""
    return probe("packed fp16 linears", torch.float32, pack_few, run_few)


def fits_half(weight: torch.Tensor) -> bool:
    """Whether every number of a weight is in fp16's range; NaN is not."""
    return bool(weight.detach().abs().max() <= MAX_HALF)


@functools.cache
def rows_are_alike() -> bool:
    """Whether the fp16 kernel gives a row the same bits in every window of few rows.

    A quick look at three shapes; ``ModelMember`` tries its whole forward.
    """
    for num_out, num_in in ((96, 64), (1000, 576), (320, 1536)):
        rows, packed = drawn(FEW_ROWS, num_in), pack_few(drawn(num_out, num_in))
        alone = torch.cat([run_few(row[None], packed) for row in rows])
        for count in range(2, FEW_ROWS + 1):
            if not torch.equal(run_few(rows[:count], packed), alone[:count]):
                logger.warning("packed fp16 linears mix rows here: exact mode pads all operations")
                return False
    return True


def is_rowwise(weights: Iterable[torch.Tensor]) -> bool:
    """Whether linears over all these weights compute a row alike in any window of few rows.

    A row's bits then do not depend on how many rows (up to ``FEW_ROWS``) are computed with it.
    """
    return all(
        weight.device.type == "cpu"
        and packing_works(weight.dtype)
        and half_works()
        and rows_are_alike()
        and fits_half(weight)
        for weight in weights
    )


def stream_dtype(weight: torch.Tensor) -> torch.dtype:
    """Type of the hidden states between a model's linears: what spares them conversions."""
    is_half = weight.device.type == "cpu" and packing_works(weight.dtype) and half_works()
    return torch.float32 if is_half else weight.dtype


def pack_few(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """A weight in fp16 in the layout of FBGEMM's kernel."""
    wide = weight.detach().float().contiguous()
    return torch.ops.quantized.linear_prepack_fp16(wide, None if bias is None else bias.float())


def run_few(rows: torch.Tensor, packed: Any) -> torch.Tensor:
    """A linear of float32 rows over a weight that ``pack_few`` packed, its bias included."""
    return torch.ops.quantized.linear_dynamic_fp16(rows, packed)


def pack_many(weight: torch.Tensor) -> torch.Tensor:
    """A weight in bf16 in the layout of oneDNN's kernel."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), FEW_ROWS)


def run_many(
    rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """A linear of bf16 rows over a weight that ``pack_many`` packed."""
    return torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in the layouts the CPU's kernels read fastest.

    There are two, so a bf16 weight takes 4 bytes a number. Up to ``FEW_ROWS`` rows the weight's
    bytes are what takes time: it is read in fp16, at 1.5 times the bytes per second of bf16, and
    rows are computed in float32. (A bf16 number is the same in fp16 from 6e-5 to 65504; below it
    is off by at most 3e-8; a weight beyond is not packed in fp16.) For more rows arithmetic is:
    bf16's is twice as fast. Figures: ``specgym bench decode``. The weight cannot be read back; the
    module is for inference only.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.many = pack_many(weight)
        self.bias = None if bias is None else bias.detach()
        has_few = half_works() and fits_half(weight)
        self.few = pack_few(weight, self.bias) if has_few else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows @ weight.T + bias``, [..., in_features] -> [..., out_features], in their type."""
        if torch.compiler.is_compiling():
            narrow = rows.to(torch.bfloat16)
            return packed_linear(narrow, self.many, self.bias, self.out_features).to(rows.dtype)
        if self.few is not None and rows.numel() <= FEW_ROWS * self.in_features:
            if rows.dtype == torch.float32:
                return run_few(rows, self.few)
            return run_few(rows.float(), self.few).to(rows.dtype)
        return run_many(rows.to(torch.bfloat16), self.many, self.bias).to(rows.dtype)


@torch.library.custom_op("specgym::packed_linear", mutates_args=())
def packed_linear(
    rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    """A packed linear as one piece: torch's compiler wants to pack the weight itself."""
    return run_many(rows, packed, bias)


@packed_linear.register_fake
def packed_linear_shape(
    rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    """What comes out, without numbers."""
    return rows.new_empty((*rows.shape[:-1], out_features))


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable:
    """The fastest callable for a linear layer on the weight's device and type."""
    if weight.device.type == "cpu" and packing_works(weight.dtype):
        return PackedLinear(weight, bias).forward  # past the hooks of a module's call
    return functools.partial(F.linear, weight=weight, bias=bias)


def by_rows(function: Callable, states: torch.Tensor) -> torch.Tensor:
    """A function of single entries, applied so that a row's bits do not depend on the others.

    Above some size torch splits an operation among threads in the middle of a row, and what is left
    over beside the vector registers is computed by other instructions. (Seen with SiLU.)

    Args:
        function: From [..., N, n] to [..., N, m].
        states: Hidden states, [..., N, n].
    """
    num_rows = max(SPLIT // states.shape[-1], 1)
    if states.shape[-2] <= num_rows or states.shape[-2] > FEW_ROWS:
        return function(states)
    return torch.cat([function(part) for part in states.split(num_rows, dim=-2)], dim=-2)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it is torch's own linear over a weight of numbers: not quantised, not adapted.

    Quantised linears may be another class, or torch's own over a weight of another class.
    """
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def pack_linears(model: nn.Module) -> int:
    """Replaces the model's linears by packed ones; returns how many.

    The unpacked copies are dropped; an embedding tied to the head keeps its own weight.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if is_plain_linear(child) and packing_works(child.weight.dtype):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
                count += 1
    return count
