"""Functions of scalars for torch, ``score_mod`` and ``mask_mod`` of its attention, as functions in array-API style.

Such a function is traced to a graph of ATen operators on scalars, of which each is an operator or a function of ``xp``.
Tensors that it reads by index become captured arrays, which have no negative indices: one that may be negative is
compared with 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from cute_ops.errors import first_line
from cute_ops.expressions.captured import Captured, Whole
from cute_ops.expressions.symbols import TraceError

Tensor = torch.Tensor
Function = Callable[..., Any]


class ScalarFunction:
    """A function in array-API style, ``function(xp, *values, *captured)``.

    Args:
        function: of torch's tensors without dims.
        name: what messages call it.
        scores: how many of its arguments are floats; four whole numbers follow.

    Attributes:
        tensors: those that it reads.

    Raises:
        TraceError: it does what a function of scores cannot.
    """

    def __init__(self, function: Function, name: str, scores: int) -> None:
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.name, self.tensors, self.numbers = f"{name} {self.__name__}", list[Tensor](), dict[str, float | bool]()
        self.arguments, self.reads = scores + 4, dict[str, int]()
        self.graph = self._traced(function, scores)
        self._read_constants()
        self.naturals = self._found_naturals(scores)

    def _traced(self, function: Function, scores: int) -> GraphModule:
        dtypes = [torch.float32] * scores + [torch.int32] * 4

        def run(*given: Tensor) -> Any:
            with _Indexing():
                return function(*given)

        try:
            with torch.no_grad():
                return make_fx(run)(*(torch.zeros((), dtype=dtype) for dtype in dtypes))
        except RuntimeError as error:
            if "value out of a tracing tensor" not in str(error):
                raise
            self._refuse("Python's control flow on a value, or its number", "write torch.where(condition, a, b)", error)

    def _read_constants(self) -> None:
        for node in self.graph.graph.nodes:
            if node.op != "get_attr" or node.target in self.reads or node.target in self.numbers:
                continue
            tensor = getattr(self.graph, node.target)
            if all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users) and not tensor.ndim:
                self.numbers[node.target] = tensor.item()  # written in the function
                continue
            places = [i for i, known in enumerate(self.tensors) if known is tensor]
            self.reads[node.target] = places[0] if places else len(self.tensors)
            if not places:
                self.tensors.append(tensor)

    def _found_naturals(self, scores: int) -> set[Node]:
        """The values that are at least 0 whatever the coordinates are, as far as operators tell."""
        found: set[Node] = set()
        for i, node in enumerate(self.graph.graph.nodes):
            name, args = _operator(node), node.args
            if node.op == "placeholder":
                is_natural = i >= scores
            elif node.op == "get_attr":
                is_natural = self.numbers.get(node.target, -1) >= 0
            else:
                args = args[1:] if name in ("remainder", "clamp", "where") else args  # divisor, bounds, values
                is_natural = name in _NATURAL or (
                    name in _OF_NATURALS and "alpha" not in node.kwargs
                    and all(x in found if isinstance(x, Node) else x is not None and x >= 0 for x in args)
                )  # fmt: skip
            found |= {node} if is_natural else set()
        return found

    def of(self, every: Sequence[Tensor]) -> Function:
        """The function, which gets these tensors in place of its own."""
        places = [next(i for i, tensor in enumerate(every) if tensor is own) for own in self.tensors]

        def function(xp: Any, *given: Any) -> Any:
            captured = given[self.arguments :]
            return self._run(xp, given[: self.arguments], [captured[i] for i in places])

        function.__name__ = function.__qualname__ = self.__name__
        return function

    def _run(self, xp: Any, given: Sequence[Any], captured: Sequence[Any]) -> Any:
        values: dict[Node, Any] = {}
        arguments = iter(given)
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(arguments)
            elif node.op == "get_attr":
                number = node.target in self.numbers
                values[node] = self.numbers[node.target] if number else captured[self.reads[node.target]]
            elif node.op == "output":
                return self._element(torch.fx.node.map_arg(node.args[0], values.__getitem__))
            else:
                try:
                    values[node] = self._computed(xp, node, values)
                except TraceError as error:
                    if self.name in str(error):
                        raise
                    what = first_line(error).partition("cannot be traced: ")[2]
                    self._refuse(f"{what} ({node.target})", str(error).rpartition("\n  ")[2])

    def _computed(self, xp: Any, node: Node, values: Mapping[Node, Any]) -> Any:
        filled: Any = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        args, options = filled
        name = _operator(node)
        if name == "index":
            if any(i is None for i in args[1]):
                self._word(node)
            return args[0][self._counted_from_the_first(xp, node, *args)]
        args = [self._element(x) for x in args]
        function = _FUNCTIONS.get(name)
        return self._word(node) if function is None else function(xp, *args, **_computing(options))

    def _counted_from_the_first(self, xp: Any, read: Node, array: Any, index: Sequence[Any]) -> tuple[Any, ...]:
        """The index of a read as captured arrays have it: torch counts a negative one from the end."""
        nodes: Any = read.args[1]
        found = []
        for axis, (i, node) in enumerate(zip(index, nodes, strict=True)):
            if isinstance(i, int | float):
                i = i + array.shape[axis] if i < 0 else i
            elif node not in self.naturals:
                i = xp.where(i < 0, i + array.shape[axis], i)
            found.append(i)
        return tuple(found)

    def _element(self, x: Any) -> Any:
        """A captured array without dims as its element."""
        return x[0] if isinstance(x, Captured) else x

    def _word(self, node: Node) -> NoReturn:
        self._refuse(f"{node.target} is no function of scores", f"write it with {', '.join(sorted(_FUNCTIONS))}")

    def _refuse(self, what: str, instead: str, error: Exception | None = None) -> NoReturn:
        said = "" if error is None else f"\n  {first_line(error)}"
        raise TraceError(f"cute.flex_attention: {self.name} cannot be traced: {what}.{said}\n  {instead}") from error


class _Indexing(TorchFunctionMode):
    """Reads tensors by scalars as a graph shows it: torch itself would ask for the scalars' numbers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__getitem__:
            array, index = args
            each = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, Tensor) for i in each) and all(isinstance(i, Tensor | int) for i in each):
                places = [i if isinstance(i, Tensor) else torch.full((), i) for i in each]
                return torch.ops.aten.index(array, places)
        return function(*args, **(kwargs or {}))


