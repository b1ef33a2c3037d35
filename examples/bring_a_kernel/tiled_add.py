"""WHAT: a sum of two tensors, by a class that existed before. HOW is in tiled_add_kernel.py."""

from cute_ops import FLOATS, Case, Op, Tensor, widen


def reference(xp, a, b):
    wide_a, wide_b = widen(xp, a, b)
    return xp.astype(wide_a + wide_b, a.dtype)


ROWS = Tensor("*m n", "T", merged=True)  # one stride steps over all rows
tiled_add = Op(
    "brought_add", inputs={"a": ROWS, "b": ROWS}, outputs={"out": ROWS}, dtypes={"T": FLOATS},
    reference=reference, kernel="tiled_add_kernel:tiled_add",
    cases=(Case("tiles", {"m": (256,), "n": 1024}), Case("edges", {"m": (3, 67), "n": 1001})),
)  # fmt: skip
