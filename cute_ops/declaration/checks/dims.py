"""Dims of a declaration: what is wrong with the shapes, and with what names their dims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from cute_ops.declaration.fields import Declaration
from cute_ops.declaration.tensor import Tensor


def problems(op: Declaration) -> Iterator[str]:
    required = [t for t in op.inputs.values() if not t.optional]
    always, bound = _bound(required), _bound(op.inputs.values())
    yield from _input_dims(op, required, always)
    if both := sorted(bound & op.derived.keys()):
        yield f"dim {both[0]!r} is derived, but an input binds it"
    yield from _leading_dims(op, bound | op.derived.keys())
    for name, t in op.inputs.items():
        if t.upper_bound is not None and t.bound(dict.fromkeys(bound, 1)) is None:
            yield f"input {name!r} has upper_bound={t.upper_bound!r}, no dim of an input; there are {sorted(bound)}"
    yield from _output_dims(op, required)
    yield from _named_dims(op, bound, always | op.derived.keys())
    yield from _buckets(op, always | op.derived.keys() | {t.rows for t in required if t.rows})
    yield from _shared_dims(op, bound | op.derived.keys())


def _bound(tensors: Iterable[Tensor]) -> set[str]:
    """The names that the dims of these inputs bind together."""
    known: set[str] = set()
    expressions, count = [], -1
    for t in tensors:
        for d in t.dims:
            if d.name:
                known.add(d.name)
            else:
                expressions.append(d)
    while expressions and len(known) > count:
        count = len(known)
        known |= {d.binds(known) for d in expressions} - {""}
    return known


def _input_dims(op: Declaration, required: list[Tensor], always: set[str]) -> Iterator[str]:
    for name, t in op.inputs.items():
        known = _bound([*required, t]) if t.optional else always
        if lost := [(d, free) for d in t.dims for free in d.names if free not in known]:
            yield (
                f"{name}: nothing says how large {lost[0][1]} is in {str(lost[0][0])!r}; a dim of "
                f"{'it or ' if t.optional else ''}a required input must be that name, or an expression without 'ceil' "
                "of which it is the only unknown"
            )


def _leading_dims(op: Declaration, dims: set[str]) -> Iterator[str]:
    tensors = [*op.inputs.items(), *op.outputs.items()]
    if both := sorted({t.rows for _, t in tensors if t.rows} & dims):
        yield f"{both[0]!r} is a dim, and *{both[0]} are leading dims: take two names"
    whole = {t.rows for t in op.inputs.values() if t.rows and not t.broadcast}
    for name, t in tensors:
        if t.broadcast and (name in op.outputs or t.rows not in whole):
            yield f"{name} cannot broadcast: no input has all of *{t.rows}"


def _output_dims(op: Declaration, required: list[Tensor]) -> Iterator[str]:
    found: dict[str | None, tuple[set[str], set[str]]] = {}  # by the optional input that is given, too
    for name, t in op.outputs.items():
        if t.given not in found:
            present = [*required, *([op.inputs[t.given]] if t.given in op.inputs else [])]
            found[t.given] = {i.rows for i in present if i.rows}, _bound(present) | op.derived.keys()
        rows, known = found[t.given]
        if free := [n for d in t.dims for n in d.names if n not in known]:
            yield f"{name} has dim {free[0]}, neither an input's nor in `derived`"
        if t.accumulates and (free := [n for n in t.accumulates.over if n not in known | rows]):
            dims = sorted(known | rows)
            yield f"output {name!r} accumulates over {free[0]!r}, no dim of an input; there are {dims}"
        if t.rows and t.rows not in rows:
            yield f"{name} has leading dims *{t.rows}, which are no input's"


def _named_dims(op: Declaration, bound: set[str], always: set[str]) -> Iterator[str]:
    """Dims that the declaration refers to by name."""
    rows = {t.rows for t in op.inputs.values() if t.rows}
    for what, names, known, kind in (
        ("static", [name for name in op.static if name not in op.few], bound | op.derived.keys(), "an input"),
        ("static while few", op.few, always, "a required input"), ("parallel", op.parallel, bound, "an input"),
        ("contracted", op.contracted, bound | rows, "an input"), ("inner", op.inner, bound, "an input"),
    ):  # fmt: skip
        if unknown := [name for name in names if name not in known]:
            yield f"{what} has {unknown[0]!r}, which is no dim of {kind}; there are {sorted(known)}"
    if twice := sorted({dim for dim in op.static if op.static.count(dim) > 1}):
        yield f"static has {twice[0]!r} twice: a dim is static always or while few"


def _buckets(op: Declaration, known: set[str]) -> Iterator[str]:
    for name, sizes in (op.space.buckets if op.space else {}).items():
        if name not in known:
            yield f"buckets has {name!r}, which is no dim of a required input; there are {sorted(known)}"
        if not sizes or not all(type(s) is int and before < s for before, s in pairwise((0, *sizes))):
            yield f"buckets of {name!r} must be rising sizes, (64, 512), got {sizes!r}"


def _shared_dims(op: Declaration, dims: set[str]) -> Iterator[str]:
    """Dims that devices share."""
    for name, t in op.outputs.items():
        if lost := [dim for dim in op.parallel if not (t.has(dim) or op.sums(name, dim))]:
            yield (
                f"parallel has {lost[0]!r}, which output {name!r} lacks: a slice of it gives no slice of {name!r}; "
                f"a dim that {name!r} is a sum over is contracted"
            )
    if op.inner and not (op.program or op.fallback):
        yield f"inner has {op.inner[0]!r}, over which only a program can add up, and the op has none"
    if op.split is not None and op.split.dim not in dims:
        yield f"it splits {op.split.dim!r}, which is no dim of an input"
    yield from _slices(op, {*op.parallel, *op.contracted, *op.inner}, {op.split.dim} if op.split else set())


def _slices(op: Declaration, shared: set[str], split: set[str]) -> Iterator[str]:
    for name, t in [*op.inputs.items(), *op.outputs.items()] if shared or split else ():
        if any(shared.intersection(d.names) - {d.outer} or split.intersection(d.names) - {d.name} for d in t.dims):
            yield f"a slice of a dim that devices share is no slice of {name}: {t.shape!r}"
