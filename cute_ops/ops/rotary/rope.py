"""Rotary position embedding: declaration, reference maths, cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cute_ops.declaration.array_api import cast, divide, widen
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.kernel import Kernel
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.static import WhileFew
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.rotary import config

SHARED = {"cos": 1, "sin": 1}
LARGEST, LEAST_SM = 448.0, 89  # of float8_e4m3fn, and the first GPUs with a conversion
CASES = (
    Case("llama3-8b-k", {"m": (2, 67), "h": 8, "d": 128, "r": 64}, {"C": "float32"}, leading=SHARED),
    Case("llama3-8b-q", {"m": (2, 67), "h": 32, "d": 128, "r": 64}),
    Case("odd-head", {"m": (3, 5), "h": 3, "d": 7, "r": 3}),
    Case("gpt-neox-20b", {"m": (2, 33), "h": 64, "d": 96, "r": 12}, {"C": "float32"}, leading=SHARED),
    Case("glm4-9b", {"m": (131,), "h": 32, "d": 128, "r": 32}, leading={"cos": 1, "sin": 1},
         attrs={"interleaved": True}),
    Case("one-position", {"m": (65, 1), "h": 1, "d": 64, "r": 32}, leading={"cos": 0, "sin": 0}),
)  # fmt: skip


def rotate(xp: Any, x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    """Pairs rotated by their angles, all in the accumulation dtype."""
    r = cos.shape[-1]
    # One angle for all heads; leading dims that are missing broadcast.
    c, s = cos[..., None, :], sin[..., None, :]
    if interleaved:
        a, b = x[..., 0 : 2 * r : 2], x[..., 1 : 2 * r : 2]
        rotated = xp.stack([a * c - b * s, b * c + a * s], axis=-1)
        rotated = xp.reshape(rotated, (*x.shape[:-1], 2 * r))
    else:
        a, b = x[..., :r], x[..., r : 2 * r]
        rotated = xp.concat([a * c - b * s, b * c + a * s], axis=-1)
    return xp.concat([rotated, x[..., 2 * r :]], axis=-1)


def reference(xp: Any, x: Any, cos: Any, sin: Any, *, interleaved: bool) -> Any:
    wide, c, s = widen(xp, x, cos, sin)
    return xp.astype(rotate(xp, wide, c, s, interleaved), x.dtype)


def reference_bwd(xp: Any, dout: Any, cos: Any, sin: Any, *, interleaved: bool) -> tuple[Any]:
    dy, c, s = widen(xp, dout, cos, sin)
    return (xp.astype(rotate(xp, dy, c, -s, interleaved), dout.dtype),)


def reference_packed(xp: Any, x: Any, cos: Any, sin: Any, *, heads: int, interleaved: bool) -> Any:
    rotated = reference(xp, x[..., :heads, :], cos, sin, interleaved=interleaved)
    return xp.concat([rotated, x[..., heads:, :]], axis=-2)


def reference_packed_bwd(xp: Any, dout: Any, cos: Any, sin: Any, *, heads: int, interleaved: bool) -> tuple[Any]:
    return (reference_packed(xp, dout, cos, -sin, heads=heads, interleaved=interleaved),)


def reference_joined(xp: Any, dq: Any, dk: Any, dv: Any, cos: Any, sin: Any, *, interleaved: bool) -> tuple[Any]:
    rotated = (reference_bwd(xp, d, cos, sin, interleaved=interleaved)[0] for d in (dq, dk))
    return (xp.concat([*rotated, dv], axis=-2),)


def check(binding: Any) -> str | None:
    d, r = binding.dims["d"], binding.dims["r"]
    cos, sin = (tuple(binding.inputs[name].shape) for name in ("cos", "sin"))
    if len(cos) != len(sin) or any(a != b for a, b in zip(cos, sin, strict=True)):
        return f"argument `sin` has shape {sin}, expected that of `cos`, {cos}."
    return f"heads have d={d} elements, expected at least 2r={2 * r} for r={r} angles." if d < 2 * r else None


def _check_packed(binding: Any) -> str | None:
    heads, h = binding.attrs["heads"], binding.dims["h"]
    if heads < 1 or (isinstance(h, int) and heads > h):
        return f"attribute `heads` is {heads}, expected how many heads are rotated, at least 1 and at most h={h}."
    return check(binding)


HEADS, TABLE = Tensor("*m h d", "T"), Tensor("*#m r", "C", otherwise="copy")
COMMON: dict[str, Any] = {
    "dtypes": {"T": FLOATS, "C": FLOATS}, "attrs": {"interleaved": False},
    "tuning": Tuning(config.rope, space=config.SPACE), "check": check,
}  # fmt: skip
OF_ONE: dict[str, Any] = {
    **COMMON, "static": WhileFew("h", "d", "r"), "sharding": Sharding(parallel=("h",)), "cases": CASES,
}  # fmt: skip


def _declare(
    name: str, reference: Callable[..., Any], reference_bwd: Callable[..., Any], doc: str, doc_bwd: str, **common: Any
) -> Op:
    """A rotation of heads, in place where it may be, and its gradient."""
    tables = {"cos": TABLE, "sin": TABLE}
    gradient = Op(
        f"{name}_bwd", inputs={"dout": HEADS, **tables}, outputs={"dx": HEADS._replace(donates="dout")},
        reference=reference_bwd, kernel="cute_ops.kernels.rotary.rope:RopeBackward", doc=doc_bwd, **common,
    )  # fmt: skip
    return Op(
        name, inputs={"x": HEADS, **tables}, outputs={"out": HEADS._replace(donates="x", contiguous="d")},
        reference=reference, kernel="cute_ops.kernels.rotary.rope:Rope", grad=gradient, no_gradient=("cos", "sin"),
        doc=doc, **common,
    )  # fmt: skip


rope = _declare(
    "rope",
    reference,
    reference_bwd,
    **OF_ONE,
    doc="""Rotary position embedding of every head.

    ``out[j] = x[j] * cos[j] - x[j + r] * sin[j]``, ``out[j + r] = x[j + r] * cos[j] + x[j] * sin[j]`` for ``j < r``;
    elements from ``2r`` on pass through.

    Args:
        x: ``T[*m h d]``: (batch, seqlen, nheads, headdim), or (tokens, nheads, headdim); float32, float16 or bfloat16.
            Heads and positions may have any stride: q or k of a fused projection, or transposed, without a copy.
        cos: ``C[*#m r]``, a float dtype of its own: (seqlen, r) for all of a batch, or (batch, seqlen, r); leading
            dims of 1 broadcast, too, as in (seqlen, 1, r) for positions first. ``2r`` is the rotary dim, at most d. Any
            strides: a table whose last dim is not contiguous is copied. No gradient.
        sin: ``C[*#m r]``, likewise.
        interleaved: pairs are ``(2j, 2j + 1)``, as in GPT-J, instead of ``(j, j + r)``, as in GPT-NeoX and Llama.
        inplace_backward: x's gradient takes the memory of the output's. In PyTorch nothing else may read that: where a
            sum hands it to another function, too, that one would read x's. XLA copies it first.

    Returns:
        ``T[*m h d]``, compact. Computed in float32, rounded once. In place with ``out=x`` in PyTorch, also in a part of
        a packed projection, ``out=qkv[:, :, :heads]`` of the same; in JAX where x is donated.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim of x that is not contiguous, ``d < 2r``.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """,
    doc_bwd="""Gradient of :func:`rope` to x: the rotation of ``dout`` by the negative angles.""",
)
(rope_bwd,) = rope.steps

rope_bwd_joined = Op(
    "rope_bwd_joined",
    inputs={
        "dq": Tensor("*m hq d", "T"), "dk": Tensor("*m hk d", "T"), "dv": Tensor("*m hk d", "T"),
        "cos": TABLE, "sin": TABLE,
    },
    outputs={"dqkv": Tensor("*m h d", "T")},
    derived={"h": lambda dims, attrs: dims["hq"] + 2 * dims["hk"]},
    static=WhileFew("hq", "hk", "d", "r"),
    reference=reference_joined,
    kernel="cute_ops.kernels.rotary.rope:RopeBackwardJoined",
    **COMMON,
    cases=(
        Case("llama3-8b", {"m": (2, 67), "hq": 32, "hk": 8, "d": 128, "r": 64}, {"C": "float32"}, leading=SHARED),
        Case("llama3-1b", {"m": (2, 67), "hq": 32, "hk": 8, "d": 64, "r": 32}),
        Case("odd-head", {"m": (3, 5), "hq": 3, "hk": 1, "d": 7, "r": 3}),
        Case("interleaved", {"m": (131,), "hq": 4, "hk": 4, "d": 128, "r": 32}, leading=SHARED,
             attrs={"interleaved": True}),
    ),
    doc="""Gradient of :func:`rope` to q and to k, and that of v, side by side: as those of one projection to all three.

    ``dqkv = concat([rope_bwd(dq, cos, sin), rope_bwd(dk, cos, sin), dv])``, of heads

    Projections of one input have one product in the backward where their gradients are the columns of one matrix. The
    bits are those of the two ops.

    Args:
        dq: ``T[*m hq d]``, the cotangent of rotated queries: (batch, seqlen, nheads, headdim), or (tokens, nheads,
            headdim); float32, float16 or bfloat16. Heads and positions may have any stride.
        dk: ``T[*m hk d]``, of rotated keys.
        dv: ``T[*m hk d]``, of values.
        cos: ``C[*#m r]``, as in :func:`rope`.
        sin: ``C[*#m r]``, likewise.
        interleaved: as in :func:`rope`.

    Returns:
        ``T[*m h d]`` with ``h = hq + 2 hk``, compact. Computed in float32, rounded once. Not differentiable.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous, ``d < 2r``.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """,
)  # fmt: skip

rope_packed = _declare(
    "rope_packed",
    reference_packed,
    reference_packed_bwd,
    dtypes=COMMON["dtypes"],
    attrs={"heads": 0, "interleaved": False},
    tuning=COMMON["tuning"],
    check=_check_packed,
    static=WhileFew("h", "d", "r"),
    sharding=Sharding(whole={"h": "is sharded along heads; `rope` takes those of queries and keys so"}),
    cases=(
        Case("llama3-8b", {"m": (2, 67), "h": 48, "d": 128, "r": 64}, {"C": "float32"}, leading=SHARED,
             attrs={"heads": 40}),
        Case("odd-head", {"m": (3, 5), "h": 5, "d": 7, "r": 2}, attrs={"heads": 3}),
        Case("kv", {"m": (131,), "h": 8, "d": 64, "r": 16}, attrs={"heads": 4, "interleaved": True}),
    ),
    doc="""Rotary position embedding of the first heads of a packed projection: of q and k in qkv, of k in kv.

    ``out = concat([rope(x[..., :heads, :], cos, sin, interleaved), x[..., heads:, :]])``

    Args:
        x: ``T[*m h d]``: heads of queries, of keys, then of values; float32, float16 or bfloat16. Heads and positions
            may have any stride.
        cos: ``C[*#m r]``, as in :func:`rope`.
        sin: ``C[*#m r]``, likewise.
        heads: how many heads are rotated, the first ones; others pass through. It has to be given.
        interleaved: as in :func:`rope`.
        inplace_backward: as in :func:`rope`.

    Returns:
        ``T[*m h d]``, compact; in place with ``out=x`` in PyTorch. In place, :func:`rope` of a part of x,
        ``rope(x[..., :heads, :], cos, sin, out=x[..., :heads, :])``, moves no values. Computed in float32, rounded
        once.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, ``d < 2r``, ``heads`` left out or beyond h.

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021.
    """,
    doc_bwd="""Gradient of :func:`rope_packed` to x: the first heads of ``dout`` rotated by the negative angles.""",
)  # fmt: skip


def reference_fp8(xp: Any, x: Any, cos: Any, sin: Any, scale: Any, *, interleaved: bool) -> Any:
    wide, c, s, by = widen(xp, x, cos, sin, scale)
    rotated = divide(xp, rotate(xp, wide, c, s, interleaved), by)
    return cast(xp, xp.clip(rotated, -LARGEST, LARGEST), "float8_e4m3fn", x)


rope_fp8 = Op(
    "rope_fp8",
    inputs={"x": HEADS, "cos": TABLE, "sin": TABLE, "scale": Tensor("", "float32")},
    outputs={"out": HEADS._replace(dtype="float8_e4m3fn")},
    reference=reference_fp8,
    kernel=Kernel("cute_ops.kernels.rotary.rope:RopeFP8", least_sm=LEAST_SM),
    inference_only="rotate without fp8 (rope)",
    arrange=lambda xp, arrays: arrays["scale"].fill(0.125),
    **OF_ONE,
    doc="""Rotary position embedding, quantised to float8_e4m3fn with a given scale. Inference only.

    ``out = rope(x, cos, sin, interleaved) / scale``, at most 448

    Args:
        x: ``T[*m h d]``: (batch, seqlen, nheads, headdim), or (tokens, nheads, headdim); float32, float16 or bfloat16.
            Heads and positions may have any stride.
        cos: ``C[*#m r]``, as in :func:`rope`.
        sin: ``C[*#m r]``, likewise.
        scale: float32 scalar, on the device; positive.
        interleaved: as in :func:`rope`.

    Returns:
        ``float8_e4m3fn[*m h d]``, compact. Computed in float32, to nearest even; infinities become 448 with their sign.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, ``d < 2r``.
        NotImplementedError: a gradient is asked for, or the GPU is older than SM 8.9.

    Source: Su et al., RoFormer, 2021; Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """,
)

CASES_OF_POSITIONS = (
    Case("text", {"m": (2, 67), "k": 1, "r": 64}),
    Case("qwen2-vl", {"m": (131,), "k": 3, "r": 64}, {"I": "int32"}),
    Case("odd-float", {"m": (3, 5), "k": 2, "r": 7}, {"I": "float32"}),
)


def reference_tables(xp: Any, positions: Any, frequencies: Any, section: Any) -> tuple[Any, Any]:
    at, steps = widen(xp, positions, frequencies)
    at = xp.astype(at, steps.dtype)
    # Each angle has the position of its own section; indexing by an array is no function of the array API.
    places = xp.arange(at.shape[-1], dtype=section.dtype)
    chosen = xp.astype(section[:, None] == places[None, :], steps.dtype)
    angles = xp.sum(at[..., None, :] * chosen, axis=-1) * steps
    return xp.astype(xp.cos(angles), frequencies.dtype), xp.astype(xp.sin(angles), frequencies.dtype)


def _arrange_positions(xp: Any, arrays: dict[str, Any]) -> None:
    """Positions of short sequences: an angle in float32 loses as many digits as it has before the point."""
    arrays["positions"][...] = xp.floor(abs(arrays["positions"])) % 61


rope_tables = Op(
    "rope_tables",
    inputs={
        "positions": Tensor("*m k", "I", contiguous=()),
        "frequencies": Tensor("r", "float32"),
        "section": Tensor("r", "int32", upper_bound="k"),
    },
    outputs={"cos": Tensor("*m r", "float32"), "sin": Tensor("*m r", "float32")},
    dtypes={"I": ("int64", "int32", *FLOATS)},
    static=WhileFew("r"),
    reference=reference_tables,
    kernel="cute_ops.kernels.rotary.tables:RopeTables",
    tuning=Tuning(config.tables),
    inference_only="positions have no gradient",
    arrange=_arrange_positions,
    cases=CASES_OF_POSITIONS,
    doc="""Cosines and sines of positions times frequencies: a step of :func:`rope_from_positions`.

    ``cos[..., j], sin[..., j]`` of the angle ``positions[..., section[j]] * frequencies[j]``

    Args:
        positions: ``I[*m k]``, int64, int32 or a float dtype, of any strides: time, height and width of a token, or
            one.
        frequencies: float32 ``[r]``.
        section: int32 ``[r]``: which of the k positions each angle has, from 0 to k - 1.

    Returns:
        ``(cos, sin)``: float32 ``[*m r]``. Angles are products in float32; no gradient.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit.
    """,
)
