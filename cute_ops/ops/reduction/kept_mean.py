"""The mean of losses over what is not ignored: declaration, reference maths, cases. Losses of a linear head call it."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor

CASES = (
    Case("one-element", {"n": 1}),
    Case("even", {"n": 8192}),
    Case("odd-small", {"n": 7}, {"I": "int32"}, attrs={"ignore_index": 8}),
    Case("odd", {"n": 4097}, attrs={"ignore_index": 3}),
    Case("of-one", {"n": 1031}, attrs={"ignore_index": 5}, absent=("loss",)),
)


def reference(xp: Any, target: Any, loss: Any = None, *, ignore_index: int) -> Any:
    kept = xp.astype(target != ignore_index, xp.float32)
    return (1.0 if loss is None else xp.sum(loss)) / xp.sum(kept)


kept_mean = Op(
    "kept_mean",
    inputs={"target": Tensor("n", "I", upper_bound="n"), "loss": Tensor("n", "float32", optional=True)},
    outputs={"out": Tensor("", "float32")},
    dtypes={"I": ("int64", "int32")},
    attrs={"ignore_index": -100},
    static=(),
    reference=reference,
    kernel="cute_ops.kernels.reduction.kept_mean:KeptMean",
    inference_only="the backward of a loss has what its forward computed",
    cases=CASES,
    doc="""The sum of losses, divided by how many of their targets are not ignored.

    ``out = sum(loss) / sum(target != ignore_index)``

    A loss is one small kernel instead of four: a comparison, two sums and a quotient.

    Args:
        target: ``I[n]``, int64 or int32.
        loss: float32 ``[n]``, whose ignored elements are zero. None: ``1 / sum(...)``.
        ignore_index: a compile-time constant.

    Returns:
        float32, a scalar; no number where all targets are ignored. Summed in float32, deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, gaps between elements.
    """,
)
