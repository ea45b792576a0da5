"""Vectors of sixteen float32 lanes as a numba type, and raw memory, for compiled forwards.

Every operation works lane by lane, and the few that go across lanes do so in a fixed order, so a
result depends on its inputs alone: not on the width of the processor's registers (LLVM splits a
vector into what there is), nor on what else is computed. Multiplication and addition are fused
only where ``fma`` is written.

Memory is addressed by plain integers. Nothing here checks a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
VECTOR_I32 = ir.VectorType(I32, LANES)
VECTOR_I16 = ir.VectorType(I16, LANES)
UNDEFINED = ir.Constant(VECTOR, ir.Undefined)
UPPER_HALF = -65536  # 0xffff0000 as a signed number
LOG2_E = 1.0 / math.log(2.0)
LN2_HIGH = 0.693145751953125  # ln 2 in 17 bits: n * LN2_HIGH is exact for |n| < 128
LN2_LOW = math.log(2.0) - LN2_HIGH
ROUND_MAGIC = 12582912.0  # 1.5 * 2**23: adding it leaves an integer in the lowest bits
EXP_TERMS = tuple(1.0 / math.factorial(n) for n in range(7, -1, -1))


class Vector(types.Type):
    """The numba type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A vector is one LLVM value."""

    def __init__(self, manager: Any, numba_type: Any):
        super().__init__(manager, numba_type, VECTOR)


def splat_constant(value: float | int, kind: ir.VectorType = VECTOR) -> ir.Constant:
    """A constant vector of equal lanes."""
    return ir.Constant(kind, [value] * LANES)


def emit_fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """Emit ``a * b + c``, rounded once; vectors of any number of lanes."""
    kind = a.type
    name = f"llvm.fma.v{kind.count}f32"
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
    return builder.call(fused, [a, b, c])


def emit_splat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int = LANES) -> ir.Value:
    """Emit a vector whose lanes all hold a scalar."""
    kind = ir.VectorType(scalar.type, lanes)
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, undefined, zeros)


def emit_pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """Emit a typed pointer to an address."""
    return builder.inttoptr(address, kind.as_pointer())


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value, *, is_once: bool) -> None:
    """Emit a prefetch for reading, into all levels of the cache, or past the last where it can."""
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    hints = [ir.Constant(I32, hint) for hint in (0, 0 if is_once else 3, 1)]
    builder.call(prefetch, [emit_pointer(builder, address, I8), *hints])


def emit_exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit e**x, within two units in the last place; 0 below -86, finite above 88.

    x = n ln 2 + r with |r| <= ln 2 / 2; e**r by its Taylor series to r**7 (error 5e-9).
    """
    low, high = splat_constant(-86.0), splat_constant(88.0)
    is_low = builder.fcmp_ordered("<", x, low)
    is_high = builder.fcmp_ordered(">", x, high)
    clamped = builder.select(is_high, high, builder.select(is_low, low, x))
    magic = splat_constant(ROUND_MAGIC)
    shifted = emit_fma(builder, clamped, splat_constant(LOG2_E), magic)
    n = builder.fsub(shifted, magic)
    r = emit_fma(builder, n, splat_constant(-LN2_HIGH), clamped)
    r = emit_fma(builder, n, splat_constant(-LN2_LOW), r)
    series = splat_constant(EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        series = emit_fma(builder, series, r, splat_constant(term))
    steps = builder.shl(builder.bitcast(shifted, VECTOR_I32), splat_constant(23, VECTOR_I32))
    bits = builder.add(builder.bitcast(series, VECTOR_I32), steps)
    return builder.select(is_low, splat_constant(0.0), builder.bitcast(bits, VECTOR))


def emit_widen(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """Emit bfloat16 numbers, given as their bits, as float32."""
    wide = builder.zext(halves, VECTOR_I32)
    return builder.bitcast(builder.shl(wide, splat_constant(16, VECTOR_I32)), VECTOR)


def emit_narrow(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Emit the bits of float32 numbers as bfloat16, to nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(x, VECTOR_I32)
    upper = builder.lshr(bits, splat_constant(16, VECTOR_I32))
    is_odd = builder.and_(upper, splat_constant(1, VECTOR_I32))
    rounded = builder.add(bits, builder.add(is_odd, splat_constant(0x7FFF, VECTOR_I32)))
    is_nan = builder.fcmp_unordered("uno", x, x)
    nan = splat_constant(0x7FC00000, VECTOR_I32)
    kept = builder.lshr(builder.select(is_nan, nan, rounded), splat_constant(16, VECTOR_I32))
    return builder.trunc(kept, VECTOR_I16)


def emit_across(
    builder: ir.IRBuilder, x: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """Emit a scalar from all lanes: lanes i and i + 8 first, then i and i + 4, and so on."""
    half = LANES // 2
    while half:
        order = [lane + half if lane < half else 0 for lane in range(LANES)]
        mask = ir.Constant(VECTOR_I32, order)
        x = combine(x, builder.shuffle_vector(x, UNDEFINED, mask))
        half //= 2
    return builder.extract_element(x, ir.Constant(I32, 0))


def emit_larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Emit the larger of each pair of lanes; the second where one is not a number."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def make_operation(result: Any, arguments: Sequence[Any], emit: Callable[..., Any]) -> Any:
    """Make an intrinsic of fixed types from what emits its code: (builder, *arguments)."""
    signature = result(*arguments)

    def generate(context: Any, builder: ir.IRBuilder, _: Any, values: Sequence[Any]) -> Any:
        emitted = emit(builder, *values)
        return context.get_dummy_value() if emitted is None else emitted

    names = ", ".join(f"a{index}" for index in range(len(arguments)))
    scope: dict[str, Any] = {"signature": signature, "generate": generate}
    exec(f"def operation(context, {names}):\n    return signature, generate", scope)
    return intrinsic(scope["operation"])


def _load(kind: ir.Type, size: int) -> Callable[..., ir.Value]:
    return lambda builder, address: builder.load(emit_pointer(builder, address, kind), align=size)


def _store(kind: ir.Type, size: int) -> Callable[..., None]:
    def emit(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
        builder.store(value, emit_pointer(builder, address, kind), align=size)

    return emit


def _load_bf16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return emit_widen(builder, builder.load(emit_pointer(builder, address, VECTOR_I16), align=2))


def _store_bf16(builder: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    pointer = emit_pointer(builder, address, VECTOR_I16)
    builder.store(emit_narrow(builder, value), pointer, align=2)


load_i64 = make_operation(types.int64, [types.int64], _load(I64, 8))
store_i64 = make_operation(types.void, [types.int64, types.int64], _store(I64, 8))
load_i32 = make_operation(types.int32, [types.int64], _load(I32, 4))
store_i32 = make_operation(types.void, [types.int64, types.int32], _store(I32, 4))
load_u8 = make_operation(types.uint8, [types.int64], _load(I8, 1))
load_f32 = make_operation(types.float32, [types.int64], _load(F32, 4))
store_f32 = make_operation(types.void, [types.int64, types.float32], _store(F32, 4))
load = make_operation(vector, [types.int64], _load(VECTOR, 4))
store = make_operation(types.void, [types.int64, vector], _store(VECTOR, 4))
load_bf16 = make_operation(vector, [types.int64], _load_bf16)
store_bf16 = make_operation(types.void, [types.int64, vector], _store_bf16)
splat = make_operation(vector, [types.float32], emit_splat)
fma = make_operation(vector, [vector] * 3, emit_fma)
add = make_operation(vector, [vector] * 2, lambda b, x, y: b.fadd(x, y))
subtract = make_operation(vector, [vector] * 2, lambda b, x, y: b.fsub(x, y))
multiply = make_operation(vector, [vector] * 2, lambda b, x, y: b.fmul(x, y))
divide = make_operation(vector, [vector] * 2, lambda b, x, y: b.fdiv(x, y))
larger = make_operation(vector, [vector] * 2, emit_larger)
exp = make_operation(vector, [vector], emit_exp)
put_lane = make_operation(
    vector,
    [vector, types.int64, types.float32],
    lambda b, x, lane, value: b.insert_element(x, value, b.trunc(lane, I32)),
)
take_lane = make_operation(
    types.float32,
    [vector, types.int64],
    lambda b, x, lane: b.extract_element(x, b.trunc(lane, I32)),
)
sum_lanes = make_operation(
    types.float32, [vector], lambda b, x: emit_across(b, x, lambda i, j: b.fadd(i, j))
)
largest_lane = make_operation(
    types.float32, [vector], lambda b, x: emit_across(b, x, lambda i, j: emit_larger(b, i, j))
)


@njit(inline="always")
def silu(x):
    """x times its sigmoid."""
    one = splat(types.float32(1.0))
    zero = splat(types.float32(0.0))
    return divide(x, add(one, exp(subtract(zero, x))))
