"""One step of AdamW on bfloat16 parameters, which are rounded up or down by chance: declaration, reference, cases."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.philox import words
from cute_ops.ops.optim import adamw as plain

# Vectors of a CTA: random numbers take registers, and an SM has room for one CTA of 1024 threads. 2047 x 8192 runs at
# 0.96 of a copy's rate, by such CTAs at 0.83.
SEGMENT_VECTORS = 256
CASES = (
    Case("odd-small", {"m": (3, 5), "n": 7}, attrs=plain.EPS),
    Case("llama-mlp", {"m": (129,), "n": 1024}, {"S": "float32"}, attrs=plain.EPS),
    Case("odd", {"m": (33,), "n": 1001}, {"G": "float32"}, attrs=plain.EPS),
)


def rounded(xp: Any, x: Any, seed: Any) -> Any:
    """Float32 numbers up or down to one of the two bfloat16 numbers beside them, with odds that keep the mean."""
    torch = "torch" in xp.__name__
    n, kind = x.shape[-1], xp.int32 if torch else xp.uint32
    drawn = xp.reshape(words(xp, seed, math.prod(x.shape[:-1]), n), x.shape)
    low = xp.astype(drawn & 0xFFFF, kind)
    bits = (x.view(kind) + low) & (-0x10000 if torch else xp.uint32(0xFFFF0000))
    return xp.where(xp.isfinite(x), bits.view(xp.float32), x)


def reference(
    xp: Any, param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, seed: Any, *numbers: Any, **attrs: Any
) -> tuple[Any, Any, Any]:
    wide = param if param.dtype == xp.float64 else xp.astype(param, xp.float32)
    p, m, v = plain.reference(xp, wide, grad, exp_avg, exp_avg_sq, *numbers, **attrs)
    if p.dtype != xp.float64:
        p = rounded(xp, p, seed)
    return xp.astype(p, param.dtype), m, v


_PARAM = {name: t._replace(dtype="bfloat16") if "param" in name else t for name, t in plain.adamw.inputs.items()}
_ROWS = tuple(plain.ROWS)
adamw_stochastic = Op(
    "adamw_stochastic",
    inputs={
        **{name: _PARAM[name] for name in _ROWS},
        "seed": Tensor("", "I", upper_bound="2147483648"),
        **{name: t for name, t in _PARAM.items() if name not in _ROWS},
    },
    outputs={n: t._replace(dtype="bfloat16") if "param" in n else t for n, t in plain.adamw.outputs.items()},
    dtypes={"G": FLOATS, "S": FLOATS, "I": ("int64", "int32")},
    attrs=plain.adamw.attrs,
    check=plain.adamw.check,
    reference=reference,
    kernel="cute_ops.kernels.optim.adamw:AdamWStochastic",
    tuning=Tuning(partial(plain.segments, most=SEGMENT_VECTORS), space=plain.SPACE),
    cases=CASES,
    doc="""One step of AdamW on a bfloat16 parameter, rounded stochastically: small steps are not lost.

    As :func:`adamw`, but ``param_out`` is one of the two bfloat16 numbers beside the new value, each with the odds that
    keep the mean: rounding is unbiased, and small steps add up without a copy of the parameters in float32.

    Args:
        param: ``bfloat16[*m n]``; any leading shape, any row stride.
        grad: ``G[*m n]``, a float dtype of its own.
        exp_avg: ``S[*m n]``, a float dtype of its own: the mean of the gradients.
        exp_avg_sq: ``S[*m n]``, the mean of their squares.
        seed: int64 or int32 scalar, on the device: another number for each step and parameter.
        keep: float32 ``[*m]``, as the next two, see :func:`adamw`.
        step_size: float32 ``[*m]``.
        scale: float32 ``[*m]``.
        beta1: how much of the first moment stays; a compile-time constant, as the next two.
        beta2: how much of the second one.
        eps: added to the root.
        counted: as :func:`adamw` has it.

    Returns:
        ``(param_out, exp_avg_out, exp_avg_sq_out)``. Computed in float32; moments are rounded to nearest. The same seed
        gives the same numbers, in both frameworks. No gradient.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a last dim that is not contiguous.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; Zamirai et al., Revisiting BFloat16
    Training, 2020.
    """,
)
