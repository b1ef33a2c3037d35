"""WHAT: an op of your own in both frameworks, Gemma 2's soft cap of logits. HOW is in softcap_kernel.py."""

import cute_ops_jax
import cute_ops_torch
from cute_ops import FLOATS, Case, Op, Tensor


def reference(xp, x, *, cap):
    return xp.astype(cap * xp.tanh(wide(xp, x) / cap), x.dtype)


def reference_bwd(xp, x, dout, *, cap):
    return xp.astype(wide(xp, dout) * (1 - xp.tanh(wide(xp, x) / cap) ** 2), x.dtype)


def wide(xp, x):
    return x if x.dtype == xp.float64 else xp.astype(x, xp.float32)


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

softcap_torch = cute_ops_torch.register(softcap)
softcap_jax = cute_ops_jax.register(softcap)
