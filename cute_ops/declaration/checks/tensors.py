"""Inputs and outputs of a declaration: what is wrong with their fields."""

from __future__ import annotations

from collections.abc import Iterator

from cute_ops.declaration.fields import Declaration
from cute_ops.declaration.program import HOW_FUSED
from cute_ops.declaration.shapes import ACCUMULATORS, ITEMSIZE, parse
from cute_ops.declaration.tensor import Tensor

_DTYPES = ", ".join(sorted(ITEMSIZE))
_OF_INPUTS = ("optional", "upper_bound", "unread")
_OF_OUTPUTS = ("same_as", "donates", "hidden", "accumulates", "skippable", "zero_without", "strided_like")


def problems(op: Declaration) -> Iterator[str]:
    yield from _inputs(op)
    yield from _mutated(op)
    yield from _dtypes(op)
    yield from _outputs(op)
    for name, t in [*op.inputs.items(), *op.outputs.items()]:
        if wrong := parse(t.shape).wrong:
            yield f"{name}: {wrong}"
        yield from _memory(name, t, name in op.outputs, name in op.mutates)
    yield from _fallback(op)


def _inputs(op: Declaration) -> Iterator[str]:
    seen_optional = False
    for name, t in op.inputs.items():
        if seen_optional and not t.optional:
            yield f"required input {name!r} comes after an optional one"
        seen_optional |= t.optional
        other = op.inputs.get(t.given) if t.given else None
        if t.given and not (t.optional and other and other is not t and other.optional and not other.given):
            pair = "both must be optional inputs, and only one of them names the other"
            yield f"input {name!r} is given with {t.given!r}: {pair}"
        if words := [word for word in _OF_OUTPUTS if getattr(t, word)]:
            yield f"input {name!r} has {words[0]!r}, which outputs have"
    if all(t.optional for t in op.inputs.values()):
        yield "no input is required, so nothing says where a call runs"


def _mutated(op: Declaration) -> Iterator[str]:
    if op.split and bool(op.split.of_slice or op.split.merge) == bool(op.program):
        yield "what each device does with a slice must be given by `of_slice` and `merge` or by a program, not by both"
    if unknown := sorted(set(op.mutates) - op.inputs.keys()):
        yield f"it mutates {unknown}, which are no inputs; there are {list(op.inputs)}"
    if twice := sorted({name for name in op.mutates if op.mutates.count(name) > 1}):
        yield f"mutates has {twice[0]!r} twice"
    for name in op.mutates:
        if op.inputs[name].unread or op.inputs[name].broadcast:
            yield f"it mutates {name!r}, which broadcasts or is not read"
    if both := [name for name, t in op.outputs.items() if t.donates in op.mutates]:
        yield f"output {both[0]!r} donates {op.outputs[both[0]].donates!r}, which the op mutates"
    gradient = f"cannot have the gradient {op.steps[0].name}: a backward needs their old values" if op.steps else ""
    for has, problem in (
        (op.steps, f"so it {gradient}"),
        (op.finish, "so it has no `finish`: that changes outputs, which a framework differentiates"),
        (op.split, "so it cannot be split: a device's slice is a call of its own"),
        (op.program, "which a program cannot: it returns new arrays"),
        (op.space, "so its config cannot be measured: every run would change the next one's inputs"),
    ):
        if op.mutates and has:
            yield f"it mutates inputs, {problem}"


def _dtypes(op: Declaration) -> Iterator[str]:
    for variable, names in op.dtypes.items():
        for name in names:
            if name not in ITEMSIZE:
                yield f"dtype variable {variable} may be {name!r}, which is none of {_DTYPES}"
    for name, t in [*op.inputs.items(), *op.outputs.items()]:
        if t.dtype in op.attrs:
            yield from _dtype_of_attribute(op, name, t)
        elif t.dtype not in op.dtypes and t.dtype not in ITEMSIZE:
            yield f"{name} has dtype {t.dtype!r}, neither a variable nor a dtype"
    for name, t in op.outputs.items():
        present = [i.dtype for source, i in op.inputs.items() if not i.optional or source == t.given]
        if t.dtype in op.dtypes and t.dtype not in present:
            yield f"output {name!r} has dtype {t.dtype}, which no input has that is present whenever it is"


def _dtype_of_attribute(op: Declaration, name: str, tensor: Tensor) -> Iterator[str]:
    what = f"{name} has the dtype that attribute {tensor.dtype!r} names"
    if name in op.inputs:
        yield f"{what}, as only outputs may"
    if tensor.same_as or tensor.donates:
        yield f"{what}, so it cannot share an array by {'same_as' if tensor.same_as else 'donates'!r}"
    if other := [value for value in op.choices.get(tensor.dtype, (op.attrs[tensor.dtype],)) if value not in ITEMSIZE]:
        yield f"{what}, which may be {other[0]!r}, none of {_DTYPES}"
    elif tensor.dtype not in op.choices:
        yield f"{what}, which must say what it may be: OneOf({op.attrs[tensor.dtype]!r}, ...)"


