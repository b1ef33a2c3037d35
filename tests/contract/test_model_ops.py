"""The ops of models and their trainers: values and gradients of every case against float64, programs and batches."""

from __future__ import annotations

import importlib
import importlib.util
import re
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cute_ops import testing
from cute_ops.calls import lookup
from cute_ops.composite.models import MODELS
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.testing import EPS
from cute_ops.tools import gradient
from tests.contract.adapters import Adapter, as_tuple

PAIRS = [(op, case) for op in MODELS if not op.program for case in op.cases]
SMALL = [(op, case) for op, case in PAIRS if testing.elements(case) <= 40_000]
DTYPES = ("float32", "bfloat16", "float16")
# Ops whose numbers say where sequences begin: there are none without rows.
NAME_ROWS = {"causal_conv1d_packed", "causal_conv1d_states"}


def dtype_of(op: Op, case: Case) -> str:
    """One dtype of a case, by chance: all come up over an op's cases."""
    return DTYPES[zlib.crc32(f"{op.name} {case.name}".encode()) % 3]


def floats(op: Op, outputs: Any) -> tuple[Any, ...]:
    """The outputs that have a gradient."""
    named = zip(op.shown, as_tuple(outputs), strict=True)
    return tuple(a for name, a in named if a is not None and "int" not in op.outputs[name].dtype)


@pytest.mark.feature("values of every case against float64")
@pytest.mark.drawn(0.4)
@pytest.mark.on_gpus
@pytest.mark.parametrize(("op", "case"), PAIRS, ids=lambda v: v.name)
def test_values(adapter: Adapter, op: Op, case: Case) -> None:
    arrays, attrs = testing.inputs(op, case, dtype_of(op, case)), testing.attributes(op, case)
    testing.check(op, arrays, attrs, adapter.run(op, arrays, attrs))


@pytest.mark.feature("gradients of every case against float64")
@pytest.mark.drawn(0.35)
@pytest.mark.on_gpus
@pytest.mark.parametrize(("op", "case"), [(op, case) for op, case in SMALL if op.grad], ids=lambda v: v.name)
def test_gradients(adapter: Adapter, op: Op, case: Case) -> None:
    """Of all outputs for drawn cotangents, against the gradient's reference in float64."""
    arrays, attrs = testing.inputs(op, case, dtype_of(op, case)), testing.attributes(op, case)
    names = [name for name in op.differentiable if arrays[name] is not None]
    function, fixed = testing.plain(op, adapter.register(op)), {}
    for name, a in arrays.items():
        if name not in names:
            fixed[name] = None if a is None else adapter.array(a)

    def of(*given: Any) -> Any:
        return floats(op, function(**fixed, **dict(zip(names, given, strict=True)), **attrs))

    rng = np.random.default_rng(1)
    raw = testing.run_reference(op, testing.in_float64(arrays), attrs)
    shown = [name for name in op.shown if "int" not in op.outputs[name].dtype]
    values = dict(zip(op.shown, testing.shown(op, raw), strict=True))
    kinds = [a.dtype for a in map(adapter.numpy, as_tuple(of(*(adapter.array(arrays[n]) for n in names))))]
    cotangents = [rng.standard_normal(values[n].shape).astype(kind) for n, kind in zip(shown, kinds, strict=True)]
    _, got = adapter.value_and_gradients(adapter.usual(of), [adapter.array(arrays[n]) for n in names], cotangents)
    wide = {n: c.astype(np.float64) for n, c in zip(shown, cotangents, strict=True)}
    exact = gradient.backward(op, testing.in_float64(arrays), raw, wide, attrs)
    for name, found in zip(names, got, strict=True):
        # Inputs and outputs are rounded to the dtype, sums to float32.
        unit = max(EPS[str(found.dtype)], *(EPS[str(kind)] for kind in kinds))
        off = np.abs(found.astype(np.float64) - exact[name])
        assert np.nanmax(off, initial=0.0) <= 8 * unit * max(1.0, np.abs(exact[name]).max(initial=0.0)), name