def _operator(node: Node) -> str:
    """The name of an operator of ATen."""
    return str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")[2]


def _computing(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an operator without those that say where its result is."""
    return {key: x for key, x in options.items() if key not in ("device", "layout", "pin_memory", "memory_format")}


def _cast(xp: Any, x: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is None or isinstance(x, bool | int | float):
        return x
    if dtype.is_floating_point:
        return xp.astype(x, "float32" if dtype == torch.float64 else str(dtype).partition(".")[2])
    if dtype == torch.bool:
        return xp.astype(x, "bool")
    if x.dtype == "bool":
        return xp.where(x, 1.0, 0.0)
    return x if isinstance(x, Whole) else xp.where(x < 0, -xp.floor(-x), xp.floor(x))  # towards zero


def _divided(xp: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return x / y
    return _floor_divided(xp, x, y) if rounding_mode == "floor" else _cast(xp, x / y, torch.int32)


def _floor_divided(xp: Any, x: Any, y: Any) -> Any:
    return x // y if isinstance(x, Whole) else xp.floor(x / y)


def _remainder(xp: Any, x: Any, y: Any) -> Any:
    return x % y if isinstance(x, Whole) else x - y * xp.floor(x / y)


def _of(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda xp, *args: operation(*args)


def _named(name: str) -> Callable[..., Any]:
    return lambda xp, *args: getattr(xp, name)(*args)


def _scaled(sign: int) -> Callable[..., Any]:
    def function(xp: Any, x: Any, y: Any, alpha: float = 1) -> Any:
        y = y if alpha == 1 else alpha * y
        return x + y if sign > 0 else x - y

    return function


def _differ(xp: Any, x: Any, y: Any) -> Any:
    """Whether two numbers differ, or two bools."""
    if not all(isinstance(z, bool) or getattr(z, "dtype", "") == "bool" for z in (x, y)):
        return x != y
    if isinstance(x, bool) or isinstance(y, bool):
        number, other = (x, y) if isinstance(x, bool) else (y, x)
        return xp.logical_not(other) if number else other
    return xp.logical_and(xp.logical_or(x, y), xp.logical_not(xp.logical_and(x, y)))


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "add": _scaled(1), "sub": _scaled(-1), "rsub": lambda xp, x, y, alpha=1: _scaled(-1)(xp, y, x, alpha),
    "mul": _of(operator.mul), "div": _divided, "floor_divide": _floor_divided, "remainder": _remainder,
    "neg": _of(operator.neg), "abs": _of(abs), "pow": _of(operator.pow), "square": lambda xp, x: x * x,
    **{name: _named(name) for name in (
        "exp", "exp2", "log", "log1p", "log2", "tanh", "sigmoid", "sqrt", "rsqrt", "sin", "cos", "floor", "round",
        "erf", "sign", "relu", "silu", "reciprocal", "minimum", "maximum", "where", "logical_and", "logical_or",
        "logical_not",
    )},
    "softplus": _named("softplus"),
    "bitwise_and": _named("logical_and"), "bitwise_or": _named("logical_or"), "bitwise_not": _named("logical_not"),
    "bitwise_xor": _differ, "logical_xor": _differ, "ne": _differ,
    "eq": lambda xp, x, y: xp.logical_not(_differ(xp, x, y)),
    "lt": _of(operator.lt), "le": _of(operator.le),
    "gt": _of(operator.gt), "ge": _of(operator.ge),
    "clamp": lambda xp, x, min=None, max=None: xp.clip(x, min, max),
    "clamp_min": _named("maximum"), "clamp_max": _named("minimum"),
    "expm1": lambda xp, x: xp.exp(x) - 1,
    "masked_fill": lambda xp, x, mask, value: xp.where(mask, value, x),
    "detach": _named("stop_gradient"),
    "_to_copy": _cast, "lift_fresh_copy": lambda xp, x: x, "clone": lambda xp, x: x, "alias": lambda xp, x: x,
    "scalar_tensor": lambda xp, number, **_: number, "full": lambda xp, size, number, **_: number,
    "full_like": lambda xp, x, number, **_: number, "zeros_like": lambda xp, x, **_: 0.0,
    "ones_like": lambda xp, x, **_: 1.0, "zeros": lambda xp, size, **_: 0.0, "ones": lambda xp, size, **_: 1.0,
    "new_ones": lambda xp, x, size, dtype=None, **_: True if dtype == torch.bool else 1.0,
    "new_zeros": lambda xp, x, size, dtype=None, **_: False if dtype == torch.bool else 0.0,
    "new_full": lambda xp, x, size, number, **_: number,
}  # fmt: skip
# What is at least 0, and what is of numbers that are.
_NATURAL = {"abs", "lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not", "bitwise_not"}
_OF_NATURALS = {"add", "mul", "floor_divide", "div", "remainder", "minimum", "maximum", "clamp", "where", "_to_copy"}