def _outputs(op: Declaration) -> Iterator[str]:
    if not op.shown and not op.mutates:
        yield "it has no output that is not hidden"
    if sum(t.skippable for t in op.outputs.values()) > 1:
        narrowed = sorted(op.name_of(left) for left in op.narrowings)  # the ops themselves follow on first use
        if len(set(narrowed)) < len(narrowed):
            yield f"narrowed to some outputs it has one name twice: {narrowed}"
    for name, t in op.outputs.items():
        yield from _output(op, name, t)
        yield from _named_inputs(op, name, t)
        if t.same_as is not None:
            yield from _same_as(op.outputs.get(t.same_as), name, t)


def _output(op: Declaration, name: str, t: Tensor) -> Iterator[str]:
    refused = ("donates", "same_as", *(() if op.narrow else ("skippable",))) if op.program else ()
    for words, problem in (
        (_OF_INPUTS, "which inputs have"),
        (refused, "but a program returns all outputs, each in memory of its own"),
    ):
        if has := [word for word in words if getattr(t, word)]:
            yield f"output {name!r} has {has[0]!r}, {problem}"
    if t.accumulates and t.accumulates.dtype not in ACCUMULATORS:
        yield f"output {name!r} accumulates in {t.accumulates.dtype!r}, which is none of {', '.join(ACCUMULATORS)}"
    if t.skippable and op.split is not None and op.split.merge is not None:
        yield f"output {name!r} is skippable, but the merge of slices takes all outputs"


def _named_inputs(op: Declaration, name: str, t: Tensor) -> Iterator[str]:
    """The inputs that an output names."""
    if t.given is not None and (t.given not in op.inputs or not op.inputs[t.given].optional):
        optional = [other for other, i in op.inputs.items() if i.optional]
        yield f"output {name!r} is given with {t.given!r}, which is no optional input; there are {optional}"
    if t.zero_without is not None and t.zero_without not in op.inputs:
        yield f"output {name!r} has zero_without={t.zero_without!r}, which is no input; there are {[*op.inputs]}"
    like = op.inputs.get(t.strided_like) if t.strided_like else None
    if t.strided_like and not (op.program and like and like.shape == t.shape):
        yield f"output {name!r} has strided_like={t.strided_like!r}: it takes an input of its shape, and a program"
    if t.donates and (t.donates not in op.inputs or op.inputs[t.donates].declared != t.declared):
        yield f"{name} donates {t.donates!r}, which is no input of its shape and dtype"


def _same_as(other: Tensor | None, name: str, t: Tensor) -> Iterator[str]:
    problem = f"output {name!r} has same_as={t.same_as!r}: "
    if other is None or other is t or other.same_as or other.shape != t.shape:
        yield f"{problem}that must be another output of its shape"
    elif other.skippable:
        yield f"{problem}an output that stands for two cannot be skippable"


def _memory(name: str, t: Tensor, is_output: bool, is_mutated: bool) -> Iterator[str]:
    """Strides and alignment."""
    if t.contiguous is not None:
        yield from _contiguous(name, t, is_output)
    if t.align not in (0, 2, 4, 8, 16):
        yield f"{name}: align must be 2, 4, 8 or 16 bytes, got {t.align!r}"
    if t.align and is_output:
        yield f"output {name!r} has 'align', which inputs have: a heuristic sees how an output is aligned"
    if t.align and not t.may_be_contiguous:
        yield f"{name}: align needs a contiguous dim, and it has none"
    if t.otherwise not in ("refuse", "copy"):
        yield f"{name}: otherwise must be 'refuse' or 'copy', got {t.otherwise!r}"
    if t.merged and (not t.rows or t.broadcast):
        yield f"{name} is merged, but has no leading dims that are always there"
    if t.otherwise == "copy" and (is_output or is_mutated):
        yield f"{name} is written, so a copy cannot stand for it: otherwise='copy' is for inputs that are read"


def _contiguous(name: str, tensor: Tensor, is_output: bool) -> Iterator[str]:
    own = [*([] if tensor.broadcast or not tensor.rows else [tensor.rows]), *(str(d) for d in tensor.dims)]
    names = tensor.may_be_contiguous
    if not isinstance(names, tuple) or not all(isinstance(word, str) for word in names):
        yield f"{name}: contiguous must be a dim's name or a tuple of names, got {names!r}"
    elif lost := [dim for dim in names if own.count(dim) != 1 or names.count(dim) != 1]:
        yield f"{name}: contiguous names {lost[0]!r}, which must be one of its dims, once; they are {own}"
    elif is_output and -1 not in tensor.axes:
        yield f"output {name!r} is made compact, so its last dim must be one of those that may be contiguous"


def _fallback(op: Declaration) -> Iterator[str]:
    """The declared fallback of a kernel."""
    if op.fallback is None:
        return
    if unknown := [name for name in op.fallback.anywhere if name not in op.inputs]:
        yield f"its fallback takes {unknown[0]!r} anywhere, which is no input"
    if op.choices.get("fused") != HOW_FUSED:
        yield "it has a fallback, so it must declare the attribute fused=FUSED"
    if op.program:
        yield "a fallback runs in place of a kernel, but it has a program"
