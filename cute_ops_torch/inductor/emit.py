"""Nodes of Dynamo's graph that compute an expression which was found: calls of ``torch.ops.cute``.

Each node is made together with its fake value, so whatever an op refuses, strides included, is known before the graph
has changed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from cute_ops.composite.gated_mlp import gated_mlp, gated_mlp_apart
from cute_ops.composite.linear_add_rmsnorm import linear_add_rmsnorm
from cute_ops.composite.mlp import mlp
from cute_ops.composite.qkv_rope import SIZES, qkv_rope
from cute_ops.declaration.op import Op
from cute_ops.expressions.graph import Expression, copied
from cute_ops.expressions.graph import Graph as Nodes
from cute_ops.expressions.text import text_of
from cute_ops.fusion.analyse import Found
from cute_ops.fusion.attention_arrays import Read
from cute_ops.fusion.changed_scores import functions_of
from cute_ops.fusion.choose import Choice, is_whole
from cute_ops.fusion.composite import Composite
from cute_ops.fusion.declare import declaration, is_expanded, is_of_example, operand_dtypes, with_dtypes
from cute_ops.fusion.express import COLUMNS, Leaf
from cute_ops.fusion.graph import Node as Value
from cute_ops.ops import OPS
from cute_ops.ops.attention.attention import attention
from cute_ops.ops.gemm import by_call
from cute_ops.ops.rotary.rope import rope
from cute_ops_torch.composite import recipes
from cute_ops_torch.inductor.complex_numbers import is_of_complex
from cute_ops_torch.inductor.effects import example
from cute_ops_torch.inductor.front import shape_of
from cute_ops_torch.inductor.insertion import Insertion
from cute_ops_torch.library.known_recipes import recipe_of
from cute_ops_torch.registry import define

NOTHING: Mapping[str, Any] = {}
_OPS = {op.name: op for op in OPS}
_SHAPES = {"t": "*m n", "2t": "*m 2n", "r": "n", "2r": "2n", "c": "*m 1", "s": ""}


class Refused(Exception):
    """A part stays as it is; says why."""


class Call(NamedTuple):
    """The call of an op.

    Attributes:
        op: the op.
        arrays: for each of its inputs the tensor among the leaves' tensors, or None.
        attrs: its attributes.
        outputs: the places of the roots among its outputs.
    """

    op: Op
    arrays: tuple[Any, ...]
    attrs: tuple[Any, ...]
    outputs: tuple[int, ...]


class Emitter(Insertion):
    """Puts calls of ops before a node of a graph.

    Args:
        graph: Dynamo's graph.
        before: the node.
        lookup: the node that holds a value there; None if none does.
        order: the order of the values' leading dims in which results lie row by row; empty for the usual one.
    """

    def __init__(
        self, graph: Graph, before: Node, lookup: Callable[[Value], Node | None], order: tuple[int, ...] = ()
    ) -> None:
        super().__init__(graph, before)
        self.lookup, self.order = lookup, order

    def emit(
        self, found: Found, choice: Choice, judge: Callable[[Call], float | None]
    ) -> tuple[list[Node], float | None]:
        """The nodes of the roots, and what ``judge`` returns of the call.

        Raises:
            Refused: a tensor lies otherwise than the op takes it, or ``judge`` raises it.
        """
        with self._refusing():
            makers = {"op": self._op, "fused": self._fused, "linear": self._linear, "own": self._own}
            call = makers[choice.kind](found, choice)
            gain = judge(call)
            outs = self._called(call)
            return [self._as_root(out, root, found) for out, root in zip(outs, found.roots, strict=True)], gain

    def emit_composite(
        self, found: Composite, judge: Callable[[str, Call], float | None]
    ) -> tuple[list[Node], float | None]:
        """The nodes of the roots of a part of a layer, and what ``judge`` returns of its name and call.

        Raises:
            Refused: as for :meth:`emit`.
        """
        with self._refusing():
            makers = {
                "gated_mlp": self._gated_mlp, "mlp": self._mlp, "qkv_rope": self._qkv_rope,
                "linear_add_rmsnorm": self._linear_add_rmsnorm, "attention": self._attention, "rope": self._rope,
            }  # fmt: skip
            finish = {
                "qkv_rope": lambda outs, each: self._heads(outs[0], each), "attention": self._attended,
                "rope": self._rotated,
            }  # fmt: skip
            given = {name: self.array(value) for name, value in found.operands.items()}
            if any(type(example(node)) is not FakeTensor for node in given.values()):
                raise Refused("an operand is a DTensor or another subclass, of which products are torch's own")
            call = makers[found.name](found, given)
            gain = judge(found.name, call)
            outs = self._called(call)
            return (finish[found.name](outs, found) if found.name in finish else outs), gain

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Removes what was made, and raises :class:`Refused`, where a call does not take its arguments."""
        try:
            yield
        except (Refused, TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            self.undo()
            said = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            raise Refused(said.splitlines()[0]) from error

    def _called(self, call: Call) -> list[Node]:
        """The outputs of a call."""
        recipe = recipe_of(call.op)
        if recipe and self.leaves_python():
            made = self.function(torch.ops.cute.by_recipe.default, recipe, list(call.arrays))
            return [self.function(operator.getitem, made, k) for k in call.outputs]
        define(call.op).lower()  # code from Inductor's caches calls it and its gradient, and nothing else is traced
        whole = self.function(define(call.op).overload, *call.arrays, *call.attrs)
        several = len(call.op.outputs) > 1
        return [self.function(operator.getitem, whole, k) if several else whole for k in call.outputs]

    def leaves_python(self) -> bool:
        """Whether the code will run where no op that was made for a graph is known."""
        return bool(V.aot_compilation)

    def as_held(self, made: Node, holder: Node) -> Node:
        """A new tensor as what a node holds that it takes the place of."""
        return made

    def function(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of a function with its value."""
        return self._made(self.graph.call_function, target, target, args, kwargs)

    def method(self, name: str, *args: Any) -> Node:
        """A call of a tensor's method with its value."""
        return self._made(self.graph.call_method, name, getattr(torch.Tensor, name), args)

    def _made(
        self, create: Callable[..., Node], target: Any, run: Callable[..., Any], args: tuple[Any, ...],
        kwargs: Mapping[str, Any] = NOTHING,
    ) -> Node:  # fmt: skip
        given = torch.fx.map_arg(args, example)
        fakes = (each for each in torch.utils._pytree.tree_leaves(given) if isinstance(each, FakeTensor))
        mode = next((fake.fake_mode for fake in fakes), nullcontext())
        # As Dynamo runs functions: else torch 2.11 guards sizes.
        with torch.no_grad(), torch._C._DisableAutocast(), mode, enable_python_dispatcher():
            value = run(*given, **kwargs)
        return self.insert(create, target, args, dict(kwargs), value)

    def part(self, array: Node, axis: int, start: int, stop: int, step: int) -> Node:
        """A slice of a tensor."""
        return self.function(operator.getitem, array, (slice(None),) * axis + (slice(start, stop, step),))

    # The three kinds of calls

    def _op(self, found: Found, choice: Choice) -> Call:
        meaning = found.meaning
        assert meaning is not None
        op = _OPS[meaning.op]
        given = {name: self._fitted(leaf, found) for name, leaf in zip(meaning.operands, found.leaves, strict=True)}
        attrs = tuple(meaning.attrs.get(name, default) for name, default in op.attrs.items())
        names = list(op.outputs)
        outputs = tuple(names.index(name) for name in meaning.outputs)
        return Call(op, tuple(given.get(name) for name in op.inputs), attrs, outputs)

    def _fused(self, found: Found, choice: Choice) -> Call:
        examples = not self.order
        op = recipes.fused(*declaration(found, examples))
        arrays = []
        for leaf, dtype in zip(found.leaves, operand_dtypes(found), strict=True):
            shared = examples and is_of_example(leaf, found)
            array = self._of_example(leaf, found) if shared else self._fitted(leaf, found)
            if leaf.node.dtype == "bool":
                array = self.method("to", array, getattr(torch, dtype))
            arrays.append(array)
        return Call(op, tuple(arrays), tuple(op.attrs.values()), tuple(range(len(found.roots))))

    def _linear(self, found: Found, choice: Choice) -> Call:
        op, others, roots = linear_op(found, choice)
        product = found.leaves[choice.product].node
        x, weight = (self.array(each) for each in product.args)
        operands = [self._fitted(leaf, found, copied=True) for leaf in others]
        return Call(op, (x, weight, *operands), ("auto",), roots)

    def _own(self, found: Found, choice: Choice) -> Call:
        owned = choice.own
        op, product = owned.own.op, owned.own.product
        given: dict[str, Node] = {}
        for i, (name, leaf) in enumerate(zip(owned.operands, found.leaves, strict=True)):
            if i == choice.product:
                x, weight = map(self.array, leaf.node.args)
                given |= dict(zip(product, (self._aligned(x), self._aligned(weight)), strict=True))
            elif leaf.node.dtype == "bool":
                raise Refused(f"{op.name} takes no bools")
            else:
                given[name] = self._fitted(leaf, found, copied=True)
        trains = any(example(node).requires_grad for node in given.values())
        if op.grad is None and trains and torch.is_grad_enabled():
            raise Refused(f"{op.name} has no gradient")
        attrs = tuple(owned.attrs[name] for name in op.attrs)
        names = list(op.outputs)
        return Call(op, tuple(given.get(name) for name in op.inputs), attrs, tuple(map(names.index, owned.outputs)))

    # Parts of layers

    def _gated_mlp(self, found: Composite, given: dict[str, Node]) -> Call:
        packed, transposed = "w_gate_up" in given, found.attrs["transposed"]
        op = gated_mlp("pre", transposed) if packed else gated_mlp_apart(transposed)
        return Call(op, tuple(given[name] for name in op.inputs), (found.attrs["activation"], "auto"), (0,))

    def _mlp(self, found: Composite, given: dict[str, Node]) -> Call:
        op = mlp("pre", found.attrs["transposed"])
        return Call(op, tuple(given.get(name) for name in op.inputs), (found.attrs["activation"], "auto"), (0,))

    def _qkv_rope(self, found: Composite, given: dict[str, Node]) -> Call:
        attrs, size = found.attrs, found.attrs["size"]
        if size not in SIZES:
            raise Refused(f"its heads have {size} columns, not {' or '.join(map(str, SIZES))}")
        tables = [self._table(given[name], found.operands[name].shape, attrs["table"]) for name in ("cos", "sin")]
        weights = [given[name] for name in ("w_q", "w_k", "w_v") if name in given]
        weight = self.function(torch.cat, weights, 1 if attrs["transposed"] else 0)
        heads = sum(attrs["columns"][:2]) // size
        op = qkv_rope(size, attrs["transposed"])
        return Call(op, (given["x"], weight, *tables), (heads, "auto"), (0,))

    def _table(self, array: Node, before: tuple[Any, ...], after: tuple[Any, ...], copied: bool = False) -> Node:
        if example(array).requires_grad:
            raise Refused("its angles have a gradient")
        table = self._reshaped(array, before, after)
        return self.method("contiguous", table) if copied and not _has_rows(table) else self._aligned(table)

    def _rope(self, found: Composite, given: dict[str, Node]) -> Call:
        order, table = found.attrs["order"], found.attrs["table"]
        cos, sin = (self._table(given[name], found.operands[name].shape, table, copied=True) for name in ("cos", "sin"))
        x = self.method("unsqueeze", given["x"], -2) if order is None else self.method("permute", given["x"], order)
        return Call(rope, (self._aligned(x), cos, sin), (found.attrs["interleaved"],), (0,))

    def _rotated(self, outs: Sequence[Node], found: Composite) -> list[Node]:
        """The result in the order of dims that the program has."""
        order = found.attrs["order"]
        if order is None:
            return [self.method("squeeze", outs[0], -2)]
        return [self.method("permute", outs[0], tuple(map(order.index, range(len(order)))))]

    def _heads(self, out: Node, found: Composite) -> list[Node]:
        """Queries and keys by head, and values, of all columns together."""
        parts = self.function(torch.split, out, list(found.attrs["columns"]), -1)
        made = [self.function(operator.getitem, parts, k) for k, _ in enumerate(found.roots)]
        for k, turned in enumerate(found.attrs["turned"]):
            made[k] = self.method("unflatten", made[k], -1, (-1, found.attrs["size"]))
            made[k] = self.method("transpose", made[k], 1, 2) if turned else made[k]
        return made

    def _linear_add_rmsnorm(self, found: Composite, given: dict[str, Node]) -> Call:
        op = linear_add_rmsnorm(found.attrs["transposed"])
        names = list(op.outputs)
        outputs = tuple(names.index(name) for name in found.attrs["outputs"])
        return Call(op, tuple(given[name] for name in op.inputs), (found.attrs["eps"], "auto"), outputs)

    def _attention(self, found: Composite, given: dict[str, Node]) -> Call:
        parts, scores, reads = (found.attrs[name] for name in ("parts", "scores", "reads"))
        op = attention
        if scores.expression is not None:
            if self.leaves_python():
                raise Refused("packages have no attention whose scores an expression changes")
            own = functions_of(scores, reads)
            op = recipes.attention(own.score, own.captured)
        arrays = [self._seen(given[name], part.order, part.shape) for name, part in parts.items()]
        default = math.isclose(scores.scale, parts["q"].shape[-1] ** -0.5, rel_tol=1e-6)
        causal = scores.right == 0
        sides = scores.left, -1 if causal else scores.right
        fixed = torch.are_deterministic_algorithms_enabled()  # Dynamo guards it
        attrs = (0.0 if default else scores.scale, causal, *sides, scores.softcap, fixed)
        captured = [self._as_read(given[f"captured{i}"], read) for i, read in enumerate(reads)]
        outputs = (0, 1) if found.attrs["unknown"] else (0,)
        return Call(op, (*arrays, *captured, self._sinks(found, given)), attrs, outputs)

    def _as_read(self, array: Node, read: Read) -> Node:
        """An array that scores are computed from, by the dims of batch, head, query and key that it has."""
        whole = self.method("expand", self.method("reshape", array, read.shape), read.sizes)
        return self.method("contiguous", self._seen(whole, read.order, read.merged))

    def _sinks(self, found: Composite, given: dict[str, Node]) -> Node | None:
        """The sinks of heads; None if there are none."""
        sinks = found.attrs["sinks"]
        if sinks is None:
            return None
        if sinks.node is None:
            raise Refused("its sinks are a number")
        whole = self.method("expand", self._seen(given["sinks"], sinks.order, sinks.shape), sinks.sizes)
        return self.method("contiguous", self.method("reshape", whole, (-1,)))

    def _attended(self, outs: Sequence[Node], found: Composite) -> list[Node]:
        """The result in the order of dims that the program has."""
        sizes, order = found.attrs["out"]  # without dims of one element
        views = found.attrs["views"]
        product = views[0].args[0] if views else found.roots[0]
        out = outs[0]
        if len(outs) > 1:  # NaN of queries whose keys are all hidden
            lse = self.method("unsqueeze", self.method("transpose", outs[1], 1, 2), -1)
            out = self.function(torch.where, self.function(operator.gt, lse, -math.inf), out, math.nan)
        made = self.method("permute", self.method("reshape", out, sizes), order)
        made = made if shape_of(example(made)) == product.shape else self.method("reshape", made, product.shape)
        for view in views:
            if view.op == "transpose":
                made = self.method("permute", made, tuple(view.attr))
            elif view.op == "reshape":
                made = self.method("reshape", made, view.shape)
        return [made]

    def _seen(self, array: Node, order: tuple[int, ...], shape: tuple[int, ...]) -> Node:
        """A tensor with its dims in another order, some of them joined."""
        return self.method("reshape", self.method("permute", array, order), shape)

    # Arrays as ops take them

    def array(self, value: Value) -> Node:
        """The node that holds a value, made anew where the program has none.

        Raises:
            Refused: it is none of the program's, and no view or cast of one.
        """
        held = self.lookup(value)
        if held is not None:
            return held
        if value.op == "cast":
            return self.method("to", self.array(value.args[0]), getattr(torch, value.dtype))
        if value.op == "reshape" and sum(isinstance(size, str) for size in value.shape) <= 1:
            return self.method("reshape", self.array(value.args[0]), _sizes(value.shape))
        if value.op == "transpose":
            return self.method("permute", self.array(value.args[0]), tuple(value.attr))
        if value.op == "slice" and all(isinstance(each, int) for each in value.attr):
            return self.part(self.array(value.args[0]), *value.attr)
        if is_of_complex(value):
            return self.function(getattr(torch, str(value.attr)), self.array(value.args[0]))
        if value.op == "contract" and (made := self._product(value)) is not None:
            return made
        raise Refused(f"the program has no tensor of its {value.op}")

    def _product(self, value: Value) -> Node | None:
        """A product of rows and a matrix, or of a batch, such as that of ``baddbmm``; None of another one."""
        (x, other), (over, of, batch) = value.args, value.attr
        if (over, of, batch) == ((2,), (1,), ((0,), (0,))) and x.dtype == other.dtype == value.dtype:
            return self.function(torch.bmm, self.array(x), self.array(other))
        if batch != ((), ()) or len(other.shape) != 2 or over != (len(x.shape) - 1,):
            return None
        function = torch.matmul if of == (0,) else torch.nn.functional.linear
        return self.function(function, self.array(x), self.array(other))

    def _fitted(self, leaf: Leaf, found: Found, copied: bool = False) -> Node:
        """An operand in the shape in which it meets the values, its rows in the results' order."""
        array = self._broadcast(leaf, found, copied)
        rows = self.order and leaf.operand.kind.rows
        array = self.method("permute", array, (*self.order, len(self.order))) if rows else array
        if found.reduces and not (copied or _has_rows(array)):
            return self.method("contiguous", array)  # where Inductor computes it, it writes it so
        return self._aligned(array)

    def _of_example(self, leaf: Leaf, found: Found) -> Node:
        """An operand that all rows of an example share, without their dim."""
        columns = leaf.node.shape[leaf.labels.index(COLUMNS)] if COLUMNS in leaf.labels else 1
        array = self._reshaped(self.array(leaf.node), leaf.node.shape, (*found.rows[:-1], columns))
        return array if _has_rows(array) else self.method("contiguous", array)

    def _broadcast(self, leaf: Leaf, found: Found, copied: bool) -> Node:
        array = self.array(leaf.node)
        if not leaf.operand.kind.rows:
            columns = [size for label, size in zip(leaf.labels, leaf.node.shape, strict=True) if label == COLUMNS]
            return self._reshaped(array, leaf.node.shape, tuple(columns))
        columns = [leaf.node.shape[leaf.labels.index(COLUMNS)]] if COLUMNS in leaf.labels else [1]
        there = tuple(size if i in leaf.labels else 1 for i, size in enumerate(leaf.rows))
        array = self._reshaped(array, leaf.node.shape, (*there, *columns))
        if leaf.rows == found.rows and is_whole(leaf):
            return array
        if not is_whole(leaf):
            array = self._expanded(array, leaf, found, (*leaf.rows, *columns))
        if leaf.rows != found.rows:
            array = self._reshaped(array, (*leaf.rows, *columns), (*found.rows, *columns))
        return self.method("contiguous", array) if copied or not is_expanded(leaf, found) else array

    def _expanded(self, array: Node, leaf: Leaf, found: Found, shape: tuple[Any, ...]) -> Node:
        """A tile, copied to rows that it lacks; one of 16 bits as float32, so that its gradient is summed in that."""
        if any(isinstance(size, str) for size in shape):
            like = next((each for each in found.leaves if each is not leaf and each.node.shape == shape), None)
            if like is None:
                raise Refused("an operand is repeated along sizes that are not known")
            return self.method("expand_as", array, self.array(like.node))
        return self.method("expand", array, shape)

    def _reshaped(self, array: Node, before: tuple[Any, ...], after: tuple[Any, ...]) -> Node:
        if before == after:
            return array
        unknown = sum(isinstance(size, str) for size in after)
        if unknown > 1 or (unknown and 0 in after):
            raise Refused("a reshape to sizes that are not known")
        return self.method("reshape", array, _sizes(after))

    def _aligned(self, array: Node) -> Node:
        if not _has_rows(array):
            raise Refused("an operand's rows are not contiguous")
        return array

    def _as_root(self, out: Node, root: Value, found: Found) -> Node:
        """An output with the shape and the dtype that the program has."""
        if self.order:
            place = [self.order.index(i) for i in range(len(self.order))]
            out = self.method("permute", out, (*place, len(place)))
        shape = shape_of(example(out))
        if shape != root.shape:
            if root.shape[-1:] != shape[-1:] and len(root.shape) == len(shape):
                raise Refused("the program repeats what is computed once per row")
            out = self._reshaped(out, shape, root.shape)
        if root.dtype == "bool":
            return self.function(operator.ne, out, 0)
        dtype = getattr(torch, root.dtype)
        return out if example(out).dtype == dtype else self.method("to", out, dtype)


def _has_rows(array: Node) -> bool:
    """Whether neighbours in the last dim of a tensor are neighbours in memory."""
    value = example(array)
    return not value.ndim or value.shape[-1] == 1 or value.stride(-1) == 1


def linear_op(found: Found, choice: Choice) -> tuple[Op, list[Leaf], tuple[int, ...]]:
    """The op of a product with an epilogue, the leaves that are its operands, and the outputs that the roots are."""
    leaf = found.leaves[choice.product]
    others = [each for i, each in enumerate(found.leaves) if i != choice.product]
    expression = _acc_first(found.expression, choice.product)
    x = leaf.node.args[0]
    tiles = {i: x.dtype for i, operand in enumerate(expression.operands) if operand.kind.rows and operand.kind.columns}
    epilogue = text_of(with_dtypes(expression, tiles, [root.dtype for root in found.roots]))
    layout = by_call.weight_shape(leaf.packed, leaf.node.attr[1] == (0,))
    shapes = tuple(_SHAPES[str(each.operand)] for each in others)
    return recipes.linear(epilogue, shapes, layout), others, tuple(range(len(found.roots)))


def _acc_first(expression: Expression, product: int) -> Expression:
    """The expression with the product as its first operand."""
    order = [product, *(i for i in range(len(expression.operands)) if i != product)]
    graph = Nodes([expression.operands[i] for i in order])
    nodes = copied(expression, graph, lambda node: graph.operand(order.index(node.operand), node.half))
    return graph.finish([nodes[i] for i in expression.outputs])


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes for a reshape; the one that is symbolic follows from the others."""
    return tuple(-1 if isinstance(size, str) else size for size in shape)
