"""Ops with lists of tensors, and the op without lists that each becomes for a given number of tensors.

An op whose inputs or outputs are lists is *unrolled* first: for three tensors ``add_n`` becomes ``add_n_of_3``, an op
like any other with the arguments ``xs_0``, ``xs_1`` and ``xs_2``. So the number belongs to a kernel's key, and binding,
gradients, vmap and sharding know nothing of lists. Messages call the arguments ``xs[2]``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial, update_wrapper
from math import prod
from typing import TYPE_CHECKING, Any

from cute_ops.declaration.dims import Dim
from cute_ops.declaration.dims import parse as parse_dim
from cute_ops.declaration.shapes import parse
from cute_ops.errors import message

if TYPE_CHECKING:
    from cute_ops.declaration.case import Case
    from cute_ops.declaration.op import Op
    from cute_ops.declaration.tensor import Tensor

Tensors = Mapping[str, "Tensor"]
_NAME = re.compile(r"\w+_of_(\d+(?:_\d+)*)")


def counts(op: Op, given: Mapping[str, Any]) -> dict[str, int]:
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
        values = given.get(name)
        if not isinstance(values, (list, tuple)):
            came = "None" if values is None else type(values).__name__
            raise TypeError(message(op, f"argument `{name}` must be a list of tensors, got {came}."))
        if not values:
            raise ValueError(message(op, f"argument `{name}` is empty, expected one tensor or more."))
        if absent := [f"{name}[{place}]" for place, value in enumerate(values) if value is None]:
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


def named(op: Op, name: str) -> Op | None:
    """The unrolled op of this name; None if the name is not one's."""
    found = _NAME.fullmatch(name)
    sizes = [int(size) for size in found[1].split("_")] if found else []
    if len(sizes) != len(op.numbers) or 0 in sizes:
        return None
    made = op.unrolled(dict(zip(op.numbers, sizes, strict=True)))
    return made if made.name == name else None


def unroll(op: Op, number: Mapping[str, int]) -> Op:
    """The op without lists for these numbers of tensors.

    Raises:
        ValueError: the declaration is wrong for them.
    """
    made, lists = copy(op), _Lists(op, number)
    made.name = f"{op.name}_of_{'_'.join(str(number[name]) for name in op.numbers)}"
    made.inputs, made.outputs = lists.tensors(op.inputs), lists.tensors(op.outputs)
    made.kernel_outputs = tuple(made.outputs)
    made.mutates, made.no_gradient = lists.arguments(op.mutates), lists.arguments(op.no_gradient)
    made.static, made.few = lists.own(op.static), lists.own(op.few)
    made.reference = _like(op.reference, partial(_reference, op, number))
    made.config, made.check = lists.seen_by(op.config), partial(_check, op, lists)
    made.workspace = op.workspace and lists.seen_by(op.workspace)
    if op.space is not None:
        needs = op.space.needs and lists.seen_by(op.space.needs)
        made.space = op.space._replace(configs=lists.seen_by(op.space.configs), needs=needs)
    made.derived = {name: partial(_derived, lists, size) for name, size in op.derived.items()}
    made.flops, made.bytes = (work and partial(_derived, lists, work) for work in (op.flops, op.bytes))
    made.arrange = partial(_arrange, op, number)
    made.cases = tuple(lists.case(case) for case in op.cases if all(case.dims[n] == k for n, k in number.items()))
    steps = tuple(step.unrolled({name: number[name] for name in step.numbers}) for step in op.steps)
    made.grad = steps if isinstance(op.grad, tuple) else steps[0] if steps else None
    made.handed_on = lists.handed_on(op.handed_on)
    made.saving = op.saving and op.saving.unrolled(number)
    made.template, made.counts = op, dict(number)
    made.aliases = {made.name: op.name, **lists.aliases()}
    return made