@pytest.mark.parametrize(("op", "case"), [(op, case) for op, case in SMALL if op.grad], ids=lambda v: v.name)
def test_the_gradient_is_that_of_the_reference(op: Op, case: Case) -> None:
    gradient.check(op, testing.small(case, op=op))


@pytest.mark.feature("compiled in one graph, abstract, under vmap")
@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("op", MODELS, ids=lambda op: op.name)
def test_programs_and_batches(adapter: Adapter, op: Op) -> None:
    """Compiled, abstract and under vmap, a call is what it is."""
    torch._dynamo.reset()  # all ops compile one function
    case = next(case for case in op.cases if testing.elements(case) <= 40_000)
    attrs = testing.attributes(op, case)
    function = testing.plain(op, adapter.register(op))
    many = [testing.inputs(op, case, "float32", seed) for seed in (0, 1)]
    names = [name for name, a in many[0].items() if a is not None]

    def run(*given: Any) -> Any:
        return function(**{**dict.fromkeys(op.inputs), **dict(zip(names, given, strict=True))}, **attrs)

    given = [[adapter.array(arrays[name]) for name in names] for arrays in many]
    wanted = [as_tuple(run(*each)) for each in given]
    for found, expected in zip(as_tuple(adapter.compiled(run)(*given[0])), wanted[0], strict=True):
        np.testing.assert_allclose(
            adapter.numpy(found).astype(np.float64), adapter.numpy(expected).astype(np.float64), rtol=1e-5, atol=1e-5
        )
    for found, expected in zip(as_tuple(adapter.abstract(run, *given[0])), wanted[0], strict=True):
        assert tuple(found.shape) == tuple(expected.shape)
        assert found.dtype == expected.dtype
    stacked = [adapter.array(np.stack([arrays[name] for arrays in many])) for name in names]
    for k, found in enumerate(as_tuple(adapter.vmap(run)(*stacked))):
        expected = np.stack([adapter.numpy(each[k]) for each in wanted])
        np.testing.assert_allclose(
            adapter.numpy(found).astype(np.float64), expected.astype(np.float64), rtol=1e-5, atol=1e-5
        )


@pytest.mark.feature("zero rows, and their gradients")
@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("op", [op for op in MODELS if op.name not in NAME_ROWS], ids=lambda op: op.name)
def test_no_rows(adapter: Adapter, op: Op) -> None:
    """Outputs without elements; what rows share has a gradient of zeros."""
    case = op.cases[0]
    rows = "r" if op.name == "unpermute_tokens" else next(t.rows or t.dims[0].name for t in op.inputs.values())
    case = case._replace(dims={**case.dims, rows: (0,) if isinstance(case.dims[rows], tuple) else 0})
    arrays, attrs = testing.inputs(op, case, "float32"), testing.attributes(op, case)
    names = [name for name in op.differentiable if arrays[name] is not None] if op.grad else []
    function, fixed = testing.plain(op, adapter.register(op)), {}
    for name, a in arrays.items():
        if name not in names:
            fixed[name] = None if a is None else adapter.array(a)
    if not names:
        assert all(not a.shape[0] for a in map(adapter.numpy, as_tuple(function(**fixed, **attrs))) if a.ndim)
        return
    values, slopes = adapter.value_and_gradients(
        lambda *given: floats(op, function(**fixed, **dict(zip(names, given, strict=True)), **attrs)),
        [adapter.array(arrays[name]) for name in names],
    )
    assert all(not a.size or not a.any() or op.name == "route" for a in values)
    for name, slope in zip(names, slopes, strict=True):
        assert slope.shape == arrays[name].shape  # type: ignore[union-attr]
        assert not np.nan_to_num(slope).any()


# --- losses ----------------------------------------------------------------------------------------------------------


