"""An fx graph of ATen operators, from make_fx or AOTAutograd, as a neutral graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from cute_ops.fusion.graph import FLOATS, NARROW, Graph
from cute_ops.fusion.graph import Node as Value
from cute_ops_torch.inductor.effects import example

_PRIMITIVES = {
    "neg": "negative", "silu": "silu", "sigmoid": "sigmoid", "tanh": "tanh", "exp": "exp", "exp2": "exp2", "log": "log",
    "log1p": "log1p", "sqrt": "sqrt", "rsqrt": "rsqrt", "reciprocal": "reciprocal", "relu": "relu", "abs": "abs",
    "sign": "sign", "floor": "floor", "erf": "erf", "square": "square", "logical_not": "logical_not",
    "bitwise_not": "logical_not", "mul": "multiply", "maximum": "maximum", "minimum": "minimum", "eq": "equal",
    "lt": "less", "le": "less_equal", "logical_and": "logical_and", "bitwise_and": "logical_and",
    "logical_or": "logical_or", "bitwise_or": "logical_or", "where": "where",
}  # fmt: skip
_REDUCTIONS = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min"}
VIEWS = frozenset(("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten"))
COPIES = frozenset((
    "clone", "detach", "contiguous", "alias", "lift_fresh_copy", "lift_fresh", "_to_copy", "convert_element_type", "to",
))  # fmt: skip
VALUES = (*FLOATS, "bool")
# Of decompositions; whatever else a program writes in place was made functional before.
_IN_PLACE = ("add_", "mul_", "sub_", "div_")
Args = Sequence[Any]


def shape_of(value: torch.Tensor) -> tuple[Any, ...]:
    """Sizes as ints, or as texts where they are symbolic."""
    shape = value.shape
    for size in shape:
        if type(size) is not int:
            return tuple(map(_size, shape))
    return tuple(shape)


def _size(size: int | torch.SymInt) -> int | str:
    known = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
    return str(size) if known is None else int(known)


def dtype_of(value: torch.Tensor) -> str:
    return _name_of_dtype(value.dtype)


@cache
def _name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Front:
    """The graph of a module of ATen operators.

    Attributes:
        graph: the graph; its outputs are the tensors that the module returns.
        values: by fx node its value, a tuple of values for a node with several results.
        inputs: by value the fx node of an input.
    """

    def __init__(self, module: GraphModule, graph: Graph | None = None) -> None:
        self.graph = Graph() if graph is None else graph
        self.values: dict[Node, Any] = {}
        self.inputs: dict[Value, Node] = {}
        self._module = module
        for node in module.graph.nodes:
            if node.op == "output":
                leaves = torch.utils._pytree.tree_leaves(node.args)
                made = [self._read(leaf) for leaf in leaves if isinstance(leaf, Node)]
                self.graph.outputs = [each for each in made if isinstance(each, Value)]
            else:
                self.values[node] = self._value(node)

    def _value(self, node: Node) -> Any:
        value = example(node)
        if node.op == "get_attr":
            if not _may_be_set(node):
                value = getattr(self._module, str(node.target), value)
            if type(value) is torch.Tensor and value.numel() == 1 and dtype_of(value) in VALUES and not _is_fake(value):
                with _disable_current_modes():  # a pass may run where tensors are fake
                    return self._constant(value.item(), dtype_of(value))
        if node.op in ("placeholder", "get_attr"):
            made = self.graph.input(shape_of(value), dtype_of(value)) if isinstance(value, torch.Tensor) else value
            if isinstance(made, Value):
                self.inputs[made] = node
            return made
        if node.target is operator.getitem and isinstance(whole := self.values[node.args[0]], tuple):  # type: ignore[index]
            return whole[node.args[1]]  # type: ignore[index]
        made = self._translated(node, value)
        return self._opaque(node, value) if made is None else made

    def _read(self, node: Node) -> Any:
        """The value of a node that another reads."""
        return self.values[node]

    def _constant(self, number: Any, dtype: str = "float32") -> Value:
        return self.graph.constant(number if isinstance(number, bool) else float(number), dtype)

    def _opaque(self, node: Node, value: Any) -> Any:
        args = [each for arg in node.all_input_nodes for each in _flat(self._read(arg))]
        name = _name(node.target)

        def of(each: Any) -> Any:
            if isinstance(each, torch.Tensor):
                return self.graph.opaque(name, args, shape_of(each), dtype_of(each))
            # A dropout that a checkpoint repeats gives its results beside the state of the random numbers.
            return tuple(map(of, each)) if isinstance(each, (tuple, list)) else each

        return of(value)

    def _translated(self, node: Node, value: Any) -> Any:
        both: Any = torch.fx.map_arg((node.args, node.kwargs), self._read)
        args, kwargs = both
        return self._of_name(_name(node.target), args, kwargs, value)

    def _of_name(self, name: str, args: Args, kwargs: Any, value: Any) -> Any:
        """The value of a call of ATen's function of this name; None of one that no primitive says."""
        several = _SEVERAL.get(name)
        if several is not None:
            return several(self.graph, args, kwargs, value)
        if not isinstance(value, torch.Tensor) or not args:
            return None
        for arg in args:  # a tensor that the graph does not have
            if type(arg) is not Value and isinstance(arg, torch.Tensor):
                return None
        shape, dtype = shape_of(value), dtype_of(value)
        if name in _IN_PLACE:  # on a tensor that the graph made, and reads nowhere else
            name = name[:-1]
        if name in VIEWS:
            return self.graph.reshape(args[0], shape)
        if name in COPIES:
            return self.graph.cast(args[0], dtype)
        translate = _TRANSLATIONS.get(name)
        if translate is not None:
            return translate(self.graph, args, kwargs, shape, dtype)
        return self.of_elements(name, args, kwargs, shape, dtype)

    def of_elements(self, name: str, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value | None:
        """The value of a function of elements; None of another one."""
        if dtype not in VALUES:
            return None
        for arg in args:
            if type(arg) is Value and arg.dtype not in VALUES:
                return None
        if name in _PRIMITIVES:
            return self.graph.primitive(_PRIMITIVES[name], [*map(self._operand, args)], shape, dtype)
        elementwise = _ELEMENTWISE.get(name)
        return None if elementwise is None else elementwise(self, args, kwargs, shape, dtype)

    def _operand(self, arg: Any) -> Value:
        return arg if isinstance(arg, Value) else self._constant(arg)

    def primitive(self, name: str, args: Args, shape: Any, dtype: str) -> Value:
        """A primitive of values and numbers."""
        return self.graph.primitive(name, [*map(self._operand, args)], shape, dtype)


def _may_be_set(node: Node) -> bool:
    """Whether an attribute is a parameter or a buffer of an exported program, which may get other values later."""
    return "val" in node.meta and not str(node.target).startswith(("_tensor_constant", "lifted_tensor"))


def _is_fake(value: torch.Tensor) -> bool:
    return type(value).__name__ == "FakeTensor" or value.is_meta


def _flat(value: Any) -> list[Value]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [each for each in values if isinstance(each, Value)]


@cache
def _name(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    full = schema.name if schema is not None else getattr(target, "__name__", str(target))
    return str(full).rpartition("::")[2]


def _get(args: Args, kwargs: Any, place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _sum(primitive: str, turned: bool = False) -> Callable[..., Value]:
    """A sum or a difference of two operands, the second one times ``alpha``."""

    def translate(front: Front, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
        x, y = args[1::-1] if turned else args[:2]
        if (alpha := kwargs.get("alpha", 1)) != 1:
            scaled = x if turned else y
            made = front.primitive(
                "multiply", [scaled, alpha], scaled.shape if isinstance(scaled, Value) else (), dtype
            )
            x, y = (made, y) if turned else (x, made)
        return front.primitive(primitive, [x, y], shape, dtype)

    return translate


def _divide(front: Front, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value | None:
    return None if kwargs.get("rounding_mode") else front.primitive("divide", args, shape, dtype)


def _power(front: Front, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value | None:
    x, power = args
    return front.graph.power(x, power, shape, dtype) if isinstance(x, Value) and not isinstance(power, Value) else None


def _gelu(front: Front, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
    form = _get(args, kwargs, 1, "approximate", "none")
    return front.primitive("gelu_tanh" if form == "tanh" else "gelu", args[:1], shape, dtype)


def _clamp(front: Front, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
    low, high = _get(args, kwargs, 1, "min"), _get(args, kwargs, 2, "max")
    if low is not None and high is not None:
        return front.primitive("clip", [args[0], low, high], shape, dtype)
    return front.primitive(
        "minimum" if low is None else "maximum", [args[0], high if low is None else low], shape, dtype
    )


def _unequal(front: Front, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
    return front.primitive("logical_not", [front.primitive("equal", args, shape, "bool")], shape, dtype)


def _softmax(logarithm: bool) -> Callable[..., Value | None]:
    def translate(front: Front, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value | None:
        x, dim = args[0], args[1] % len(shape)
        if dim != len(shape) - 1 or (len(args) > 2 and args[2] is True):
            return None
        return softmax(front.graph, x, dtype, logarithm)

    return translate


def softmax(graph: Graph, x: Value, dtype: str, logarithm: bool = False) -> Value:
    """The softmax of rows, or its logarithm, computed in a dtype from their differences from the largest element."""
    shape, row = x.shape, (*x.shape[:-1], 1)
    shifted = graph.primitive("subtract", [x, graph.reduce("max", x, (-1,), True, dtype)], shape, dtype)
    exponential = graph.primitive("exp", [shifted], shape, dtype)
    total = graph.reduce("sum", exponential, (-1,), True, dtype)
    if logarithm:
        return graph.primitive("subtract", [shifted, graph.primitive("log", [total], row, dtype)], shape, dtype)
    return graph.primitive("divide", [exponential, total], shape, dtype)


_ELEMENTWISE: dict[str, Callable[..., Value | None]] = {
    "add": _sum("add"),
    "sub": _sum("subtract"),
    "rsub": _sum("subtract", turned=True),
    "div": _divide,
    "pow": _power,
    "gelu": _gelu,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda front, args, kwargs, *rest: _clamp(front, (args[0], None, args[1]), {}, *rest),
    "gt": lambda front, args, kwargs, *rest: front.primitive("less", args[::-1], *rest),
    "ge": lambda front, args, kwargs, *rest: front.primitive("less_equal", args[::-1], *rest),
    "ne": _unequal,
    "masked_fill": lambda front, args, kwargs, *rest: front.primitive("where", [args[1], args[2], args[0]], *rest),
    "_softmax": _softmax(logarithm=False),
    "_log_softmax": _softmax(logarithm=True),
}


def _expand(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
    return graph.broadcast(args[0], shape)


def _broadcast_in_dim(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
    return graph.broadcast(args[0], shape, args[2])


def _permute(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
    return graph.transpose(args[0], args[1])


def _transpose(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
    order = list(range(len(shape)))
    i, j = (args[1], args[2]) if len(args) > 2 else (0, -1)
    if len(order) > 1:
        order[i], order[j] = order[j], order[i]
    return graph.transpose(args[0], order)


def _slice(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
    x, dim = args[0], _get(args, kwargs, 1, "dim", 0)
    start, stop, step = _get(args, kwargs, 2, "start"), _get(args, kwargs, 3, "end"), _get(args, kwargs, 4, "step", 1)
    size, axis = x.shape[dim], dim % len(x.shape)
    if not all(each is None or isinstance(each, int) for each in (size, start, stop, step)):
        return x if (start in (0, None) and shape == x.shape) else graph.opaque("slice", [x], shape, dtype)
    first = 0 if start is None else start
    last = size if stop is None else min(stop, size)
    return graph.slice(x, axis, first % size if first < 0 else first, last + size if last < 0 else last, step)


def _reduce(primitive: str) -> Callable[..., Value | None]:
    def translate(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value | None:
        dims = _get(args, kwargs, 1, "dim")
        if dims is None or dtype not in FLOATS or args[0].dtype not in FLOATS:
            return None
        axes = [dims] if isinstance(dims, int) else list(dims)
        return (
            graph.reduce(primitive, args[0], axes, bool(_get(args, kwargs, 2, "keepdim", False)), dtype)
            if axes
            else None
        )

    return translate


def _var(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value | None:
    """The mean of squares of differences from the mean, over rows, without a correction."""
    x, dims = args[0], _get(args, kwargs, 1, "dim")
    axes = [axis % len(x.shape) for axis in ([dims] if isinstance(dims, int) else dims or [])]
    correction = kwargs.get("correction", 0 if _get(args, kwargs, 2, "unbiased") is False else 1)
    if axes != [len(x.shape) - 1] or correction or dtype not in FLOATS:
        return None
    return _variance(graph, x, bool(kwargs.get("keepdim", _get(args, {}, 3, "keepdim", False))), dtype)[0]


def _variance(graph: Graph, x: Value, keepdims: bool, dtype: str) -> tuple[Value, Value, Value]:
    """The variance of each row, its mean, and the differences from it."""
    mean = graph.reduce("mean", x, (-1,), True, dtype)
    centred = graph.primitive("subtract", [x, mean], x.shape, dtype)
    squares = graph.primitive("square", [centred], x.shape, dtype)
    return graph.reduce("mean", squares, (-1,), keepdims, dtype), mean, centred


def _mm(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
    left, right = args[:2]
    return graph.contract(left, right, ((len(left.shape) - 1,), (0,)), shape, dtype)


def _bmm(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
    return graph.contract(args[0], args[1], ((2,), (1,)), shape, dtype, ((0,), (0,)))


def _addmm(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value | None:
    if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1 or _rounds_once(graph, dtype):
        return None
    return graph.primitive("add", [_mm(graph, args[1:], {}, shape, dtype), args[0]], shape, dtype)


def _rounds_once(graph: Graph, dtype: str) -> bool:
    """Whether a product has to stay with its bias, which torch adds before it rounds."""
    return graph.exact and dtype in NARROW


def _linear(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value | None:
    x, weight, bias = args[0], args[1], _get(args, kwargs, 2, "bias")
    if bias is not None and _rounds_once(graph, dtype):
        return None
    made = graph.contract(x, weight, ((len(x.shape) - 1,), (1,)), shape, dtype)
    return made if bias is None else graph.primitive("add", [made, bias], shape, dtype)


def _full(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value | None:
    number = args[-1]
    if isinstance(number, Value) or dtype not in VALUES or not isinstance(number, (bool, int, float)):
        return None
    return graph.broadcast(graph.constant(number if isinstance(number, bool) else float(number), dtype), shape)


def _concatenated(graph: Graph, args: Args, kwargs: Any, shape: Any, dtype: str) -> Value:
    return graph.concat(args[0], _get(args, kwargs, 1, "dim", 0) % len(shape), shape)


_TRANSLATIONS: dict[str, Callable[..., Value | None]] = {
    "expand": _expand, "broadcast_in_dim": _broadcast_in_dim, "permute": _permute, "transpose": _transpose,
    "t": _transpose, "slice": _slice, "var": _var, "mm": _mm, "bmm": _bmm, "addmm": _addmm, "linear": _linear,
    "full": _full, "scalar_tensor": _full, "cat": _concatenated,
    **{name: _reduce(primitive) for name, primitive in _REDUCTIONS.items()},
}  # fmt: skip


def parts(graph: Graph, args: Args, kwargs: Any, value: Any) -> Any:
    """The tensors of ``chunk`` and ``split``."""
    x, axis = args[0], _get(args, kwargs, 2, "dim", 0) % len(args[0].shape)
    at, made = 0, []
    for part in value:
        size = part.shape[axis]
        if not isinstance(size, int):
            return None
        made.append(graph.slice(x, axis, at, at + size))
        at += size
    return tuple(made)


def _normalised(graph: Graph, args: Args, kwargs: Any, value: Any) -> Any:
    """``native_layer_norm``: rows, their means and the reciprocal roots of their variances, computed in float32."""
    x, sizes, weight, bias, eps = args
    if len(sizes) != 1:
        return None
    row = (*x.shape[:-1], 1)
    variance, mean, centred = _variance(graph, x, True, "float32")
    rstd = graph.primitive(
        "rsqrt", [graph.primitive("add", [variance, graph.constant(eps)], row, "float32")], row, "float32"
    )
    made = graph.primitive("multiply", [centred, rstd], x.shape, "float32")
    if weight is not None:
        made = graph.primitive("multiply", [made, weight], x.shape, "float32")
    if bias is not None:
        made = graph.primitive("add", [made, bias], x.shape, "float32")
    return graph.cast(made, dtype_of(value[0])), mean, rstd


def _var_mean(graph: Graph, args: Args, kwargs: Any, value: Any) -> Any:
    x, dims, keepdims = args[0], _get(args, kwargs, 1, "dim"), kwargs.get("keepdim", False)
    if not dims or [axis % len(x.shape) for axis in dims] != [len(x.shape) - 1] or kwargs.get("correction", 1):
        return None
    variance, mean, _ = _variance(graph, x, keepdims, dtype_of(value[0]))
    return variance, mean if keepdims else graph.reduce("mean", x, (-1,), False, dtype_of(value[1]))


_SEVERAL: dict[str, Callable[..., Any]] = {
    "split": parts, "split_with_sizes": parts, "chunk": parts, "native_layer_norm": _normalised,
    "var_mean": _var_mean,
}  # fmt: skip
