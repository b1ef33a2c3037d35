"""What is wrong with a declaration, found where it is made: a framework would refuse it later, in other words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from keyword import iskeyword
from typing import TYPE_CHECKING, Any

from cute_ops.declaration.program import HOW_FUSED
from cute_ops.declaration.shapes import ACCUMULATORS, ITEMSIZE

if TYPE_CHECKING:
    from cute_ops.declaration.op import Op
    from cute_ops.declaration.tensor import Tensor

_KINDS = (bool, int, float, str)
_LEAST_NORMAL, _INT64 = 2.0**-1022, 2**63
# Names that references or generated code use, and names that torch's schemas refuse.
_TAKEN = frozenset({"Ellipsis", "TypeError", "ctx", "type", "xp"})


def problems(op: Op) -> Iterator[str]:
    """What is wrong with a declaration, basic mistakes first."""
    yield from _strings(op)
    yield from _names(op)
    yield from _attributes(op)
    yield from _inputs(op)
    yield from _mutated(op)
    yield from _dtypes(op)
    yield from _outputs(op)
    yield from _dims(op)
    yield from _memory(op)
    yield from _instead(op)
    yield from _gradient(op)


def _strings(op: Op) -> Iterator[str]:
    """Texts, and tuples for which one text might be given."""
    module, found, name = op.kernel.partition(":")
    if not op.program and not (found and all(word.isidentifier() for word in [*module.split("."), name])):
        yield f"kernel must be 'module:Class', got {op.kernel!r}"
    for what in ("static", "parallel", "contracted", "inner", "sources", "no_gradient", "mutates"):
        given = getattr(op, what)
        if isinstance(given, str) or not all(isinstance(word, str) for word in given):
            yield f"{what} must be a tuple of names, got {given!r}"
    for variable, names in op.dtypes.items():
        if isinstance(names, str) or not names:
            yield f"dtype variable {variable} must have a tuple of dtype names, got {names!r}"
    if type(op.least_sm) is not int:
        yield f"least_sm must be a whole number, 89 for SM 8.9, got {op.least_sm!r}"


def _names(op: Op) -> Iterator[str]:
    if not _is_name(op.name):
        yield f"its name {op.name!r} cannot name a function; {_NAMES}"
    options = op.finish.defaults if op.finish else {}
    for what, names in (
        ("input", op.inputs), ("attribute", op.attrs), ("scalar", op.scalars), ("output", op.outputs),
        ("option", options),
    ):  # fmt: skip
        for name in names:
            if not _is_name(name):
                yield f"{what} {name!r} cannot be an argument's name; {_NAMES}"
            if name in _TAKEN:
                yield f"{what} {name!r} must have another name: this one has a meaning in references or schemas"
    every = [*op.inputs, *op.outputs, *op.attrs, *op.scalars, *options, *(op.dtypes.keys() & op.attrs.keys())]
    if len(set(every)) < len(every):
        yield f"names used twice: {sorted({name for name in every if every.count(name) > 1})}"


_NAMES = "names are letters, digits and underscores, begin with a letter and are not keywords"


@cache
def _is_name(name: str) -> bool:
    return name.isidentifier() and name.isascii() and not iskeyword(name) and not name.startswith("_")


def _attributes(op: Op) -> Iterator[str]:
    yield from _defaults("attribute", op.attrs, _KINDS)
    yield from _defaults("scalar", op.scalars, (int, float))
    for name in op.attrs:
        if any(value != value for value in op.choices.get(name, ())):
            yield f"attribute {name!r} may be nan, which equals no value that a call has"


def _defaults(what: str, defaults: Mapping[str, Any], kinds: tuple[type, ...]) -> Iterator[str]:
    for name, default in defaults.items():
        if type(default) not in kinds:
            expected = ", ".join(kind.__name__ for kind in kinds)
            yield f"{what} {name!r} has the default {default!r}, expected one of {expected}"
        if isinstance(default, float) and (not math.isfinite(default) or 0 < abs(default) < _LEAST_NORMAL):
            yield f"{what} {name!r} has the default {default!r}, which torch's schemas cannot hold: take a normal one"
        if type(default) is int and not -_INT64 <= default < _INT64:
            yield f"{what} {name!r} has the default {default!r}, which is no 64-bit number"


def _dtypes(op: Op) -> Iterator[str]:
    for variable, names in op.dtypes.items():
        for name in names:
            if name not in ITEMSIZE:
                yield f"dtype variable {variable} may be {name!r}, which is none of {', '.join(sorted(ITEMSIZE))}"
    for name, t in [*op.inputs.items(), *op.outputs.items()]:
        if t.dtype in op.attrs:
            yield from _dtype_of_attribute(op, name, t)
        elif t.dtype not in op.dtypes and t.dtype not in ITEMSIZE:
            yield f"{name} has dtype {t.dtype!r}, neither a variable nor a dtype"
    for name, t in op.outputs.items():
        if t.dtype in op.dtypes and all(i.dtype != t.dtype for i in _present(op, t)):
            yield f"output {name!r} has dtype {t.dtype}, which no input has that is present whenever it is"


def _dtype_of_attribute(op: Op, name: str, tensor: Tensor) -> Iterator[str]:
    what = f"{name} has the dtype that attribute {tensor.dtype!r} names"
    if name in op.inputs:
        yield f"{what}, as only outputs may"
    if tensor.same_as or tensor.donates:
        yield f"{what}, so it cannot share an array by {'same_as' if tensor.same_as else 'donates'!r}"
    if other := [value for value in op.choices.get(tensor.dtype, (op.attrs[tensor.dtype],)) if value not in ITEMSIZE]:
        yield f"{what}, which may be {other[0]!r}, none of {', '.join(sorted(ITEMSIZE))}"
    elif tensor.dtype not in op.choices:
        yield f"{what}, which must say what it may be: OneOf({op.attrs[tensor.dtype]!r}, ...)"


def _present(op: Op, output: Tensor) -> list[Tensor]:
    """The inputs that are present whenever an output is."""
    return [t for name, t in op.inputs.items() if not t.optional or name == output.given]


def _inputs(op: Op) -> Iterator[str]:
    seen_optional = False
    for name, t in op.inputs.items():
        if seen_optional and not t.optional:
            yield f"required input {name!r} comes after an optional one"
        seen_optional |= t.optional
        other = op.inputs.get(t.given) if t.given else None
        if t.given and not (t.optional and other and other is not t and other.optional and not other.given):
            pair = "both must be optional inputs, and only one of them names the other"
            yield f"input {name!r} is given with {t.given!r}: {pair}"
        only_outputs = "same_as", "donates", "hidden", "accumulates", "skippable", "strided_like"
        if words := [word for word in only_outputs if getattr(t, word)]:
            yield f"input {name!r} has {words[0]!r}, which outputs have"
    if all(t.optional for t in op.inputs.values()):
        yield "no input is required, so nothing says where a call runs"


def _mutated(op: Op) -> Iterator[str]:
    if unknown := sorted(set(op.mutates) - op.inputs.keys()):
        yield f"it mutates {unknown}, which are no inputs; there are {list(op.inputs)}"
    if twice := sorted({name for name in op.mutates if op.mutates.count(name) > 1}):
        yield f"mutates has {twice[0]!r} twice"
    for name in op.mutates:
        if op.inputs[name].unread or op.inputs[name].broadcast:
            yield f"it mutates {name!r}, which broadcasts or is not read"
    if both := [name for name, t in op.outputs.items() if t.donates in op.mutates]:
        yield f"output {both[0]!r} donates {op.outputs[both[0]].donates!r}, which the op mutates"
    if op.mutates and op.steps:
        yield f"it mutates inputs, so it cannot have the gradient {op.steps[0].name}: a backward needs their old values"
    if op.mutates and op.finish is not None:
        yield "it mutates inputs, so it has no `finish`: that changes outputs, which a framework differentiates"
    if op.mutates and op.split is not None:
        yield "it mutates inputs, so it cannot be split: a device's slice is a call of its own"
    if op.mutates and op.program:
        yield "it mutates inputs, which a program cannot: it returns new arrays"
    if op.split and bool(op.split.of_slice or op.split.merge) == bool(op.program):
        yield "what each device does with a slice must be given by `of_slice` and `merge` or by a program, not by both"
    if op.mutates and op.space is not None:
        yield "it mutates inputs, so its config cannot be measured: every run would change the next one's inputs"


def _outputs(op: Op) -> Iterator[str]:
    if not op.shown and not op.mutates:
        yield "it has no output that is not hidden"
    narrowed = sorted(op.name_of(left) for left in op.narrowings)  # the ops themselves are made on first use
    if len(set(narrowed)) < len(narrowed):
        yield f"narrowed to some outputs it has one name twice: {narrowed}"
    for name, t in op.outputs.items():
        if words := [word for word in ("optional", "upper_bound", "unread") if getattr(t, word)]:
            yield f"output {name!r} has {words[0]!r}, which inputs have"
        if t.given is not None and (t.given not in op.inputs or not op.inputs[t.given].optional):
            optional = [other for other, i in op.inputs.items() if i.optional]
            yield f"output {name!r} is given with {t.given!r}, which is no optional input; there are {optional}"
        other = op.outputs.get(t.same_as) if t.same_as is not None else None
        if t.same_as is not None and (other is None or other is t or other.same_as or other.shape != t.shape):
            yield f"output {name!r} has same_as={t.same_as!r}: that must be another output of its shape"
        if t.accumulates and t.accumulates.dtype not in ACCUMULATORS:
            yield f"output {name!r} accumulates in {t.accumulates.dtype!r}, which is none of {', '.join(ACCUMULATORS)}"
        if other is not None and other.skippable:
            yield f"output {name!r} has same_as={t.same_as!r}: an output that stands for two cannot be skippable"
        like = op.inputs.get(t.strided_like) if t.strided_like else None
        if t.strided_like and not (op.program and like and like.shape == t.shape):
            yield f"output {name!r} has strided_like={t.strided_like!r}: it takes an input of its shape, and a program"
        unsaid = ("donates", "same_as", *(() if op.narrow else ("skippable",)))
        if op.program and (words := [word for word in unsaid if getattr(t, word)]):
            yield f"output {name!r} has {words[0]!r}, but a program returns all outputs, each in memory of its own"
        if t.skippable and op.split is not None and op.split.merge is not None:
            yield f"output {name!r} is skippable, but the merge of slices takes all outputs"
        if t.donates and (t.donates not in op.inputs or op.inputs[t.donates].declared != t.declared):
            yield f"{name} donates {t.donates!r}, which is no input of its shape and dtype"


def _dims(op: Op) -> Iterator[str]:
    tensors = [*op.inputs.items(), *op.outputs.items()]
    for name, t in tensors:
        if wrong := t.wrong:
            yield f"{name}: {wrong}"
    required = [t for t in op.inputs.values() if not t.optional]
    always = _bound(required)
    for name, t in op.inputs.items():
        known = _bound([*required, t]) if t.optional else always
        if lost := [(d, free) for d in t.dims for free in d.names if free not in known]:
            yield f"{name}: nothing says how large {lost[0][1]} is in {str(lost[0][0])!r}; {_bind_it(t.optional)}"
    bound = _bound(op.inputs.values())
    if both := sorted(bound & op.derived.keys()):
        yield f"dim {both[0]!r} is derived, but an input binds it"
    leading = {t.rows for _, t in tensors if t.rows}
    if both := sorted(leading & (bound | op.derived.keys())):
        yield f"{both[0]!r} is a dim, and *{both[0]} are leading dims: take two names"
    whole = {t.rows for t in op.inputs.values() if t.rows and not t.broadcast}
    for name, t in tensors:
        if t.broadcast and (name in op.outputs or t.rows not in whole):
            yield f"{name} cannot broadcast: no input has all of *{t.rows}"
    for name, t in op.inputs.items():
        if t.upper_bound is not None and t.bound(dict.fromkeys(bound, 1)) is None:
            yield f"input {name!r} has upper_bound={t.upper_bound!r}, no dim of an input; there are {sorted(bound)}"
    yield from _output_dims(op)
    yield from _named_dims(op, bound)
    shared = {*op.parallel, *op.contracted, *op.inner}
    apart = {op.split.dim} if op.split else set()
    for name, t in tensors:
        if any(shared.intersection(d.names) - {d.outer} or apart.intersection(d.names) - {d.name} for d in t.dims):
            yield f"a slice of a dim that devices share is no slice of {name}: {t.shape!r}"


def _output_dims(op: Op) -> Iterator[str]:
    for name, t in op.outputs.items():
        present = _present(op, t)
        known = _bound(present) | op.derived.keys()
        if free := [n for d in t.dims for n in d.names if n not in known]:
            yield f"{name} has dim {free[0]}, neither an input's nor in `derived`"
        known |= {i.rows for i in present if i.rows}
        if t.accumulates and (free := [n for n in t.accumulates.over if n not in known]):
            yield f"output {name!r} accumulates over {free[0]!r}, no dim of an input; there are {sorted(known)}"
        if t.rows and t.rows not in {i.rows for i in present}:
            yield f"{name} has leading dims *{t.rows}, which are no input's"


def _memory(op: Op) -> Iterator[str]:
    """Strides and alignments."""
    for name, t in [*op.inputs.items(), *op.outputs.items()]:
        if t.contiguous is not None:
            yield from _contiguous(name, t, name in op.outputs)
        if t.align not in (0, 2, 4, 8, 16):
            yield f"{name}: align must be 2, 4, 8 or 16 bytes, got {t.align!r}"
        if t.align and name in op.outputs:
            yield f"output {name!r} has 'align', which inputs have: a heuristic sees how an output is aligned"
        if t.align and not t.may_be_contiguous:
            yield f"{name}: align needs a contiguous dim, and it has none"
        if t.otherwise not in ("refuse", "copy"):
            yield f"{name}: otherwise must be 'refuse' or 'copy', got {t.otherwise!r}"
        if t.merged and (not t.rows or t.broadcast):
            yield f"{name} is merged, but has no leading dims that are always there"
        if t.otherwise == "copy" and (name in op.outputs or name in op.mutates):
            yield f"{name} is written, so a copy cannot stand for it: otherwise='copy' is for inputs that are read"


def _contiguous(name: str, tensor: Tensor, is_output: bool) -> Iterator[str]:
    own = [*([] if tensor.broadcast or not tensor.rows else [tensor.rows]), *(str(d) for d in tensor.dims)]
    given = tensor.may_be_contiguous
    if not isinstance(given, tuple) or not all(isinstance(word, str) for word in given):
        yield f"{name}: contiguous must be a dim's name or a tuple of names, got {given!r}"
    elif lost := [dim for dim in given if own.count(dim) != 1 or given.count(dim) != 1]:
        yield f"{name}: contiguous names {lost[0]!r}, which must be one of its dims, once; they are {own}"
    elif is_output and -1 not in tensor.places:
        yield f"output {name!r} is made compact, so its last dim must be one of those that may be contiguous"


def _bound(tensors: Iterable[Tensor]) -> set[str]:
    """The names that the dims of these inputs bind together."""
    dims, known, count = [d for t in tensors for d in t.dims], set[str](), -1
    while len(known) > count:
        count = len(known)
        known |= {d.binds(known) for d in dims} - {""}
    return known


def _bind_it(optional: bool) -> str:
    where = "it or a required input" if optional else "a required input"
    return f"a dim of {where} must be that name, or an expression without 'ceil' of which it is the only unknown"


def _named_dims(op: Op, bound: set[str]) -> Iterator[str]:
    """Dims that the declaration refers to by name."""
    always = _bound(t for t in op.inputs.values() if not t.optional) | op.derived.keys()
    rows = {t.rows for t in op.inputs.values() if t.rows}
    for what, names, known, kind in (
        ("static", [name for name in op.static if name not in op.few], bound | op.derived.keys(), "an input"),
        ("static while few", op.few, always, "a required input"), ("parallel", op.parallel, bound, "an input"),
        ("contracted", op.contracted, bound | rows, "an input"), ("inner", op.inner, bound, "an input"),
    ):  # fmt: skip
        if unknown := [name for name in names if name not in known]:
            yield f"{what} has {unknown[0]!r}, which is no dim of {kind}; there are {sorted(known)}"
    for name, sizes in (op.space.buckets if op.space else {}).items():
        known = always | {t.rows for t in op.inputs.values() if t.rows and not t.optional}
        if name not in known:
            yield f"buckets has {name!r}, which is no dim of a required input; there are {sorted(known)}"
        if not sizes or list(sizes) != sorted(set(sizes)) or any(type(s) is not int or s < 1 for s in sizes):
            yield f"buckets of {name!r} must be rising sizes, (64, 512), got {sizes!r}"
    if twice := sorted({dim for dim in op.static if op.static.count(dim) > 1}):
        yield f"static has {twice[0]!r} twice: a dim is static always or while few"
    for name, t in op.outputs.items():
        if lost := [dim for dim in op.parallel if not t.has(dim) and not op.sums(name, dim)]:
            yield (
                f"parallel has {lost[0]!r}, which output {name!r} lacks: a slice of it gives no slice of {name!r}; "
                f"a dim that {name!r} is a sum over is contracted"
            )
    if op.inner and not (op.program or op.instead):
        yield f"inner has {op.inner[0]!r}, over which only a program can add up, and the op has none"
    if op.split is not None and op.split.dim not in bound | op.derived.keys():
        yield f"it splits {op.split.dim!r}, which is no dim of an input"


def _instead(op: Op) -> Iterator[str]:
    """What may run in place of a kernel."""
    if op.instead is None:
        return
    if unknown := [name for name in op.instead.anywhere if name not in op.inputs]:
        yield f"the program that may run instead takes {unknown[0]!r} anywhere, which is no input"
    if op.choices.get("fused") != HOW_FUSED:
        yield "a program may run instead of its kernel, so it must declare the attribute fused=FUSED"
    if op.program:
        yield "a program may run instead of a kernel, but it has a program"


def _gradient(op: Op) -> Iterator[str]:
    """What a declared gradient leaves out."""
    if not op.steps and not op.scaled:
        if op.no_gradient:
            yield f"it has no_gradient={op.no_gradient}, but declares no gradient"
        if op.handed_on or op.saving:
            yield "it has handed_on or saving, but declares no gradient"
        return
    if op.inference_only:
        yield "it is for inference only, yet declares a gradient"
    by_step = [(step, name) for step in op.steps for name in step.outputs]
    given = {name: step for step, name in by_step}
    for name in given:
        if len(twice := [step.name for step, other in by_step if other == name]) > 1:
            yield f"{name!r} is given by two steps of the gradient, {' and '.join(twice)}"
    yield from _wiring(op, given)
    yield from _scaled(op, given)
    if unknown := sorted(set(op.no_gradient) - op.inputs.keys() - op.keywords.keys()):
        yield f"no_gradient has {unknown}, which are neither inputs nor attributes"
    names, gives = " and ".join(step.name for step in op.steps), "gives" if len(op.steps) == 1 else "give"
    for name in op.inputs:
        step = given.get(f"d{name}")
        if step is not None and name in op.no_gradient:
            yield f"input {name!r} has no gradient by `no_gradient`, but {step.name} gives 'd{name}'"
        elif step is None and name not in {*op.no_gradient, *op.differentiable} and _floating(op, op.inputs[name]):
            yield f"input {name!r} has no gradient: {names} {gives} no 'd{name}'; {_meant(name)}"
        # A step with this output alone runs only if the input is present.
        elif op.inputs[name].optional and step and len(step.outputs) > 1 and step.outputs[f"d{name}"].given != name:
            yield f"{step.name} gives 'd{name}' also where there is no {name!r}: declare it with given={name!r}"
    yield from _reaching_attributes(op, names)


def _reaching_attributes(op: Op, names: str) -> Iterator[str]:
    """Whether a step of the gradient has each attribute and scalar; ``names`` is the steps' names as one text."""
    have = "has" if len(op.steps) == 1 else "have"
    cotangents = {t.dtype for t in op.outputs.values()}  # their dtypes tell an attribute that names one
    for what in () if op.scaled else ("attrs", "scalars"):  # of scaled gradients the forward has them all
        kind = {"attrs": "attribute", "scalars": "scalar"}[what]
        for name, default in getattr(op, what).items():
            reached = {step.name: getattr(step, what) for step in op.steps if name in getattr(step, what)}
            if not reached and name not in op.no_gradient and name not in cotangents:
                yield f"{kind} {name!r} does not reach the gradient: {names} {have} none; {_meant(name)}"
            for step_name, others in reached.items():
                if type(others[name]) is not type(default):
                    kinds = [type(value).__name__ for value in (default, others[name])]
                    yield f"{kind} {name!r} is {kinds[0]}, but in {step_name} {kinds[1]}"


