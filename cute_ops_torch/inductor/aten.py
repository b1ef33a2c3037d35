"""Graphs of ATen operators that AOTAutograd gives to Inductor, the forward's and the backward's, read and written.

They are functional, except that results are copied to inputs which the program writes to.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from itertools import takewhile
from typing import Any

import torch
from torch._inductor import config
from torch.fx import GraphModule, Node

from cute_ops.fusion.graph import Graph
from cute_ops.fusion.graph import Node as Value
from cute_ops_torch.inductor.dynamo import Holder, kinds_of
from cute_ops_torch.inductor.effects import example, has_effects, is_random, storage_of, written_by
from cute_ops_torch.inductor.emit import Emitter, Refused
from cute_ops_torch.inductor.front import COPIES, VIEWS, Front, dtype_of, shape_of

_aten = torch.ops.aten
_TAKES_SIZES = VIEWS | COPIES | {"expand", "full", "slice", "cat", "permute"}


class AtenFront(Front):
    """The neutral graph of a graph after autograd.

    Attributes:
        holders: by value the nodes that hold it.
        written: by storage the places at which it is written to.
        barriers: places of nodes that others must not be moved across.
        mode: by node the mode in which it runs, which is one for all.
    """

    known = None  # attention is found before autograd

    def __init__(self, module: GraphModule, exact: bool = False) -> None:
        self.holders: dict[Value, list[Holder]] = defaultdict(list)
        self.written: dict[int, list[int]] = defaultdict(list)
        self.barriers: list[int] = []
        self.mode: dict[Node, int] = defaultdict(int)
        self._effects: list[Value] = []
        self._place = -1
        # Rows of one matrix that were computed instead of a program's values of more dims.
        self._flat: set[Value] = set()
        super().__init__(module, Graph(exact, flat=True))
        self.graph.outputs += self._effects

    def stable(self, holder: Holder) -> bool:
        """Whether nothing writes to what a node holds, from then on."""
        return not self.written or not self.written.get(storage_of(example(holder.node)))

    def device_of(self, value: Value) -> str:
        """The type of the device that a value lies on; empty where no node holds it."""
        holders = self.holders.get(value)
        return example(holders[0].node).device.type if holders else ""

    def _value(self, node: Node) -> Any:
        self._place += 1
        made = example(node)
        if has_effects(node):
            writes = written_by(node)
            if writes or is_random(node) or isinstance(node.target, torch._ops.HigherOrderOperator):
                self.barriers.append(self._place)
            for each in writes:
                self.written[storage_of(example(each))].append(self._place)
            value = self._opaque(node, made)
        else:
            value = super()._value(node)
        if not isinstance(made, (torch.Tensor, tuple, list, torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
            self.barriers.append(self._place)
            self._effects += [each for arg in node.all_input_nodes if isinstance(each := self.values[arg], Value)]
        if isinstance(value, Value) and isinstance(made, torch.Tensor):
            self.holders[value].append(Holder(node, self._place))
            if value.op == "reshape" and value.args[0] in self._flat:
                self.holders[value.args[0]].append(Holder(node, self._place))
        return value

    def _translated(self, node: Node, value: Any) -> Any:
        name = str(getattr(node.target, "_opname", ""))
        if name not in _TAKES_SIZES and any(
            issubclass(kind, (torch.SymInt, torch.SymFloat, torch.SymBool)) for kind in self._kinds(node)
        ):
            return None
        if any(self.values[arg] is None for arg in node.all_input_nodes):
            return None  # random numbers that a checkpoint draws again: nothing says what they are
        source = node.args[0] if node.args else None
        if name in VIEWS and isinstance(source, Node) and example(source).dtype != value.dtype:
            return None  # the bits as they are
        flat = self._flattened(node, name, value)
        return super()._translated(node, value) if flat is None else flat

    def _flattened(self, node: Node, name: str, value: Any) -> Value | None:
        """The expression of functions of elements and sums of rows, as rows of one matrix; None of other values."""
        if not isinstance(value, torch.Tensor) or value.ndim < 3 or value.shape[-1] == 1:
            return None
        joined = math.prod(value.shape[:-1])
        rows: Any = joined if isinstance(joined, int) else str(joined.node.expr)
        both: Any = torch.fx.map_arg((node.args, node.kwargs), self._read)
        shape, (args, kwargs) = shape_of(value), both
        given: list[Any] = []
        for arg in args:
            if not isinstance(arg, Value) or len(arg.shape) < 2:
                given.append(arg)
            elif arg.shape[:-1] == shape[:-1] and arg.shape[-1] in (1, shape[-1]):
                given.append(self.graph.reshape(arg, (rows, arg.shape[-1])))
            else:
                return None
        if not any(isinstance(arg, Value) and len(arg.shape) == 2 for arg in given):
            return None
        if name in COPIES:
            made: Value | None = self.graph.cast(given[0], dtype_of(value))
        else:
            made = self.of_elements(name, given, kwargs, (rows, shape[-1]), dtype_of(value))
        if made is None or made.shape != (rows, shape[-1]):
            return None
        self._flat.add(made)
        return self.graph.reshape(made, shape)

    def _kinds(self, node: Node) -> set[type]:
        given: Any = torch.fx.map_arg((node.args, node.kwargs), self._read)
        return kinds_of([*given[0], *given[1].values()])


class AtenEmitter(Emitter):
    """Puts calls of ATen's operators before a node of a graph after autograd."""

    key = "val"

    def leaves_python(self) -> bool:
        """Code in caches that calls ops from C++ makes none of them in a process that has not found them, either."""
        return super().leaves_python() or bool(config.cpp_wrapper)

    def array(self, value: Value) -> Node:
        held = super().array(value)
        return held if shape_of(example(held)) == value.shape else self._reshaped(held, (), value.shape)

    def as_held(self, made: Node, holder: Node) -> Node:
        """A new tensor in the shape of one that a node holds."""
        shape = shape_of(example(holder))
        return made if shape_of(example(made)) == shape else self._reshaped(made, (), shape)

    def _reshaped(self, array: Node, before: tuple[Any, ...], after: tuple[Any, ...]) -> Node:
        if before == after:
            return array
        if sum(isinstance(size, str) for size in after) < 2:
            return super()._reshaped(array, before, after)
        known = {
            str(size.node.expr): node for node in takewhile(lambda node: node is not self.before, self.graph.nodes)
            if isinstance(size := example(node), torch.SymInt)
        }  # fmt: skip
        sizes = [known.get(size, -1) if isinstance(size, str) else size for size in after]
        if sizes.count(-1) > 1:
            raise Refused("a reshape to several sizes that are not known")
        return self.function(_aten.reshape.default, array, sizes)

    def method(self, name: str, *args: Any) -> Node:
        x, *rest = args
        if name == "to":
            return self.function(torch.ops.prims.convert_element_type.default, x, *rest)
        if name == "contiguous":
            return self.function(_aten.clone.default, x, memory_format=torch.contiguous_format)
        if name == "expand_as":
            # Sizes that are not known are nodes: a graph has no other names for them.
            sizes = [
                size if isinstance(size, int) else self.function(_aten.sym_size.int, rest[0], dim)
                for dim, size in enumerate(example(rest[0]).shape)
            ]
            return self.function(_aten.expand.default, x, sizes)
        return self.function(getattr(_aten, name).default, x, list(rest[0]))

    def function(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        if target in (torch.matmul, torch.nn.functional.linear):
            raise Refused("the program has no tensor of a product")
        return super().function(_aten.ne.Scalar if target is operator.ne else target, *args, **kwargs)

    def part(self, array: Node, axis: int, start: int, stop: int, step: int) -> Node:
        return self.function(_aten.slice.Tensor, array, axis, start, stop, step)
