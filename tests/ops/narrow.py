"""Ops on dtypes that no op of ours has, one each, for the tests of all frameworks."""

from cute_ops import Case, Op, Tensor

X = Tensor("*m n", "T")
CASES = (Case("odd", {"m": (2, 3), "n": 33}),)
copy_float8_e5m2, copy_float8_e8m0fnu, copy_uint32 = COPIES = [
    Op(f"copy_{dtype}", inputs={"x": X}, outputs={"out": X}, dtypes={"T": (dtype,)}, reference=lambda xp, x: x,
       kernel="tests.ops.copying:Copy", cases=CASES)
    for dtype in ("float8_e5m2", "float8_e8m0fnu", "uint32")
]  # fmt: skip