def logits_and_target(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    lead = tuple(rng.integers(1, 5, rng.integers(1, 3)))
    target = rng.integers(0, n, lead).astype(np.int64)
    target[rng.random(lead) < 0.2] = -100
    return 3 * rng.standard_normal((*lead, n)).astype(np.float32), target


@pytest.mark.parametrize(("seed", "smoothing"), [(0, 0.0), (1, 0.2)])
def test_class_weights_are_those_of_torch(adapter: Adapter, smoothing: float, seed: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 300))
    x, target = logits_and_target(rng, n)
    target.flat[0] = 0
    weight = rng.random(n).astype(np.float32)
    for reduction in ("mean", "none"):
        leaf = torch.from_numpy(x).double().requires_grad_()
        exact = torch.nn.functional.cross_entropy(
            leaf.reshape(-1, n), torch.from_numpy(target).reshape(-1), torch.from_numpy(weight).double(),
            reduction=reduction, label_smoothing=smoothing,
        )  # fmt: skip
        options = {"reduction": reduction, "label_smoothing": smoothing}
        classes, weights = adapter.array(target), adapter.array(weight)

        def ours(x: Any, classes: Any = classes, weights: Any = weights, options: Any = options) -> Any:
            return adapter.ours.cross_entropy_metrics(x, classes, weights, **options)[0]

        (loss,), (slope,) = adapter.value_and_gradients(ours, [adapter.array(x)])
        (wanted,) = torch.autograd.grad(exact.sum(), leaf)
        np.testing.assert_allclose(loss.reshape(-1), exact.detach().numpy().reshape(-1), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(slope, wanted.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_predictions_and_probabilities(adapter: Adapter, seed: int) -> None:
    """Equal logits, NaN and -inf among them; the cap does not make predictions equal."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 3000))
    x, target = logits_and_target(rng, n)
    x = np.round(8 * x)
    x[rng.random(x.shape) < 0.3] = -np.inf
    classes = adapter.array(target)
    _, lse, log_prob, predicted = map(
        adapter.numpy, adapter.ours.cross_entropy_metrics(adapter.array(x), classes, softcap=3.0, reduction="none")
    )
    kept = target != -100
    np.testing.assert_array_equal(predicted, np.where(kept, x.argmax(-1), -1))
    capped = np.where(np.isfinite(x), 3 * np.tanh(x.astype(np.float64) / 3), -np.inf)
    with np.errstate(divide="ignore"):
        exact = np.where(kept, np.log(np.exp(capped).sum(-1)), 0)
        own = np.take_along_axis(capped, np.where(kept, target, 0)[..., None], -1)[..., 0] - exact
    np.testing.assert_allclose(lse, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(log_prob, np.where(kept, own, 0), rtol=1e-5, atol=1e-5)


def test_scaling_by_the_targets_probability(adapter: Adapter) -> None:
    x, target = logits_and_target(np.random.default_rng(3), 50)
    classes = adapter.array(target)

    def loss(x: Any, scaled: bool) -> Any:
        return adapter.ours.cross_entropy_metrics(x, classes, reduction="none", token_scaling=scaled)[0]

    results = [
        adapter.value_and_gradients(partial(loss, scaled=scaled), [adapter.array(x)]) for scaled in (False, True)
    ]
    (plain,), (slope,) = results[0]
    (scaled,), (scaled_slope,) = results[1]
    np.testing.assert_allclose(scaled, plain * np.exp(-plain) * (target != -100), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scaled_slope, slope * np.exp(-plain)[..., None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [0])
def test_slices_of_the_classes_add_up(adapter: Adapter, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 200))
    x, target = logits_and_target(rng, n)
    cut = int(rng.integers(1, n))
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0}
    capped = 4 * np.tanh(x.astype(np.float64) / 4)

    def whole(x: Any) -> Any:
        return adapter.ours.cross_entropy(x, adapter.array(target), reduction="none", **options)

    (loss,), (slope,) = adapter.value_and_gradients(whole, [adapter.array(x)])
    losses, slopes = [], []
    for start, stop in ((0, cut), (cut, n)):
        others = np.concatenate([capped[..., :start], capped[..., stop:]], -1)
        partial_lse = adapter.array(np.log(np.exp(others).sum(-1)).astype(np.float32))
        here = (target >= start) & (target < stop)
        local = adapter.array(np.where(target == -100, -100, np.where(here, target - start, -1)))

        def of_slice(x: Any, local: Any = local, partial_lse: Any = partial_lse) -> Any:
            return adapter.ours.cross_entropy_of_slice(x, local, partial_lse, classes=n, **options)[0]

        (part,), (gradient_part,) = adapter.value_and_gradients(of_slice, [adapter.array(x[..., start:stop])])
        losses.append(part)
        slopes.append(gradient_part)
    np.testing.assert_allclose(sum(losses), loss, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(slopes, -1), slope, rtol=1e-4, atol=1e-5)


@pytest.mark.on_gpus
@pytest.mark.parametrize(("reduction", "chunk_rows"), [("mean", 0), ("none", 5)])
def test_the_loss_of_a_head_with_metrics(adapter: Adapter, reduction: str, chunk_rows: int) -> None:
    """Outputs and gradients are those of logits that are written out."""
    rng = np.random.default_rng(5)
    n, h = 67, 16
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((3, 4, h), (n, h), (n,))]
    target = rng.integers(0, n, (3, 4)).astype(np.int32)
    target.flat[1] = -100
    classes, weights = adapter.array(target), adapter.array(rng.random(n).astype(np.float32))
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 2.0, "token_scaling": True}

    def ours(hidden: Any, weight: Any, bias: Any) -> Any:
        more = {"chunk_rows": chunk_rows, **options}
        return adapter.ours.linear_cross_entropy_metrics(hidden, weight, classes, bias, weights, **more)

    def written_out(hidden: Any, weight: Any, bias: Any) -> Any:
        return adapter.ours.cross_entropy_metrics(hidden @ weight.T + bias, classes, weights, **options)

    given = adapter.arrays(arrays)
    np.testing.assert_array_equal(adapter.numpy(ours(*given)[3]), adapter.numpy(written_out(*given)[3]))
    results = []
    for run in (ours, written_out):
        of = adapter.usual(lambda *given, run=run: run(*given)[:3])
        kinds = [adapter.numpy(a).shape for a in of(*given)]
        results.append(adapter.value_and_gradients(of, given, [np.cos(np.ones(k, np.float32)) for k in kinds]))
    for got, wanted in zip(*(values + slopes for values, slopes in results), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.on_gpus
@pytest.mark.parametrize(("reduction", "smoothing"), [("mean", 0.2), ("none", 0.0)])
def test_soft_targets_are_those_of_torch(adapter: Adapter, reduction: str, smoothing: float) -> None:
    """Gradients of targets too, also of those that are 0."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(7)
    x, p = 3 * rng.standard_normal((9, 37)).astype(np.float32), rng.dirichlet(np.ones(37), 9).astype(np.float32)
    p[:, 5] = 0
    x[:, 5] = -80
    wide = [torch.from_numpy(a).double().requires_grad_() for a in (x, p)]
    exact = torch.nn.functional.cross_entropy(*wide, reduction=reduction, label_smoothing=smoothing)
    run = partial(adapter.ours.soft_cross_entropy, reduction=reduction, label_smoothing=smoothing)
    (loss,), slopes = adapter.value_and_gradients(adapter.usual(run), adapter.arrays([x, p]))
    np.testing.assert_allclose(loss, exact.detach().numpy(), rtol=1e-5, atol=1e-5)
    for slope, right in zip(slopes, torch.autograd.grad(exact.sum(), wide), strict=True):
        np.testing.assert_allclose(slope, right.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda ours, x, t: ours.cross_entropy_metrics(x, t, reduction="max"),
         "option `reduction` is 'max', expected 'mean', 'sum' or 'none'"),
        (lambda ours, x, t: ours.cross_entropy_metrics(x, t, token_scaling=1),
         "option `token_scaling` is 1, expected False or True"),
        (lambda ours, x, t: ours.cross_entropy_metrics(x, t, x[0, :3]), "argument `weight` has n=3, but n=5"),
        (lambda ours, x, t: ours.cross_entropy_of_slice(x, t, x[:, 0], classes=3),
         "attribute `classes` is 3, expected 0, or at least n=5"),
        (lambda ours, x, t: ours.soft_cross_entropy(x, x[:2]), "argument `target` has"),
    ],
    ids=["reduction", "scaling", "weight", "classes", "rows"],
)  # fmt: skip
def test_what_losses_refuse(adapter: Adapter, call: Any, text: str) -> None:
    x, target = adapter.array(np.ones((3, 5), np.float32)), adapter.array(np.zeros(3, np.int32))
    with pytest.raises(ValueError, match=text.replace("[", r"\[")):
        call(adapter.ours, x, target)


