"""Causal depthwise convolution along a sequence: declaration, reference maths, cases."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.array_api import sigmoid, widen
from cute_ops.declaration.attributes import OneOf
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.static import WhileFew
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.conv import config
from cute_ops.ops.norm.rmsnorm import sum_rows

WIDTHS = (2, 3, 4)
# Kernels count the rows of a sequence in 32 bits.
LONGEST = 2**31 - 2**16
SILU = {"activation": "silu"}
CASES = (
    Case("short", {"m": (2,), "s": 13, "n": 64, "w": 4}, attrs=SILU),
    Case("mamba2-2.7b", {"m": (2,), "s": 67, "n": 5376, "w": 4}, absent=("initial_state",), attrs=SILU),
    Case("mamba-370m", {"m": (3,), "s": 131, "n": 2048, "w": 4}, {"W": "float32", "B": "float32"},
         absent=("initial_state",), attrs=SILU),
    Case("jamba-v0.1", {"m": (2,), "s": 65, "n": 8192, "w": 4}, attrs=SILU),
    Case("qwen3-next-80b", {"m": (2,), "s": 65, "n": 8192, "w": 4}, absent=("bias", "initial_state"),
         attrs=SILU),
    Case("lfm2-1.2b", {"m": (2,), "s": 97, "n": 2048, "w": 3}, absent=("bias", "initial_state")),
    Case("one-step", {"m": (65,), "s": 1, "n": 5376, "w": 4}, {"W": "float32"}, attrs=SILU),
    Case("one-sequence", {"m": (), "s": 513, "n": 136, "w": 2}),
    Case("two-leading-dims", {"m": (3, 2), "s": 5, "n": 12, "w": 3}, {"B": "float32"}, attrs=SILU),
    Case("odd", {"m": (3,), "s": 50, "n": 77, "w": 4}, {"W": "float16"}, absent=("bias",)),
)  # fmt: skip


def _padded(xp: Any, x: Any, initial_state: Any, width: int) -> Any:
    """The inputs from ``width - 1`` before the first one of x."""
    if initial_state is not None:
        return xp.concat([initial_state, x], axis=-2)
    zeros = xp.sum(x[..., :0, :], axis=-2, keepdims=True, dtype=x.dtype)
    return xp.concat([zeros] * (width - 1) + [x], axis=-2)


def _taps(a: Any, width: int) -> list[Any]:
    """The elements of a padded sequence that each tap meets."""
    s = a.shape[-2] - (width - 1)
    return [a[..., j : j + s, :] for j in range(width)]


def _convolved(padded: Any, weight: Any, bias: Any) -> Any:
    """The convolution before the activation; all in the accumulation dtype."""
    terms = [x * weight[:, j] for j, x in enumerate(_taps(padded, weight.shape[-1]))]
    return sum(terms[1:], terms[0] if bias is None else terms[0] + bias)


def _silu(xp: Any, x: Any) -> tuple[Any, Any]:
    """The value and the derivative."""
    s = sigmoid(xp, x)
    return x * s, s + x * s * (1 - s)


def reference(
    xp: Any, x: Any, weight: Any, bias: Any = None, initial_state: Any = None, *, activation: str
) -> tuple[Any, Any]:
    width = weight.shape[-1]
    padded = _padded(xp, x, initial_state, width)
    wide, w, b = widen(xp, padded, weight, bias)
    out = _convolved(wide, w, b)
    if activation == "silu":
        out, _ = _silu(xp, out)
    return xp.astype(out, x.dtype), xp.astype(padded[..., 1 - width :, :], x.dtype)


def reference_bwd(
    xp: Any, x: Any, weight: Any, dout: Any, bias: Any = None, initial_state: Any = None, dfinal_state: Any = None,
    *, activation: str,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    width = weight.shape[-1]
    padded, w, b, d, df = widen(xp, _padded(xp, x, initial_state, width), weight, bias, dout, dfinal_state)
    if activation == "silu":
        d = d * _silu(xp, _convolved(padded, w, b))[1]
    # The gradient of a padded input is the sum over the outputs that it reaches, each by its tap.
    zeros = xp.zeros_like(padded[..., : width - 1, :])
    reached = _taps(xp.concat([zeros, d, zeros], axis=-2), width)
    dpadded = sum((r * w[:, width - 1 - j] for j, r in enumerate(reached[1:], 1)), reached[0] * w[:, width - 1])
    if df is not None:
        s = x.shape[-2]
        dpadded = xp.concat([dpadded[..., :s, :], dpadded[..., s:, :] + df], axis=-2)
    dweight = xp.stack([sum_rows(xp, d * tap, weight) for tap in _taps(padded, width)], axis=-1)
    dstate = None if initial_state is None else xp.astype(dpadded[..., : width - 1, :], x.dtype)
    return xp.astype(dpadded[..., width - 1 :, :], x.dtype), dweight, sum_rows(xp, d, bias), dstate


def check_width(w: Any) -> str | None:
    return None if w in WIDTHS else f"argument `weight` has w={w}, expected 2, 3 or 4."


def check(binding: Any) -> str | None:
    w, s = binding.dims["w"], binding.dims["s"]
    if problem := check_width(w):
        return problem
    if isinstance(s, int) and s > LONGEST:
        return f"argument `x` has s={s}, expected at most {LONGEST}."
    return None


X, WEIGHT, BIAS, STATE = Tensor("*m s n", "T"), Tensor("n w", "W"), Tensor("n", "B"), Tensor("*m w-1 n", "T")
OPTIONAL = {"bias": BIAS._replace(optional=True), "initial_state": STATE._replace(optional=True)}
COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "W": FLOATS, "B": FLOATS}, "attrs": {"activation": OneOf("none", "silu")},
    "static": ("w", WhileFew("n")), "sharding": Sharding(parallel=("n",)), "check": check, "cases": CASES,
}  # fmt: skip

causal_conv1d_bwd = Op(
    "causal_conv1d_bwd",
    inputs={"x": X, "weight": WEIGHT, "dout": X, **OPTIONAL, "dfinal_state": STATE._replace(optional=True)},
    outputs={
        "dx": X,
        "dweight": WEIGHT,
        "dbias": BIAS._replace(given="bias"),
        "dinitial_state": STATE._replace(given="initial_state"),
    },
    **COMMON,
    reference=reference_bwd,
    kernel="cute_ops.kernels.conv.causal_conv1d:CausalConv1dBackward",
    tuning=Tuning(config.backward, space=config.BACKWARD, workspace=config.workspace),
    doc="""Gradients of :func:`causal_conv1d`.

    With ``x_t`` the inputs, those of the initial state before them, and ``g_t = dout_t * activation'(...)``:
    ``dx_t = sum_j weight[:, j] * g_(t + w - 1 - j)``, likewise ``dinitial_state``; the last w-1 also get
    ``dfinal_state``. ``dweight[:, j] = sum_t g_t * x_(t - w + 1 + j)``, ``dbias = sum_t g_t``, over all sequences.
    The convolution is recomputed from x. Sums are in float32, in a fixed order: results are deterministic.
    """,
)

causal_conv1d = Op(
    "causal_conv1d",
    inputs={"x": X, "weight": WEIGHT, **OPTIONAL},
    outputs={"out": X, "final_state": STATE},
    **COMMON,
    reference=reference,
    kernel="cute_ops.kernels.conv.causal_conv1d:CausalConv1d",
    tuning=Tuning(config.forward, space=config.SPACE),
    grad=causal_conv1d_bwd,
    doc="""Causal depthwise convolution along a sequence, of a few taps, as in Mamba.

    ``out_t = activation(bias + sum_j weight[:, j] * x_(t - w + 1 + j))``, j from 0 to w-1

    Args:
        x: ``T[*m s n]``: (batch, seqlen, channels); float32, float16 or bfloat16. Sequences and rows may have any
            stride: a slice of a fused projection without a copy.
        weight: ``W[n w]``, a float dtype of its own: (channels, width), the weight of a depthwise ``conv1d`` without
            its dim of size 1; width 2, 3 or 4, a compile-time constant. The last tap meets the present input.
        bias: ``B[n]``, a float dtype of its own; zeros where None.
        initial_state: ``T[*m w-1 n]``: the inputs before x, the oldest first; zeros where None.
        activation: "none" or "silu".

    Returns:
        ``(out, final_state)``: ``T[*m s n]``, and ``T[*m w-1 n]``, the last inputs, those of the initial state
        included: the initial state of what follows x. Both compact. Computed in float32, rounded once; deterministic,
        and the same bits however a sequence is cut into calls.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, another width, a last dim that is not contiguous.

    Source: Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023.
    """,
)
