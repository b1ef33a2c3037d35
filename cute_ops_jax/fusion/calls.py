"""Replacements of the expressions that were found: an op, or a product with an epilogue."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cute_ops.expressions.graph import Expression, Graph, copied
from cute_ops.expressions.groups import sizes
from cute_ops.expressions.text import text_of
from cute_ops.fusion.analyse import Call as Named
from cute_ops.fusion.analyse import Found
from cute_ops.fusion.choose import Choice
from cute_ops.fusion.declare import declaration, declared, operand_dtypes, with_dtypes
from cute_ops.fusion.express import COLUMNS, Leaf
from cute_ops.fusion.graph import Node
from cute_ops.ops import OPS
from cute_ops.ops.expression.broadcast import Fit
from cute_ops_jax.composite.fused import call_fitted, summing
from cute_ops_jax.composite.linear import linear
from cute_ops_jax.fusion.losses import linear_loss, linear_loss_with_metrics, loss, loss_with_metrics
from cute_ops_jax.fusion.rotation import rope
from cute_ops_jax.primitive.function import register

# Arrays of the leaves, in order, to those of the roots, in order.
Call = Callable[[Sequence[Any]], list[Any]]
_OPS = {op.name: op for op in OPS}
# The derivative of an expression reads its operands and results. If these are more than this, both are traced when the
# expression is found, which shows whether one of them is too large for an op.
MOST_OPERANDS = 24


def call_of(found: Found, choice: Choice) -> Call:
    """The replacement of an expression. Of ``linear`` the product's leaf is a pair: x and the weight.

    Raises:
        TypeError: the expression, or its derivative, is too large.
    """
    call = _as_roots({"op": _op, "fused": _fused, "linear": _linear, "own": _own_op}[choice.kind](found, choice), found)
    if choice.kind == "own" and choice.own.own.op.grad is None:
        again = _linear if choice.product >= 0 else _fused
        return _with_gradient_of(_as_roots(again(found, choice), found), call)
    if choice.kind not in ("op", "own") and len(found.leaves) + 2 * len(found.roots) > MOST_OPERANDS:
        jax.eval_shape(partial(_derivative, call), _specs(found, choice))
    return call


def _as_roots(made: Call, found: Found) -> Call:
    def call(arrays: Sequence[Any]) -> list[Any]:
        return [_as_root(out, root, found) for out, root in zip(made(arrays), found.roots, strict=True)]

    return call


def _derivative(call: Call, arrays: Sequence[Any]) -> Any:
    out, back = jax.vjp(call, arrays)
    return back([np.zeros(a.shape, jax.dtypes.float0) if a.dtype == bool else jnp.ones_like(a) for a in out])


def _specs(found: Found, choice: Choice) -> Any:
    """The shapes and dtypes of the arrays that the call of an expression takes, one for each leaf; for the product of
    ``linear`` those of x and the weight.
    """
    nodes = [each.node.args if i == choice.product else each.node for i, each in enumerate(found.leaves)]
    return jax.tree.map(lambda node: jax.ShapeDtypeStruct(node.shape, node.dtype), nodes, is_leaf=_is_node)


def call_of_named(found: Named) -> Call:
    """The replacement of a rotation or of a loss."""
    named, run = found.named, _NAMED[found.named.op]

    def call(arrays: Sequence[Any]) -> list[Any]:
        shaped = zip(named.operands, arrays, named.shapes, strict=True)
        made = run(**{name: jnp.reshape(a, shape) for name, a, shape in shaped}, **named.attrs)
        outs = made if isinstance(made, list) else [made]
        return [jnp.reshape(out, root.shape).astype(root.dtype) for out, root in zip(outs, found.roots, strict=True)]

    return call


_NAMED: dict[str, Callable[..., Any]] = {
    "rope": rope, "cross_entropy": loss, "linear_cross_entropy": linear_loss,
    "cross_entropy_metrics": loss_with_metrics, "linear_cross_entropy_metrics": linear_loss_with_metrics,
}  # fmt: skip


def _as_root(out: Any, root: Any, found: Found) -> Any:
    """An output with the shape and the dtype that the program has."""
    if out.shape != root.shape:
        if math.prod(out.shape) != math.prod(root.shape):  # one number per row, which the program repeats
            out = jnp.broadcast_to(jnp.reshape(out, (*found.rows, 1)), (*found.rows, root.shape[-1]))
        out = jnp.reshape(out, root.shape)
    return out != 0 if root.dtype == "bool" else out.astype(root.dtype)


def _op(found: Found, choice: Choice) -> Call:
    meaning = found.meaning
    assert meaning is not None
    function = partial(register(_OPS[meaning.op]), **meaning.attrs)

    def run(arrays: Sequence[Any]) -> list[Any]:
        given = {
            name: _fitted(array, leaf, found)
            for name, array, leaf in zip(meaning.operands, arrays, found.leaves, strict=True)
        }
        made = function(**given)
        named = dict(zip(_OPS[meaning.op].outputs, made if isinstance(made, tuple) else (made,), strict=False))
        return [named[name] for name in meaning.outputs]

    return run


def _own_op(found: Found, choice: Choice) -> Call:
    """An op of the user's."""
    owned = choice.own
    op, product = owned.own.op, owned.own.product
    if any(leaf.node.dtype == "bool" for leaf in found.leaves):
        raise TypeError(f"{op.name} takes no bools")
    function, shown = partial(register(op), **owned.attrs), [name for name, t in op.outputs.items() if not t.hidden]

    def run(arrays: Sequence[Any]) -> list[Any]:
        given: dict[str, Any] = {}
        for i, (name, array, leaf) in enumerate(zip(owned.operands, arrays, found.leaves, strict=True)):
            if i == choice.product:
                given |= dict(zip(product, array, strict=True))
            else:
                given[name] = _fitted(array, leaf, found)
        made = function(**given)
        named = dict(zip(shown, made if isinstance(made, tuple) else (made,), strict=True))
        return [named[name] for name in owned.outputs]

    jax.eval_shape(run, _specs(found, choice))  # a dtype that the op does not take: refused now, it stays as it is
    return run


