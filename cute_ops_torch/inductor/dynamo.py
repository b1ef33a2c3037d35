"""A graph of Dynamo, before autograd, as a neutral graph.

Such a graph is a list of calls of torch's functions and methods as the model writes them. It may write in place, switch
gradients or autocast on and off, and draw random numbers. So this front end also knows which node of Dynamo holds each
value, from where on, and until when: values that are written to, and those of another mode, begin anew as opaque ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.utils._python_dispatch import _disable_current_modes

from cute_ops.fusion.graph import FLOATS, Graph
from cute_ops.fusion.graph import Node as Value
from cute_ops.fusion.named import MODE
from cute_ops_torch.inductor import masked_attention
from cute_ops_torch.inductor.attention_mask import ARGUMENTS, known_value, sides_of
from cute_ops_torch.inductor.complex_numbers import as_real
from cute_ops_torch.inductor.effects import (
    DROPOUT,
    MODES,
    example,
    has_effects,
    is_random,
    is_transform,
    is_transformed,
    name_of,
    storage_of,
    written_by,
)
from cute_ops_torch.inductor.front import COPIES, VALUES, VIEWS, Front, dtype_of, parts, shape_of, softmax

# Names of functions and methods of torch whose meaning a name of ATen has.
_ATEN = {
    "truediv": "div", "divide": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub",
    "and_": "logical_and", "or_": "logical_or", "invert": "logical_not", "negative": "neg", "view_as": "view",
    "reshape_as": "view",
    "float": "to", "half": "to", "bfloat16": "to", "type_as": "to", "type": "to", "expand_as": "expand",
    "broadcast_to": "expand", "swapaxes": "transpose", "swapdims": "transpose", "adjoint": "transpose",
    "concat": "cat", "concatenate": "cat", "greater": "gt",
    "less": "lt", "greater_equal": "ge", "less_equal": "le", "not_equal": "ne", "clip": "clamp",
}  # fmt: skip
# Tensors that front ends read by their places, and that a program may give by these names.
_PLACES = {"linear": ("input", "weight", "bias")}
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "einsum")
_TAKES_SIZES = frozenset(
    (*VIEWS, *COPIES, "view_as", "reshape_as", "expand", "expand_as", "broadcast_to", "getitem", "narrow")
)
_WITH_DTYPE = ("sum", "mean")


class Holder(NamedTuple):
    """A node of Dynamo that holds a value, from a place in the graph on."""

    node: Node
    since: int


class DynamoFront(Front):
    """The neutral graph of a module that Dynamo captured.

    Attributes:
        holders: by value the nodes that hold it.
        place: by node its place in Dynamo's graph.
        written: by storage the places at which it is written to.
        barriers: places of nodes that others must not be moved across.
        mode: by node the mode in which it runs; 0 is the one in which the graph begins.
        attentions: by value the calls of torch's attention that are read as what they compute; those that are to stay
            ``whole`` are not.
    """

    def __init__(self, module: GraphModule, exact: bool = False, whole: Collection[Node] = ()) -> None:
        self.holders: dict[Value, list[Holder]] = defaultdict(list)
        self.place: dict[Node, int] = {}
        self.written: dict[int, list[int]] = defaultdict(list)
        self.barriers: list[int] = []
        self.mode: dict[Node, int] = {}
        self._state: list[Any] = []
        self._now = 0
        self._modes: dict[Any, int] = {(): 0}
        self._of_mode: dict[Value, int] = {}
        self._seen: dict[tuple[Value, int], Value] = {}
        # Nodes by the storage of what they hold; noted when something is written to.
        self._aliases: dict[int, list[Node]] = defaultdict(list)
        self._unnoted: list[Node] = []
        self._effects: list[Value] = []
        self._devices: set[torch.device] = set()
        self._transforms = False  # whether one of torch.func's has begun
        self._initial = _initial_mode(module)
        self.attentions: dict[Value, Node] = {}
        self._whole = whole
        super().__init__(module, Graph(exact))
        self.graph.outputs += self._effects

    def stable(self, holder: Holder) -> bool:
        """Whether nothing writes to what a node holds, from then on."""
        if not self.written:
            return True
        return not any(place > holder.since for place in self.written[storage_of(example(holder.node))])

    def known(self, value: Value) -> Any:
        """The array of a value that follows from sizes alone; None of others."""
        for holder in self.holders.get(value, ()):
            anew = holder.since > self.place[holder.node]  # what was written to a tensor after it was made
            if anew or not self.stable(holder) or (array := known_value(self._module.graph, holder.node)) is None:
                continue
            return (array.float() if array.is_floating_point() else array).numpy()
        return None

    def device_of(self, value: Value) -> str:
        """The type of the device that a value lies on; empty where no node holds it."""
        holders = self.holders.get(value)
        return example(holders[0].node).device.type if holders else ""

    def _value(self, node: Node) -> Any:
        self.place[node], self.mode[node] = len(self.place), self._now
        made = example(node)
        if is_tensor := isinstance(made, torch.Tensor):
            self._devices.add(made.device)
        if has_effects(node):
            if node.op == "call_function" and name_of(node.target) in MODES:
                return self._switch(node)
            if writes := written_by(node):
                return self._write(node, writes)
            if is_transform(node.target):
                self._transforms = True
            if is_random(node) or is_transform(node.target) or isinstance(node.target, torch._ops.HigherOrderOperator):
                self.barriers.append(self.place[node])
        beyond = is_tensor and (made.is_nested or (self._transforms and is_transformed(made)))
        opaque = beyond and node.op != "placeholder"
        value = self._opaque(node, made) if opaque else super()._value(node)
        if isinstance(value, Value):
            if value.op not in ("constant", "input", "opaque"):
                if self._now and not any(isinstance(each, Value) for each in self._reads(node)):
                    value = self._opaque(node, made)
                self._of_mode.setdefault(value, self._now)
            else:
                self._of_mode.setdefault(value, self._now if value.op == "opaque" else 0)
            if is_tensor:
                self._hold(node, value)
        if not is_tensor and not isinstance(made, (tuple, list, torch.SymInt, torch.SymFloat, torch.SymBool, int)):
            self._note_effect(node)
        return value

    def _note_effect(self, node: Node) -> None:
        """A node that makes no value is there for what it does."""
        self.barriers.append(self.place[node])
        self._effects += [each for each in self._reads(node) if isinstance(each, Value)]

    def _hold(self, node: Node, value: Value) -> None:
        if example(node).requires_grad:
            self.graph.fixed.discard(value)
        elif value not in self.holders:
            self.graph.fixed.add(value)
        self.holders[value].append(Holder(node, self.place[node]))
        self._unnoted.append(node)

    def _reads(self, node: Node) -> list[Any]:
        return [self.values.get(arg) for arg in node.all_input_nodes]

    def _moves(self, node: Node, made: torch.Tensor) -> bool:
        """Whether an argument of a node lies on another device; numbers that an array is made of may lie on any."""
        if len(self._devices) < 2:
            return False
        given = [each for each in map(example, node.all_input_nodes) if isinstance(each, torch.Tensor)]
        return any(each.device != made.device for each in given if each.ndim or not made.ndim)

    def _switch(self, node: Node) -> None:
        """Gradients or autocast are switched."""
        self.barriers.append(self.place[node])
        name = name_of(node.target)
        if name.startswith("_exit"):
            entered = node.args[0]
            self._state = [each for each in self._state if each[0] is not entered]
        elif name == "_set_grad_enabled":
            self._state = [each for each in self._state if each[0] != "grad"]
            self._state += [("grad", node.args[0])] if node.args[0] != self._initial else []
        else:
            self._state.append((node, name))
        self._now = self._modes.setdefault(tuple(self._state), len(self._modes))

    def _write(self, node: Node, writes: Sequence[Node]) -> Any:
        """A node that writes to others: they, and what shares their memory, have new values from now on."""
        place, made = self.place[node], example(node)
        self.barriers.append(place)
        before = [each for each in self._reads(node) if isinstance(each, Value)]
        own = self.graph.opaque(f"{name_of(node.target)}, which writes in place", before, (), "float32")
        self._effects.append(own)
        for held in self._unnoted:
            self._aliases[storage_of(example(held))].append(held)
        self._unnoted.clear()
        for memory in dict.fromkeys(storage_of(example(written)) for written in writes):
            self.written[memory].append(place)
            for alias in self._aliases[memory]:
                value = example(alias)
                assert value is not None
                anew = self.graph.opaque("what is written in place", [own], shape_of(value), dtype_of(value))
                self.values[alias] = anew
                self._of_mode[anew] = self._now
                self.holders[anew].append(Holder(alias, place))
        if not isinstance(made, torch.Tensor):
            return made
        result = self.graph.opaque("what is written in place", [own], shape_of(made), dtype_of(made))
        self._of_mode[result] = self._now
        self._hold(node, result)
        return result

    def _read(self, node: Node) -> Any:
        """The value of a node; one of another mode is opaque."""
        value = self.values[node]
        if not isinstance(value, Value) or value.op == "constant" or self._of_mode.get(value, 0) == self._now:
            return value
        key = value, self._now
        if key not in self._seen:
            if self._now == 0 and value.op in ("input", "opaque"):
                return value
            self._seen[key] = self.graph.opaque(MODE, [value], value.shape, value.dtype)
            self._of_mode[self._seen[key]] = self._now
            self.holders[self._seen[key]] += [Holder(node, self.place[node])]
        return self._seen[key]

    def _translated(self, node: Node, value: Any) -> Any:
        name = name_of(node.target)
        kinds: set[type] = set()
        args: Any = self._arguments(node.args, kinds)
        kwargs: Any = node.kwargs
        if kwargs:
            kwargs = dict(zip(kwargs, self._arguments(kwargs.values(), kinds), strict=True))
            args, kwargs = _by_place(name, args, kwargs)
        if isinstance(value, (tuple, list)) and name in _SEVERAL and len(args):
            return _SEVERAL[name](self.graph, args, kwargs, value)
        if not isinstance(value, torch.Tensor) or not args or self._moves(node, value):
            return None
        if _are_some(kinds, (torch.Tensor, Node)):
            return None
        if name not in _TAKES_SIZES and _are_some(kinds, _SYMBOLS):
            if not _may_add_epsilon(name, value, (args, kwargs)):
                return None
            args, kwargs = _specialized((args, kwargs))  # an epsilon, of whose value alone the graph then is
        if name in _PRODUCTS:
            args = _in_one_dtype(self.graph, name, args, dtype_of(value))
        if name == "scaled_dot_product_attention":
            return self._attention(node, args, kwargs, value)
        translate = _TRANSLATIONS.get(name)
        if translate is not None:
            return translate(self, args, kwargs, value)
        if name in _WITH_DTYPE:
            args, kwargs = _cast_first(self.graph, name, args, kwargs, value)
        return self._of_name(_ATEN.get(name, name), args, kwargs, value)

    def _attention(self, node: Node, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
        """Attention with a mask that does not follow from sizes alone."""
        given, nodes = (dict(zip(ARGUMENTS, each, strict=False)) for each in (args, node.args))
        mask = (nodes | node.kwargs).get("attn_mask")
        if self.graph.exact or node in self._whole or not isinstance(mask, Node):
            return None
        if sides_of(self._module.graph, mask, node) is not None:
            return None
        made = masked_attention.write_out(self.graph, given | kwargs, self.known)
        self.attentions |= {} if made is None else {made: node}
        return made

    def _arguments(self, given: Iterable[Any], kinds: set[type]) -> tuple[Any, ...]:
        """Arguments with values in place of nodes; the types of others than values and constants are noted."""
        made = []
        for each in given:
            kind = type(each)
            if kind is Node:
                each = self._read(each)
                kind = type(each)
            elif kind not in _CONSTANTS:
                each = torch.fx.map_arg(each, self._read)
            if kind not in _PLAIN:
                kinds |= kinds_of([each])
            made.append(each)
        return tuple(made)


def _may_add_epsilon(name: str, value: torch.Tensor, given: Any) -> bool:
    """Whether a function may add an epsilon, which is a number of the graph: a norm, or a sum of one column. What
    follows from sizes is none.
    """
    if name not in ("layer_norm", "rms_norm") and (name != "add" or shape_of(value)[-1:] != (1,)):
        return False
    symbols = [each for each in torch.utils._pytree.tree_leaves(given) if isinstance(each, _SYMBOLS)]
    # An atom is a symbol, or a number once it has been guarded.
    return all(isinstance(each, torch.SymFloat) and each.node.expr.is_Atom for each in symbols)


def _are_some(kinds: set[type], wanted: tuple[type, ...]) -> bool:
    return bool(kinds) and any(issubclass(kind, wanted) for kind in kinds)


def _initial_mode(module: GraphModule) -> bool | None:
    """Whether gradients are on where the graph begins: what the last switch sets again. None if that is not sure."""
    switches = [
        node.args[0] for node in module.graph.nodes if node.op == "call_function" and name_of(node.target) == MODES[0]
    ]
    known = torch.is_grad_enabled()
    return known if not switches or switches[-1] == known else None


def sweep(graph: FxGraph) -> None:
    """Remove what nothing reads, as long as it neither writes in place nor draws random numbers nor transforms.

    ``Graph.eliminate_dead_code`` would take ``x.add_(y)`` away, too.
    """
    for node in reversed(graph.nodes):
        if node.users or node.op not in ("call_function", "call_method") or is_random(node):
            continue
        made = example(node)
        computes = isinstance(made, torch.Tensor) or (isinstance(made, tuple) and made)
        acts = isinstance(node.target, torch._ops.HigherOrderOperator) or is_transform(node.target)
        if computes and not acts and not written_by(node):
            graph.erase_node(node)


def kinds_of(given: Iterable[Any]) -> set[type]:
    """The types of what is among arguments and in lists of them, besides values and constants."""
    found: set[type] = set()
    for each in given:
        kind = type(each)
        if kind in _PLAIN:
            continue
        if isinstance(each, (tuple, list)):
            found |= kinds_of(each)
        else:
            found.add(kind)
    return found


_CONSTANTS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device, type(...)))
_PLAIN = _CONSTANTS | {Value, slice}
# Numbers that are not known when the graph is compiled.
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _specialized(given: Any) -> Any:
    """Arguments with numbers in place of symbols, which are guarded."""
    return torch.utils._pytree.tree_map_only(_SYMBOLS, guard_scalar, given)


def _by_place(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call whose first ones were given by their names, ``linear(input=x, weight=w)``."""
    names = [*takewhile(kwargs.__contains__, _PLACES.get(name, ())[len(args) :])]
    rest = {key: value for key, value in kwargs.items() if key not in names}
    return (*args, *(kwargs[key] for key in names)), rest


