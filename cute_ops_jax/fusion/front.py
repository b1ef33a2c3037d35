"""A jaxpr as a neutral graph: jits are inlined, equations that no primitive says are opaque."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import AxisType, NamedSharding

from cute_ops.fusion.graph import FLOATS, Graph, Node
from cute_ops.fusion.heads import by_columns
from cute_ops.fusion.lengths import EXACT, WHOLE, kept_dims, masks_outside
from cute_ops.fusion.named import number_of
from cute_ops.fusion.orders import reorder
from cute_ops.fusion.scores import Known, may_have_gradient
from cute_ops_jax import _compat
from cute_ops_jax._compat import ClosedJaxpr, JaxprEqn, Literal, Tracer
from cute_ops_jax.fusion.rules import name_loss

# Ours, by the names of JAX's primitives of the same meaning.
_PRIMITIVES = {
    "neg": "negative", "exp": "exp", "exp2": "exp2", "log": "log", "log1p": "log1p", "tanh": "tanh",
    "logistic": "sigmoid", "sqrt": "sqrt", "rsqrt": "rsqrt", "erf": "erf", "erfc": "erfc", "abs": "abs", "sign": "sign",
    "floor": "floor", "square": "square", "add": "add", "add_any": "add", "sub": "subtract", "mul": "multiply",
    "div": "divide", "max": "maximum", "min": "minimum", "eq": "equal", "lt": "less", "le": "less_equal",
    "and": "logical_and", "or": "logical_or", "not": "logical_not",
}  # fmt: skip
_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
_CALLS = ("jit", "pjit", "closed_call", "core_call")
# Functions of JAX whose own derivative is that of their body.
_KNOWN_RULES = ("relu", "silu", "softmax", "_softmax", "log_softmax")
_VALUES = (*FLOATS, "bool")
# Precisions by name that say what our products do anyway: products of 16 bits are summed in float32.
_OWN_PRECISION = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}
# What a gather gives where its index is no element.
_OUTSIDE = {"CLIP": "clip", "PROMISE_IN_BOUNDS": "promised"}


class Step(NamedTuple):
    """An equation of the program.

    Attributes:
        equation: the equation.
        inputs: what it reads.
        call: the call with a derivative of its own in which it stands; None if in none.
    """

    equation: JaxprEqn
    inputs: tuple[Any, ...]
    call: JaxprEqn | None


class Value:
    """The node of a variable of the program; numbers stand for themselves.

    Attributes:
        node: its node in the graph, which equal values share.
        step: the equation that makes it; None of inputs and constants.
        index: which output of the equation, or which input of the program, it is.
        array: of a constant the array.
    """

    __slots__ = ("array", "index", "node", "step")

    def __init__(self, node: Node, step: Step | None = None, index: int = 0, array: Any = None) -> None:
        self.node, self.step, self.index, self.array = node, step, index, array


class Outside(NamedTuple):
    """The program in which a body runs.

    Attributes:
        graph: its graph.
        inputs: by number of the body's inputs the value that one of them is at each run.
        known: the program's arrays.
        numbers: by number of the body's inputs the number that one of them always is.
    """

    graph: Graph
    inputs: Mapping[int, Node]
    known: Known
    numbers: Mapping[int, Any]


class Front:
    """The graph of a jaxpr.

    Attributes:
        graph: the graph.
        inputs: the program's inputs.
        outputs: its outputs: values, or numbers.
        steps: its equations, in order, those of inlined calls in place of the calls.
        values: by node the first value that has it.
        named: by node the last value of it to which ``checkpoint_name`` gives a name.
        names: the nodes and steps of all such names.
        stops: by node of a ``stop_gradient`` its equation.
    """

    def __init__(
        self, closed: ClosedJaxpr, whole: Container[int] = (), passed: Container[int] = (), exact: bool = False,
        *, outside: Outside | None = None,
    ) -> None:  # fmt: skip
        """``whole``: ids of calls with a derivative of their own that are kept; ``passed``: ids of equations of
        ``stop_gradient`` that change no derivative; ``exact``: constants stay as they are rounded; ``outside``: of a
        body, the program of its equation.
        """
        self.graph = Graph(exact, metrics=not exact)
        self.steps: list[Step] = []
        self.values: dict[Node, Value] = {}
        self.named: dict[Node, Value] = {}
        self.names: list[tuple[Node, Step]] = []
        self.stops: dict[Node, JaxprEqn] = {}
        self._whole, self._passed, self._exact = whole, passed, exact
        self._only_values = isinstance(passed, _Every)
        self._call: JaxprEqn | None = None
        self._mesh = _compat.mesh_among(closed)
        self._known: dict[Any, list[Node]] = {}
        avals = [v.aval for v in closed.jaxpr.invars]
        self.inputs = [self._value(self.graph.input(_shape(a), _dtype(a)), None, i) for i, a in enumerate(avals)]
        if outside is not None:
            inputs = {node: self.inputs[i].node for i, node in outside.inputs.items()}
            self.graph.meant = masks_outside(outside.graph, inputs, self.graph)
            fixed = (
                i
                for i, node in outside.inputs.items()
                if not may_have_gradient(node, outside.known, outside.graph.fixed)
            )
            self.graph.fixed = {self.inputs[i].node for i in fixed}
        numbers = {} if outside is None else outside.numbers
        self.outputs = self._run(closed, [numbers.get(i, each) for i, each in enumerate(self.inputs)])
        self.graph.outputs = [each.node for each in self.outputs if isinstance(each, Value)]
        if not (exact or self._only_values):
            self._follow(reorder(self.graph))
            self._follow(by_columns(self.graph))

    def _follow(self, moved: Mapping[Node, Node]) -> None:
        """Let the program's values be the nodes that take the place of theirs."""
        if not moved:
            return
        read = [value for step in self.steps for value in step.inputs]
        for value in [*read, *self.outputs, *self.values.values(), *self.named.values()]:
            if isinstance(value, Value):
                value.node = moved.get(value.node, value.node)
        self.values |= {moved[node]: value for node, value in self.values.items() if node in moved}
        self.named |= {moved[node]: value for node, value in self.named.items() if node in moved}
        self.names = [(moved.get(node, node), step) for node, step in self.names]

    def is_apart(self, equation: JaxprEqn) -> bool:
        """Whether an equation is on another mesh than the program, as those of ``auto_axes`` are: it runs as it is."""
        return self._mesh is not None and _compat.mesh_of(equation) != self._mesh

    def value_of(self, node: Node) -> Value | None:
        """The value that a part reads of a node, with a name if the program gives it one."""
        return self.named.get(node) or self.values.get(node)

    def _value(self, node: Node, step: Step | None, index: int, array: Any = None) -> Value:
        made = Value(node, step, index, array)
        self.values.setdefault(node, made)
        return made

    def _held(self, constant: Any) -> Any:
        """A constant of a jaxpr: a number, or a value of an array."""
        if not isinstance(constant, Tracer) and np.ndim(constant) == 0 and _dtype(constant) in _VALUES:
            return constant
        return self._value(self.graph.input(_shape(constant), _dtype(constant)), None, 0, constant)

    def _node(self, value: Any) -> Node:
        if isinstance(value, Value):
            return value.node
        number = np.asarray(value)
        if number.dtype == bool:
            return self.graph.constant(bool(number))
        return self.graph.constant(float(number), str(number.dtype))

    def _run(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        jaxpr = closed.jaxpr
        env: dict[Any, Any] = {v: self._held(c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)}
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, Literal) else env[v]

        for equation in jaxpr.eqns:
            inputs = [read(v) for v in equation.invars]
            env.update(zip(equation.outvars, self._equation(equation, inputs), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        name = equation.primitive.name
        only_value = self._only_values and name.startswith("custom_vjp_call")
        if (name in _CALLS or only_value) and (body := _inlined(equation)) is not None:
            return self._run(body, inputs)
        if name == "custom_jvp_call" and _has_known_rule(equation) and id(equation) not in self._whole:
            return self._of_call(equation, inputs)
        return self._step(name, equation, inputs)

    def _of_call(self, equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        """The equations of a call with a derivative of its own, which only expressions may compute."""
        before = self._call
        self._call = before or equation
        made = self._run(equation.params["call_jaxpr"], inputs)
        self._call = before
        return made

    def _step(self, name: str, equation: JaxprEqn, inputs: list[Any]) -> Sequence[Any]:
        made = None if self.is_apart(equation) else self._translated(name, equation, inputs)
        if made is None:
            made = self._opaque(name, equation, inputs)
        step = Step(equation, tuple(inputs), self._call)
        self.steps.append(step)
        values = [self._value(node, step, i) for i, node in enumerate(made)]
        if name == "name":
            self.named[made[0]] = values[0]
            self.names.append((made[0], step))
        return values

    def _opaque(self, name: str, equation: JaxprEqn, inputs: list[Any]) -> list[Node]:
        """Nodes of an equation that the graph does not say. Equations without effects that are equal have the same."""
        args = [each.node if isinstance(each, Value) else _number(each) for each in inputs]
        key = None if equation.effects else (name, *args, *equation.params.items())
        try:
            known = self._known.get(key)
        except TypeError:  # something in it has no hash
            key = known = None
        if known is None:
            nodes = [each.node for each in inputs if isinstance(each, Value)]
            known = [self.graph.opaque(name, nodes, _shape(v.aval), _dtype(v.aval)) for v in equation.outvars]
            if name.startswith("custom_vjp_call") and not (self._exact or self._only_values):
                name_loss(self.graph, equation, args, known, _read)
            if key is not None:
                self._known[key] = known
        return known

    def _translated(self, name: str, equation: JaxprEqn, inputs: list[Any]) -> list[Node] | None:
        """Nodes of an equation in the graph's operations; None where these do not say it."""
        if not _has_plain_outputs(equation) or not all(isinstance(each, Value) or _is_exact(each) for each in inputs):
            return None
        aval = equation.outvars[0].aval
        if (primitive := _PRIMITIVES.get(name)) is not None:
            dtype = _dtype(aval)
            if dtype not in _VALUES and not (dtype in WHOLE and primitive in ("add", "subtract")):
                return None
            return [self.graph.primitive(primitive, [self._node(each) for each in inputs], _shape(aval), dtype)]
        if (translate := _TRANSLATIONS.get(name)) is not None:
            nodes = [self._node(each) for each in inputs]
            params = equation.params
            if name == "dot_general":
                shardings = (getattr(v.aval, "sharding", None) for v in equation.invars)
                params = {**params, "placed": any(map(_is_placed, shardings))}
            return translate(self.graph, nodes, params, _shape(aval), _dtype(aval))
        if name == "stop_gradient":
            return self._stop(equation, inputs[0])
        return self._iota(equation) if name == "iota" else None

    def _iota(self, equation: JaxprEqn) -> list[Node]:
        aval, axis = equation.outvars[0].aval, equation.params["dimension"]
        key = ("iota", axis, _shape(aval), _dtype(aval))
        if key not in self._known:
            self._known[key] = [self.graph.iota(*key[1:])]
        return self._known[key]

    def _stop(self, equation: JaxprEqn, x: Any) -> list[Node] | None:
        if not isinstance(x, Value):
            return None
        if id(equation) in self._passed:
            return [x.node]
        made = self.graph.opaque("stop_gradient", [x.node], x.node.shape, x.node.dtype)
        self.stops[made] = equation
        return [made]


class _Every(Container[int]):
    """All numbers."""

    def __contains__(self, number: object) -> bool:
        return True


def _read(closed: ClosedJaxpr) -> tuple[list[Node], list[Node]]:
    """The nodes of the inputs and outputs of a jaxpr of which only values matter."""
    front = Front(closed, passed=_Every())
    return [each.node for each in front.inputs], [front._node(each) for each in front.outputs]


def _inlined(equation: JaxprEqn) -> ClosedJaxpr | None:
    """The body of a call that says nothing but its body; None of another one."""
    params = equation.params
    body = params.get("jaxpr") or params.get("call_jaxpr")
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    layouts = (*params.get("in_layouts", ()), *params.get("out_layouts", ()))
    free = all("Unspecified" in type(each).__name__ for each in shardings) and not any(layouts)
    options = params.get("compiler_options_kvs") or any(params.get("donated_invars", ()))
    return body if isinstance(body, ClosedJaxpr) and free and not options and not body.effects else None


def _has_plain_outputs(equation: JaxprEqn) -> bool:
    """Whether an equation only makes one array, or several by a split."""
    outputs = equation.outvars
    plain = len(outputs) == 1 or equation.primitive.name == "split"
    return plain and not equation.effects and hasattr(outputs[0].aval, "dtype")


def _has_known_rule(equation: JaxprEqn) -> bool:
    """Whether a call with a derivative of its own is one of JAX's functions whose derivative is their body's."""
    if equation.params.get("symbolic_zeros"):
        return False
    where = getattr(equation.params["call_jaxpr"].jaxpr, "debug_info", None)
    name, file = getattr(where, "func_name", ""), getattr(where, "func_filename", None) or ""
    return name in _KNOWN_RULES and "/jax/_src/" in file.replace("\\", "/")


def _is_exact(number: Any) -> bool:
    """Whether a number can be a constant of the graph: a large whole one would become another."""
    if np.ndim(number) or np.iscomplexobj(number):
        return False
    return np.asarray(number).dtype.kind not in "iu" or abs(int(number)) <= EXACT


def _number(number: Any) -> tuple[str, bytes]:
    """A key that tells a number of the program from others."""
    array = np.asarray(number)
    return str(array.dtype), array.tobytes()


def _shape(aval: Any) -> tuple[Any, ...]:
    """Sizes: integers, or what JAX has for one that is not known while it traces, of which equal ones are equal."""
    shape: tuple[Any, ...] = getattr(aval, "shape", ())
    return shape


def _dtype(aval: Any) -> str:
    dtype = getattr(aval, "dtype", None)
    return _name(np.result_type(aval) if dtype is None else dtype)


@cache
def _name(dtype: Any) -> str:
    return str(dtype)


_Made = list[Node] | None
_Args = list[Node]


def _is_placed(sharding: Any) -> bool:
    """Whether a sharding says where a value lies; in a shard map none does."""
    if not isinstance(sharding, NamedSharding):
        return sharding is not None
    return AxisType.Explicit in sharding.mesh.axis_types or any(sharding.spec)


def _is_number_or_whole(node: Node) -> bool:
    """Whether a value is one number everywhere or an array of whole ones, which have no gradient."""
    return node.dtype.startswith(("int", "uint", "bool")) or number_of(node) is not None


def _compare(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    return [g.primitive("less", args[::-1], shape, dtype)] if args[0].dtype in (*_VALUES, *WHOLE) else None


def _at_least(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    return [g.primitive("less_equal", args[::-1], shape, dtype)] if args[0].dtype in (*_VALUES, *WHOLE) else None


def _unequal(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    if args[0].dtype not in FLOATS:
        return None
    return [g.primitive("logical_not", [g.primitive("equal", args, shape, "bool")], shape, dtype)]


def _select(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    which = args[0].args[0] if args[0].op == "broadcast" else args[0]
    if which.op == "constant" and args[1 + int(which.attr)].shape == shape:
        return [args[1 + int(which.attr)]]
    if len(args) != 3 or args[0].dtype != "bool" or dtype not in FLOATS:
        return None
    return [g.primitive("where", [args[0], args[2], args[1]], shape, dtype)]


def _is_finite(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    if args[0].dtype not in FLOATS:
        return None
    size = g.primitive("abs", args, shape, args[0].dtype)
    return [g.primitive("less", [size, g.constant(math.inf)], shape, dtype)]


def _integer_pow(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    made = g.power(args[0], params["y"], shape, dtype) if dtype in FLOATS else None
    return None if made is None else [made]


def _pow(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    x, power = args
    if power.op != "constant" or dtype not in FLOATS or isinstance(power.attr, bool):
        return None
    made = g.power(x, power.attr, shape, dtype)
    return None if made is None else [made]


def _clamp(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    return [g.primitive("clip", [args[1], args[0], args[2]], shape, dtype)] if dtype in FLOATS else None


def _convert(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    return None if _is_placed(params.get("sharding")) else [g.cast(args[0], dtype)]


def _reduce(primitive: str) -> Callable[..., _Made]:
    def translate(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
        axes = tuple(params["axes"])
        if not axes or dtype not in FLOATS or _is_placed(params.get("out_sharding")):
            return None
        return [g.reduce(primitive, args[0], axes, False, dtype)]

    return translate


def _reshape(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    return None if _is_placed(params.get("sharding")) else [g.reshape(args[0], shape)]


def _broadcast(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    if _is_placed(params.get("sharding")) and not _is_number_or_whole(args[0]):
        return None
    return [g.broadcast(args[0], shape, params["broadcast_dimensions"])]


def _transpose(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    return [g.transpose(args[0], params["permutation"])]


def _slice(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    made = args[0]
    steps = params["strides"] or (1,) * len(made.shape)
    bounds = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    for axis, bound in enumerate(bounds):
        start, stop, step = (int(each) if isinstance(each, np.integer) else each for each in bound)
        made = g.slice(made, axis, start, stop, step)
    return [made]


def _split(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    at, made = 0, []
    for size in map(int, params["sizes"]):
        made.append(g.slice(args[0], params["axis"], at, at + size))
        at += size
    return made


def _concatenate(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    return [g.concat(args, params["dimension"], shape)]


def _stack(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    axis = params["axis"]
    each = (*shape[:axis], 1, *shape[axis + 1 :])
    return [g.concat([g.reshape(x, each) for x in args], axis, shape)]


def _tile(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    *others, last = params["reps"]
    return [g.concat(args * last, len(shape) - 1, shape)] if last > 1 and set(others) <= {1} else None


def _argmax(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    x = args[0]
    last = tuple(params["axes"]) == (len(x.shape) - 1,) and x.dtype in FLOATS
    return [g.argmax(x, shape, dtype)] if last else None


def _gather(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    """One element of each row, or a slice at a place that is known."""
    (x, index), dims = args, params["dimension_numbers"]
    last, mode = len(x.shape) - 1, params["mode"].name
    outside = _OUTSIDE.get(mode)
    if mode == "FILL_OR_DROP":
        outside = "nan" if params["fill_value"] is None or np.isnan(params["fill_value"]) else None
    if dtype not in FLOATS or outside is None:
        return None
    if (made := _of_constant_index(g, x, index, dims, params["slice_sizes"])) is not None:
        return [g.reshape(made, shape)]
    rows = tuple(range(last))
    batched, start = tuple(dims.operand_batching_dims), tuple(dims.start_index_map)
    if any(size != 1 for size in params["slice_sizes"]):
        return None
    if batched == rows == tuple(dims.start_indices_batching_dims) and start == (last,):
        picked = index
    elif start == (*rows, last) and not batched and (columns := _indexed(g, index, x.shape)) is not None:
        picked = columns
    else:
        return None
    if math.prod(picked.shape) != math.prod(shape) or x.shape[:-1] != shape[:last]:
        return None
    return [g.reshape(g.pick(x, picked, outside), shape)]


def _of_constant_index(g: Graph, x: Node, index: Node, dims: Any, sizes: Any) -> Node | None:
    """A gather at one place of one axis that the program knows."""
    while index.op in ("reshape", "broadcast"):
        index = index.args[0]
    collapsed = tuple(dims.collapsed_slice_dims)
    if index.op != "constant" or len(collapsed) != 1 or tuple(dims.start_index_map) != collapsed:
        return None
    axis, at = int(collapsed[0]), int(index.attr)
    whole = all(size == whole for i, (size, whole) in enumerate(zip(sizes, x.shape, strict=True)) if i != axis)
    size = x.shape[axis]
    return g.slice(x, axis, at, at + 1) if whole and isinstance(size, int) and 0 <= at < size else None


def _indexed(g: Graph, index: Node, shape: Any) -> Node | None:
    """The columns of an index whose other parts count the rows."""
    last = len(shape) - 1
    if index.op != "concat" or len(index.args) != last + 1 or index.attr != len(index.shape) - 1:
        return None
    parts = enumerate(index.args[:-1])
    return (
        index.args[-1]
        if all(part.shape == (*shape[:-1], 1) and _counts(g, part, axis) for axis, part in parts)
        else None
    )


def _counts(g: Graph, node: Node, axis: int) -> bool:
    """Whether a value counts along one of its dims, and is the same along all others."""
    while node.op in ("reshape", "broadcast"):
        x = node.args[0]
        if node.op == "broadcast":
            if axis not in node.attr or x.shape[node.attr.index(axis)] != node.shape[axis]:
                return False
            axis = node.attr.index(axis)
        else:
            before = {after: axis for axis, after in (kept_dims(node) or {}).items()}
            if axis not in before:
                return False
            axis = before[axis]
        node = x
    call = g.named.get(node)
    return call is not None and call.op == "iota" and call.attrs["axis"] == axis


def _dot_general(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    """``params``: the equation's, and whether its operands are ``placed``, which dims that are joined would not be."""
    precision = params.get("precision")
    own = _OWN_PRECISION.get(args[0].dtype) == getattr(precision, "name", "") and args[0].dtype == args[1].dtype
    if not (precision is None or own) or _is_placed(params.get("out_sharding")):
        return None
    dims, batch = params["dimension_numbers"]
    dims, batch = tuple(map(tuple, dims)), tuple(map(tuple, batch))
    return [g.contract(args[0], args[1], dims, shape, dtype, batch, join=not params["placed"])]


def _vary(g: Graph, args: _Args, params: Any, shape: Any, dtype: str) -> _Made:
    """A number and whole ones are the same on all devices; the gradient of an array is summed over them."""
    return args if _is_number_or_whole(args[0]) else None


_TRANSLATIONS: dict[str, Callable[..., _Made]] = {
    "gt": _compare, "ge": _at_least, "ne": _unequal, "select_n": _select, "is_finite": _is_finite, "clamp": _clamp,
    "integer_pow": _integer_pow, "pow": _pow, "convert_element_type": _convert, "reshape": _reshape,
    "squeeze": _reshape, "expand_dims": _reshape, "broadcast_in_dim": _broadcast, "transpose": _transpose,
    "slice": _slice, "split": _split, "concatenate": _concatenate, "dot_general": _dot_general,
    "pvary": _vary, "pcast": _vary, "stack": _stack, "tile": _tile, "gather": _gather,
    "argmax": _argmax,
    "copy": lambda g, args, params, shape, dtype: [args[0]],
    "name": lambda g, args, params, shape, dtype: [args[0]],
    **{name: _reduce(primitive) for name, primitive in _REDUCTIONS.items()},
}  # fmt: skip
