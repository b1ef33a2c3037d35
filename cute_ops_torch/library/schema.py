"""Declaration -> the texts that torch and Python want: schema and signature.

Torch schemas have fixed arity, so the raw op returns an empty tensor of shape (0,) for an absent output.
:func:`resolver` says which those are and what stands for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cute_ops.op import Op, Tensor

_SCHEMA_TYPES = {float: "float", int: "int", bool: "bool", str: "str"}


def schema(op: Op) -> str:
    """``rmsnorm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-06, ...) -> Tensor``."""
    inputs = [f"Tensor? {name}=None" if t.optional else f"Tensor {name}" for name, t in op.inputs.items()]
    attrs = [f"{_SCHEMA_TYPES[type(value)]} {name}={_default(value)}" for name, value in op.attrs.items()]
    outputs = ", ".join("Tensor" for _ in op.outputs)
    return f"{op.name}({', '.join(inputs + attrs)}) -> {outputs if len(op.outputs) == 1 else f'({outputs})'}"


def _default(value: Any) -> str:
    """An attribute's default as torch's schemas have it: text with C's escapes."""
    if not isinstance(value, str):
        return repr(value)
    return '"' + "".join(f"\\{ord(c):03o}" if c in '"\\' or c < " " else c for c in value) + '"'


def parameters(op: Op, annotated: bool = False, options: bool = False) -> str:
    """``x, weight=None, bias=None, eps=1e-06, weight_offset=0.0``, with types for the stubs, and with the options that
    only Python functions have.
    """
    optional, required = (": Tensor | None = None", ": Tensor") if annotated else ("=None", "")
    inputs = [name + (optional if t.optional else required) for name, t in op.inputs.items()]
    named = {**op.attrs, **(op.options if options else {})}
    attrs = [f"{n}: {type(v).__name__} = {_quoted(v)}" if annotated else f"{n}={_quoted(v)}" for n, v in named.items()]
    return ", ".join(inputs + attrs)


def _quoted(value: Any) -> str:
    """A default as Python has it; text in the quotes of this project, where it has none of its own."""
    return f'"{value}"' if isinstance(value, str) and repr(value) == f"'{value}'" and '"' not in value else repr(value)


def defaults(op: Op) -> tuple[Any, ...]:
    """The values of the trailing arguments that may be left out."""
    return (*(None for t in op.inputs.values() if t.optional), *op.attrs.values())


def filler(op: Op) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Appends the defaults to a call's arguments: the dispatcher drops trailing ones that equal them."""
    arity, tail = len(op.inputs) + len(op.attrs), defaults(op)
    missing = {n: tail[len(tail) - (arity - n) :] for n in range(arity - len(tail), arity)}
    return lambda args: args if len(args) == arity else args + missing[len(args)]


def resolved(op: Op, raw: Sequence[str], inputs: Mapping[str, str] | None = None) -> list[str]:
    """Raw outputs as expressions -> expressions of what stands for each.

    An absent output is None, a shared one the array that serves for it.

    Args:
        inputs: the inputs as expressions, where they are not their names.
    """
    outputs = dict(zip(op.outputs, raw, strict=True))
    local = inputs or {name: name for name in op.inputs}
    source = {t.dtype: local[name] for name, t in reversed(op.inputs.items())}

    def dtype_of(tensor: Tensor) -> str:
        if tensor.dtype not in source:
            raise ValueError(
                f"op {op.name}: an output has dtype {tensor.dtype}, which no input binds; same_as needs that"
            )
        return f"{source[tensor.dtype]}.dtype"

    expressions = []
    for name, tensor in op.outputs.items():
        text = outputs[name]
        if tensor.same_as:
            other = tensor.same_as
            text = f"({outputs[other]} if {dtype_of(tensor)} == {dtype_of(op.outputs[other])} else {text})"
        expressions.append(f"(None if {local[tensor.given]} is None else {text})" if tensor.given else text)
    return expressions


def resolver(op: Op) -> Callable[[Sequence[Any], Sequence[torch.Tensor]], tuple[torch.Tensor | None, ...]]:
    """``resolve(inputs, raw outputs)``: absent outputs as None, shared ones as the array that serves for them."""
    raw = [f"_raw[{k}]" for k, _ in enumerate(op.outputs)]
    text = f"def resolve({', '.join(op.inputs)}, _raw):\n    return {', '.join(resolved(op, raw))},\n"
    resolve = define(text, f"resolve {op.name}")["resolve"]
    return lambda tensors, outputs: resolve(*tensors, outputs)


def define(text: str, name: str, **values: Any) -> dict[str, Any]:
    """Runs generated source, as dataclasses do, in a scope of these values; returns what it defines.

    A loop over a call's arguments costs more host time than the rest of the call, so what is called often is written
    out. Names of the scope start with an underscore, which no argument does.
    """
    space: dict[str, Any] = dict(values)
    exec(compile(text, f"<cute_ops_torch {name}>", "exec"), space)
    return space
