"""WHAT: rows scaled to length one, an op with a row kernel. HOW is in unit_norm_kernel.py."""

from cute_ops import FLOATS, Case, Op, Tensor, Tuning, widen
from cute_ops.ops.reduction.config import REDUCE, normalised, reduced_pairs


def reference(xp, x, *, eps):
    (wide,) = widen(xp, x)
    scale = 1 / xp.sqrt(xp.sum(wide * wide, axis=-1) + eps)
    return xp.astype(wide * scale[..., None], x.dtype), scale


def reference_bwd(xp, out, scale, dout):
    y, s, dy = widen(xp, out, scale, dout)
    return xp.astype(s[..., None] * (dy - y * xp.sum(y * dy, axis=-1, keepdims=True)), out.dtype)


ROWS, SCALE = Tensor("*m n", "T"), Tensor("*m", "float32", hidden=True)
CASES = (Case("clip", {"m": (3, 5), "n": 512}), Case("odd", {"m": (7,), "n": 4097}))
shared = {"dtypes": {"T": FLOATS}, "cases": CASES}
unit_norm_bwd = Op(
    "unit_norm_bwd", inputs={"out": ROWS, "scale": SCALE._replace(hidden=False), "dout": ROWS}, outputs={"dx": ROWS},
    reference=reference_bwd, kernel="unit_norm_kernel:UnitNormBackward", tuning=Tuning(reduced_pairs, REDUCE), **shared,
)  # fmt: skip
unit_norm = Op(
    "unit_norm", inputs={"x": ROWS}, outputs={"out": ROWS, "scale": SCALE}, attrs={"eps": 1e-12},
    reference=reference, kernel="unit_norm_kernel:UnitNorm", tuning=Tuning(normalised, REDUCE), grad=unit_norm_bwd,
    no_gradient=("eps",), **shared,
)  # fmt: skip
