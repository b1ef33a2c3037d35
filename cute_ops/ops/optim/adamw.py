"""One step of AdamW: declaration, reference maths, cases."""

from __future__ import annotations

import math
from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Problem, Tuning, vary
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.kernels.rowwise.config import MapConfig
from cute_ops.ops.checks import NOT_NEGATIVE, within
from cute_ops.ops.rows import CTA_VECTORS, row_of, threads_for

EPS = {"eps": 0.1}
SEGMENT_VECTORS = 512
BETA = (0.0, math.nextafter(1.0, 0.0))
CASES = (
    Case("odd-small", {"m": (3, 5), "n": 7}, attrs=EPS),
    Case("one-row", {"m": (), "n": 2048}, attrs=EPS),
    Case("llama-mlp", {"m": (129,), "n": 1024}, {"S": "float32"}, attrs=EPS),
    Case("wide-parameters", {"m": (33,), "n": 1000}, {"P": "float32", "S": "float32"}, attrs=EPS),
)
ROWS = {"param": "P", "grad": "G", "exp_avg": "S", "exp_avg_sq": "S"}


def segments(problem: Problem, most: int = CTA_VECTORS) -> MapConfig:
    """One vector of every tensor per thread; a row is cut into as few CTAs of ``most`` vectors as hold it. Of 16 bits
    they are smaller, since an SM has no room for two large ones: 1020 x 13824 runs at 0.95 of a copy's rate by four, at
    0.89 by two.
    """
    if problem.n is None:
        return MapConfig("elements", 256)
    row = row_of(problem, tuple(ROWS))
    if row.itemsize == 2 and row.touched > CTA_VECTORS:
        most = min(most, SEGMENT_VECTORS)
    count = -(-row.touched // most)
    share = threads_for(-(-row.touched // count), 1)
    return MapConfig("segments", max(128, share), share, align_vectors=row.align_vectors, segments=count)


SPACE = vary(threads=(64, 128, 256, 512))
TUNING = Tuning(segments, space=SPACE)


def reference(
    xp: Any, param: Any, grad: Any, exp_avg: Any, exp_avg_sq: Any, keep: Any, step_size: Any, scale: Any,
    *, beta1: float, beta2: float, eps: float, counted: bool,
) -> tuple[Any, Any, Any]:  # fmt: skip
    p, g, m, v, k, s, c = widen(xp, param, grad, exp_avg, exp_avg_sq, keep, step_size, scale)
    if counted:
        # A decay of 0 has a logarithm, too: infinity times 0 would be no number.
        first, second = (-xp.expm1(c * math.log(max(beta, 1e-80))) for beta in (beta1, beta2))
        s, c = s / first, 1 / xp.sqrt(second)
    k, s, c = (a[..., None] for a in (k, s, c))
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * xp.abs(v) + (1 - beta2) * g * g
    p = k * p - s * m / (xp.abs(c) * xp.sqrt(v) + eps)
    return xp.astype(p, param.dtype), xp.astype(m, exp_avg.dtype), xp.astype(v, exp_avg.dtype)


adamw = Op(
    "adamw",
    inputs={
        **{name: Tensor("*m n", dtype) for name, dtype in ROWS.items()},
        "keep": Tensor("*m", "float32"),
        "step_size": Tensor("*m", "float32"),
        "scale": Tensor("*m", "float32"),
    },
    outputs={
        "param_out": Tensor("*m n", "P", donates="param"),
        "exp_avg_out": Tensor("*m n", "S", donates="exp_avg"),
        "exp_avg_sq_out": Tensor("*m n", "S", donates="exp_avg_sq"),
    },
    dtypes={"P": FLOATS, "G": FLOATS, "S": FLOATS},
    attrs={"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "counted": False},
    sharding=Sharding(parallel=("n",)),
    check=within(beta1=BETA, beta2=BETA, eps=NOT_NEGATIVE),
    reference=reference,
    kernel="cute_ops.kernels.optim.adamw:AdamW",
    tuning=TUNING,
    cases=CASES,
    doc="""One step of AdamW on a parameter: the parameter and its two moments in one pass.

    ``m = beta1 * exp_avg + (1 - beta1) * grad``; ``v = beta2 * |exp_avg_sq| + (1 - beta2) * grad^2``
    ``param_out = keep * param - step_size * m / (|scale| * sqrt(v) + eps)``

    :class:`cute_ops_torch.optim.AdamW` runs on it, in place. What changes from step to step comes as numbers, of any
    strides, so that one kernel serves all steps: with the learning rate lr and weight decay w in step t,
    ``keep = 1 - lr * w``, ``step_size = lr / (1 - beta1^t)`` and ``scale = 1 / sqrt(1 - beta2^t)``. Where the device
    counts steps, the kernel computes the last two of lr and t: ``counted``.

    Args:
        param: ``P[*m n]``; float32, float16 or bfloat16; any leading shape, any row stride.
        grad: ``G[*m n]``, a float dtype of its own.
        exp_avg: ``S[*m n]``, a float dtype of its own: the mean of the gradients.
        exp_avg_sq: ``S[*m n]``, the mean of their squares.
        keep: float32 ``[*m]``, as the next two; one number repeated costs no memory.
        step_size: float32 ``[*m]``.
        scale: float32 ``[*m]``.
        beta1: how much of the first moment stays; a compile-time constant, as the next two.
        beta2: how much of the second one.
        eps: added to the root.
        counted: whether ``step_size`` is lr, and ``scale`` is t, from 1 on.

    Returns:
        ``(param_out, exp_avg_out, exp_avg_sq_out)``. Computed in float32, rounded once; no gradient.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a last dim that is not contiguous.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019.
    """,
)
