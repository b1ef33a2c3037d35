"""The mean of rows over what is not ignored: declaration, reference maths, cases. Losses of a linear head call it."""

from __future__ import annotations

from typing import Any

from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor

CASES = (
    Case("one-element", {"m": (1,), "n": 1}),
    Case("one-row", {"m": (), "n": 8192}),
    Case("odd-small", {"m": (3, 5), "n": 7}, {"I": "int32"}, attrs={"ignore_index": 8}),
    Case("some-ignored", {"m": (37,), "n": 4097}, attrs={"ignore_index": 3}),
    Case("of-one", {"m": (2,), "n": 1031}, attrs={"ignore_index": 5}, absent=("loss",)),
)


def reference(xp: Any, target: Any, loss: Any = None, *, ignore_index: int) -> Any:
    kept = xp.where(target != ignore_index, 1.0, 0.0)
    count = xp.sum(kept, axis=-1)
    return (1.0 if loss is None else xp.sum(loss, axis=-1)) / count


kept_mean = Op(
    "kept_mean",
    inputs={"target": Tensor("*m n", "I", upper_bound="n"), "loss": Tensor("*m n", "float32", optional=True)},
    outputs={"out": Tensor("*m", "float32")},
    dtypes={"I": ("int64", "int32")},
    attrs={"ignore_index": -100},
    static=(),
    reference=reference,
    kernel="cute_ops.kernels.reduction.kept_mean:KeptMean",
    inference_only="the backward of a loss has what its forward computed",
    cases=CASES,
    doc="""The sum of each row, divided by how many of its targets are not ignored.

    ``out = sum(loss) / sum(target != ignore_index)``

    A loss is one small kernel instead of four: a comparison, two sums and a quotient.

    Args:
        target: ``I[*m n]``, int64 or int32; any leading shape, any row stride, any n.
        loss: float32 ``[*m n]``, whose ignored elements are zero; any row stride. None: ``1 / sum(...)``.
        ignore_index: a compile-time constant.

    Returns:
        float32 ``[*m]``; no number where all targets are ignored. Summed in float32, deterministic.

    Raises:
        TypeError: a dtype that is not listed.
        ValueError: shapes that do not fit, a last dim that is not contiguous.
    """,
)
