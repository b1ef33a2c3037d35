"""The torch schema and the Python signature of a declaration.

Torch schemas have fixed arity, so the raw op returns an empty tensor of shape (0,) for an absent output.
:func:`resolver` maps raw outputs to what callers get.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor

_SCHEMA_TYPES = {float: "float", int: "int", bool: "bool", str: "str"}
# A compiled graph serves all values of an integer that it need not know; torch fixes floats.
_SCALAR_TYPES = {float: "float", int: "SymInt"}


def schema(op: Op, name: str | None = None) -> str:
    """``rmsnorm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-06, ...) -> Tensor``."""
    written = {name: f"(w{k}!)" for k, name in enumerate(op.mutates)}
    inputs = [
        f"Tensor{written.get(name, '')}{'[]' if t.many else ''}" + (f"? {name}=None" if t.optional else f" {name}")
        for name, t in op.inputs.items()
    ]
    attrs = [f"{_SCHEMA_TYPES[type(value)]} {name}={_default(value)}" for name, value in op.attrs.items()]
    scalars = [f"{_SCALAR_TYPES[type(value)]} {name}={value!r}" for name, value in op.scalars.items()]
    outputs = ", ".join("Tensor[]" if t.many else "Tensor" for t in op.outputs.values())
    arguments = ", ".join(inputs + attrs + scalars)
    return f"{name or op.name}({arguments}) -> {outputs if len(op.outputs) == 1 else f'({outputs})'}"


def _default(value: Any) -> str:
    """An attribute's default in a torch schema: strings have C escapes."""
    if not isinstance(value, str):
        return repr(value)
    return '"' + "".join(f"\\{ord(c):03o}" if c in '"\\' or c < " " else c for c in value) + '"'


def parameters(op: Op, options: bool = False, required: str = "") -> str:
    """``x, weight=None, bias=None, eps=1e-06, weight_offset=0.0``, also the options that only Python functions have;
    ``required`` follows the name of an input that is not optional.
    """
    inputs = [f"{name}{'=None' if t.optional else required}" for name, t in op.inputs.items()]
    named = {**op.keywords, **(op.options if options else {})}
    # What comes by position after the options is refused: it would be written as `out`.
    given = ["*_more", *(["out=None"] if takes_out(op) else [])] if options else []
    return ", ".join([*inputs, *(f"{name}={value!r}" for name, value in named.items()), *given])


def takes_out(op: Op) -> bool:
    """Whether the Python function takes ``out=``: of kernels without lists, if no argument is called that."""
    kernel = bool(op.shown) and not op.program and not op.numbers
    return kernel and op.finish is None and "out" not in {*op.inputs, *op.keywords, *op.options}


def defaults(op: Op) -> tuple[Any, ...]:
    """The values of the trailing arguments that a call may leave out."""
    return (*(None for t in op.inputs.values() if t.optional), *op.keywords.values())


@cache
def filler(op: Op) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that appends defaults to a call's arguments: the dispatcher drops trailing ones that equal them."""
    arity, tail = len(op.inputs) + len(op.keywords), defaults(op)
    first = arity - len(tail)
    return lambda args: args if len(args) == arity else args + tail[len(args) - first :]


def resolver(
    op: Op, wanted: Collection[str] | None = None, given: Collection[str] = ()
) -> Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]:
    """``resolve(inputs, raw outputs)``: what a caller gets for each raw output, with absent inputs as None.

    That is None for an absent output, and for one that another serves for (``same_as``) the other. Looks at the outputs
    that are ``wanted``, all by default; inputs in ``given`` are known not to be None.
    """
    inputs, outputs = list(op.inputs), list(op.outputs)
    source = {t.dtype: k for k, t in reversed(list(enumerate(op.inputs.values())))}
    looked_at = [(k, t) for k, (name, t) in enumerate(op.outputs.items()) if wanted is None or name in wanted]

    def dtype_of(tensor: Tensor) -> int:
        """The input that has the dtype of an output."""
        if tensor.dtype not in source:
            raise ValueError(
                f"op {op.name}: an output has dtype {tensor.dtype}, which no input binds; same_as needs that"
            )
        return source[tensor.dtype]

    shared = []
    for k, t in looked_at:
        if t.same_as:
            other = op.outputs[t.same_as]
            places = (0, 0) if t.dtype == other.dtype else (dtype_of(t), dtype_of(other))
            shared.append((k, outputs.index(t.same_as), *places))
    absent = [(k, inputs.index(t.given)) for k, t in looked_at if t.given and t.given not in given]
    if not shared and not absent:
        return lambda tensors, raw: raw

    def resolve(tensors: Sequence[Any], raw: Sequence[Any]) -> Sequence[Any]:
        results = list(raw)
        for k, other, own, others in shared:
            if tensors[own].dtype == tensors[others].dtype:
                results[k] = raw[other]
        for k, place in absent:
            if tensors[place] is None:
                results[k] = None
        return results

    return resolve
