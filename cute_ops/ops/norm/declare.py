"""Parts that the declarations of norms share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cute_ops.declaration.array_api import widen
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE
from cute_ops.declaration.tensor import Tensor
from cute_ops.ops.norm.config import BACKWARD, FORWARD, backward, forward, workspace

ROWS, RESIDUAL = Tensor("*m n", "T"), Tensor("*m n", "R")
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


def declare_of_sum(
    name: str,
    kernel: str,
    norm: Any,
    *,
    attrs: Mapping[str, Any],
    check: Callable[[Binding], str | None],
    cases: tuple[Case, ...],
    doc: str,
    doc_bwd: str,
    centred: bool = False,
) -> Op:
    """A norm of ``x + residual``, which it returns, too, and its gradient, by the kernels of the norm alone.

    ``norm``: the module that declares it, for its references.
    """

    def reference(xp: Any, x: Any, residual: Any, weight: Any = None, bias: Any = None, **attrs: Any) -> Any:
        wide, r = widen(xp, x, residual)
        residual_out = xp.astype(wide + r, residual.dtype)
        out = norm.reference(xp, *widen(xp, residual_out, weight, bias), **attrs)
        return xp.astype(out, x.dtype), residual_out

    def reference_bwd(
        xp: Any, residual_out: Any, dout: Any, dresidual_out: Any = None, weight: Any = None, bias: Any = None,
        **attrs: Any,
    ) -> Any:  # fmt: skip
        wide, dy, dh = widen(xp, residual_out, dout, dresidual_out)
        dsum, dweight, dbias = norm.reference_bwd(xp, wide, dy, weight, bias, **attrs)
        dsum = dsum if dh is None else dsum + dh
        dx = None if dout.dtype == residual_out.dtype else xp.astype(dsum, dout.dtype)
        return dx, xp.astype(dsum, residual_out.dtype), dweight, dbias

    where = f"{norm.__name__.replace('.ops.', '.kernels.')}:{kernel}"
    common: dict[str, Any] = {"dtypes": {**DTYPES, "R": FLOATS}, "attrs": attrs, "cases": cases}
    dcolumns = {key: t._replace(zero_without="dout") for key, t in DCOLUMNS.items()}
    gradient = Op(
        f"{name}_bwd",
        inputs={"residual_out": RESIDUAL, "dout": ROWS, "dresidual_out": RESIDUAL._replace(optional=True), **COLUMNS},
        outputs={"dx": ROWS._replace(same_as="dresidual"), "dresidual": RESIDUAL, **dcolumns},
        reference=reference_bwd, kernel=f"{where}Backward", check=check,
        tuning=Tuning(partial(backward, centred=centred), space=BACKWARD, workspace=workspace), doc=doc_bwd, **common,
    )  # fmt: skip
    return Op(
        name, inputs={"x": ROWS, "residual": RESIDUAL, **COLUMNS}, outputs={"out": ROWS, "residual_out": RESIDUAL},
        reference=reference, kernel=where, check=lambda binding: check(binding) or residual_problem(binding),
        tuning=Tuning(partial(forward, centred=centred), space=FORWARD), grad=gradient, doc=doc, **common,
    )  # fmt: skip


def residual_problem(binding: Binding) -> str | None:
    """The error text for the residual's dtype; empty if it is right."""
    x, residual = binding.dtypes["T"], binding.dtypes["R"]
    if residual == x or ITEMSIZE[residual] > ITEMSIZE[x]:
        return None
    return f"argument `residual` has dtype {residual}, expected {x} (that of `x`) or a wider one."
