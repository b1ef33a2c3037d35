"""Residual add + layer norm in one pass: declaration, cases."""

from cute_ops.declaration.case import Case
from cute_ops.ops import docs
from cute_ops.ops.checks import NOT_NEGATIVE, within
from cute_ops.ops.norm import layernorm as norm
from cute_ops.ops.norm.declare import declare_of_sum

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("odd-small", {"m": (3, 5), "n": 7}, {"W": "float32", "B": "float16"}),
    Case("odd-wide-residual", {"m": (37,), "n": 1001}, {"R": "float32"}),
    Case("bert-large", {"m": (65,), "n": 1024}, attrs={"eps": 1e-12}),
    Case("whisper-large", {"m": (2, 75), "n": 1280}, {"W": "float32", "B": "float32"}),
    Case("gpt2-xl", {"m": (3, 33), "n": 1600}),
    Case("no-bias", {"m": (37,), "n": 4097}, absent=("bias",)),
    Case("no-weight", {"m": (300,), "n": 4096}, absent=("weight", "bias")),
)

add_layernorm = declare_of_sum(
    "add_layernorm",
    "LayerNorm",
    norm,
    centred=True,
    attrs={"eps": 1e-5},
    check=within(eps=NOT_NEGATIVE),
    cases=CASES,
    doc=f"""Residual add and layer norm in one pass.

    ``residual_out = x + residual``; ``out = layernorm(residual_out, weight, bias, eps)``

    Args:
        {docs.X}
        {docs.RESIDUAL}
        weight: ``W[n]``, a float dtype of its own; ones where None.
        {docs.BIAS}
        eps: added to the variance; a compile-time constant.

    Returns:
        ``(out, residual_out)``: ``T[*m n]`` and ``R[*m n]``. The sum is rounded to R before it is
        normalised, as the next layer sees it; the rest is float32; deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, an attribute out of its range, a narrower residual, a last dim that is not
            contiguous.

    Source: the residual stream of BERT (Devlin et al., 2018), GPT-2 and vision transformers; Ba, Kiros and Hinton,
    Layer Normalization, 2016.
    """,
    doc_bwd="""Gradients of :func:`add_layernorm`.

    ``dresidual = layernorm_bwd(residual_out, dout) + dresidual_out`` and ``dx`` is the same sum in x's dtype
    (absent where the dtypes are equal: one array serves for both). ``dweight`` and ``dbias`` as for
    :func:`layernorm`; sums in float32, in a fixed order.
    """,
)
