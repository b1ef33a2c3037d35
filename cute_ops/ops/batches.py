"""Parts that declarations of batched products share. Each example has matrices, ``*b n k``, and vectors of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Problem
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.tensor import Tensor

CASES = (
    Case("odd", {"b": (3,), "m": 67, "n": 333, "k": 200}),
    Case("experts", {"b": (8,), "m": 1024, "n": 4096, "k": 2048}),
    Case("heads", {"b": (2, 16), "m": 512, "n": 128, "k": 128}),
)


def each(tensors: Mapping[str, Tensor], skippable: bool = False) -> dict[str, Tensor]:
    """The tensors of a product, or of its gradient, in a batch: their rows are one dim. Outputs may be ``skippable``
    where they are for one example.
    """
    return {
        name: t._replace(
            shape=" ".join(["*b", *t.shape.replace("*m", "m").split()]),
            merged=False,
            skippable=skippable and t.skippable,
        )
        for name, t in tensors.items()
    }


def of_program(op: Op, name: str = "") -> Op:
    """The op of a batch of a composite: the same program, which calls the ops of batches. To an op that has none a
    batch is more rows.
    """
    program = op.program
    assert program is not None  # other ops have kernels of batches

    def run(xp: Any, call: Any, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> Mapping[str, Any]:
        return program.run(xp, lambda called, *given: call(called.batched or called, *given), inputs, attrs)

    run.__module__ = program.run.__module__
    return Op(
        name or f"{op.name}_batched", inputs=each(op.inputs), outputs=each(op.outputs, skippable=True), static=(),
        dtypes=op.dtypes, attrs=op.declared_attrs,
        kernel=Program(run, tuple(called.batched or called for called in program.ops)),
        grad=tuple(step.batched or step for step in op.steps) or None, saving=op.saving and op.saving.batched,
        narrow=lambda name, outputs: of_program(op.only(*outputs), name), called=op.called,
        doc=f"The same of each example of a batch.\n\n    {op.doc}",
    )  # fmt: skip


def batch_of(problem: Problem) -> int:
    """The matrices that are multiplied: 1 where there is no batch."""
    return problem.size("b") if "b" in problem.dims else 1
