"""Activation functions in fp32, one element at a time.

They keep the two MUFU instructions per element (an exponential and a reciprocal) that a memory-bound kernel has time
for.
"""

import math

import cutlass
import cutlass.cute as cute

LOG2_E = math.log2(math.e)
# tanh approximation of GELU: x * sigmoid(SLOPE * (x + CUBE * x^3)).
SLOPE, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
# The normal distribution's upper tail is exp(-x^2 / 2) * t * Q(t) with t = 1 / (1 + TAIL_SCALE * x), x >= 0. Q is a
# minimax fit for the relative error, 1.5e-7 up to x = 14, where float32's tail has become 0.
TAIL_SCALE = 0.3
TAIL = (
    0.11962923690896758, 0.1207549070798247, 0.09990754931673099, 0.12858125397079384, -0.05372076253433654,
    0.20639384480429981, -0.15722649468461264, 0.03568039244942034,
)  # fmt: skip


def sigmoid(x):
    """``1 / (1 + exp(-x))``: for a very negative x the exponential is inf and the quotient 0."""
    return cute.arch.rcp_approx(cute.math.exp2(x * -LOG2_E, fastmath=True) + 1.0)


def silu(x):
    """``(silu(x), derivative)``; what a kernel does not use costs nothing."""
    s = sigmoid(x)
    y = x * s
    return y, s + y * (1.0 - s)


def times_silu_derivative(g, x):
    """``g`` times the derivative of ``silu(x)``, by one instruction fewer than with :func:`silu`.

    The compiler makes ``x - x * s`` one instruction, which rounds once; rounded twice, a large x would lose bits.
    """
    s = sigmoid(x)
    gs = g * s
    return gs + gs * (x - x * s)


def gelu_tanh(x):
    return x * sigmoid(x * (x * x * (SLOPE * CUBE) + SLOPE))


def ndtr(x):
    """The normal distribution's cdf, by its tail rather than by erf: right in the far negative too. Its exponential is
    the density's.
    """
    t = cute.arch.rcp_approx(cute.math.absf(x) * TAIL_SCALE + 1.0)
    q = t * TAIL[-1] + TAIL[-2]
    for c in reversed(TAIL[:-2]):
        q = q * t + c
    tail = q * t * cute.math.exp2(x * x * (-LOG2_E / 2), fastmath=True)
    return cutlass.Float32(cutlass.select_(x < 0.0, tail, 1.0 - tail))
