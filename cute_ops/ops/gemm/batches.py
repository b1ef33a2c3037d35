"""What declarations of batched products share. Each example has its own matrices, ``*b n k``, and its own vectors."""

from __future__ import annotations

from collections.abc import Mapping

from cute_ops.config import Problem
from cute_ops.op import Case, Tensor

CASES = (
    Case("odd", {"b": (3,), "m": 67, "n": 333, "k": 200}),
    Case("experts", {"b": (8,), "m": 1024, "n": 4096, "k": 2048}),
    Case("heads", {"b": (2, 16), "m": 512, "n": 128, "k": 128}),
)


def each(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a product, or of its gradient, in a batch: their rows are one dim."""
    return {
        name: t._replace(shape=" ".join(["*b", *t.shape.replace("*m", "m").split()]), skippable=False)
        for name, t in tensors.items()
    }


def batch_of(problem: Problem) -> int:
    """The matrices that are multiplied: 1 where there is no batch."""
    return problem.size("b") if "b" in problem.dims else 1
