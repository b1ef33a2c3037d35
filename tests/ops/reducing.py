"""Ops of functions with reductions of rows, for the tests of all frameworks."""

from cute_ops import fused

ROW = {"axis": -1, "keepdims": True}


def rms(xp, x, weight):
    return x * xp.rsqrt(xp.mean(x * x, **ROW) + 1e-6) * weight


def probabilities(xp, x):
    e = xp.exp(x - xp.max(x, **ROW))
    return e / xp.sum(e, **ROW)


def capped_log_probabilities(xp, x, *, cap):
    capped = cap * xp.tanh(x / cap)
    shifted = capped - xp.max(capped, **ROW)
    return shifted - xp.log(xp.sum(xp.exp(shifted), **ROW))


def unit(xp, x):
    return x * xp.rsqrt(xp.sum(x * x, **ROW) + 1e-6)


def rms_of_gated(xp, x, weight):
    n = x.shape[-1] // 2
    y = xp.silu(x[..., :n]) * x[..., n:]
    return y * xp.rsqrt(xp.mean(y * y, **ROW) + 1e-6) * weight


def log_sum_exp(xp, x, scale):
    """Numbers of rows, beside a tile."""
    top = xp.max(x * scale, **ROW)
    return top + xp.log(xp.sum(xp.exp(x * scale - top), **ROW)), x - top


def spread(xp, x, weight, bias, factor):
    """Layer norm by the range of a row, all its operands differentiable."""
    n = weight.shape[-1] // 2
    width = xp.max(x, **ROW) - xp.min(x, **ROW) + factor
    y = (x - xp.mean(x, **ROW)) / width
    return y * weight[..., :n] + weight[..., n:] * bias, width


def rms_of_sum(xp, x, residual, weight):
    """Two operands with one gradient."""
    return rms(xp, x + residual, weight)


def rms_beside_sum(xp, x, residual, weight):
    """The sum is returned, too, and its gradient reads it in place of what it is the sum of."""
    added = x + residual
    return rms(xp, added, weight), added


def total(xp, x):
    return xp.sum(x, **ROW)


TILE, COLUMN, PACKED = "*m n", "*m 1", "*m 2n"
# The five of the documentation first.
OPS = (
    fused(rms, operands={"x": TILE, "weight": "n"}),
    fused(probabilities, operands={"x": TILE}),
    fused(capped_log_probabilities, operands={"x": TILE}, attrs={"cap": 30.0}),
    fused(unit, operands={"x": TILE}),
    fused(rms_of_gated, operands={"x": PACKED, "weight": "n"}),
    fused(log_sum_exp, operands={"x": TILE, "scale": COLUMN}, outputs=("lse", "below")),
    fused(spread, operands={"x": TILE, "weight": "2n", "bias": "n", "factor": ""}),
    fused(rms_of_sum, operands={"x": TILE, "residual": TILE, "weight": "n"}),
    fused(total, operands={"x": TILE}),
    fused(rms_beside_sum, operands={"x": TILE, "residual": TILE, "weight": "n"}),
)
FIVE = OPS[:5]
# Those that frameworks can compute, and differentiate, from the function alone.
PLAIN = [op for op in OPS if not op.attrs]


def of_nothing(xp, x):
    """What reductions are of a row without elements: 0, nan, -inf, inf."""
    return tuple(reduce(x, axis=-1, keepdims=True) for reduce in (xp.sum, xp.mean, xp.max, xp.min))
