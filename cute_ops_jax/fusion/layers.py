"""Replacements of a part of a layer, which several expressions and products make up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from cute_ops.composite.gated_mlp import gated_mlp, gated_mlp_apart
from cute_ops.composite.linear_add_rmsnorm import linear_add_rmsnorm
from cute_ops.composite.mlp import mlp
from cute_ops.composite.qkv_rope import SIZES
from cute_ops.fusion.attention_arrays import Ends, Read, Sinks
from cute_ops.fusion.changed_scores import functions_of, op_of
from cute_ops.fusion.choose import FEW_QUERIES, too_few_queries
from cute_ops.fusion.composite import Composite
from cute_ops.fusion.graph import Node
from cute_ops.ops.attention.attention import attention as plain
from cute_ops_jax.fusion.decoding import Given, by_lengths, masks_of
from cute_ops_jax.fusion.rotation import Projection, qkv_rope
from cute_ops_jax.primitive.function import register

Call = Callable[[Sequence[Any]], list[Any]]
# Keys; heads of keys of all sequences; keys of all these: XLA's products are faster for fewer of both or of the first.
FEW_KEYS, MANY_HEADS, LEAST_KEYS = 256, 40, 1 << 15
LONG = 2048  # keys, for more than a few queries of a head of keys
MOST_KEYS = 1 << 24
# Operands that are row vectors, which a program may hold with more dims, of one element.
_ROWS = ("b_up", "b_down", "norm_weight")


def call_of_layer(found: Composite) -> Call:
    """The function that runs in place of a part of a layer: of its operands, in order, it computes the roots.

    Raises:
        ValueError: no op of ours computes it, or it would not be faster.
    """
    if why := _too_few_rows(found):
        raise ValueError(why)
    made = _MAKERS[found.name](found)
    names = tuple(found.operands)

    def call(arrays: Sequence[Any]) -> list[Any]:
        given = dict(zip(names, arrays, strict=True))
        outs = made({name: jnp.ravel(a) if name in _ROWS else a for name, a in given.items()})
        return [_as_root(out, root) for out, root in zip(outs, found.roots, strict=True)]

    return call


def _as_root(out: Any, root: Node) -> Any:
    """An output with the dims of rows that the program has, which may join or split those of the operands."""
    known = all(isinstance(size, int) for size in root.shape)
    return jnp.reshape(out, root.shape) if known and out.shape != root.shape else out


def _too_few_rows(found: Composite) -> str:
    """Why joining weights would cost more than a pass saves; empty where it does not. References join nothing."""
    if found.name not in ("gated_mlp", "qkv_rope") or jax.default_backend() != "gpu":
        return ""
    sizes = [size for size in found.operands["x"].shape if isinstance(size, int)]
    if len(sizes) < len(found.operands["x"].shape):
        return ""
    rows, k = prod(sizes[:-1]), sizes[-1]
    least = {"w_gate": 2 * k, "w_q": k}
    few = any(name in found.operands and rows < bound for name, bound in least.items())
    return f"{rows} rows are too few: joining the weights would cost more than a pass" if few else ""


def _gated_mlp(found: Composite) -> Callable[..., list[Any]]:
    across = found.attrs["transposed"]
    op = gated_mlp_apart(across) if "w_gate" in found.operands else gated_mlp("pre", across)
    run = partial(register(op), activation=found.attrs["activation"])
    return lambda given: [run(**given)]


def _mlp(found: Composite) -> Callable[..., list[Any]]:
    run = partial(register(mlp("pre", found.attrs["transposed"])), activation=found.attrs["activation"])
    return lambda given: [run(**given)]


def _linear_add_rmsnorm(found: Composite) -> Callable[..., list[Any]]:
    op = linear_add_rmsnorm(found.attrs["transposed"])
    run, names = partial(register(op), eps=found.attrs["eps"]), list(op.outputs)
    places = [names.index(name) for name in found.attrs["outputs"]]

    def call(given: dict[str, Any]) -> list[Any]:
        made = run(**given)
        return [made[place] for place in places]

    return call


def _qkv_rope(found: Composite) -> Callable[..., list[Any]]:
    attrs, size, across = found.attrs, found.attrs["size"], found.attrs["transposed"]
    if size not in SIZES:
        raise ValueError(f"its heads have {size} columns, not {' or '.join(map(str, SIZES))}")
    columns = attrs["columns"]
    of, ends = Projection(size, across, sum(columns[:2]) // size), [sum(columns[:k]) for k in range(1, len(columns))]

    def call(given: dict[str, Any]) -> list[Any]:
        weight = jnp.concatenate([given[name] for name in ("w_q", "w_k", "w_v") if name in given], int(across))
        cos, sin = (jnp.reshape(given[name], attrs["table"]) for name in ("cos", "sin"))
        parts = jnp.split(qkv_rope(given["x"], weight, cos, sin, of), ends, -1)
        for k, turned in enumerate(attrs["turned"]):
            by_head = jnp.reshape(parts[k], (*parts[k].shape[:-1], -1, size))
            parts[k] = jnp.swapaxes(by_head, 1, 2) if turned else by_head
        return parts

    return call


def _attention(found: Composite) -> Callable[..., list[Any]]:
    if jax.default_backend() == "gpu" and float(getattr(jax.devices()[0], "compute_capability", "8.0")) < 8:
        raise ValueError("attention has no kernel for this GPU")
    parts, scores, reads, sinks = (found.attrs[name] for name in ("parts", "scores", "reads", "sinks"))
    if jax.default_backend() == "gpu" and (why := too_few_queries(parts["q"].shape, parts["k"].shape)):
        raise ValueError(why)
    attrs = {name: getattr(scores, name) for name in ("scale", "left", "right", "softcap")}
    if scores.right == 0:
        attrs |= {"causal": True, "right": -1}
    function = register(plain if scores.expression is None else op_of(functions_of(scores, reads)))
    views = [*found.attrs["views"], *found.roots]

    def call(given: dict[str, Any]) -> list[Any]:
        arrays = [jnp.reshape(jnp.transpose(given[name], part.order), part.shape) for name, part in parts.items()]
        captured = [_as_read(given[f"captured{i}"], read) for i, read in enumerate(reads)]
        out, lse = function(*arrays, *captured, sinks=None if sinks is None else _by_head(sinks, given), **attrs)
        if found.attrs["unknown"]:
            out = jnp.where(jnp.swapaxes(lse, 1, 2)[..., None] > -jnp.inf, out, jnp.asarray(jnp.nan, out.dtype))
        return [_as_viewed(out, found.attrs["out"], views)]

    return call


def decoding_of(found: Composite) -> Composite | None:
    """The step of decoding that an attention is, of which `decode_attention` splits the keys; None if it is none, or if
    XLA's products are faster.

    On an H200 8 sequences of 8192 keys of 8 heads take 82 us (XLA 268), 12 of 13450 152 (916), 64 of 2048 129 (474), 64
    of 256 35 (78), 1 of 8192 22 (27), 3 of 1024 26 (26), 4 of 512 24 (22); 16 queries of 4 heads that share each of
    them, 8 of 8192, 147 (403).
    """
    step = found.attrs.get("decoding")
    if step is None:
        return None
    b, *sizes, _ = step.parts["k"].shape
    heads, keys = sizes if step.heads_first else sizes[::-1]
    many = step.parts["q"].shape[2] > FEW_QUERIES * heads and keys < LONG
    few = keys < FEW_KEYS or (b * heads < MANY_HEADS and b * heads * keys < LEAST_KEYS)
    if jax.default_backend() == "gpu" and (many or few):
        return None
    operands = {name: part.node for name, part in step.parts.items()}
    operands |= {name: end.array for name, end in (("end", step.end), ("begin", step.begin)) if end and end.array}
    operands |= {name: node for name, node in found.operands.items() if name == "sinks"}
    attrs = {"step": step, **{name: found.attrs[name] for name in ("views", "scores", "sinks")}}
    return found._replace(name="decode_attention", operands=operands, attrs=attrs)


def _decode_attention(found: Composite) -> Callable[..., list[Any]]:
    step, views, sinks = found.attrs["step"], [*found.attrs["views"], *found.roots], found.attrs["sinks"]
    run = by_lengths(masks_of(step, found.attrs["scores"].scale))

    def call(given: dict[str, Any]) -> list[Any]:
        arrays = {name: jnp.reshape(jnp.transpose(given[name], x.order), x.shape) for name, x in step.parts.items()}
        end = _number_of_keys(step.end, given.get("end"))
        begin = None if step.begin is None else _number_of_keys(step.begin, given.get("begin"))
        of_heads = None if sinks is None else jnp.repeat(_by_head(sinks, given), step.queries)
        return [_as_viewed(run(Given(**arrays, end=end, begin=begin, sinks=of_heads)), step.out, views)]

    return call


def _number_of_keys(end: Ends, array: Any) -> Any:
    """A number of keys by batch and head, ``[batch, 1]`` or ``[batch, heads]``."""
    if array is None:
        return jnp.full((prod(end.sizes), 1), end.constant, "int32")
    found = jnp.reshape(jnp.transpose(array, end.order), end.shape)
    found = jnp.clip(found, -MOST_KEYS, MOST_KEYS).astype("int32") + end.constant
    return jnp.reshape(jnp.broadcast_to(found, end.sizes), (-1, end.sizes[-1]))


def _as_viewed(out: Any, placed: tuple[tuple[int, ...], tuple[int, ...]], views: Sequence[Node]) -> Any:
    """A result as the program has it. ``placed``: sizes and the order of dims."""
    sizes, order = placed
    out = jnp.transpose(jnp.reshape(out, sizes), order)
    for view in views:
        turned = view.op == "transpose"  # of dims that the result may lack, as they have one element
        out = jnp.reshape(out, view.args[0].shape if turned else view.shape)
        out = jnp.transpose(out, view.attr) if turned else out
    return out


def _by_head(sinks: Sinks, given: dict[str, Any]) -> Any:
    if sinks.node is None:
        return jnp.full((prod(sinks.sizes),), sinks.number, "float32")
    made = jnp.reshape(jnp.transpose(given["sinks"], sinks.order), sinks.shape)
    return jnp.ravel(jnp.broadcast_to(made, sinks.sizes))


def _as_read(array: Any, read: Read) -> Any:
    whole = jnp.broadcast_to(jnp.reshape(array, read.shape), read.sizes)
    return jnp.reshape(jnp.transpose(whole, read.order), read.merged)


_MAKERS: dict[str, Callable[[Composite], Callable[..., list[Any]]]] = {
    "gated_mlp": _gated_mlp, "mlp": _mlp, "qkv_rope": _qkv_rope, "linear_add_rmsnorm": _linear_add_rmsnorm,
    "attention": _attention, "decode_attention": _decode_attention,
}  # fmt: skip
