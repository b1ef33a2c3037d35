"""Small ops that say which layouts their tensors have in memory, for the tests of all frameworks."""

from cute_ops import FLOATS, Case, Op, Tensor, widen


def _product(xp, x, w, bias):
    wide, other, more = widen(xp, x, w, bias)
    return xp.astype(xp.matmul(wide, other) + more, x.dtype)


def _gradient(xp, x, w, dout):
    wide, other, dy = widen(xp, x, w, dout)
    rows, dys = (xp.reshape(a, (-1, a.shape[-1])) for a in (wide, dy))
    found = xp.matmul(dy, other.T), xp.matmul(rows.T, dys), xp.sum(dys, axis=0)
    return tuple(xp.astype(d, x.dtype) for d in found)


X = Tensor("*m k", "T", contiguous=("k", "m"))
W = Tensor("k n", "T", contiguous="k")
BIAS = Tensor("n", "T", contiguous=())
CASES = (Case("", {"m": (6,), "k": 8, "n": 4}),)

by_columns_bwd = Op(
    "by_columns_bwd", inputs={"x": X, "w": W, "dout": Tensor("*m n", "T", contiguous="m")},
    outputs={"dx": Tensor("*m k", "T"), "dw": Tensor("k n", "T"), "dbias": Tensor("n", "T")}, dtypes={"T": FLOATS},
    static=(), reference=_gradient, kernel="tests.ops.layouts_kernels:Told", cases=CASES,
)  # fmt: skip
# Either operand by columns, a bias with any stride.
by_columns = Op(
    "by_columns", inputs={"x": X, "w": W, "bias": BIAS}, outputs={"out": Tensor("*m n", "T")}, dtypes={"T": FLOATS},
    static=(), reference=_product, kernel="tests.ops.layouts_kernels:Told", cases=CASES, grad=by_columns_bwd,
)  # fmt: skip

ALIGNED = Tensor("m n", "T", align=16)
# One row-major operand where TMA could load it, one that is copied to where it could.
aligned = Op(
    "aligned", inputs={"x": ALIGNED, "y": ALIGNED._replace(contiguous="m", otherwise="copy")},
    outputs={"out": Tensor("m n", "T")}, dtypes={"T": FLOATS}, reference=lambda xp, x, y: x + y, static=(),
    kernel="tests.ops.layouts_kernels:Told",
)  # fmt: skip

# Three dims, of which the first is contiguous: those of its kernel are in declared order.
turned = Op(
    "turned", inputs={"x": Tensor("*m k d", "T", contiguous="m")}, outputs={"out": Tensor("*m", "T")},
    dtypes={"T": FLOATS}, static=("k", "d"), reference=lambda xp, x: x[..., 0, 0],
    kernel="tests.ops.layouts_kernels:Told",
)  # fmt: skip
