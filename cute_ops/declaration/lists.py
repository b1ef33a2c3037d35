"""Ops with lists of tensors, and the op without lists that each becomes for a number of tensors.

An op whose inputs or outputs are lists is *unrolled* first: for three tensors ``add_n`` becomes ``add_n_of_3``, an op
like any other with the arguments ``xs_0``, ``xs_1`` and ``xs_2``. So the number belongs to a kernel's key, and binding,
gradients, vmap and sharding know nothing of lists. Messages call the arguments ``xs[2]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial, update_wrapper
from math import prod
from typing import Any, TypeVar

from cute_ops.declaration.case import Case
from cute_ops.declaration.dims import Dim
from cute_ops.declaration.dims import parse as parse_dim
from cute_ops.declaration.fields import Declaration
from cute_ops.declaration.gradient import once
from cute_ops.declaration.messages import message
from cute_ops.declaration.shapes import parse
from cute_ops.declaration.tensor import Tensor

D = TypeVar("D", bound=Declaration)
Tensors = Mapping[str, Tensor]
_NAME = r"\w+_of_(\d+(?:_\d+)*)"


def counts(op: Declaration, arguments: Mapping[str, Any]) -> dict[str, int]:
    """The lengths of a call's lists, by the name of the number.

    Raises:
        TypeError: an argument is not a list.
        ValueError: a list is empty, or its length differs from that of another one with the same name.
    """
    found: dict[str, int] = {}
    first: dict[str, str] = {}
    for name, tensor in op.inputs.items():
        if tensor.many is None:
            continue
        values = arguments.get(name)
        if not isinstance(values, (list, tuple)):
            came = "None" if values is None else type(values).__name__
            raise TypeError(message(op, f"argument `{name}` must be a list of tensors, got {came}."))
        if not values:
            raise ValueError(message(op, f"argument `{name}` is empty, expected one tensor or more."))
        if absent := [f"{name}[{k}]" for k, value in enumerate(values) if value is None]:
            raise TypeError(message(op, f"argument `{absent[0]}` is required, but None was given."))
        count = found.setdefault(tensor.many, len(values))
        if count != len(values):
            other = f"{tensor.many}={count} from `{first[tensor.many]}`"
            raise ValueError(message(op, f"argument `{name}` has {len(values)} tensors, but {other}."))
        first.setdefault(tensor.many, name)
    return found


def spread(tensors: Tensors, values: Sequence[Any]) -> list[Any]:
    """The values with lists taken apart; values after those of the tensors are kept."""
    found: list[Any] = []
    for tensor, value in zip(tensors.values(), values, strict=False):
        if tensor.many is None:
            found.append(value)
        else:
            found += value
    found += values[len(tensors) :]
    return found


def gathered(tensors: Tensors, number: Mapping[str, int], values: Sequence[Any]) -> list[Any]:
    """The reverse of :func:`spread`."""
    rest = iter(values)
    found = [next(rest) if t.many is None else [next(rest) for _ in range(number[t.many])] for t in tensors.values()]
    return [*found, *rest]


def named(op: D, name: str) -> D | None:
    """The unrolled op of this name; None if the name is not one's."""
    found = re.fullmatch(_NAME, name)
    sizes = [int(size) for size in found[1].split("_")] if found else []
    if len(sizes) != len(op.numbers) or 0 in sizes:
        return None
    one = unrolled(op, dict(zip(op.numbers, sizes, strict=True)))
    return one if one.name == name else None


def unrolled(op: D, number: Mapping[str, int]) -> D:
    """The op without lists for these numbers of tensors; the same object every time.

    Raises:
        ValueError: the declaration is wrong for them.
    """
    if not op.numbers:
        return op
    return once(op, tuple(number[name] for name in op.numbers), lambda: _unroll(op, number))


def _unroll(op: D, number: Mapping[str, int]) -> D:
    one, lists = copy(op), _Lists(op, number)
    one.name = f"{op.name}_of_{'_'.join(str(number[name]) for name in op.numbers)}"
    one.inputs, one.outputs = lists.tensors(op.inputs), lists.tensors(op.outputs)
    one.kernel_outputs = tuple(one.outputs)
    one.mutates, one.no_gradient = lists.arguments(op.mutates), lists.arguments(op.no_gradient)
    one.static, one.few = lists.own(op.static), lists.own(op.few)
    one.reference = _like(op.reference, partial(_reference, op, number))
    one.config, one.check = lists.seen_by(op.config), partial(_check, op, lists)
    one.workspace = op.workspace and lists.seen_by(op.workspace)
    if op.space is not None:
        needs = op.space.needs and lists.seen_by(op.space.needs)
        one.space = op.space._replace(configs=lists.seen_by(op.space.configs), needs=needs)
    one.derived = {name: partial(_derived, lists, size) for name, size in op.derived.items()}
    one.flops, one.bytes = (work and partial(_derived, lists, work) for work in (op.flops, op.bytes))
    one.arrange = partial(_arrange, op, number)
    one.cases = tuple(lists.case(case) for case in op.cases if all(case.dims[n] == k for n, k in number.items()))
    steps = tuple(unrolled(step, {name: number[name] for name in step.numbers}) for step in op.steps)
    one.grad = steps if isinstance(op.grad, tuple) else steps[0] if steps else None
    one.handed_on = lists.handed_on(op.handed_on)
    one.saving = op.saving and unrolled(op.saving, number)
    one.template, one.counts = op, dict(number)
    one.aliases = {one.name: op.name, **lists.aliases()}
    one.derive()
    one.validate()
    return one


