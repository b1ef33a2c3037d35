"""The mean of losses over what is not ignored: declaration, reference maths, cases. Composites of losses call it."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor

CASES = (
    Case("one-element", {"n": 1}, absent=("factor",)),
    Case("even", {"n": 8192}, absent=("factor",)),
    Case("odd-small", {"n": 7}, {"I": "int32"}, attrs={"ignore_index": 8}, absent=("factor",)),
    Case("odd", {"n": 4097}, attrs={"ignore_index": 3}, absent=("factor",)),
    Case("of-one", {"n": 1031}, attrs={"ignore_index": 5}, absent=("loss", "factor")),
    Case("of-a-factor", {"n": 1031}, attrs={"ignore_index": 5}, absent=("loss",)),
    Case("times-a-factor", {"n": 300}),
)


def reference(xp: Any, target: Any, loss: Any = None, factor: Any = None, *, ignore_index: int) -> Any:
    kept = xp.astype(target != ignore_index, xp.float32)
    total = 1.0 if loss is None else xp.sum(loss)
    return (total if factor is None else total * factor) / xp.sum(kept)


kept_mean = Op(
    "kept_mean",
    inputs={
        "target": Tensor("n", "I", upper_bound="n"),
        "loss": Tensor("n", "float32", optional=True),
        "factor": Tensor("", "float32", optional=True),
    },
    outputs={"out": Tensor("", "float32")},
    dtypes={"I": ("int64", "int32")},
    attrs={"ignore_index": -100},
    static=(),
    reference=reference,
    kernel="cute_ops.kernels.reduction.kept_mean:KeptMean",
    inference_only="the backward of a loss has what its forward computed",
    cases=CASES,
    doc="""The sum of losses, divided by how many of their targets are not ignored.

    ``out = sum(loss) * factor / sum(target != ignore_index)``

    A loss is one small kernel instead of four: a comparison, two sums and a quotient.

    Args:
        target: ``I[n]``, int64 or int32.
        loss: float32 ``[n]``, whose ignored elements are zero. None: 1 in place of their sum.
        factor: float32, a scalar: the cotangent of a mean. None: 1.
        ignore_index: a compile-time constant.

    Returns:
        float32, a scalar; no number where all targets are ignored. Summed in float32, deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, gaps between elements.
    """,
)
