"""The gradient of a declaration: whether its steps get what they read, and leave nothing out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cute_ops.declaration.fields import Declaration
from cute_ops.declaration.tensor import Tensor

Steps = Mapping[str, Declaration]  # by the name of what a step computes


def problems(op: Declaration) -> Iterator[str]:
    if not op.steps and not op.scaled:
        if op.no_gradient:
            yield f"it has no_gradient={op.no_gradient}, but declares no gradient"
        if op.handed_on or op.saving:
            yield "it has handed_on or saving, but declares no gradient"
        return
    if op.inference_only:
        yield "it is for inference only, yet declares a gradient"
    by_step = [(step, name) for step in op.steps for name in step.outputs]
    steps = {name: step for step, name in by_step}
    for name in steps:
        if len(twice := [step.name for step, other in by_step if other == name]) > 1:
            yield f"{name!r} is given by two steps of the gradient, {' and '.join(twice)}"
    yield from _handed_on(op, steps)
    yield from _saving(op)
    yield from _wiring(op, steps)
    yield from _scaled(op, steps)
    yield from _left_out(op, steps)
    yield from _reaching_attributes(op)


def _handed_on(op: Declaration, steps: Steps) -> Iterator[str]:
    for name, output in op.handed_on.items():
        if name not in op.inputs or output not in op.shown or op.inputs[name].shape != op.outputs[output].shape:
            yield f"handed_on gives {name!r} the cotangent of {output!r}: an input, and an output of its shape"
        if f"d{name}" in steps:
            yield f"handed_on gives {name!r} a gradient, but {steps[f'd{name}'].name} gives 'd{name}'"


def _saving(op: Declaration) -> Iterator[str]:
    if op.saving is None:
        return
    if (op.saving.inputs, op.saving.keywords) != (op.inputs, op.keywords):
        yield f"{op.saving.name} saves for its gradient, but has other inputs or attributes"
    if list(op.saving.outputs.items())[: len(op.outputs)] != list(op.outputs.items()):
        yield f"{op.saving.name} saves for its gradient, but does not have its outputs first"


def _wiring(op: Declaration, steps: Steps) -> Iterator[str]:
    """Whether each step gets the inputs that it reads."""
    cotangents, arguments = {f"d{name}" for name in op.outputs}, op.inputs.keys() | op.outputs.keys()
    known = arguments | cotangents | (op.saving.outputs.keys() if op.saving else set())
    earlier: set[str] = set()
    for k, step in enumerate(op.steps):
        unknown = sorted(step.inputs.keys() - known - earlier)
        if late := [name for name in unknown if name in steps]:
            yield f"gradient {step.name} reads {late[0]!r}, which {steps[late[0]].name} gives, but not before it"
        if unknown:
            yield f"gradient {step.name} reads {unknown}, which nothing gives it"
        if both := [name for name in step.inputs if name in cotangents & arguments]:
            yield f"gradient {step.name} reads {both[0]!r}: that argument, or the cotangent of {both[0][1:]!r}?"
        for what, own, wanted in (("attribute", op.attrs, step.attrs), ("scalar", op.scalars, step.scalars)):
            if lost := [name for name in wanted if name not in own]:
                yield f"gradient {step.name} has the {what} {lost[0]!r}, which nothing gives it: {op.name} has none"
        if taken := sorted(step.outputs.keys() & known):
            yield f"gradient {step.name} gives {taken[0]!r}, which is the name of something that it is given"
        yield from _results(op, step, {name for later in op.steps[k + 1 :] for name in later.inputs})
        earlier |= step.outputs.keys()


def _results(op: Declaration, step: Declaration, read: set[str]) -> Iterator[str]:
    """Whether each output of a step is a gradient, or read by a later step; ``read`` is what later steps read."""
    if idle := sorted(step.outputs.keys() - {f"d{name}" for name in op.inputs} - read):
        where = ", and no later step reads them" if len(op.steps) > 1 else ""
        yield f"gradient {step.name} has the outputs {idle}, which are no 'd' and an input of {[*op.inputs]}{where}"
    overwritten = {t.donates: name for name, t in step.outputs.items() if t.donates and t.donates in read}
    for source, name in overwritten.items():
        yield f"gradient {step.name} may write {name!r} over {source!r}, but a later step reads {source!r}"


def _scaled(op: Declaration, steps: Steps) -> Iterator[str]:
    """Gradients that the forward computes."""
    if not op.scaled:
        return
    outputs = op.outputs if op.saving is None else op.saving.outputs
    first, *others = op.outputs.items()
    if first[1].shape or any(name not in op.scaled.values() for name, _ in others):
        yield f"its gradients are scaled by the cotangent of {first[0]!r}, which must be a scalar and no output beside"
    for name, gradient in op.scaled.items():
        if name not in op.inputs or gradient not in outputs or outputs[gradient].declared != op.inputs[name].declared:
            yield f"scaled gives {name!r} the gradient {gradient!r}: an input, and an output of its shape and dtype"
        if f"d{name}" in steps:
            yield f"scaled gives {name!r} a gradient, but {steps[f'd{name}'].name} gives 'd{name}'"


def _left_out(op: Declaration, steps: Steps) -> Iterator[str]:
    """Floating inputs without a gradient, and gradients of inputs that have none."""
    if unknown := sorted(set(op.no_gradient) - op.inputs.keys() - op.keywords.keys()):
        yield f"no_gradient has {unknown}, which are neither inputs nor attributes"
    gives = f"{_names(op)} {'gives' if len(op.steps) == 1 else 'give'}"
    for name, tensor in op.inputs.items():
        step = steps.get(f"d{name}")
        if step is not None and name in op.no_gradient:
            yield f"input {name!r} has no gradient by `no_gradient`, but {step.name} gives 'd{name}'"
        elif step is None and name not in {*op.no_gradient, *op.differentiable} and _floating(op, tensor):
            yield f"input {name!r} has no gradient: {gives} no 'd{name}'; {_intended(name)}"
        # A step with this output alone runs only if the input is present.
        elif tensor.optional and step and len(step.outputs) > 1 and step.outputs[f"d{name}"].given != name:
            yield f"{step.name} gives 'd{name}' also where there is no {name!r}: declare it with given={name!r}"


def _reaching_attributes(op: Declaration) -> Iterator[str]:
    """Whether a step of the gradient has each attribute and scalar; of scaled gradients the forward has them all."""
    have = f"{_names(op)} {'has' if len(op.steps) == 1 else 'have'}"
    cotangents = {t.dtype for t in op.outputs.values()}  # their dtypes tell an attribute that names one
    for what, kind in () if op.scaled else (("attrs", "attribute"), ("scalars", "scalar")):
        for name, default in getattr(op, what).items():
            reached = {step.name: getattr(step, what) for step in op.steps if name in getattr(step, what)}
            if not reached and name not in op.no_gradient and name not in cotangents:
                yield f"{kind} {name!r} does not reach the gradient: {have} none; {_intended(name)}"
            for step, others in reached.items():
                if type(others[name]) is not type(default):
                    kinds = [type(value).__name__ for value in (default, others[name])]
                    yield f"{kind} {name!r} is {kinds[0]}, but in {step} {kinds[1]}"


def _names(op: Declaration) -> str:
    return " and ".join(step.name for step in op.steps)


def _floating(op: Declaration, tensor: Tensor) -> bool:
    return any(dtype.startswith(("float", "bfloat")) for dtype in op.dtype_choices(tensor))


def _intended(name: str) -> str:
    return f"if that is intended, declare no_gradient=({name!r},)"
