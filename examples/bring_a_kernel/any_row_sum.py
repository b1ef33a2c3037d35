"""WHAT: the sum of each row of any rank and float. HOW is in any_row_sum_kernel.py."""

from cute_ops import FLOATS, Case, Op, Tensor, widen


def reference(xp, x):
    (wide,) = widen(xp, x)
    return xp.astype(xp.sum(wide, axis=-1), x.dtype)


any_row_sum = Op(
    "brought_any_row_sum", inputs={"x": Tensor("*m n", "T", merged=True)},
    outputs={"out": Tensor("*m", "T", merged=True)}, dtypes={"T": FLOATS},
    reference=reference, kernel="any_row_sum_kernel:any_row_sum",
    cases=(Case("introduction", {"m": (1024,), "n": 1024}), Case("few columns", {"m": (2, 32), "n": 32})),
)  # fmt: skip