# --- what every op of models has -------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_metrics_without_weights(adapter: Adapter, reduction: str) -> None:
    """The shortest calls: all that may be left out is."""
    x, classes = np.arange(15, dtype=np.float32).reshape(3, 5), np.array([1, -100, 4])
    log_sum = np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1)) + x.max(-1)
    wanted = sum(log_sum[i] - x[i, classes[i]] for i in (0, 2)) / (2 if reduction == "mean" else 1)
    options = {} if reduction == "mean" else {"reduction": reduction}
    logits, head, target = (adapter.array(a) for a in (x, np.eye(5, dtype=np.float32), classes))
    for found in (
        adapter.ours.cross_entropy_metrics(logits, target, **options),
        adapter.ours.linear_cross_entropy_metrics(logits, head, target, **options),
    ):
        np.testing.assert_allclose(adapter.numpy(found[0]), wanted, rtol=1e-5)


# Benchmarks of their own, and ops whose sequences no random numbers say.
NOT_IN_THE_GRID = {"linear_cross_entropy_metrics", "causal_conv1d_packed", "causal_conv1d_states"}
# Ops that are no layers: on the tokens of all sequences, and the step of an optimizer.
NO_LAYER = {
    "permute_tokens", "unpermute_tokens", "causal_conv1d_packed", "causal_conv1d_states", "rope_at", "adamw_stochastic",
}  # fmt: skip


