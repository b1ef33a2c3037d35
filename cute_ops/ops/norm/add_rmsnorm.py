"""Residual add + RMSNorm in one pass: declaration, cases."""

from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.norm import rmsnorm as norm
from cute_ops.ops.norm.declare import declare_of_sum

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}, {"W": "float32", "B": "float16"}),
    Case("odd", {"m": (37,), "n": 4097}),
    Case("odd-wide-residual", {"m": (37,), "n": 1001}, {"R": "float32"}),
    Case("gemma2-2b", {"m": (2, 17), "n": 2304}, absent=("bias",), attrs={"weight_offset": 1.0}),
    Case("llama3-8b", {"m": (2, 67), "n": 4096}, absent=("bias",), attrs={"eps": 1e-5}),
    Case("wide-residual", {"m": (33,), "n": 4096}, {"R": "float32", "W": "float32"}, absent=("bias",)),
    Case("no-weight", {"m": (65,), "n": 1024}, absent=("weight", "bias")),
    Case("llama3-405b", {"m": (19,), "n": 16384}, absent=("bias",), attrs={"eps": 1e-5}),
    Case("longest", {"m": (3,), "n": 262144}, absent=("bias",)),
)

add_rmsnorm = declare_of_sum(
    "add_rmsnorm",
    "RMSNorm",
    norm,
    attrs={"eps": 1e-6, "weight_offset": 0.0},
    check=norm.CHECK,
    cases=CASES,
    doc=f"""Residual add and RMSNorm in one pass.

    ``residual_out = x + residual``; ``out = rmsnorm(residual_out, weight, bias, eps, weight_offset)``

    Args:
        {docs.X}
        {docs.RESIDUAL}
        {docs.RMS}

    Returns:
        ``(out, residual_out)``: ``T[*m n]`` and ``R[*m n]``. The sum is rounded to R before it is
        normalised, as the next layer sees it; the rest is float32; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a narrower residual, a last dim that is not
            contiguous.

    Source: the pre-norm residual stream of Llama-style decoders (Touvron et al., LLaMA, 2023).
    """,
    doc_bwd="""Gradients of :func:`add_rmsnorm`.

    ``dresidual = rmsnorm_bwd(residual_out, dout) + dresidual_out`` and ``dx`` is the same sum in x's dtype
    (absent where the dtypes are equal: one array serves for both). ``dweight`` and ``dbias`` as for
    :func:`rmsnorm`; sums in float32, in a fixed order.
    """,
)
(add_rmsnorm_bwd,) = add_rmsnorm.steps
