"""What the declarations of norms share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.norm.config import BACKWARD, FORWARD, backward, forward, workspace

ROWS = Tensor("*m n", "T")
# The last two inputs of a norm, and their gradients.
COLUMNS = {"weight": Tensor("n", "W", optional=True), "bias": Tensor("n", "B", optional=True)}
DCOLUMNS = {
    "dweight": Tensor("n", "W", given="weight", skippable=True),
    "dbias": Tensor("n", "B", given="bias", skippable=True),
}
DTYPES = {"T": FLOATS, "W": FLOATS, "B": FLOATS}


def declare(
    name: str,
    kernel: str,
    *,
    attrs: Mapping[str, Any],
    check: Callable[[Binding], str | None],
    reference: Callable[..., Any],
    reference_bwd: Callable[..., Any],
    cases: tuple[Case, ...],
    doc: str,
    doc_bwd: str,
    centred: bool = False,
) -> Op:
    """A norm of rows and its gradient, by the classes ``kernel`` and ``kernelBackward`` of the kernels' module.

    ``centred``: the row's mean is subtracted.
    """
    where = f"cute_ops.kernels.norm.{name}:{kernel}"
    common: dict[str, Any] = {"dtypes": DTYPES, "attrs": attrs, "check": check, "cases": cases}
    gradient = Op(
        f"{name}_bwd", inputs={"x": ROWS, "dout": ROWS, **COLUMNS},
        outputs={"dx": ROWS._replace(skippable=True), **DCOLUMNS},
        reference=reference_bwd, kernel=f"{where}Backward",
        tuning=Tuning(partial(backward, centred=centred), space=BACKWARD, workspace=workspace), doc=doc_bwd, **common,
    )  # fmt: skip
    return Op(
        name, inputs={"x": ROWS, **COLUMNS}, outputs={"out": ROWS}, reference=reference, kernel=where,
        tuning=Tuning(partial(forward, centred=centred), space=FORWARD), grad=gradient, doc=doc, **common,
    )  # fmt: skip
