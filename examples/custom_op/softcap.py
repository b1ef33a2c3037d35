"""WHAT: an op of your own in both frameworks, Gemma 2's soft cap of logits. HOW is in softcap_kernel.py."""

from cute_ops import FLOATS, Case, Op, Tensor, widen


def reference(xp, x, *, cap):
    (wide,) = widen(xp, x)
    return xp.astype(cap * xp.tanh(wide / cap), x.dtype)


def reference_bwd(xp, x, dout, *, cap):
    wide, dy = widen(xp, x, dout)
    return xp.astype(dy * (1 - xp.tanh(wide / cap) ** 2), x.dtype)


X = Tensor("*m n", "T")
shared = {"dtypes": {"T": FLOATS}, "attrs": {"cap": 30.0}, "cases": (Case("gemma2", {"m": (3, 5), "n": 256}),)}
softcap_bwd = Op(
    "softcap_bwd", inputs={"x": X, "dout": X}, outputs={"dx": X},
    reference=reference_bwd, kernel="softcap_kernel:SoftCapBackward", **shared,
)  # fmt: skip
softcap = Op(
    "softcap", inputs={"x": X}, outputs={"out": X},
    reference=reference, kernel="softcap_kernel:SoftCap", grad=softcap_bwd, **shared,
)  # fmt: skip
