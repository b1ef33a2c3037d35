"""WHAT: the sum of each row, by a kernel that existed before. HOW is in row_sum_kernel.py."""

from cute_ops import Case, Op, Tensor


def reference(xp, x):
    return xp.sum(x, axis=-1)


row_sum = Op(
    "brought_row_sum", inputs={"x": Tensor("m n", "T")}, outputs={"out": Tensor("m", "T")}, dtypes={"T": ("float32",)},
    reference=reference, kernel="row_sum_kernel:row_sum",
    cases=(Case("introduction", {"m": 1024, "n": 1024}), Case("few columns", {"m": 64, "n": 32})),
)  # fmt: skip
