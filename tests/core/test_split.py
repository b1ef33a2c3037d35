"""Ops on slices of a dim, merged as devices that share the dim do it, against the op on the whole dim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cute_ops import Op, Split, Tensor, testing
from cute_ops.declaration.binding import bind
from cute_ops.declaration.case import Case
from cute_ops.declaration.shapes import FLOATS, Array
from cute_ops.declaration.sharding import factors, sizes
from cute_ops.declaration.split import Sharding
from cute_ops.ops import OPS

SPLIT = tuple(one for op in OPS for one in (op, op.grad) if one and one.split)
ATTRS = ({}, {"label_smoothing": 0.1, "z_loss": 1e-2, "ignore_index": 3}, {"label_smoothing": 0.3})


def in_slices(op: Op, inputs: dict[str, Any], attrs: dict[str, Any], sizes: tuple[int, ...]) -> list[Any]:
    split = op.split
    assert split is not None
    results: dict[str, list[Any]] = {name: [] for name in op.outputs}
    start, last = 0, lambda name: split.dim in [d.name for d in {**op.inputs, **op.outputs}[name].dims]
    for size in sizes:
        own = {n: a[..., start : start + size] if last(n) else a for n, a in inputs.items()}
        given, chosen = split.of_slice(np, own, attrs, start, size, sum(sizes))
        assert {n: a.dtype for n, a in given.items()} == {n: a.dtype for n, a in own.items()}
        for name, value in zip(op.outputs, testing.run_reference(op, given, chosen), strict=True):
            results[name].append(value)
        start += size
    parts = {n: np.stack(v) for n, v in results.items() if not last(n)}
    merged = split.merge(np, parts, inputs, attrs, sizes, sum(sizes)) if split.merge else {}
    return [np.concatenate(v, axis=-1) if last(n) else merged[n] for n, v in results.items()]


@pytest.mark.parametrize("op", SPLIT, ids=lambda op: op.name)
@pytest.mark.parametrize("changed", ATTRS, ids=str)
@pytest.mark.parametrize("sizes", [(17, 17, 3), (37,)], ids=str)
def test_slices_give_the_whole(op: Op, changed: dict[str, Any], sizes: tuple[int, ...]) -> None:
    case = Case("split", {"m": (3, 4), "n": 37})
    arrays, attrs = testing.inputs(op, case, "float32"), {**op.attrs, **changed}
    logits, target = arrays["logits"], arrays["target"]
    assert logits is not None and target is not None
    ignored = attrs["ignore_index"]
    target[0] = [ignored, 20, -7, 37]  # ignored; fine; no classes
    target[1] = [36, 19, 2, 36]
    logits[1, 0, 17:34] = -np.inf  # a slice of nothing but -inf, without the target, ...
    logits[1, 1, 17:34] = -np.inf  # ... and with it,
    logits[1, 2, :] = -np.inf  # all of them;
    logits[1, 3, 5] = np.inf
    target[2] = [17, 16, 20, 33]
    logits[2, 2, 0], logits[2, 3, 2] = np.nan, 90.0
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if "log_sum" in op.inputs:
            forward = next(f for f in OPS if f.grad is op)
            _, *saved = testing.run_reference(forward, {"logits": logits, "target": target}, attrs)
            arrays["row_max"], arrays["log_sum"] = saved
        got = in_slices(op, arrays, attrs, sizes)
        for name, value, whole in zip(op.outputs, got, testing.run_reference(op, arrays, attrs), strict=True):
            np.testing.assert_allclose(value, whole, rtol=2e-6, atol=2e-6, err_msg=name)
            assert value.dtype == whole.dtype


def test_slices_of_logits_with_a_common_offset_keep_their_digits() -> None:
    """Each slice's loss is relative to its own maximum, which says nothing of the others'."""
    forward = next(op for op in OPS if op.name == "cross_entropy")
    logits = 3 * np.random.default_rng(0).standard_normal((4, 37), np.float32)
    logits += np.array([0, 1e3, -1e4, 1e6], np.float32)[:, None]
    arrays, attrs = {"logits": logits, "target": np.array([1, 20, 36, 30])}, {**forward.attrs, "label_smoothing": 0.1}
    exact = testing.expected(forward, arrays, attrs)[0]
    np.testing.assert_allclose(in_slices(forward, arrays, attrs, (17, 17, 3))[0], exact, rtol=1e-6)


def test_what_cannot_be_shared_is_refused() -> None:
    declared: dict[str, Any] = {
        "inputs": {"x": Tensor("*m 2n", "T")}, "outputs": {"out": Tensor("*m n", "T")}, "dtypes": {"T": FLOATS},
        "reference": lambda xp, x: x, "kernel": "m:K",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"a slice of a dim that devices share is no slice of x: '\*m 2n'"):
        Op("halves", sharding=Sharding(parallel=("n",)), **declared)
    for sharding in (Sharding(split=Split("n", lambda *a: a)), Sharding(contracted=("n",))):
        with pytest.raises(ValueError, match=r"is no slice of x: '\*m 2n'"):
            Op("halves", sharding=sharding, **declared)
    heads = Tensor("*m g*r", "T")
    tied = {"inputs": {"q": heads, "k": Tensor("*m g", "T")}, "outputs": {"out": heads}}
    for sharding in (Sharding(parallel=("r",)), Sharding(split=Split("g", lambda *a: a))):
        with pytest.raises(ValueError, match=r"is no slice of q: '\*m g\*r'"):
            Op("heads", sharding=sharding, **{**declared, **tied})
    with pytest.raises(ValueError, match="it splits 'k', which is no dim of an input"):
        Op("halves", sharding=Sharding(split=Split("k", lambda *a: a)), **declared)


GROUPED = Op(
    "grouped_bwd", inputs=dict.fromkeys(("dout", "q"), Tensor("*m g r d", "T")) | {"k": Tensor("*m g d", "T")},
    outputs={"dq": Tensor("*m g r d", "T"), "dk": Tensor("*m g d", "T")}, dtypes={"T": FLOATS}, kernel="m:K",
    reference=lambda xp, dout, q, k: (dout * k[..., None, :], (dout * q).sum(-2)), sharding=Sharding(("g", "r")),
)  # fmt: skip


def test_a_gradient_is_a_sum_over_the_dims_that_only_others_have() -> None:
    """``r`` stays a factor although ``dk`` lacks it."""
    heads, keys = Array((5, 2, 4, 6), "float32"), Array((5, 2, 6), "float32")
    named = factors(bind(GROUPED, {"dout": heads, "q": heads, "k": keys}))
    assert named["dq"] == named["q"] == ("m1", "g", "r", None) and named["dk"] == named["k"] == ("m1", "g", None)
    # A cotangent without the dim says that the outputs' slices already are sums over it.
    total = Op(
        "total_bwd", inputs={"dout": Tensor("*m", "T"), "scale": Tensor("", "T")}, outputs={"dscale": Tensor("", "T")},
        dtypes={"T": FLOATS}, kernel="m:K", reference=lambda xp, dout, scale: dout.sum(),
    )  # fmt: skip
    assert total.sums("dscale", "m") and not total.sums("dscale", "n")


def test_devices_share_leading_dims_of_one_name() -> None:
    """Those that the output lacks are whole on every device: it is any function of them, not a sum."""
    rows, others = Tensor("*m n", "T"), Tensor("*p n", "T")
    forward: dict[str, Any] = {"dtypes": {"T": FLOATS}, "kernel": "m:K", "reference": lambda xp, *arrays: arrays[0]}
    cross = Op("cross", inputs={"x": rows, "y": others}, outputs={"out": rows}, **forward)
    backward = Op(
        "cross_bwd", inputs={"dout": rows, "x": rows, "y": others}, outputs={"dx": rows, "dy": others}, **forward
    )
    x, y = Array((8, 4, 6), "float32"), Array((5, 6), "float32")
    for op in (cross, backward):
        named = factors(bind(op, {n: y if n == "y" else x for n in op.inputs}))
        assert named["x"] == ("m2", "m1", None) and named["y"] == (None, None)
    assert backward.sums("dy", "m") and not backward.sums("dx", "p")


def test_dims_of_expressions_stay_whole_but_for_groups() -> None:
    rows: dict[str, Any] = {
        "inputs": {
            "q": Tensor("*m g*r d", "T"), "k": Tensor("*m g d", "T"), "scale": Tensor("ceil(d/4)", "T"),
        },
        "outputs": {"out": Tensor("*m g*r d", "T")}, "dtypes": {"T": FLOATS}, "kernel": "m:K",
        "reference": lambda xp, q, *_: q,
    }  # fmt: skip
    given = {"q": Array((5, 8, 6), "float32"), "k": Array((5, 2, 6), "float32"), "scale": Array((2,), "float32")}
    for parallel, group in ((), None), (("g",), "g"):
        binding = bind(Op("tied", sharding=Sharding(parallel), **rows), given)
        own = ("m1", group, None)
        assert factors(binding) == {"q": own, "k": own, "scale": (None,), "out": own}
    assert sizes(binding, factors(binding)) == {"m1": 5, "g": 2}


def test_factors_of_a_backward() -> None:
    backward = OPS[0].grad
    assert backward is not None
    rows, weight = Array((8, 4, 6), "float32"), Array((6,), "float32")
    named = factors(bind(backward, {"x": rows, "dout": rows, "weight": weight}))
    assert named["x"] == named["dx"] == ("m2", "m1", None)
    assert named["weight"] == named["dweight"] == (None,)
