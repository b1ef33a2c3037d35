"""WHAT: a ReLU of matrices whose rows are whole vectors, by a kernel that existed before. HOW is in relu_kernel.py."""

from cute_ops import FLOATS, Case, Op, Tensor


def reference(xp, x):
    return xp.where(x > 0, x, xp.zeros_like(x))


relu = Op(
    # 8 divides the number of columns, 16 bytes the address and the stride of x.
    "brought_elementwise_relu", inputs={"x": Tensor("m 8v", "T", align=16)}, outputs={"out": Tensor("m 8v", "T")},
    dtypes={"T": FLOATS}, static=("v",), reference=reference, kernel="relu_kernel:relu",
    cases=(Case("guide", {"m": 1024, "v": 64}), Case("few columns", {"m": 3, "v": 5})),
)  # fmt: skip
