"""Ops of functions, for the tests of all frameworks."""

from cute_ops import OneOf, fused


def biased_gelu(xp, x, bias, residual):
    return xp.gelu(x + bias) + residual


def gated(xp, x, bias):
    n = x.shape[-1] // 2
    return xp.silu(x[..., :n] + bias[..., :n]) * (x[..., n:] + bias[..., n:])


def scaled_gate(xp, x, up, scale):
    n = x.shape[-1] // 2
    return xp.silu(x[..., :n]) * x[..., n:] * scale + up


def clipped(xp, x, *, limit):
    return xp.clip(x, -limit, limit)


def chosen(xp, x, y, *, kind):
    return xp.where(x > y, xp.gelu(x) if kind == "gelu" else xp.silu(x), y / 2)


def affine(xp, x, scale, shift):
    """A scaled tile, and its tanh."""
    return x * scale + shift, xp.tanh(x) * scale


def scaled(xp, x, factor):
    return x * factor


def whole(xp, x):
    return xp.floor(x)


def averaged(xp, x, y):
    return x + 0.5 * y


def by_length(xp, x, bias):
    return (x + bias) / x.shape[-1]


def rounded(xp, x, y):
    return xp.astype(xp.exp(x), "bfloat16") * y


def gated_relu(xp, x, row):
    return xp.square(xp.relu(x)) * row


def gelu_beside_sum(xp, x, y, bias):
    """A gradient that reads an output."""
    added = x + y - bias
    return xp.gelu(added), added


TILE, ROW, COLUMN, SCALAR, PACKED = "*m n", "n", "*m 1", "", "*m 2n"
OPS = (
    fused(biased_gelu, operands={"x": TILE, "bias": ROW, "residual": TILE}),
    fused(gated, operands={"x": PACKED, "bias": "2n"}),
    fused(scaled_gate, operands={"x": PACKED, "up": TILE, "scale": COLUMN}),
    fused(clipped, operands={"x": TILE}, attrs={"limit": 1.5}),
    fused(chosen, operands={"x": TILE, "y": TILE}, attrs={"kind": OneOf("gelu", "silu")}),
    fused(affine, operands={"x": TILE, "scale": COLUMN, "shift": SCALAR}, outputs=("line", "curve")),
    fused(scaled, operands={"x": TILE, "factor": SCALAR}),
    fused(whole, operands={"x": TILE}),
    fused(averaged, operands={"x": TILE, "y": TILE}),
    fused(by_length, operands={"x": TILE, "bias": ROW}),
    fused(rounded, operands={"x": TILE, "y": TILE}),
    fused(gated_relu, operands={"x": TILE, "row": ROW}),
    fused(gelu_beside_sum, operands={"x": TILE, "y": TILE, "bias": ROW}),
)
# Those that frameworks can compute, and differentiate, from the function alone.
PLAIN = [op for op in OPS if not op.attrs and op.name != "rounded"]
