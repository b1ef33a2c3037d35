"""Cross entropy, and its fusion with a linear layer: accuracy, chunks of rows, no rows, and what is refused."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
from ml_dtypes import finfo

from cute_ops import testing
from cute_ops.ops.reduction.cross_entropy import cross_entropy as declared
from cute_ops.testing import namespace, numpy_dtype
from tests.contract.adapters import Adapter


@pytest.mark.drawn(0.5)
@pytest.mark.fault(
    "all logits of a row have a common offset of up to a million",
    "the loss and its gradient are as accurate as without it", "nothing",
)  # fmt: skip
@pytest.mark.on_gpus
@pytest.mark.parametrize("n", [7, 1003, 50257])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_common_offset_costs_no_digits(adapter: Adapter, dtype: str, smoothing: float, n: int) -> None:
    rng = np.random.default_rng(2)
    offsets = np.array([o for o in (0.0, 1e3, -1e4, 6e4, 1e6) if abs(o) < float(finfo(dtype).max)])
    logits = (3 * rng.standard_normal((len(offsets), n)) + offsets[:, None]).astype(numpy_dtype(dtype))
    target = rng.integers(0, n, len(offsets)).astype(np.int32)
    classes = adapter.array(target)

    def loss_of(x: Any) -> Any:
        return adapter.ours.cross_entropy(x, classes, label_smoothing=smoothing, reduction="none")

    (loss,), (gradient,) = adapter.value_and_gradients(loss_of, [adapter.array(logits)])
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    wanted = np.full(wide.shape, smoothing / n)
    wanted[np.arange(len(target)), target] += 1 - smoothing
    exact, slope = -(wanted * logs).sum(-1), np.exp(logs) - wanted
    # By the tolerance rule without the offset, which it would count among the largest numbers.
    without = {"logits": shifted.astype(np.float32), "target": target}
    off = testing.tolerances(declared, without, {**declared.attrs, "label_smoothing": smoothing})[0]
    assert off.max() < 2e-5  # an offset of a thousand rounds off more
    assert (np.abs(loss.astype(np.float64) - exact) <= off).all()
    # What the log of a sum is off by, every probability is off by relative to itself.
    rounded = 2 * (testing.EPS[dtype] * np.abs(slope) + testing.EPS["float32"])
    assert (np.abs(gradient.astype(np.float64) - slope) <= off[:, None] * np.exp(logs) + rounded).all()
    if dtype == "float32":
        assert (np.abs(gradient.astype(np.float64).sum(-1)) <= off).all()


def problem(lead: tuple[int, ...] = (3, 4), n: int = 67, h: int = 16) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((*lead, h), (n, h), (n,))]
    target = rng.integers(0, n, lead).astype(np.int32)
    target.flat[1] = -100
    return arrays, target


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_rows", [1, 5, 100])
def test_chunks_of_so_many_rows(adapter: Adapter, chunk_rows: int, reduction: str) -> None:
    """The loss and its gradients are those of logits that are written out."""
    arrays, target = problem()
    given, classes = adapter.arrays(arrays), adapter.array(target)
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 2.0, "logit_scale": 0.5}

    def ours(hidden: Any, weight: Any, bias: Any) -> Any:
        more = {"chunk_rows": chunk_rows, **options}
        return adapter.ours.linear_cross_entropy(hidden, weight, classes, bias, **more)

    def written_out(hidden: Any, weight: Any, bias: Any) -> Any:
        logits = hidden @ weight.T + bias
        capped = 2.0 * namespace([logits]).tanh(0.5 / 2.0 * logits)
        more = {name: value for name, value in options.items() if name not in ("softcap", "logit_scale")}
        return adapter.ours.cross_entropy(capped, classes, **more)

    cotangent = None if reduction != "none" else [np.cos(target).astype(np.float32)]
    found, exact = (
        adapter.value_and_gradients(adapter.usual(run), given, cotangent) for run in (ours, written_out)
    )  # fmt: skip
    for got, wanted in zip((*found[0], *found[1]), (*exact[0], *exact[1]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_linear_layer_without_rows(adapter: Adapter, reduction: str) -> None:
    hidden, weight = adapter.arrays([np.zeros((0, 16), np.float32), np.ones((5, 16), np.float32)])
    run = partial(adapter.ours.linear_cross_entropy, target=adapter.array(np.zeros(0, np.int32)), reduction=reduction)
    (value,), (dhidden, dweight) = adapter.value_and_gradients(lambda h, w: run(h, w).sum(), [hidden, weight])
    assert dhidden.shape == (0, 16)
    assert not value and not dweight.any()


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"reduction": "max"}, ValueError, "option `reduction` is 'max', expected 'mean', 'sum' or 'none'"),
        ({"chunk_rows": 0}, ValueError, "option `chunk_rows` is 0, expected at least 1"),
        ({"chunk_rows": 1.5}, TypeError, "option `chunk_rows` is 1.5, expected an int or None"),
        ({"label_smoothing": 2.0}, ValueError, "attribute `label_smoothing` is 2.0, expected a number from 0 to 1"),
        ({"z_loss": float("nan")}, ValueError, "attribute `z_loss` is nan, expected a number"),
        ({"z_loss": 1e300}, ValueError, "attribute `z_loss` is 1e+300, expected a number from -1e+37 to 1e+37"),
        ({"softcap": -1.0}, ValueError, "attribute `softcap` is -1.0, expected a finite number of at least 0"),
        ({"softcap": 1e300}, ValueError, "attribute `softcap` is 1e+300, expected 0, or from 2^-126 to 2^126"),
        ({"logit_scale": 1e-300}, ValueError, "attribute `logit_scale` is 1e-300, expected 0, or from 2^-126"),
        ({"logit_scale": 0.0}, ValueError, "attribute `logit_scale` is 0.0, expected a positive number"),
        ({"ignore_index": 2**40}, ValueError, "attribute `ignore_index` is 1099511627776, which no target of int32"),
        ({"h": 8}, ValueError, "argument `weight` has h=8, but h=16"),
        ({"bias": "float16"}, TypeError, "argument `bias` has dtype float16, but T=float32 from `hidden`"),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [0, 3])
def test_what_is_refused_whatever_the_rows(
    adapter: Adapter, rows: int, changes: dict[str, Any], kind: type[Exception], text: str
) -> None:
    (hidden, weight, bias), target = problem((3,))
    options = {k: v for k, v in changes.items() if k not in ("h", "bias")}
    weight, bias = weight[:, : changes.get("h", 16)], bias.astype(changes.get("bias", "float32"))
    given = [hidden[:rows], weight, target[:rows], bias]
    first, *others = adapter.arrays(given)
    for call in (lambda run: run(first), lambda run: adapter.vjp(run, first)):
        with pytest.raises(kind, match=f"^cute.linear_cross_entropy: {re.escape(text)}"):
            call(lambda hidden: adapter.ours.linear_cross_entropy(hidden, *others, **options))
