"""The report of a program and of its loops' bodies."""

from __future__ import annotations

from collections.abc import Iterator

from cute_ops.fusion.graph import FLOATS, Node
from cute_ops.fusion.report import Entry, Report, entry_of, text_of_shape
from cute_ops_jax.fusion.front import Step
from cute_ops_jax.fusion.program import Program


def report_of(program: Program, name: str) -> Report:
    """The regions of a program, their replacements, and the equations that no expression says."""
    return Report(name, _entries(program, ""))


def _entries(program: Program, where: str) -> Iterator[Entry]:
    for part in program.parts:
        yield entry_of(part.found, part.choice, where)
    replaced = {root for part in program.parts if part.call for root in part.found.roots}
    for node, why in program.analysis.reasons.items():
        value = program.front.values.get(node)
        if value is not None and id(value.step) in program.lookups:
            yield Entry("embedding", "gather", "", text_of_shape(node.shape), where, 1)
            continue
        if node in replaced:
            continue
        step = None if value is None else value.step
        said = _said(node, step)
        if said not in _SILENT and node.dtype in (*FLOATS, "float64"):
            yield Entry("", said, _why(node, step, "" if why == said else why), "", where, 1)
    for node, why in program.stay.items():
        yield Entry("", "attention", why, text_of_shape(node.shape), where, 1)
    for body in program.bodies.values():
        inner = f"{where} {body.equation.primitive.name}".strip()
        for each in body.programs:
            yield from _entries(each, inner)


def _said(node: Node, step: Step | None) -> str:
    """The name of a node's operation; that of a call of a function with a custom derivative includes the function's."""
    if node.op == "opaque" and step is not None and str(node.attr).startswith("custom_"):
        body = step.equation.params.get("call_jaxpr") or step.equation.params.get("fun_jaxpr")
        name = getattr(getattr(getattr(body, "jaxpr", None), "debug_info", None), "func_name", "")
        return f"{node.attr} {name}".strip()
    if node.op in ("opaque", "primitive", "reduce"):
        return str(node.attr[0] if isinstance(node.attr, tuple) else node.attr)
    return node.op


def _why(node: Node, step: Step | None, why: str) -> str:
    """The reason for which a node stays, where its name is not all of it."""
    if node.op != "opaque" or step is None:
        return why
    if str(node.attr).startswith("custom_"):
        return "it has a derivative of its own"
    if node.attr == "stop_gradient":
        return "what is computed with its value depends on it"
    asks = node.attr == "dot_general" and step.equation.params.get("precision") is not None
    return f"a product with precision {_precision(step)}" if asks else why


def _precision(step: Step) -> str:
    precision = step.equation.params["precision"]
    both = precision if isinstance(precision, tuple) else (precision,)
    return " and ".join(dict.fromkeys(getattr(each, "name", str(each)) for each in both))


# Equations that compute nothing, or whose bodies have entries of their own.
_SILENT = (
    "jit", "pjit", "scan", "cond", "while", "remat2", "checkpoint", "remat", "shard_map", "transpose", "broadcast",
    "reshape",
)  # fmt: skip
