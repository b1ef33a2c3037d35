"""Attention: declaration, reference maths, cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from cute_ops.declaration.array_api import beside, widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Problem, Tuning
from cute_ops.declaration.kernel import Kernel
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import FUSED, Fallback, Program
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.reads import BOOL, FLOAT, INT, Mod
from cute_ops.expressions.reference import evaluate
from cute_ops.ops.attention import config, mods
from cute_ops.ops.attention.captured import captured_bwd
from cute_ops.ops.attention.reads import sums_of_read
from cute_ops.ops.attention.sequences import Sequences, fill_offsets
from cute_ops.ops.attention.weights import dscores_of, grouped, ungrouped, weights_of
from cute_ops.ops.checks import MOST_FACTOR

HALVES = ("bfloat16", "float16")
WIDE = {"T": ("float32",)}  # which the framework computes
LONGEST = 1 << 24  # whole numbers up to this one are float32
CAUSAL: dict[str, Any] = {"absent": ("sinks",), "attrs": {"causal": True}}
PACKED_CASES = (
    Case("llama3-8b", {"s": 300, "t": 300, "b": 5, "g": 2, "r": 4, "d": 128, "e": 128}, **CAUSAL),
    Case("gpt-oss-20b", {"s": 277, "t": 400, "b": 3, "g": 1, "r": 8, "d": 64, "e": 64},
         attrs={"causal": True, "left": 127}),
    Case("vit-h", {"s": 257, "t": 190, "b": 9, "g": 2, "r": 1, "d": 80, "e": 80}, absent=("sinks",)),
    Case("no-sequence", {"s": 20, "t": 30, "b": 0, "g": 1, "r": 1, "d": 64, "e": 64}, **CAUSAL),
)  # fmt: skip
CASES = (
    Case("llama3-8b", {"m": (2,), "s": 129, "t": 129, "g": 2, "r": 4, "d": 128, "e": 128}, **CAUSAL),
    Case("llama3-8b-continued", {"m": (1,), "s": 5, "t": 300, "g": 2, "r": 4, "d": 128, "e": 128}, **CAUSAL),
    Case("gpt-oss-20b", {"m": (2,), "s": 77, "t": 200, "g": 1, "r": 8, "d": 64, "e": 64},
         attrs={"causal": True, "left": 127}),
    Case("gemma2-9b", {"m": (1,), "s": 65, "t": 65, "g": 2, "r": 2, "d": 256, "e": 256}, absent=("sinks",),
         attrs={"causal": True, "softcap": 50.0, "scale": 0.0625}),
    Case("vit-h", {"m": (3,), "s": 257, "t": 257, "g": 2, "r": 1, "d": 80, "e": 80}, absent=("sinks",)),
    Case("deepseek-v3", {"m": (1,), "s": 200, "t": 200, "g": 2, "r": 1, "d": 192, "e": 128}, **CAUSAL),
    Case("one-query", {"m": (), "s": 1, "t": 1, "g": 1, "r": 1, "d": 64, "e": 64}, absent=("sinks",)),
    Case("before-the-keys", {"m": (1,), "s": 150, "t": 20, "g": 1, "r": 1, "d": 64, "e": 64}, **CAUSAL),
)  # fmt: skip


def reference(
    xp: Any, q: Any, k: Any, v: Any, *more: Any, own: mods.Own = mods.NONE, packed: bool = False, **attrs: Any
) -> tuple[Any, Any]:  # fmt: skip
    """``more`` are offsets where sequences are packed, the captured arrays, and sinks or None."""
    sequences, more = _sequences(xp, (q, k), more, packed)
    count = len(own.captured)
    captured, sinks = more[:count], more[count] if len(more) > count else None
    if 0 in (q.shape[-2], q.shape[-3]):
        lse = xp.zeros((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=xp.float32, **beside(xp, q))
        return xp.zeros((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, **beside(xp, q)), lse
    unknown = None if sequences is None else (sequences.unknown((q,), (k,)), sequences.unknown((), (v,)))
    q, k, v = (x if sequences is None else finite(xp, x) for x in (q, k, v))
    weights, lse, _ = weights_of(xp, (q, k, sinks), attrs, own, captured, sequences)
    out = ungrouped(xp, weights @ grouped(xp, *widen(xp, v)), q)
    lse = xp.reshape(lse, (*q.shape[:-3], q.shape[-2], q.shape[-3]))
    if sequences is not None and unknown is not None:
        of_scores, of_values = (each[sequences.q.number] for each in unknown)
        out, lse = out + (of_scores + of_values)[:, None, None], lse + of_scores
    return xp.astype(out, q.dtype), lse


def reference_bwd(
    xp: Any, q: Any, k: Any, v: Any, *more: Any, own: mods.Own = mods.NONE, packed: bool = False, **attrs: Any
) -> tuple[Any, ...]:  # fmt: skip
    """``more`` are offsets where sequences are packed, the results and the cotangent of ``out``, the captured arrays,
    the cotangent of ``lse``, and sinks; the last two may be None.
    """
    sequences, more = _sequences(xp, (q, k), more, packed)
    (out, _, dout), more = more[:3], more[3:]
    count = len(own.captured)
    captured, (dlse, sinks) = more[:count], (*more[count:], None, None)[:2]
    if 0 in q.shape:
        return tuple(None if x is None else xp.zeros_like(x) for x in (q, k, v, sinks))
    g, scale = k.shape[-2], attrs["scale"] or q.shape[-1] ** -0.5
    unknown = None if sequences is None else sequences.unknown((q, out, dout), (k, v))
    if sequences is not None:
        q, k, v, out, dout = (finite(xp, x) for x in (q, k, v, out, dout))
    weights, row_lse, operands = weights_of(xp, (q, k, sinks), attrs, own, captured, sequences)
    wide_q, wide_o, wide_do = (grouped(xp, x, g) for x in widen(xp, q, out, dout))
    wide_k, wide_v = (grouped(xp, x) for x in widen(xp, k, v))
    dscores, delta = dscores_of(xp, weights, (wide_v, wide_o, wide_do), dlse)
    if (change := mods.score_of(attrs["softcap"], own.score)) is not None:
        (changed,) = evaluate(mods.gradient_of(change), xp, [*operands, dscores])
        dscores = xp.where(dscores == 0, dscores, changed)  # what is hidden may have no derivative
    dq = ungrouped(xp, dscores @ wide_k * scale, q)
    dk, dv = (
        _kv(xp, xp.sum(xp.matrix_transpose(x) @ y, axis=2), like)
        for x, y, like in ((dscores, wide_q * scale, k), (weights, wide_do, v))
    )
    dsinks = None if sinks is None else _sinks_bwd(xp, sinks, row_lse[..., 0], delta)
    if sequences is not None and unknown is not None:
        dq, dk, dv, dsinks = _with_unknown(xp, sequences, unknown, (dq, dk, dv, dsinks))
    return xp.astype(dq, q.dtype), xp.astype(dk, k.dtype), xp.astype(dv, v.dtype), dsinks


def _sinks_bwd(xp: Any, sinks: Any, lse: Any, delta: Any) -> Any:
    """The gradient of sinks, of the log-sum-exp of rows and of the sums of products of their results and cotangents,
    both (batch, kv heads, heads of one, s).
    """
    share = xp.exp(xp.reshape(*widen(xp, sinks), (1, lse.shape[1], -1, 1)) - lse)
    share = xp.where(lse > -math.inf, share, xp.zeros_like(share))
    return xp.astype(xp.reshape(-xp.sum(share * delta, axis=(0, 3)), sinks.shape), sinks.dtype)


def _with_unknown(
    xp: Any, sequences: Sequences, unknown: Any, gradients: tuple[Any, Any, Any, Any]
) -> tuple[Any, Any, Any, Any]:
    """Gradients of packed sequences, NaN in those whose values are ``unknown``: NaN by sequence, else 0."""
    dq, dk, dv, dsinks = gradients
    of_q, of_k = (unknown[side.number][:, None, None] for side in (sequences.q, sequences.k))
    dsinks = None if dsinks is None else dsinks + xp.astype(xp.sum(unknown), dsinks.dtype)
    return dq + of_q, dk + of_k, dv + of_k, dsinks


def _sequences(
    xp: Any, given: tuple[Any, Any], more: tuple[Any, ...], packed: bool
) -> tuple[Sequences | None, tuple[Any, ...]]:
    """The sequences of a call, if they are packed, and what comes behind their offsets."""
    if not packed:
        return None, more
    q, k = given
    return Sequences(xp, more[:2], (q.shape[-3], k.shape[-3])), more[2:]


def finite(xp: Any, x: Any) -> Any:
    return xp.where(xp.isfinite(x), x, xp.zeros_like(x))


def _kv(xp: Any, x: Any, like: Any) -> Any:
    """(batch, kv heads, seqlen, d) as a tensor of keys or values is."""
    return xp.reshape(xp.permute_dims(x, (0, 2, 1, 3)), like.shape)


def check(binding: Binding) -> str | None:
    dims = binding.dims
    if any(isinstance(dims[name], int) and dims[name] > LONGEST for name in ("s", "t")):
        return f"a sequence has at most {LONGEST} tokens, got s={dims['s']}, t={dims['t']}."
    return check_sizes(dims, binding.attrs)


def check_sizes(dims: Mapping[str, Any], attrs: Mapping[str, Any]) -> str | None:
    """The error text for heads and attributes; empty if they are right."""
    for name in ("d", "e"):
        if not 16 <= dims[name] <= 256 or dims[name] % 16:
            return f"a head has 16, 32 ... 256 elements, got {name}={dims[name]}."
    if min(attrs["left"], attrs["right"]) < -1:
        return f"left and right are at least -1, which is all keys, got left={attrs['left']}, right={attrs['right']}."
    if attrs["causal"] and attrs["right"] >= 0:
        return f"causal=True is right=0, got right={attrs['right']}, too."
    return check_factors(attrs["scale"], attrs["softcap"])


def check_factors(scale: float, softcap: float = 0.0) -> str | None:
    """The error text for factors of scores of which float32 does not hold both the number and its reciprocal."""
    got = f"got scale={scale}, softcap={softcap}."
    if scale < 0 or softcap < 0:
        return f"scale and softcap are not negative, {got}"
    for factor in (scale, softcap, (scale or 1.0) / (softcap or 1.0)):
        if factor and not 1.0 / MOST_FACTOR <= factor <= MOST_FACTOR:
            return f"scale, softcap and scale / softcap are 0 or from 2^-126 to 2^126, as float32 holds them, {got}"
    return None


def _heads(shape: str) -> Tensor:
    return Tensor(shape, "T", merged=True, align=16, otherwise="copy")


Q, K, V = _heads("*m s g*r d"), _heads("*m t g d"), _heads("*m t g e")
OUT, LSE = Tensor("*m s g*r e", "T", merged=True), Tensor("*m g*r s", "float32", merged=True)
SINKS = Tensor("g*r", "S", optional=True)
DTYPES = {FLOAT: FLOATS, INT: ("int32", "int64"), BOOL: ("bool",)}  # of captured arrays, by kind
OFFSETS = {f"cu_seqlens_{x}": Tensor("b+1", "int32", upper_bound=size) for x, size in (("q", "s"), ("k", "t"))}
BACKWARD_DOC = """Gradients of :func:`attention`, which computes the scores again.

    ``ds = p * (dout @ v.T - sum(dout * out) + dlse)``, ``dq = scale * ds @ k``, ``dk = scale * ds.T @ q``, ``dv = p.T
    @ dout``. They are deterministic if asked for; else those are not that CTAs add up in memory.
    """
DOC = """Attention of queries to keys and values, with grouped heads.

    ``out = softmax(scores) @ v`` with ``scores = softcap(scale * q @ k.T)`` where a query attends to a key, and
    ``lse = log(sum(exp(scores)))``. Query i stands beside key ``i + t - s``: the last query beside the last key.

    Args:
        q: ``T[*m s g*r d]``: (batch, seqlen_q, heads, headdim), float16, bfloat16 or float32. All dims but the last may
            have any stride of 16 bytes, as slices of a fused projection have them; others are copied.
        k: ``T[*m t g d]``: (batch, seqlen_k, kv heads, headdim); r neighbouring heads of q share one.
        v: ``T[*m t g e]``: as k, with a headdim of its own. d and e are multiples of 16, at most 256.
        sinks: ``S[g*r]``, a float dtype of its own: for each head one more score, which has no value.
        scale: of scores; 0 is ``1 / sqrt(d)``.
        causal: a query attends to keys up to its own.
        left: keys before its own that a query attends to at most; -1 is all.
        right: keys after its own that a query attends to at most; -1 is all.
        softcap: ``softcap * tanh(score / softcap)`` takes the place of a score; 0 is none.
        deterministic: gradients are summed in a fixed order, too, which takes longer.
        fused: ``"auto"`` runs the kernel in 16 bits, and else the same formula in the framework's functions, which
            needs memory for all scores; ``"always"`` the kernel, ``"never"`` the framework's functions.

    Returns:
        ``out``: ``T[*m s g*r e]`` and ``lse``: ``float32[*m g*r s]``, compact. Sums and exponentials in float32;
        weights are rounded to T before they multiply values. A row that attends to nothing is 0, its lse -inf. Both
        have a gradient, which computes the scores again. Results are deterministic, gradients where that is asked for:
        else that of q, or of k and v where heads have more than 128 elements, may differ in the last digits.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous, ``causal`` beside ``right``.
        NotImplementedError: a GPU older than SM 8.0.

    Source: Dao et al., FlashAttention, 2022; Shah et al., FlashAttention-3, 2024.
    """


_OFFSETS_DOC = """        cu_seqlens_q: int32 ``[b+1]``: where sequences of queries begin, and where the last one ends.
            They ascend from 0, and are read on the device. A sequence may be empty.
        cu_seqlens_k: int32 ``[b+1]``: the same of keys. Queries behind the last sequence attend to nothing."""
PACKED_DOC = (
    DOC.replace("Attention of queries to keys and values, with grouped heads.",
                "Attention within sequences that are packed one after another, with grouped heads.", 1)
    .replace("(batch, seqlen_q, heads, headdim)", "(tokens, heads, headdim)")
    .replace("(batch, seqlen_k, kv heads, headdim)", "(tokens, kv heads, headdim)")
    .replace("*m ", "")
    .replace("Query i stands beside key ``i + t - s``: the last query beside the last key.",
             "Within a sequence of\n    ``a`` queries and ``b`` keys, query i stands beside key ``i + b - a``.")
    .replace("        sinks:", f"{_OFFSETS_DOC}\n        sinks:", 1)
)  # fmt: skip


def by_framework(
    reference: Callable[..., tuple[Any, ...]], names: Sequence[str], outputs: Sequence[str],
    when: Callable[[Problem], str | bool] = lambda problem: False, wide: Mapping[str, tuple[str, ...]] = WIDE,
) -> Fallback:  # fmt: skip
    """The definition in the framework's functions: of ``wide`` dtypes, and ``when`` it is to run in others."""

    def run(xp: Any, call: Any, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        import array_api_compat  # start-up time

        given = [inputs.get(name) for name in names]
        return dict(
            zip(outputs, reference(array_api_compat.array_namespace(inputs["q"]), *given, **attrs), strict=True)
        )

    return Fallback(Program(run), when, wide)


@cache
def declare(name: str, own: mods.Own = mods.NONE, packed: bool = False) -> Op:
    """Attention with a call's own functions, of a batch or of packed sequences; the same op every time."""
    q, k, v, out, lse = (_declared(tensor, packed) for tensor in (Q, K, V, OUT, LSE))
    offsets = OFFSETS if packed else {}
    functions = [Mod.parse(text) for text in (own.score, own.mask) if text]
    captured = {name: Tensor(shape, f"C_{name}", merged=shape.startswith("*m")) for name, _, shape in own.captured}
    wanted = [own.captured[i][0] for i in mods.differentiable(own)]
    common = _of_both(own, functions, packed)
    wide = {**common["dtypes"], "T": (*HALVES, *WIDE["T"])}
    cotangent = _declared(_heads(OUT.shape), packed)
    read = {"q": q, "k": k, "v": v, **offsets, "out": cotangent, "lse": lse, "dout": cotangent, **captured,
            "dlse": lse._replace(optional=True)}  # fmt: skip
    how: dict[str, Any] = {"own": own, "packed": packed} if functions or packed else {}
    forward, backward = partial(reference, **how), partial(reference_bwd, **how)
    given, read_and_sinks = {"q": q, "k": k, "v": v, **offsets, **captured, "sinks": SINKS}, {**read, "sinks": SINKS}
    bwd = Op(
        f"{name}_bwd",
        inputs=read_and_sinks,
        outputs={"dq": _output(q), "dk": _output(k), "dv": _output(v), "dsinks": Tensor("g*r", "S", given="sinks")},
        **common,
        reference=backward,
        fallback=by_framework(backward, [*read_and_sinks], ("dq", "dk", "dv", "dsinks")),
        kernel=Kernel("cute_ops.kernels.attention.bwd:AttentionBackward"),
        tuning=Tuning(partial(config.attention_bwd, own), workspace=partial(config.workspace_bwd, own)),
        doc=BACKWARD_DOC.replace("attention`", "attention_packed`") if packed else BACKWARD_DOC,
    )  # fmt: skip
    sums = partial(sums_of_read, f"{name}_bwd_sums", own, inputs=read, common=common, fallback=by_framework)
    of_captured = partial(
        captured_bwd, own, inputs=read, common={**common, "dtypes": wide}, sums=None if packed else sums
    )
    gradients = [of_captured(i, f"{name}_bwd_{own.captured[i][0]}") for i in mods.differentiable(own)]
    return Op(
        name,
        inputs=given,
        outputs={"out": out, "lse": lse},
        **common,
        reference=forward,
        fallback=by_framework(forward, [*given], ("out", "lse")),
        kernel=Kernel("cute_ops.kernels.attention.fwd:attention_fwd"),
        tuning=Tuning(partial(config.attention, own), workspace=partial(config.workspace, own)),
        grad=(bwd, *gradients) if gradients else bwd,
        no_gradient=tuple(name for name, kind, _ in own.captured if kind == FLOAT and name not in wanted),
        doc=PACKED_DOC if packed else DOC,
    )  # fmt: skip


def _of_both(own: mods.Own, functions: Sequence[Mod], packed: bool) -> dict[str, Any]:
    """The fields of a declaration that attention and its gradient share."""
    of_head = mods.depends_on_head(functions, [shape for _, _, shape in own.captured])
    return {
        "dtypes": {"T": HALVES, "S": FLOATS, **{f"C_{name}": DTYPES[kind] for name, kind, _ in own.captured}},
        "attrs": {
            "scale": 0.0,
            "causal": False,
            "left": -1,
            "right": -1,
            "softcap": 0.0,
            "deterministic": False,
            "fused": FUSED,
        },
        "static": ("d", "e"),
        "sharding": Sharding(parallel=() if of_head else ("g",)),
        "check": check,
        "cases": () if functions else PACKED_CASES if packed else CASES,
        **({"called": "attention"} if functions else {}),
        **({"arrange": fill_offsets} if packed else {}),
    }


def _declared(tensor: Tensor, packed: bool) -> Tensor:
    """A tensor of a batch, or without one where sequences are packed."""
    return tensor._replace(shape=tensor.shape.removeprefix("*m "), merged=False) if packed else tensor


def _output(tensor: Tensor) -> Tensor:
    return Tensor(tensor.shape, "T", merged=tensor.merged)


attention = declare("attention")
attention_bwd = attention.steps[0]
attention_packed = declare("attention_packed", packed=True)
attention_packed_bwd = attention_packed.steps[0]
