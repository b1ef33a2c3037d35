"""Small ops with lists of tensors, for the tests of both frameworks."""

from __future__ import annotations

from typing import Any

from cute_ops import FLOATS, Case, Op, Tensor
from cute_ops.declaration.array_api import widen

ROWS, LIST = Tensor("*m n", "T"), Tensor("*m n", "T", many="k")
CASES = (Case("three", {"k": 3, "m": (6,), "n": 40}), Case("one", {"k": 1, "m": (5,), "n": 7}))


def _added(xp: Any, xs: list[Any]) -> Any:
    first, *others = widen(xp, *xs)
    return xp.astype(sum(others, start=first), xs[0].dtype)


add_n = Op(
    "add_n",
    inputs={"xs": LIST},
    outputs={"out": ROWS},
    dtypes={"T": FLOATS},
    reference=_added,
    kernel="tests.ops.listing_kernels:AddN",
    grad=Op(
        "add_n_bwd",
        inputs={"xs": LIST._replace(unread=True), "dout": ROWS},
        outputs={"dxs": LIST},
        dtypes={"T": FLOATS},
        reference=lambda xp, xs, dout: [xp.astype(dout, dout.dtype, copy=True) for _ in xs],
        kernel="tests.ops.listing_kernels:AddNBwd",
        cases=CASES,
    ),
    cases=CASES,
    doc="The sum of tensors of one shape.",
)


def _scaled(xp: Any, xs: list[Any], factors: Any, *, alpha: float) -> list[Any]:
    return [xp.astype(alpha * factors[i] * wide, x.dtype) for i, x in enumerate(xs) for wide in widen(xp, x)]


def _scaled_bwd(xp: Any, dys: list[Any], factors: Any, *, alpha: float) -> list[Any]:
    return _scaled(xp, dys, factors, alpha=alpha)


# Each tensor has rows of its own, and all have a row length.
OWN = Tensor("r n", "T", many="k", own=("r",))
JAGGED = (Case("two", {"k": 2, "r": (3, 40), "n": 8}), Case("four", {"k": 4, "r": (1, 2, 3, 4), "n": 33}))
scale_all = Op(
    "scale_all",
    inputs={"xs": OWN, "factors": Tensor("k", "float32")},
    outputs={"ys": OWN},
    dtypes={"T": FLOATS},
    attrs={"alpha": 1.0},
    reference=_scaled,
    kernel="tests.ops.listing_kernels:ScaleAll",
    grad=Op(
        "scale_all_bwd",
        inputs={"dys": OWN, "factors": Tensor("k", "float32")},
        outputs={"dxs": OWN},
        dtypes={"T": FLOATS},
        attrs={"alpha": 1.0},
        reference=_scaled_bwd,
        kernel="tests.ops.listing_kernels:ScaleAll",
        cases=JAGGED,
    ),
    no_gradient=("factors",),
    cases=JAGGED,
    doc="Each tensor of a list times its factor.",
)


def _parts(xp: Any, xs: list[Any], dout: Any) -> list[Any]:
    ends = [sum(len(x) for x in xs[: i + 1]) for i in range(len(xs))]
    return [xp.astype(dout[end - len(x) : end], dout.dtype, copy=True) for x, end in zip(xs, ends, strict=True)]


concatenate = Op(
    "concatenate",
    inputs={"xs": OWN},
    outputs={"out": Tensor("s n", "T")},
    dtypes={"T": FLOATS},
    derived={"s": lambda dims, attrs: sum(dims["r"])},
    reference=lambda xp, xs: xp.concat(xs),
    kernel="tests.ops.listing_kernels:Concatenate",
    grad=Op(
        "concatenate_bwd",
        inputs={"xs": OWN._replace(unread=True), "dout": Tensor("s n", "T")},
        outputs={"dxs": OWN},
        dtypes={"T": FLOATS},
        reference=_parts,
        kernel="tests.ops.listing_kernels:Split",
        cases=(Case("two", {"k": 2, "r": (3, 40), "s": 43, "n": 8}),),
    ),
    cases=JAGGED,
    doc="The rows of all tensors.",
)
