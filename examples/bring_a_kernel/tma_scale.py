"""WHAT: a tensor times a constant, by a kernel whose tiles TMA moves. HOW is in tma_scale_kernel.py."""

from cute_ops import FLOATS, Case, Kernel, Op, Tensor, WhileFew, widen


def reference(xp, x, *, alpha):
    (wide,) = widen(xp, x)
    return xp.astype(wide * alpha, x.dtype)


tma_scale = Op(
    # TMA takes addresses and strides that are multiples of 16 bytes: 8 divides the number of columns.
    "brought_scale", inputs={"x": Tensor("*m 8c", "T", merged=True, align=16)},
    outputs={"out": Tensor("*m 8c", "T", merged=True)}, attrs={"alpha": 2.0}, dtypes={"T": FLOATS},
    static=(WhileFew("c"),),
    reference=reference, kernel=Kernel("tma_scale_kernel:TmaScale", least_sm=90),
    cases=(Case("tiles", {"m": (256,), "c": 128}), Case("edges", {"m": (3, 67), "c": 125})),
)  # fmt: skip
