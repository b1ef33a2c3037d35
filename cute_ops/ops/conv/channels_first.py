"""Causal depthwise convolution of channels before positions, of several sequences in a row: declaration, cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.attributes import OneOf
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import POWERS, Config, Problem, Tuning, vary
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE, Array
from cute_ops.declaration.tensor import Tensor
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.conv.config import FirstConfig
from cute_ops.ops.conv.causal_conv1d import SILU, _silu, check
from cute_ops.ops.rows import next_power

CASES = (
    Case("short", {"m": (2,), "n": 24, "s": 16, "w": 4}, attrs=SILU),
    Case("mamba2-2.7b", {"m": (2,), "n": 5376, "s": 64, "w": 4}, absent=("seq_idx",), attrs=SILU),
    Case("mamba-370m", {"m": (3,), "n": 48, "s": 1000, "w": 4}, {"W": "float32", "B": "float32"}, attrs=SILU),
    Case("odd", {"m": (3,), "n": 7, "s": 77, "w": 3}, {"W": "float16"}, absent=("bias",)),
    Case("one-position", {"m": (5, 2), "n": 3, "s": 1, "w": 2}, absent=("seq_idx",)),
)


def _shifted(xp: Any, x: Any, by: int) -> Any:
    """``x[..., t - by]``, zeros outside the row."""
    if not by:
        return x
    s = x.shape[-1]
    zeros = xp.zeros_like(x[..., : min(abs(by), s)])
    return xp.concat([zeros, x[..., : s - by]] if by > 0 else [x[..., -by:], zeros], axis=-1)[..., :s]


def _tap(xp: Any, x: Any, seq_idx: Any, by: int) -> Any:
    """The input of the tap ``by`` positions before; zeros where that is another sequence."""
    found = _shifted(xp, x, by)
    if seq_idx is None or not by:
        return found
    same = (_shifted(xp, seq_idx, by) == seq_idx)[..., None, :]
    return xp.where(same, found, xp.zeros_like(found))


def _convolved(xp: Any, x: Any, w: Any, b: Any, seq_idx: Any) -> Any:
    width = w.shape[-1]
    total = sum(w[:, k, None] * _tap(xp, x, seq_idx, width - 1 - k) for k in range(width))
    return total if b is None else total + b[:, None]


def reference(xp: Any, x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, *, activation: str) -> Any:
    wide, w, b = widen(xp, x, weight, bias)
    out = _convolved(xp, wide, w, b, seq_idx)
    return xp.astype(_silu(xp, out)[0] if activation == "silu" else out, x.dtype)


def reference_bwd(
    xp: Any, x: Any, weight: Any, dout: Any, bias: Any = None, seq_idx: Any = None, *, activation: str
) -> tuple[Any, Any, Any]:
    wide, w, b, d = widen(xp, x, weight, bias, dout)
    width = w.shape[-1]
    if activation == "silu":
        d = d * _silu(xp, _convolved(xp, wide, w, b, seq_idx))[1]
    dx = 0 * d
    for by in range(width):
        later = _shifted(xp, d, -by)
        if seq_idx is not None and by:
            same = (_shifted(xp, seq_idx, -by) == seq_idx)[..., None, :]
            later = xp.where(same, later, xp.zeros_like(later))
        dx = dx + w[:, width - 1 - by, None] * later
    over = (*range(d.ndim - 2), d.ndim - 1)
    dweight = xp.stack([xp.sum(d * _tap(xp, wide, seq_idx, width - 1 - k), axis=over) for k in range(width)], axis=-1)
    dbias = None if bias is None else xp.astype(xp.sum(d, axis=over), bias.dtype)
    return xp.astype(dx, x.dtype), xp.astype(dweight, weight.dtype), dbias


def _arrange(xp: Any, arrays: Mapping[str, Any]) -> None:
    """A few sequences, one after the other."""
    if (ids := arrays["seq_idx"]) is not None:
        ids[...] = xp.sort(ids % 3, axis=-1)


def _forward(problem: Problem) -> FirstConfig:
    """Four vectors of a thread; of 128 threads where rows may start anywhere and vectors are short, and two of these
    where rows start off half a vector, of which the last ones are few: 8 x 2048 x 4095 runs at 0.64 of a copy's rate.
    """
    aligned = min(problem.aligns[name] for name in ("x", "out"))
    if aligned < VECTOR_BYTES // 2 and "seq_idx" not in problem.dtypes:
        return FirstConfig(128, 2)
    return FirstConfig(64 if aligned >= VECTOR_BYTES else 128, 4)


def _backward(problem: Problem) -> FirstConfig:
    """A warp for each row, whose steps share their slopes, or up to four where rows are too few for all SMs; of short
    rows as many lanes as have a vector of one.
    """
    aligned = min(problem.aligns[name] for name in ("x", "dout", "dx")) >= VECTOR_BYTES
    vectors = -(-problem.dims["s"] // (VECTOR_BYTES // ITEMSIZE[problem.dtypes["x"]]))
    if (lanes := next_power(vectors + (not aligned))) < WARP:
        return FirstConfig(SHORT_THREADS, lanes=max(lanes, LEAST_LANES))
    rows, threads = problem.m * problem.dims["n"], WARP
    while threads < 4 * WARP and rows * (threads // WARP) < WARPS * problem.sm_count:
        threads *= 2
    return FirstConfig(threads, ahead=AHEAD)


def _partials(problem: Problem, flat: Config) -> dict[str, Array | None]:
    """The parameters' gradients of each sequence."""
    n, w = problem.dims["n"], problem.dims["w"]
    return {
        "dweight_partials": Array((problem.m, n * w), "float32"),
        "dbias_partials": Array((problem.m, n), "float32") if "dbias" in problem.dtypes else None,
    }


