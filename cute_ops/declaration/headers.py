"""Headers and stubs of the Python functions that adapters make of declared ops, in the terms of a framework."""

from __future__ import annotations

import re
from collections.abc import Mapping
from inspect import Parameter, Signature, signature
from textwrap import indent
from types import ModuleType
from typing import Any

from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor

Q = '"""'


def check_declaration(op: object, caller: str) -> None:
    """Raise TypeError for what is no declaration; ``caller`` is the function that it was passed to."""
    if not isinstance(op, Op):
        hint = "; cute_ops.fused makes a declaration of a function" if callable(op) else ""
        raise TypeError(f"{caller}: argument `op` must be a cute_ops.Op, got {type(op).__name__}{hint}.")


def header(op: Op, takes: str, returns: str, results: Mapping[str, Tensor] | None = None) -> Signature:
    """``(x, weight=None, bias=None, eps=1e-06, weight_offset=0.0)``, with these types as text. The function returns
    the results that are not hidden; by default those of the op.
    """
    kind, parameters = Parameter.POSITIONAL_OR_KEYWORD, []
    for name, tensor in op.inputs.items():
        default, annotation = (None, f"{takes} | None") if tensor.optional else (Parameter.empty, takes)
        annotation = f"Sequence[{takes}]" if tensor.many else annotation
        parameters.append(Parameter(name, kind, default=default, annotation=annotation))
    for name, value in {**op.keywords, **op.options}.items():
        parameters.append(Parameter(name, kind, default=value, annotation=type(value).__name__))
    shown = [t for t in (op.results if results is None else results).values() if not t.hidden]
    types = [f"list[{returns}]" if t.many else f"{returns} | None" if t.given else returns for t in shown]
    annotation = "None" if not types else types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"
    return Signature(parameters, return_annotation=annotation)


def stub(name: str, function: Signature, doc: str = "") -> str:
    """``def name(x: Tensor, eps: float = 1e-06) -> Tensor: ...``, a line for each argument where one is too short; with
    a docstring in place of the dots.
    """
    arguments: list[str] = []
    for p in function.parameters.values():
        stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        if p.kind is p.KEYWORD_ONLY and not any(a.startswith("*") for a in arguments):
            arguments.append("*")
        annotation = "" if p.annotation is p.empty else f": {p.annotation}"
        default = "" if p.default is p.empty else f" = {_literal(p.default)}"
        arguments.append(f"{stars}{p.name}{annotation}{default if annotation else default.replace(' ', '')}")
    end = "\n" if "\n" in doc else ""
    body = f"\n{indent(Q + doc + end + Q, '    ')}\n" if doc else " ...\n"
    line = f"def {name}({', '.join(arguments)}) -> {function.return_annotation}:"
    if len(line) + (0 if doc else 4) <= 120:
        return line + body
    return "\n".join([f"def {name}(", *(f"    {a}," for a in arguments), f") -> {function.return_annotation}:"]) + body


def module_stub(module: ModuleType, made_by: str, imports: Mapping[str, str]) -> str:
    """The stub file of a module of public functions; ``imports`` are lines by the name that they are for."""
    functions = [f for f in vars(module).values() if getattr(f, "__module__", "") == module.__name__]
    text = "\n".join(stub(f.__name__, signature(f), f.__doc__ or "") for f in functions)
    used = [line for name, line in imports.items() if re.search(rf"\b{name}\b", text)]
    return f"{Q}{(module.__doc__ or '').rstrip('.')}. Made by ``{made_by}``.{Q}\n\n" + "\n\n".join([*used, text])


def _literal(value: Any) -> str:
    """A default as Python source, strings in double quotes where they contain none."""
    return f'"{value}"' if isinstance(value, str) and repr(value) == f"'{value}'" and '"' not in value else repr(value)