def _in_one_dtype(graph: Graph, name: str, args: Sequence[Any], dtype: str) -> list[Any]:
    """The operands of a product in the dtype of its result, as autocast has them."""
    if dtype not in FLOATS:
        return list(args)
    first = 1 if name in ("addmm", "einsum") else 0
    return [
        graph.cast(arg, dtype) if first <= i < first + 2 and isinstance(arg, Value) and arg.dtype in FLOATS else arg
        for i, arg in enumerate(args)
    ]


def _cast_first(graph: Graph, name: str, args: Any, kwargs: Any, value: torch.Tensor) -> Any:
    """Arguments of a reduction, the first in the result's dtype, as torch computes it."""
    kwargs = {key: given for key, given in kwargs.items() if key != "dtype"}
    if isinstance(args[0], Value) and dtype_of(value) in FLOATS and args[0].dtype in FLOATS:
        args = [graph.cast(args[0], dtype_of(value)), *args[1:]]
    return args, kwargs


def _is_float(*values: Any) -> bool:
    return all(not isinstance(each, Value) or each.dtype in FLOATS for each in values)


def _plain(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    """A function without an effect, such as dropout in evaluation."""
    return front.graph.cast(args[0], dtype_of(value)) if isinstance(args[0], Value) else None


def _dropout(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    return None if training and p != 0 else _plain(front, args, kwargs, value)


def _getitem(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    """Slices, new dims and single indices; no tensors as indices."""
    x, index = args
    if not isinstance(x, Value):
        return None
    index = _each_dim(index, len(x.shape))
    if index is None:
        return None
    axis = 0
    for each in index:
        if each is None:
            continue
        size = x.shape[axis]
        if isinstance(each, int):
            if not isinstance(size, int):
                return None
            x = front.graph.slice(x, axis, each % size, each % size + 1)
        elif each != slice(None):
            bounds = each.indices(size) if isinstance(size, int) and _has_ints(each) else None
            if bounds is None or bounds[2] < 1 or bounds[1] < bounds[0]:
                return None
            x = front.graph.slice(x, axis, *bounds)
        axis += 1
    return front.graph.reshape(x, shape_of(value))


def _each_dim(given: Any, dims: int) -> list[Any] | None:
    """A slice or an integer for each dim, and None for new ones; None of other indices."""
    index: list[Any] = list(given) if isinstance(given, (tuple, list)) else [given]
    if any(not isinstance(each, (slice, int, type(None), type(...))) or isinstance(each, bool) for each in index):
        return None
    if ... in index:
        at, taken = index.index(...), sum(isinstance(each, (slice, int)) for each in index)
        index[at : at + 1] = [slice(None)] * (dims - taken)
    return index


def _has_ints(index: slice) -> bool:
    return all(each is None or isinstance(each, int) for each in (index.start, index.stop, index.step))


def _narrow(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    x, dim, start, length = args
    axis = dim % len(x.shape)
    if not all(isinstance(each, int) for each in (start, length, x.shape[axis])):
        return None
    return front.graph.slice(x, axis, start % x.shape[axis] if start < 0 else start, start % x.shape[axis] + length)


def _view(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    """Another shape. A bias that was added to a product of rows that were joined is added to the rows as they were."""
    x, shape = args[0], shape_of(value)
    if dtype_of(value) != x.dtype:  # the bits as they are
        return None
    if x.op == "primitive" and x.attr == "add" and x.args[0].op == "contract" and len(x.args[1].shape) == 1:
        product = front.graph.reshape(x.args[0], shape)
        if product.op == "contract":
            return front.graph.primitive("add", [product, x.args[1]], shape, x.dtype)
    return front.graph.reshape(x, shape)


def _square(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    return front.graph.power(args[0], 2, shape_of(value), dtype_of(value)) if _is_float(*args) else None


def _matmul(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    left, right = args[:2]
    rank, lead = len(right.shape), right.shape[:-2]
    if rank < 2 or len(left.shape) < 2 or (rank > 2 and left.shape[:-2] != lead):
        return None
    shape, dtype, batch = shape_of(value), dtype_of(value), tuple(range(rank - 2))
    return front.graph.contract(left, right, ((len(left.shape) - 1,), (rank - 2,)), shape, dtype, (batch, batch))


def _baddbmm(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    """``beta input + alpha batch1 @ batch2``, which torch rounds once; an input times zero is not read."""
    given = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
    graph, shape, dtype = front.graph, shape_of(value), dtype_of(value)
    if graph.exact or not _is_float(*given.values()) or dtype not in FLOATS:
        return None
    left, right = (graph.cast(given[name], dtype) for name in ("batch1", "batch2"))
    made = graph.contract(left, right, ((2,), (1,)), shape, dtype, ((0,), (0,)))
    for x, name in ((made, "alpha"), (given["input"], "beta")):
        factor = given.get(name, 1)
        scaled = x if factor == 1 else front.primitive("multiply", [x, factor], x.shape, dtype)
        made = scaled if x is made else made if factor == 0 else front.primitive("add", [made, scaled], shape, dtype)
    return made


def _einsum(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    """A product of two arrays whose letters are each a dim of the batch, summed up, or of one array."""
    given = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    letters = _letters(args[0])
    if letters is None or len(given) != 2 or not all(isinstance(each, Value) for each in given):
        return None
    (a, b, after), (left, right) = letters, given
    shared = [c for c in a if c in b]
    batch, summed = [c for c in shared if c in after], [c for c in shared if c not in after]
    made = [*batch, *(c for c in a + b if c not in shared)]
    alike = all(left.shape[a.index(c)] == right.shape[b.index(c)] for c in shared)  # a size of 1 is repeated
    if set(made) != set(after) or len(summed) != 1 or not alike:
        return None
    shape = tuple(map(dict(zip(after, shape_of(value), strict=True)).__getitem__, made))
    over = tuple(map(a.index, summed)), tuple(map(b.index, summed))
    of_batch = tuple(map(a.index, batch)), tuple(map(b.index, batch))
    product = front.graph.contract(left, right, over, shape, dtype_of(value), of_batch)
    return front.graph.transpose(product, [*map(made.index, after)])


def _letters(equation: str) -> tuple[str, str, str] | None:
    """The letters of two arrays and of their product; None of other equations, or where one repeats a letter."""
    before, _, after = equation.replace(" ", "").partition("->")
    a, _, b = before.partition(",")
    unique = all(each.isalpha() and len(set(each)) == len(each) for each in (a, b, after))
    return (a, b, after) if unique else None


def _rms_norm(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    given = dict(zip(("input", "normalized_shape", "weight", "eps"), args, strict=False)) | kwargs
    x, eps = given["input"], given.get("eps")
    if eps is None:
        eps = torch.finfo(torch.float32).eps  # whatever the dtype of x is
    return _normalised(front, x, given, float(eps), value, centred=False)


def _layer_norm(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    given = dict(zip(("input", "normalized_shape", "weight", "bias", "eps"), args, strict=False)) | kwargs
    return _normalised(front, given["input"], given, float(given.get("eps", 1e-5)), value, centred=True)


def _normalised(front: Front, x: Value, given: Any, eps: float, value: torch.Tensor, centred: bool) -> Value | None:
    """A norm over the last dim, computed in float32 and rounded once."""
    sizes = given["normalized_shape"]
    if (
        len(sizes if isinstance(sizes, (tuple, list)) else [sizes]) != 1
        or not _is_float(x)
        or dtype_of(value) not in FLOATS
    ):
        return None
    graph, row, wide = front.graph, (*x.shape[:-1], 1), "float32"
    y = graph.cast(x, wide)
    if centred:
        y = graph.primitive("subtract", [y, graph.reduce("mean", y, (-1,), True, wide)], x.shape, wide)
    square = graph.primitive("square", [y], x.shape, wide)
    total = graph.primitive("add", [graph.reduce("mean", square, (-1,), True, wide), graph.constant(eps)], row, wide)
    y = graph.primitive("multiply", [y, graph.primitive("rsqrt", [total], row, wide)], x.shape, wide)
    for word, name in (("multiply", "weight"), ("add", "bias")):
        if given.get(name) is not None:
            y = graph.primitive(word, [y, given[name]], x.shape, wide)
    return graph.cast(y, dtype_of(value))


def _softmax(logarithm: bool) -> Callable[..., Value | None]:
    """Over the last dim, computed in float32 and rounded once."""

    def translate(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
        x, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
        shape, dtype = shape_of(value), dtype_of(value)
        if dim is None or dim % len(shape) != len(shape) - 1 or dtype not in FLOATS or x.dtype not in FLOATS:
            return None
        graph = front.graph
        return graph.cast(softmax(graph, graph.cast(_unshifted(x), "float32"), "float32", logarithm), dtype)

    return translate


def _unshifted(x: Value) -> Value:
    """The rows from which a program subtracts their ``max(-1, keepdim=True)``, which changes no softmax; else x."""
    if (x.op, x.attr) != ("primitive", "subtract"):
        return x
    rows, most = x.args
    is_most = (most.op, most.attr, most.args) == ("opaque", "max", (rows,)) and most.dtype == rows.dtype
    return rows if is_most and most.shape == (*x.shape[:-1], 1) and rows.shape == x.shape else x


def _filled(number: float | None = None) -> Callable[..., Value | None]:
    """A new tensor of one number, its last argument if none is given."""

    def translate(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
        with_number = kwargs.get("fill_value", args[-1])
        fill, dtype = with_number if number is None else number, dtype_of(value)
        if dtype not in VALUES or value.requires_grad or not isinstance(fill, (bool, int, float)):
            return None
        with _disable_current_modes():  # a pass may run where tensors are fake
            held = torch.tensor(fill, dtype=value.dtype, device="cpu").item()  # as its dtype has it
        return front.graph.broadcast(front.graph.constant(held, dtype), shape_of(value))

    return translate


def _addcmul(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    shape, dtype, scale = shape_of(value), dtype_of(value), kwargs.get("value", 1)
    if not _is_float(*args) or dtype not in FLOATS or shape not in (args[1].shape, args[2].shape):
        return None
    product = front.primitive("multiply", args[1:3], shape, dtype)
    product = product if scale == 1 else front.primitive("multiply", [product, scale], shape, dtype)
    return front.primitive("add", [args[0], product], shape, dtype)


def _leaky(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    slope = args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)
    shape, dtype = shape_of(value), dtype_of(value)
    if dtype not in FLOATS:
        return None
    positive = front.primitive("less", [0.0, args[0]], shape, "bool")
    return front.primitive(
        "where", [positive, args[0], front.primitive("multiply", [args[0], slope], shape, dtype)], shape, dtype
    )


def _turned(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    order = args[1:] if len(args) > 2 or isinstance(args[1], int) else args[1]
    return front.graph.transpose(args[0], order)


def _stack(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    """Values side by side in a new dim."""
    graph, shape = front.graph, shape_of(value)
    axis = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(shape)
    if not all(isinstance(each, Value) and each.dtype == dtype_of(value) for each in args[0]):
        return None
    return graph.concat([graph.reshape(each, (*shape[:axis], 1, *shape[axis + 1 :])) for each in args[0]], axis, shape)


def _unbound(graph: Graph, args: Any, kwargs: Any, value: Sequence[torch.Tensor]) -> tuple[Value, ...] | None:
    """The values that a dim has side by side."""
    x, axis = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(args[0].shape)
    return tuple(graph.reshape(graph.slice(x, axis, k, k + 1), shape_of(each)) for k, each in enumerate(value))


def _repeated(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    """``repeat`` along one dim: copies one after the other."""
    x, times = args[0], args[1:] if len(args) != 2 or isinstance(args[1], int) else args[1]
    shape, repeated = shape_of(value), [axis for axis, each in enumerate(times) if each != 1]
    if len(times) != len(x.shape) or len(repeated) != 1 or not 1 < times[repeated[0]] <= _COPIES:
        return None
    return front.graph.concat([x] * times[repeated[0]], repeated[0], shape)


def _each_repeated(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    """``repeat_interleave`` along one dim: each element's copies beside it."""
    x, times, axis = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("dim")
    if not isinstance(times, int) or axis is None:
        return None
    before, after = x.shape[: axis % len(x.shape) + 1], x.shape[axis % len(x.shape) + 1 :]
    dims = (*range(len(before)), *range(len(before) + 1, len(x.shape) + 1))
    return front.graph.reshape(front.graph.broadcast(x, (*before, times, *after), dims), shape_of(value))


def _attribute(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
    x, name = args[:2]
    if name not in ("T", "mT") or not isinstance(x, Value) or len(x.shape) < 2 or (name == "T" and len(x.shape) > 2):
        return None
    rank = len(x.shape)
    return front.graph.transpose(x, (*range(rank - 2), rank - 1, rank - 2))


def _maximum(word: str) -> Callable[..., Value | None]:
    """Of two tensors; that of one is a reduction of another kind."""

    def translate(front: Front, args: Any, kwargs: Any, value: torch.Tensor) -> Value | None:
        if len(args) != 2 or not all(isinstance(each, Value) for each in args) or dtype_of(value) not in FLOATS:
            return None
        return front.primitive(word, args, shape_of(value), dtype_of(value))

    return translate


_COPIES = 4  # of a value, that are each read as it
_SEVERAL: dict[str, Callable[..., Any]] = {
    "unbind": _unbound, **dict.fromkeys(("chunk", "split", "tensor_split"), parts),
}  # fmt: skip
_TRANSLATIONS: dict[str, Callable[..., Value | None]] = {
    "stack": _stack, "repeat": _repeated, "repeat_interleave": _each_repeated, "view_as_real": as_real,
    "getitem": _getitem, "narrow": _narrow, "square": _square, "matmul": _matmul, "rms_norm": _rms_norm,
    "layer_norm": _layer_norm, "addcmul": _addcmul, "leaky_relu": _leaky, "permute": _turned, "getattr": _attribute,
    "max": _maximum("maximum"), "min": _maximum("minimum"), "softmax": _softmax(logarithm=False),
    "log_softmax": _softmax(logarithm=True), "detach": lambda *given: None, "view": _view, "reshape": _view,
    "einsum": _einsum, "baddbmm": _baddbmm, **dict.fromkeys(DROPOUT, _dropout),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), _filled(0.0)),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled(1.0)),
    **dict.fromkeys(("full", "new_full", "full_like", "tensor", "scalar_tensor"), _filled()),
}  # fmt: skip
