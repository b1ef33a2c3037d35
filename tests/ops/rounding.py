"""``out = 2 x`` in a dtype that the caller names, and its gradient, for the tests of all frameworks."""

from cute_ops import FLOATS, Case, OneOf, Op, Tensor, cast, widen


def reference(xp, x, *, out_dtype):
    (wide,) = widen(xp, x)
    return cast(xp, 2 * wide, out_dtype, wide)


def gradient(xp, x, dout):
    (wide,) = widen(xp, dout)
    return xp.astype(2 * wide, x.dtype)


X = Tensor("*m n", "T")
double_bwd = Op(
    "double_bwd", inputs={"x": X._replace(unread=True), "dout": Tensor("*m n", "D")}, outputs={"dx": X},
    dtypes={"T": FLOATS, "D": FLOATS}, reference=gradient, kernel="tests.ops.copying:Copy",
)  # fmt: skip
double = Op(
    "double", inputs={"x": X}, outputs={"out": Tensor("*m n", "out_dtype")}, dtypes={"T": FLOATS},
    attrs={"out_dtype": OneOf("bfloat16", "float32")}, reference=reference,
    kernel="tests.ops.copying:Copy", grad=double_bwd,
    cases=(Case("rounded", {"m": (3,), "n": 8}), Case("wide", {"m": (3,), "n": 8}, attrs={"out_dtype": "float32"})),
)  # fmt: skip