def _with_gradient_of(expression: Call, run: Call) -> Call:
    """``run``, with the gradient of an expression of the same value."""
    call = jax.custom_vjp(run)

    def backward(arrays: Sequence[Any], cotangents: Any) -> Any:
        return jax.vjp(expression, arrays)[1](cotangents)

    call.defvjp(lambda arrays: (run(arrays), arrays), backward)
    return lambda arrays: call(list(arrays))


def _fused(found: Found, choice: Choice) -> Call:
    op, dtypes = declared(found, examples=True), operand_dtypes(found)
    shapes = declaration(found, examples=True)[1].values()
    fits = [_fit(leaf, found, shape) for leaf, shape in zip(found.leaves, shapes, strict=True)]
    call: Any = partial(call_fitted, register(op), fits)
    wide = tuple("float32" if how.expanded else dtype for how, dtype in zip(fits, dtypes, strict=True))
    if wide != dtypes:
        # An op of tiles in several dtypes takes no others.
        own = any(shape.startswith(dtype) for shape, dtype in zip(shapes, dtypes, strict=True))
        anew = partial(call_fitted, register(declared(found, True, wide)), fits) if own else None
        call = summing(call, anew)

    def run(arrays: Sequence[Any]) -> list[Any]:
        given = [
            _in_rows(a.astype(dtype), leaf, found) for a, leaf, dtype in zip(arrays, found.leaves, dtypes, strict=True)
        ]
        made = call(*given)
        return list(made) if isinstance(made, tuple) else [made]

    return run


def _linear(found: Found, choice: Choice) -> Call:
    leaf = found.leaves[choice.product]
    others = [i for i in range(len(found.leaves)) if i != choice.product]
    expression = _acc_first(found.expression, choice.product)
    x = leaf.node.args[0]
    tiles = {i: x.dtype for i, operand in enumerate(expression.operands) if operand.kind.rows and operand.kind.columns}
    epilogue = text_of(with_dtypes(expression, tiles, [root.dtype for root in found.roots]))
    transposed = leaf.node.attr[1] == (0,)

    def run(arrays: Sequence[Any]) -> list[Any]:
        rows, weight = arrays[choice.product]
        operands = [_fitted(arrays[i], found.leaves[i], found) for i in others]
        made = linear(rows, weight, *operands, epilogue=epilogue, transposed=transposed, packed=leaf.packed)
        return list(made) if isinstance(made, tuple) else [made]

    if sizes(expression):  # not all that looks at groups of columns can be an epilogue: refused now, it stays as it is
        jax.eval_shape(run, _specs(found, choice))
    return run


def _is_node(value: Any) -> bool:
    return isinstance(value, Node)


def _acc_first(expression: Expression, product: int) -> Expression:
    """The expression with the product as its first operand."""
    order = [product, *(i for i in range(len(expression.operands)) if i != product)]
    graph = Graph([expression.operands[i] for i in order])
    nodes = copied(expression, graph, lambda node: graph.operand(order.index(node.operand), node.half))
    return graph.finish([nodes[i] for i in expression.outputs])


def _fit(leaf: Leaf, found: Found, shape: str) -> Fit:
    """How a leaf broadcasts to the values."""
    own = _own(leaf, found)
    if shape.startswith("*b"):
        sizes = (*found.rows[:-1], own[-1])
        return Fit(shape, sizes, sizes)
    if "*m" not in shape:
        return Fit(shape, own[-1:] if COLUMNS in leaf.labels else (), own[-1:] if COLUMNS in leaf.labels else ())
    return Fit(shape, (*found.rows, own[-1]), own)


def _own(leaf: Leaf, found: Found) -> tuple[Any, ...]:
    """A leaf's sizes among the values' dims, 1 where it is broadcast."""
    columns = leaf.node.shape[leaf.labels.index(COLUMNS)] if COLUMNS in leaf.labels else 1
    if leaf.rows != found.rows:
        return (*(found.rows if leaf.operand.kind.rows else ()), columns)
    return (*(size if i in leaf.labels else 1 for i, size in enumerate(found.rows)), columns)


def _in_rows(array: Any, leaf: Leaf, found: Found) -> Any:
    """An array whose rows are numbered in another way, with the rows of the values."""
    if leaf.rows == found.rows or not leaf.operand.kind.rows:
        return jnp.reshape(array, _own(leaf, found)) if leaf.rows == found.rows else array
    columns = _own(leaf, found)[-1]
    there = tuple(size if i in leaf.labels else 1 for i, size in enumerate(leaf.rows))
    whole = jnp.broadcast_to(jnp.reshape(array, (*there, columns)), (*leaf.rows, columns))
    return jnp.reshape(whole, (*found.rows, columns))


def _fitted(array: Any, leaf: Leaf, found: Found) -> Any:
    """An argument of an op, or of a product's epilogue."""
    if not leaf.operand.kind.rows:
        return jnp.reshape(array, _own(leaf, found)[-1:] if COLUMNS in leaf.labels else ())
    return jnp.reshape(_in_rows(array, leaf, found), _own(leaf, found))
