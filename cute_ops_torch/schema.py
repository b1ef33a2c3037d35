"""Declaration -> the texts that torch and Python want: schema and signature.

Torch schemas have fixed arity, so the raw op returns an empty tensor of shape (0,) for an absent output.
:func:`resolver` says which those are and what stands for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cute_ops.op import Op

_SCHEMA_TYPES = {float: "float", int: "int", bool: "bool", str: "str"}


def schema(op: Op) -> str:
    """``rmsnorm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-06, ...) -> Tensor``."""
    inputs = [f"Tensor? {name}=None" if t.optional else f"Tensor {name}" for name, t in op.inputs.items()]
    attrs = [f"{_SCHEMA_TYPES[type(value)]} {name}={_literal(value)}" for name, value in op.attrs.items()]
    outputs = ", ".join("Tensor" for _ in op.outputs)
    return f"{op.name}({', '.join(inputs + attrs)}) -> {outputs if len(op.outputs) == 1 else f'({outputs})'}"


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def parameters(op: Op, annotated: bool = False) -> str:
    """``x, weight=None, bias=None, eps=1e-06, weight_offset=0.0``, with types for the stubs."""
    optional, required = (": Tensor | None = None", ": Tensor") if annotated else ("=None", "")
    inputs = [name + (optional if t.optional else required) for name, t in op.inputs.items()]
    attrs = [f"{n}: {type(v).__name__} = {v!r}" if annotated else f"{n}={v!r}" for n, v in op.attrs.items()]
    return ", ".join(inputs + attrs)


def defaults(op: Op) -> tuple[Any, ...]:
    """The values of the trailing arguments that may be left out."""
    return (*(None for t in op.inputs.values() if t.optional), *op.attrs.values())


def filler(op: Op) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Appends the defaults to a call's arguments: the dispatcher drops trailing ones that equal them."""
    arity, tail = len(op.inputs) + len(op.attrs), defaults(op)
    missing = {n: tail[len(tail) - (arity - n) :] for n in range(arity - len(tail), arity)}
    return lambda args: args if len(args) == arity else args + missing[len(args)]


def resolver(op: Op) -> Callable[[Sequence[Any], Sequence[torch.Tensor]], tuple[torch.Tensor | None, ...]]:
    """``resolve(inputs, raw outputs)``: absent outputs as None, shared ones as the array that serves for them."""
    inputs, outputs = list(op.inputs), list(op.outputs)
    source = {t.dtype: i for i, t in reversed(list(enumerate(op.inputs.values())))}

    def index_of(dtype: str) -> int:
        if dtype not in source:
            raise ValueError(f"op {op.name}: an output has dtype {dtype}, which no input binds; same_as needs that")
        return source[dtype]

    given = [(k, inputs.index(t.given)) for k, t in enumerate(op.outputs.values()) if t.given]
    shared = [
        (k, outputs.index(t.same_as), index_of(t.dtype), index_of(op.outputs[t.same_as].dtype))
        for k, t in enumerate(op.outputs.values())
        if t.same_as
    ]

    def resolve(tensors: Sequence[Any], raw: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        result: list[torch.Tensor | None] = list(raw)
        for k, other, mine, theirs in shared:
            if tensors[mine].dtype == tensors[theirs].dtype:
                result[k] = raw[other]
        for k, i in given:
            if tensors[i] is None:
                result[k] = None
        return tuple(result)

    return resolve