def columns(page: str) -> set[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition("## Models and their trainers")[2]
    return set(re.findall(r"`(\w+)` \|", text))


@pytest.mark.parametrize("op", MODELS, ids=lambda op: op.name)
def test_every_op_has_a_benchmark_modules_rows_and_cases(op: Op) -> None:
    for name in ("torch", "jax"):
        assert op.name in columns(f"features_{name}.md"), f"features_{name}.md: run what it says above its last table"
    grid = (ROOT / "benchmarks" / "problems.py").read_text(encoding="utf-8")
    assert (f'"{op.name}"' in grid) != (op.name in NOT_IN_THE_GRID)
    assert op.cases
    assert op.program or op.reference
    nn = importlib.import_module("cute_ops_torch.nn")
    made = nn.class_name(op)
    assert (made in nn.__all__) != (op.name in NO_LAYER)
    learns = op.name not in NO_LAYER and any(not t.rows and t.dims for t in op.inputs.values())
    for library in ("nnx", "equinox") if learns else ():  # what learns nothing is a function there
        if importlib.util.find_spec("flax" if library == "nnx" else library):
            assert hasattr(importlib.import_module(f"cute_ops_jax.{library}"), made), library


@pytest.mark.parametrize("op", MODELS, ids=lambda op: op.name)
def test_programs_that_are_loaded_know_every_op(op: Op) -> None:
    """An exported program calls the steps of ops, and a process that loads it finds them by name."""
    left, seen = [op], set[str]()
    while left:
        for each in ((found := left.pop()), *found.steps):
            if each.name not in seen:
                seen.add(each.name)
                assert lookup.find(each.name).name == each.name
                left += each.program.ops if each.program else ()