def _like(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in place of another one, with that one's module."""
    return update_wrapper(function, original, ("__module__",), ())


class _Lists:
    """The names of an op that become several: its lists, and dims whose sizes differ from tensor to tensor."""

    def __init__(self, op: Declaration, number: Mapping[str, int]) -> None:
        self.number = number
        every = {**op.inputs, **op.outputs}
        self.long = {name: number[t.many] for name, t in every.items() if t.many}
        self.dims = {dim: number[t.many] for t in every.values() if t.many for dim in t.own}

    def tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            for k in range(number) if (number := self.long.get(name)) else (None,):
                found[name if k is None else f"{name}_{k}"] = self._tensor(tensor, k)
        return found

    def arguments(self, names: Sequence[str]) -> tuple[str, ...]:
        return _each(names, self.long)

    def handed_on(self, outputs_by_input: Mapping[str, str]) -> dict[str, str]:
        """``handed_on`` of the unrolled op: one output's cotangent for all of a list, or those of a list one by one."""
        found: dict[str, str] = {}
        for name, output in outputs_by_input.items():
            inputs, outputs = self.arguments((name,)), self.arguments((output,))
            found |= zip(inputs, outputs if output in self.long else outputs * len(inputs), strict=True)
        return found

    def own(self, names: Sequence[str]) -> tuple[str, ...]:
        return _each(names, self.dims)

    def with_lists(self, dims: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes as the functions of a declaration get them: ``{"k": 2, "n": (5, 7)}``."""
        own = {dim: tuple(dims.get(f"{dim}_{i}") for i in range(count)) for dim, count in self.dims.items()}
        return {**dims, **self.number, **own}

    def seen_by(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a problem, called with the sizes of :meth:`with_lists`."""

        def call(problem: Any, *rest: Any) -> Any:
            return function(problem._replace(dims=self.with_lists(problem.dims)), *rest)

        return _like(function, call)

    def case(self, case: Case) -> Case:
        dims = {name: size for name, size in case.dims.items() if name not in self.number and name not in self.dims}
        for name, count in self.dims.items():
            dims |= {f"{name}_{i}": case.dims[name][i] for i in range(count)}
        leading = {each: n for name, n in case.leading.items() for each in self.arguments((name,))}
        return case._replace(dims=dims, leading=leading)

    def aliases(self) -> dict[str, str]:
        counted = {**self.long, **{f"d{name}": count for name, count in self.long.items()}, **self.dims}
        return {f"{name}_{i}": f"{name}[{i}]" for name, count in counted.items() for i in range(count)}

    def _tensor(self, tensor: Tensor, index: int | None) -> Tensor:
        """The tensor with an index in a list, or a tensor that is in no list."""
        own = {} if index is None else {name: f"{name}_{index}" for name in tensor.own}

        def word(text: str) -> str:
            dim = parse_dim(text)
            return own.get(text, text) if dim is None else str(self._dim(dim, own))

        shape, over = parse(tensor.shape), tensor.accumulates
        words = [str(self._dim(dim, own)) for dim in shape.dims]
        if shape.rows:
            words.insert(0, f"*{'#' if shape.broadcast else ''}{own.get(shape.rows, shape.rows)}")
        if over:
            over = over._replace(over=tuple(own.get(n, n) for n in over.over) if own else self.own(over.over))
        contiguous = tensor.contiguous
        return tensor._replace(
            shape=" ".join(words), many=None, own=(), accumulates=over,
            contiguous=word(contiguous) if isinstance(contiguous, str) else contiguous and tuple(map(word, contiguous)),
            upper_bound=tensor.upper_bound and word(tensor.upper_bound),
        )  # fmt: skip

    def _dim(self, dim: Dim, own: Mapping[str, str]) -> Dim:
        """A dim in which numbers of tensors are constants and own dims have a tensor's names."""
        left = tuple(own.get(name, name) for name in dim.names if name not in self.number)
        factor = dim.factor * prod(self.number.get(name, 1) for name in dim.names)
        return Dim(factor, left, dim.divisor, dim.ceil, dim.offset)


def _each(names: Sequence[str], counted: Mapping[str, int]) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        found += [f"{name}_{i}" for i in range(counted[name])] if name in counted else [name]
    return tuple(found)


def _reference(op: Declaration, number: Mapping[str, int], xp: Any, *arrays: Any, **attrs: Any) -> tuple[Any, ...]:
    returned = op.reference(xp, *gathered(op.inputs, number, arrays), **attrs)
    results = returned if isinstance(returned, tuple) else (returned,)
    if len(results) != len(op.results):
        raise TypeError(message(op, f"its reference returned {len(results)} outputs, declared are {len(op.results)}."))
    for (name, tensor), result in zip(op.results.items(), results, strict=True):
        if tensor.many and not isinstance(result, list):
            problem = f"its reference returned {type(result).__name__} for `{name}`, declared is a list."
        elif tensor.many and len(result) != number[tensor.many]:
            problem = f"its reference returned {len(result)} for `{name}`, declared are {number[tensor.many]} tensors."
        else:
            continue
        raise TypeError(message(op, problem))
    return tuple(spread(op.results, results))


def _check(op: Declaration, lists: _Lists, binding: Any) -> str | None:
    inputs = dict(zip(op.inputs, gathered(op.inputs, lists.number, list(binding.inputs.values())), strict=True))
    return op.check(binding._replace(dims=lists.with_lists(binding.dims), inputs=inputs))


def _derived(lists: _Lists, size: Callable[..., Any], dims: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    return size(lists.with_lists(dims), attrs)


def _arrange(op: Declaration, number: Mapping[str, int], xp: Any, arrays: dict[str, Any]) -> None:
    inputs = dict(zip(op.inputs, gathered(op.inputs, number, list(arrays.values())), strict=True))
    op.arrange(xp, inputs)
    arrays |= zip(arrays, spread(op.inputs, list(inputs.values())), strict=True)
