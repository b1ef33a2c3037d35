"""Device functions of an expression's primitives, in fp32, one element at a time.

Reciprocals and roots are the hardware's, right to 2 units in the last place, and so are exp2 and log2, whose results
near 0 are right to 2**-22; denormal numbers may count as 0. exp, tanh, erf, log and log1p are the math library's,
because the hardware's lose bits of large arguments or small results.
"""

import operator

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.kernels.lib.activation import LOG2_E, gelu_tanh, ndtr, sigmoid, silu

ROUNDS_TO = {"float16": Float16, "bfloat16": BFloat16, "float8_e4m3fn": Float8E4M3FN}


def where(condition, x, y):
    return Float32(cutlass.select_(condition, x, y))


def divide(x, y):
    return x * cute.arch.rcp_approx(y)


def sign(x):
    return where(x < 0.0, Float32(-1.0), where(x > 0.0, Float32(1.0), x))  # 0 and NaN are themselves


def exp2(x):
    return cute.math.exp2(x, fastmath=True)


# log1p(t) / t for t from 0 to 1: a minimax fit for the relative error, 3e-8 before rounding.
LOG1P = (
    0.9999999698793612, -0.49999493137931933, 0.3331909675443544, -0.248429817909221, 0.19106005106215007,
    -0.13663242275751533, 0.07822591039136279, -0.029505213299473268, 0.005232687905953906,
)  # fmt: skip


# The same, 1.3e-6, for outputs of 16 bits.
SHORT_LOG1P = (
    0.9999987315270658, -0.49986965581465004, 0.33109448309168105, -0.23503857537016112, 0.14922382012694216,
    -0.06640175136100912, 0.014141007584966227,
)  # fmt: skip


def softplus(x, exp=cute.math.exp, log1p=LOG1P):
    """``relu(x) + log1p(exp(-abs(x)))``, by a polynomial: half as many instructions as the math library's log1p."""
    t = exp(cute.math.absf(x) * -1.0)
    ratio = t * log1p[-1] + log1p[-2]
    for c in reversed(log1p[:-2]):
        ratio = ratio * t + c
    return t * ratio + relu(x)


def relu(x):
    return maximum(x, 0.0)


def clip(x, low, high):
    return minimum(maximum(x, low), high)


def minimum(x, y):
    """The smaller number; NaN where one of them is NaN."""
    return cute.arch.fmin(x, y, nan=True)


def maximum(x, y):
    return cute.arch.fmax(x, y, nan=True)


# How reductions combine two numbers, and what changes none. NaN stays NaN.
COMBINE = {"sum": operator.add, "mean": operator.add, "max": maximum, "min": minimum}
NEUTRAL = {"sum": 0.0, "mean": 0.0, "max": -Float32.inf, "min": Float32.inf}


def astype(x, dtype):
    return ROUNDS_TO[dtype](x).to(Float32) if dtype in ROUNDS_TO else x  # what an output is stored as


# Functions of fp32 and Boolean elements; astype also takes the dtype's name. Kernels of rows have the reductions.
DEVICE = {
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "multiply": lambda x, y: x * y,
    "divide": divide,
    "negative": lambda x: x * -1.0,
    "reciprocal": cute.arch.rcp_approx,
    "square": lambda x: x * x,
    "sqrt": lambda x: cute.math.sqrt(x, fastmath=True),
    "rsqrt": lambda x: cute.math.rsqrt(x, fastmath=True),
    "abs": cute.math.absf,
    "sign": sign,
    "floor": cute.math.floor,
    "round": cute.math.roundeven,
    "sin": cute.math.sin,
    "cos": cute.math.cos,
    "exp": cute.math.exp,
    "exp2": exp2,
    "log": cute.math.log,
    "log1p": cute.math.log1p,
    "log2": lambda x: cute.math.log2(x, fastmath=True),
    "tanh": cute.math.tanh,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "erf": cute.math.erf,
    "ndtr": ndtr,
    "relu": relu,
    "silu": lambda x: silu(x)[0],
    "gelu": lambda x: x * ndtr(x),
    "gelu_tanh": gelu_tanh,
    "minimum": minimum,
    "maximum": maximum,
    "clip": clip,
    "where": where,
    "astype": astype,
    "stop_gradient": lambda x: x,
    "equal": lambda x, y: x == y,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "logical_and": lambda x, y: x & y,
    "logical_or": lambda x, y: x | y,
    "logical_not": lambda x: x ^ True,
}


def _exact(operation):
    """An operation in PTX that says how it rounds: the assembler makes no fused multiply-add of it."""

    def compute(x, y):
        ptx = f"{operation}.rn.f32 {{$w0}}, {{$r0}}, {{$r1}};"
        return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[Float32(x), Float32(y)])

    return compute


# For a value that is computed again and compared with what it was: whether a product and a sum become one instruction,
# which rounds once, depends on what else needs the product.
_multiply = _exact("mul")
EXACT = {
    "add": _exact("add"), "subtract": _exact("sub"), "multiply": _multiply, "square": lambda x: _multiply(x, x),
    "divide": lambda x, y: _multiply(x, cute.arch.rcp_approx(y)),
}  # fmt: skip


def short_exp(x):
    return exp2(x * LOG2_E)


def short_tanh(x):
    """``tanh(x)`` by one exponential, which loses 2 units in the last place of 1; by a cubic for small x, where that is
    too much.
    """
    large = 1.0 - cute.arch.rcp_approx(exp2(x * (2 * LOG2_E)) * 0.5 + 0.5)
    small = (x * x * (-1 / 3) + 1.0) * x
    return where(cute.math.absf(x) < 0.0625, small, large)


# For outputs of 16 bits, which round off what these lose: up to 2**-17 of the value, and no more of 1 in tanh than the
# math library's.
SHORT_DEVICE = DEVICE | {
    "exp": short_exp,
    "tanh": short_tanh,
    "softplus": lambda x: softplus(x, short_exp, SHORT_LOG1P),
}


def device_for(variant, writes):
    """The device functions of an expression whose outputs are stored in these tensors or halves, ``dx[:n] dx[n:]``."""
    stored = {name.partition("[")[0] for name in writes.split()}
    short = all(ITEMSIZE[variant.tensors[name].dtype] <= 2 for name in stored)
    return SHORT_DEVICE if short else DEVICE