def _wiring(op: Op, given: Mapping[str, Op]) -> Iterator[str]:
    """Whether each step of the gradient gets the inputs that it reads, and each of its outputs is read or a gradient;
    ``given`` is the step by output.
    """
    cotangents, before = {f"d{name}" for name in op.outputs}, set[str]()
    for name, output in op.handed_on.items():
        if name not in op.inputs or output not in op.shown or op.inputs[name].shape != op.outputs[output].shape:
            yield f"handed_on gives {name!r} the cotangent of {output!r}: an input, and an output of its shape"
        if f"d{name}" in given:
            yield f"handed_on gives {name!r} a gradient, but {given[f'd{name}'].name} gives 'd{name}'"
    more: set[str] = set()
    if op.saving is not None:
        more = op.saving.outputs.keys() - op.outputs.keys()
        if (op.saving.inputs, op.saving.keywords) != (op.inputs, op.keywords):
            yield f"{op.saving.name} saves for its gradient, but has other inputs or attributes"
        if list(op.saving.outputs.items())[: len(op.outputs)] != list(op.outputs.items()):
            yield f"{op.saving.name} saves for its gradient, but does not have its outputs first"
    known = op.inputs.keys() | op.outputs.keys() | cotangents | more
    ambiguous = cotangents & (op.inputs.keys() | op.outputs.keys())
    for k, step in enumerate(op.steps):
        unknown = sorted(step.inputs.keys() - known - before)
        if late := [name for name in unknown if name in given]:
            yield f"gradient {step.name} reads {late[0]!r}, which {given[late[0]].name} gives, but not before it"
        if unknown:
            yield f"gradient {step.name} reads {unknown}, which nothing gives it"
        if both := [name for name in step.inputs if name in ambiguous]:
            yield f"gradient {step.name} reads {both[0]!r}: that argument, or the cotangent of {both[0][1:]!r}?"
        for what, own, wanted in (("attribute", op.attrs, step.attrs), ("scalar", op.scalars, step.scalars)):
            if lost := [name for name in wanted if name not in own]:
                yield f"gradient {step.name} has the {what} {lost[0]!r}, which nothing gives it: {op.name} has none"
        if taken := sorted(step.outputs.keys() & known):
            yield f"gradient {step.name} gives {taken[0]!r}, which is the name of something that it is given"
        read = {name for later in op.steps[k + 1 :] for name in later.inputs}
        if idle := sorted(step.outputs.keys() - {f"d{name}" for name in op.inputs} - read):
            where = ", and no later step reads them" if len(op.steps) > 1 else ""
            yield f"gradient {step.name} has the outputs {idle}, which are no 'd' and an input of {[*op.inputs]}{where}"
        before |= step.outputs.keys()
        overwritten = {t.donates: name for name, t in step.outputs.items() if t.donates and t.donates in read}
        for source, name in overwritten.items():
            yield f"gradient {step.name} may write {name!r} over {source!r}, but a later step reads {source!r}"


def _scaled(op: Op, given: Mapping[str, Op]) -> Iterator[str]:
    """Gradients that the forward computes."""
    if not op.scaled:
        return
    made = op.outputs if op.saving is None else op.saving.outputs
    first, *others = op.outputs.items()
    if first[1].shape or any(name not in op.scaled.values() for name, _ in others):
        yield f"its gradients are scaled by the cotangent of {first[0]!r}, which must be a scalar and no output beside"
    for name, gradient in op.scaled.items():
        if name not in op.inputs or gradient not in made or made[gradient].declared != op.inputs[name].declared:
            yield f"scaled gives {name!r} the gradient {gradient!r}: an input, and an output of its shape and dtype"
        if f"d{name}" in given:
            yield f"scaled gives {name!r} a gradient, but {given[f'd{name}'].name} gives 'd{name}'"


def _floating(op: Op, tensor: Tensor) -> bool:
    return any(dtype.startswith(("float", "bfloat")) for dtype in op.dtype_choices(tensor))


def _meant(name: str) -> str:
    return f"if that is intended, declare no_gradient=({name!r},)"
