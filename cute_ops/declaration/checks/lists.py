"""Lists of a declaration: what is wrong with them before it is unrolled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from cute_ops.declaration.fields import Declaration
from cute_ops.declaration.tensor import Tensor

Owned = Mapping[str, str | None]  # dims whose sizes differ from tensor to tensor, with the name of their number


def problems(op: Declaration) -> Iterator[str]:
    tensors = {**op.inputs, **op.outputs}
    for name, tensor in tensors.items():
        yield from _fields(name, tensor)
    yield from _other_ops(op)
    if not op.numbers:
        yield from (f"output {n!r} is a list of {t.many}, but no input is" for n, t in op.outputs.items() if t.many)
        return
    owned = {dim: t.many for t in tensors.values() for dim in t.own}
    for name, tensor in tensors.items():
        yield from _dims(op, name, tensor, owned)
        yield from _refused_fields(op, name, tensor)
    yield from _names(op, [*(name for name, t in tensors.items() if t.many), *owned])
    yield from _refused(op, owned)
    yield from _handed_on(op, {name: tensor.many for name, tensor in tensors.items()})
    yield from _cases(op, owned)


def _other_ops(op: Declaration) -> Iterator[str]:
    """Ops with lists that this one calls, or that compute its gradient."""
    for step in op.steps:
        if unknown := [name for name in step.numbers if name not in op.numbers]:
            yield f"gradient {step.name} has lists of {unknown[0]!r}, but {op.name} has lists of {[*op.numbers]}"
    if op.program and (called := [other.name for other in op.program.ops if other.numbers]):
        yield f"its program calls {called[0]}, which has lists: let it call the `unrolled` op"


def _handed_on(op: Declaration, many: Owned) -> Iterator[str]:
    for name, output in op.handed_on.items():
        if many.get(output) and many.get(output) != many.get(name):
            yield f"handed_on gives {name!r} the cotangents of {output!r}, a list of {many[output]}"


def _fields(name: str, tensor: Tensor) -> Iterator[str]:
    many, own = tensor.many, tensor.own
    if own and not many:
        yield f"{name} has own={own}, but is not a list: name the number of tensors, many='k'"
    if many is not None and not (isinstance(many, str) and many.isidentifier()):
        yield f"{name}: many is the name of how many tensors there are, 'k', got {many!r}"
    if type(own) is not tuple:
        yield f"{name}: own must be a tuple of names, got {own!r}"


def _dims(op: Declaration, name: str, tensor: Tensor, owned: Owned) -> Iterator[str]:
    has = _dim_names(tensor)
    if lost := [dim for dim in tensor.own if dim not in has]:
        yield f"{name} has own={tensor.own}, but {lost[0]!r} is no dim of {tensor.shape!r}"
    if others := [dim for dim in has if dim in owned and (dim not in tensor.own or owned[dim] != tensor.many)]:
        yield f"{name} has dim {others[0]!r}, whose size differs from tensor to tensor of a list"
    if any(n in op.numbers and (d.divisor, d.offset) != (1, 0) for d in tensor.dims for n in d.names):
        yield f"{name}: the number of tensors may only be a dim or a factor of one, in {tensor.shape!r}"


def _refused_fields(op: Declaration, name: str, tensor: Tensor) -> Iterator[str]:
    if tensor.many and tensor.many not in op.numbers:
        yield f"output {name!r} is a list of {tensor.many}, but no input is; there are {[*op.numbers]}"
    if tensor.many and tensor.many in _dim_names(tensor):
        yield f"{name}: {tensor.many!r} is how many tensors there are, so it is no dim of each"
    of_lists = ("optional", "given", "skippable") if tensor.many else ()
    if words := [word for word in (*of_lists, "same_as", "donates") if getattr(tensor, word)]:
        yield f"{name} has {words[0]!r}, which {'a list' if of_lists else 'an op with lists'} cannot have"


def _names(op: Declaration, lists: list[str]) -> Iterator[str]:
    """Names that the tensors of lists will have."""
    dims = [dim for tensor in (*op.inputs.values(), *op.outputs.values()) for dim in _dim_names(tensor)]
    for name in (*op.inputs, *op.outputs, *op.keywords, *dims):
        if taken := [one for one in lists if re.fullmatch(rf"{one}_\d+", name)]:
            yield f"{name!r} is the name of one of {taken[0]!r}: take another name"


def _refused(op: Declaration, owned: Owned) -> Iterator[str]:
    for what, used in (
        ("finish", op.finish), ("a split", op.split), ("a program", op.program or op.fallback), ("narrow", op.narrow),
        ("gradients that are scaled", op.scaled), ("inputs that gradients overwrite", "inplace_backward" in op.options),
    ):  # fmt: skip
        if used:
            yield f"it has lists of tensors, so it cannot have {what}"
    buckets = tuple(op.space.buckets) if op.space else ()
    if shared := [dim for dim in (*op.parallel, *op.contracted, *op.inner, *op.whole, *buckets) if dim in owned]:
        yield f"{shared[0]!r} has a size of its own in each tensor: devices cannot share it, nor can buckets be of it"


def _cases(op: Declaration, owned: Owned) -> Iterator[str]:
    for case in op.cases:
        for name in op.numbers:
            if type(case.dims.get(name)) is not int or case.dims[name] < 1:
                yield f"case {case.name!r} must give the number {name!r}"
        for dim, number in owned.items():
            sizes, count = case.dims.get(dim), case.dims[number or ""]
            if not isinstance(sizes, tuple) or len(sizes) != count:
                yield f"case {case.name!r} must have {count} sizes for {dim!r}, got {sizes!r}"


def _dim_names(tensor: Tensor) -> list[str]:
    return [*([tensor.rows] if tensor.rows else []), *(name for dim in tensor.dims for name in dim.names)]
