"""The report of a program and of its loops' bodies."""

from __future__ import annotations

from collections.abc import Iterator

from cute_ops.fusion.report import Entry, Report, entry_of
from cute_ops_jax.fusion.program import Program


def report_of(program: Program, name: str) -> Report:
    """What was found in a program, what became of it, and the equations that no expression says."""
    return Report(name, _entries(program, ""))


def _entries(program: Program, where: str) -> Iterator[Entry]:
    for part in program.parts:
        yield entry_of(part.found, part.choice, where)
    replaced = {root for part in program.parts if part.call for root in part.found.roots}
    for node, why in program.analysis.reasons.items():
        value = program.front.values.get(node)
        if value is not None and id(value.step) in program.lookups:
            yield Entry("embedding", "gather", "", str(list(node.shape)), where, 1)
            continue
        if node in replaced:
            continue
        said = str(node.attr) if node.op == "opaque" else node.op
        if said not in _SILENT and node.dtype in ("float32", "bfloat16", "float16", "float64"):
            yield Entry("", said, "" if why == said else why, "", where, 1)
    for body in program.bodies.values():
        inner = f"{where} {body.equation.primitive.name}".strip()
        for each in body.programs:
            yield from _entries(each, inner)


# Equations that compute nothing, or whose bodies have entries of their own.
_SILENT = (
    "jit", "pjit", "scan", "cond", "while", "remat2", "checkpoint", "remat", "shard_map", "transpose", "broadcast",
    "reshape",
)  # fmt: skip
