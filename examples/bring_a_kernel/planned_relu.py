"""WHAT: a ReLU whose wrapper brings tilings, flops and bytes. HOW is in planned_relu_kernel.py."""

from planned_relu_tiling import TILINGS

from cute_ops import FLOATS, Case, Op, Space, Tensor, Tuning


def reference(xp, x):
    return xp.where(x > 0, x, xp.zeros_like(x))


def valid(problem, _=None):
    return [tiling for tiling in TILINGS if tiling.validate(problem)]


ROWS = Tensor("*m n", "T", merged=True)  # one stride steps over all rows
planned_relu = Op(
    "brought_relu", inputs={"x": ROWS}, outputs={"out": ROWS}, dtypes={"T": FLOATS}, static=("n",),
    reference=reference, kernel="planned_relu_kernel:planned_relu",
    tuning=Tuning(lambda problem: valid(problem)[0], Space(valid)),
    flops=lambda dims, attrs: dims["m"] * dims["n"],
    cases=(Case("even", {"m": (1024,), "n": 512}), Case("odd", {"m": (3, 67), "n": 1001})),
)  # fmt: skip