X, WEIGHT, BIAS = Tensor("*m n s", "T"), Tensor("n w", "W"), Tensor("n", "B")
OPTIONAL = {"bias": BIAS._replace(optional=True), "seq_idx": Tensor("*m s", "int32", optional=True, upper_bound="s")}
COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "W": FLOATS, "B": FLOATS}, "attrs": {"activation": OneOf("none", "silu")}, "check": check,
    "static": ("w",), "cases": CASES, "arrange": _arrange,
}  # fmt: skip
# Warps that an SM has room for: half of the most, since each holds the numbers of eight positions a lane. They wait
# less for memory if they prefetch: 33 x 2048 x 1024 and three taps run at 0.92 of a copy's rate, without at 0.87.
WARPS, AHEAD = 32, 2
# Threads of a CTA whose warps take several short rows each, and the least lanes of a row: as many as taps reach.
SHORT_THREADS, LEAST_LANES = 128, 4

causal_conv1d_channels_first_bwd = Op(
    "causal_conv1d_channels_first_bwd",
    inputs={"x": X, "weight": WEIGHT, "dout": X, **OPTIONAL},
    outputs={"dx": X, "dweight": WEIGHT, "dbias": BIAS._replace(given="bias")},
    reference=reference_bwd,
    kernel="cute_ops.kernels.conv.channels_first:CausalConv1dFirstBackward",
    doc="Gradients of :func:`causal_conv1d_channels_first`; sums in float32, in a fixed order.",
    tuning=Tuning(_backward, vary(threads=(32, 64, 128), ahead=(1, 2, 4), buckets={"m": POWERS}), _partials), **COMMON,
)  # fmt: skip

causal_conv1d_channels_first = Op(
    "causal_conv1d_channels_first",
    inputs={"x": X, "weight": WEIGHT, **OPTIONAL},
    outputs={"out": X},
    reference=reference,
    kernel="cute_ops.kernels.conv.channels_first:CausalConv1dFirst",
    grad=causal_conv1d_channels_first_bwd,
    doc="""Causal depthwise convolution of (batch, channels, seqlen), as it lies, also of several sequences in a row.

    ``out_t = activation(bias + sum_j weight[:, j] * x_(t - w + 1 + j))``, of positions with the same ``seq_idx``

    Args:
        x: ``T[*m n s]``: (batch, channels, seqlen); float32, float16 or bfloat16. Channels may have any stride.
        weight: ``W[n w]``, a float dtype of its own; width 2, 3 or 4, a compile-time constant.
        bias: ``B[n]``, a float dtype of its own; zeros where None.
        seq_idx: int32 ``[*m s]``: which sequence each position is of; a sequence begins with zeros. All are of one
            where None.
        activation: "none" or "silu".

    Returns:
        ``T[*m n s]``, compact. Computed in float32, rounded once; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, another width, a last dim that is not contiguous.

    Source: Gu and Dao, Mamba, 2023; the layout of causal-conv1d.
    """,
    tuning=Tuning(_forward, space=vary(threads=(64, 128, 256), steps=(1, 2, 4))), **COMMON,
)  # fmt: skip
