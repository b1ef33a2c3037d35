"""``out = x w^T + bias`` for each of a batch, and its gradient, for the tests of all frameworks."""

from cute_ops import FLOATS, Accumulation, Case, Op, Tensor, widen


def reference(xp, x, w, bias):
    wide, other, more = widen(xp, x, w, bias)
    return xp.astype(xp.matmul(wide, xp.matrix_transpose(other)) + more, x.dtype)


def gradient(xp, x, w, dout):
    wide, other, dy = widen(xp, x, w, dout)
    dbias = xp.sum(dy, axis=tuple(range(dy.ndim - 1)))
    dw = xp.matmul(xp.matrix_transpose(dy), wide)
    return tuple(xp.astype(d, x.dtype) for d in (xp.matmul(dy, other), dw, dbias))


X, W, BIAS, OUT = (Tensor(shape, "T") for shape in ("*b m k", "*b n k", "n", "*b m n"))


def summed(tensor, *over):
    return tensor._replace(accumulates=Accumulation(over))


product_bwd = Op(
    "product_bwd", inputs={"x": X, "w": W, "dout": OUT}, static=(), dtypes={"T": FLOATS}, reference=gradient,
    outputs={"dx": summed(X, "n"), "dw": summed(W, "m"), "dbias": summed(BIAS, "b", "m")},
    kernel="tests.ops.copying:Copy",
)  # fmt: skip
product = Op(
    "product", inputs={"x": X, "w": W, "bias": BIAS}, outputs={"out": summed(OUT, "k")}, dtypes={"T": FLOATS},
    static=(), reference=reference, kernel="tests.ops.copying:Copy", grad=product_bwd,
    cases=(Case("llama", {"b": (2,), "m": 512, "n": 1024, "k": 4096}),),
)  # fmt: skip