def _like(original: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    """A function in place of another one, with that one's module."""
    return update_wrapper(made, original, ("__module__",), ())


class _Lists:
    """The names of an op that become several: its lists, and dims whose sizes differ from tensor to tensor."""

    def __init__(self, op: Op, number: Mapping[str, int]) -> None:
        self.number = number
        every = {**op.inputs, **op.outputs}
        self.long = {name: number[t.many] for name, t in every.items() if t.many}
        self.dims = {dim: number[t.many] for t in every.values() if t.many for dim in t.own}

    def tensors(self, tensors: Tensors) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            for place in range(number) if (number := self.long.get(name)) else (None,):
                found[name if place is None else f"{name}_{place}"] = self._tensor(tensor, place)
        return found

    def arguments(self, names: Sequence[str]) -> tuple[str, ...]:
        return _each(names, self.long)

    def handed_on(self, given: Mapping[str, str]) -> dict[str, str]:
        """``handed_on`` of the unrolled op: one output's cotangent for all of a list, or those of a list one by one."""
        found: dict[str, str] = {}
        for name, output in given.items():
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

    def _tensor(self, tensor: Tensor, place: int | None) -> Tensor:
        """The tensor at a place of a list, or a tensor that is in no list."""
        own = {} if place is None else {name: f"{name}_{place}" for name in tensor.own}

        def word(text: str) -> str:
            dim = parse_dim(text)
            return own.get(text, text) if dim is None else str(self._dim(dim, own))

        shape, over = parse(tensor.shape), tensor.accumulates
        words = [str(self._dim(dim, own)) for dim in shape.dims]
        if shape.rows:
            words.insert(0, f"*{'#' if shape.broadcast else ''}{own.get(shape.rows, shape.rows)}")
        if over:
            over = over._replace(over=tuple(own.get(n, n) for n in over.over) if own else self.own(over.over))
        lies = tensor.contiguous
        return tensor._replace(
            shape=" ".join(words), many=None, own=(), accumulates=over,
            contiguous=word(lies) if isinstance(lies, str) else lies and tuple(map(word, lies)),
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


def _reference(op: Op, number: Mapping[str, int], xp: Any, *arrays: Any, **attrs: Any) -> tuple[Any, ...]:
    returned = op.reference(xp, *gathered(op.inputs, number, arrays), **attrs)
    results = returned if isinstance(returned, tuple) else (returned,)
    lists = [name for name, t in op.results.items() if t.many]
    if len(results) != len(op.results):
        raise TypeError(message(op, f"its reference returned {len(results)} outputs, declared are {len(op.results)}."))
    for (name, tensor), result in zip(op.results.items(), results, strict=True):
        if name in lists and not isinstance(result, list):
            came = type(result).__name__
            raise TypeError(message(op, f"its reference returned {came} for `{name}`, declared is a list."))
        if name in lists and len(result) != number[tensor.many or ""]:
            expected = f"{number[tensor.many or '']} tensors"
            raise TypeError(message(op, f"its reference returned {len(result)} for `{name}`, declared are {expected}."))
    return tuple(spread(op.results, results))


def _check(op: Op, lists: _Lists, binding: Any) -> str | None:
    inputs = dict(zip(op.inputs, gathered(op.inputs, lists.number, list(binding.inputs.values())), strict=True))
    return op.check(binding._replace(dims=lists.with_lists(binding.dims), inputs=inputs))


def _derived(lists: _Lists, size: Callable[..., Any], dims: Mapping[str, Any], attrs: Mapping[str, Any]) -> Any:
    return size(lists.with_lists(dims), attrs)


def _arrange(op: Op, number: Mapping[str, int], xp: Any, arrays: dict[str, Any]) -> None:
    given = dict(zip(op.inputs, gathered(op.inputs, number, list(arrays.values())), strict=True))
    op.arrange(xp, given)
    arrays |= zip(arrays, spread(op.inputs, list(given.values())), strict=True)


def problems(op: Op) -> Iterator[str]:
    """What is wrong with the lists of a declaration, before it is unrolled."""
    every = {**op.inputs, **op.outputs}
    for name, tensor in every.items():
        yield from _field_problems(name, tensor.many, tensor.own)
    for step in op.steps:
        if unknown := [name for name in step.numbers if name not in op.numbers]:
            yield f"gradient {step.name} has lists of {unknown[0]!r}, but {op.name} has lists of {[*op.numbers]}"
    if called := [other.name for other in op.program.ops if other.numbers] if op.program else []:
        yield f"its program calls {called[0]}, which has lists: let it call the `unrolled` op"
    if not op.numbers:
        yield from (f"output {n!r} is a list of {t.many}, but no input is" for n, t in op.outputs.items() if t.many)
        return
    owned = {dim: t.many for t in every.values() for dim in t.own}
    for name, tensor in every.items():
        yield from _tensor_problems(op, name, tensor, owned)
    dims = [dim for tensor in every.values() for dim in _names(tensor)]
    long = [*(name for name, t in every.items() if t.many), *owned]
    for name in (*every, *op.keywords, *dims):
        if taken := [one for one in long if re.fullmatch(rf"{one}_\d+", name)]:
            yield f"{name!r} is the name of one of {taken[0]!r}: take another name"
    for what, used in (
        ("finish", op.finish), ("a split", op.split), ("a program", op.program or op.instead), ("narrow", op.narrow),
        ("gradients that are scaled", op.scaled), ("inputs that gradients overwrite", "inplace_backward" in op.options),
    ):  # fmt: skip
        if used:
            yield f"it has lists of tensors, so it cannot have {what}"
    buckets = tuple(op.space.buckets) if op.space else ()
    if shared := [dim for dim in (*op.parallel, *op.contracted, *op.inner, *op.whole, *buckets) if dim in owned]:
        yield f"{shared[0]!r} has a size of its own in each tensor: devices cannot share it, nor can buckets be of it"
    for name, output in op.handed_on.items():
        gives, takes = (every[each].many if each in every else None for each in (output, name))
        if gives and gives != takes:
            yield f"handed_on gives {name!r} the cotangents of {output!r}, a list of {gives}"
    yield from _case_problems(op, owned)


def _case_problems(op: Op, owned: Mapping[str, str | None]) -> Iterator[str]:
    for case in op.cases:
        for name in op.numbers:
            if type(case.dims.get(name)) is not int or case.dims[name] < 1:
                yield f"case {case.name!r} must give the number {name!r}"
        for dim, number in owned.items():
            sizes, count = case.dims.get(dim), case.dims[number or ""]
            if not isinstance(sizes, tuple) or len(sizes) != count:
                yield f"case {case.name!r} must have {count} sizes for {dim!r}, got {sizes!r}"


def _field_problems(name: str, many: Any, own: Any) -> Iterator[str]:
    if own and not many:
        yield f"{name} has own={own}, but is not a list: name the number of tensors, many='k'"
    if many is not None and not (isinstance(many, str) and many.isidentifier()):
        yield f"{name}: many is the name of how many tensors there are, 'k', got {many!r}"
    if not isinstance(own, tuple):
        yield f"{name}: own must be a tuple of names, got {own!r}"


def _names(tensor: Tensor) -> list[str]:
    return [*([tensor.rows] if tensor.rows else []), *(name for dim in tensor.dims for name in dim.names)]


def _tensor_problems(op: Op, name: str, tensor: Tensor, owned: Mapping[str, str | None]) -> Iterator[str]:
    has = _names(tensor)
    if lost := [dim for dim in tensor.own if dim not in has]:
        yield f"{name} has own={tensor.own}, but {lost[0]!r} is no dim of {tensor.shape!r}"
    if others := [dim for dim in has if dim in owned and (dim not in tensor.own or owned[dim] != tensor.many)]:
        yield f"{name} has dim {others[0]!r}, whose size differs from tensor to tensor of a list"
    if any(n in op.numbers and (d.divisor, d.offset) != (1, 0) for d in tensor.dims for n in d.names):
        yield f"{name}: the number of tensors may only be a dim or a factor of one, in {tensor.shape!r}"
    if tensor.many and tensor.many not in op.numbers:
        yield f"output {name!r} is a list of {tensor.many}, but no input is; there are {[*op.numbers]}"
    if tensor.many and tensor.many in has:
        yield f"{name}: {tensor.many!r} is how many tensors there are, so it is no dim of each"
    refused = ("optional", "given", "skippable") if tensor.many else ()
    if words := [word for word in (*refused, "same_as", "donates") if getattr(tensor, word)]:
        yield f"{name} has {words[0]!r}, which {'a list' if refused else 'an op with lists'} cannot have"
