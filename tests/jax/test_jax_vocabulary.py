"""Cross entropy with classes sharded over eight devices, against one device and against the program written out.

The CUDA lowering on the CPU, with the reference as the kernel; what XLA compiled is read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import cute_ops_jax
from cute_ops.composite import chunks
from cute_ops.ops.reduction.cross_entropy import cross_entropy
from cute_ops_jax.primitive import primitive

P = jax.P
Close = Callable[[Any, Any], None]
ROWS, N, H = 12, 320, 20
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"reduction": "mean"},
    "all": {"reduction": "mean", "label_smoothing": 0.1, "z_loss": 1e-2},
    "sum": {"reduction": "sum", "z_loss": 1e-2},
    "none": {"reduction": "none", "label_smoothing": 0.1},
    "capped": {"reduction": "mean", "softcap": 2.0, "logit_scale": 0.5},
    "ignore-a-class": {"reduction": "mean", "ignore_index": 3},
}


@pytest.fixture(params=["reference", "kernel"])
def lowered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With the reference inlined, and with calls of kernels."""
    if request.param == "kernel":
        request.getfixturevalue("through_ffi")
        primitives = request.getfixturevalue("ffi_primitive")
        monkeypatch.setattr(primitive, "primitive_of", primitives)
    return request.param


# Without jax.jit around them: JAX would keep traces, with the primitives of the test that made them.
VOCAB_PARALLEL, VOCAB_PARALLEL_LINEAR = map(
    inspect.unwrap, (cute_ops_jax.vocab_parallel_cross_entropy, cute_ops_jax.vocab_parallel_linear_cross_entropy)
)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(names), devices=jax.devices("cpu"))


def problem(ignore_index: int = -100, **_: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {"logits": (ROWS, N), "hidden": (ROWS, H), "weight": (N, H), "bias": (N,)}
    arrays = {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}
    target = rng.integers(0, N, ROWS).astype(np.int32)
    target[:4] = (ignore_index, 3, 0, N - 1)
    return arrays, target


def written_out(
    logits: Any, target: Any, axis_name: Any, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, reduction: str = "mean", softcap: float = 0.0, logit_scale: float = 1.0,
) -> Any:  # fmt: skip
    """The program that a user would write, which JAX differentiates."""
    logits = softcap * jnp.tanh(logits * (logit_scale / softcap)) if softcap else logits * logit_scale
    n = logits.shape[-1]
    classes = n * jax.lax.axis_size(axis_name)
    top = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits, -1)), axis_name)
    lse = top + jnp.log(jax.lax.psum(jnp.sum(jnp.exp(logits - top[:, None]), -1), axis_name))
    mine = (jax.lax.axis_index(axis_name) * n + jnp.arange(n)) == target[:, None]
    picked = jax.lax.psum(jnp.sum(jnp.where(mine, logits, 0), -1), axis_name)
    mean = jax.lax.psum(jnp.sum(logits, -1), axis_name) / classes
    loss = lse - (1 - label_smoothing) * picked - label_smoothing * mean + z_loss * lse**2
    kept = target != ignore_index
    loss = jnp.where(kept, loss, 0)
    return loss if reduction == "none" else jnp.sum(loss) / (jnp.sum(kept) if reduction == "mean" else 1)


def value_and_gradients(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        out, pull = jax.vjp(lambda *inputs: function(*inputs, *given[count:]), *given[:count])
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    return run


def collectives(text: str) -> dict[str, list[int]]:
    """The number of elements of each collective's results, by its name."""
    found: dict[str, list[int]] = {}
    names = r"(all-\w+|collective-permute|reduce-scatter)(?:-start)?\("
    for shape, name in re.findall(rf"= \(?\w+\[([\d,]*)\][^=]*? {names}", text):
        found.setdefault(name, []).append(int(np.prod([int(s) for s in shape.split(",") if s])))
    return found


def on_one_device(hidden: Any, weight: Any, bias: Any, target: Any, **options: Any) -> Any:
    return cute_ops_jax.cross_entropy(hidden @ weight.T + bias, target, **options)


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check", "lowered"),
    [
        ("plain", True, "kernel"), ("plain", False, "reference"), ("all", True, "reference"), ("all", False, "kernel"),
        ("sum", False, "kernel"), ("none", True, "kernel"), ("none", False, "reference"),
        ("ignore-a-class", True, "kernel"),
    ],
    indirect=["lowered"],
)  # fmt: skip
def test_logits(name: str, check: bool, lowered: str, close: Close) -> None:
    """Equal to one device and, differentiated inside of the shard_map, to the program written out. No logits travel."""
    options = OPTIONS[name]
    arrays, target = problem(**options)
    mesh, cut, logits = mesh_of((8,), ("model",)), P(None, "model"), arrays["logits"]
    specs: Any = {"mesh": mesh, "check_vma": check, "in_specs": (cut, P())}
    function = partial(VOCAB_PARALLEL, axis_name="model", **options)
    outside = value_and_gradients(jax.shard_map(function, out_specs=P(), **specs), 1)
    compiled = jax.jit(outside).lower(logits, target).compile()
    whole = jax.jit(value_and_gradients(partial(cute_ops_jax.cross_entropy, **options), 1))(logits, target)
    close(compiled(logits, target), whole)
    found = collectives(compiled.as_text())
    assert found.keys() == {"all-reduce"}
    assert max(found["all-reduce"]) <= 3 * 8 * ROWS

    pair = function, partial(written_out, axis_name="model", **options)
    inside = [jax.shard_map(value_and_gradients(f, 1), out_specs=(P(), (cut,)), **specs) for f in pair]
    close(*(jax.jit(f)(logits, target) for f in inside))


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("lowered", ["kernel"], indirect=True)
@pytest.mark.parametrize(
    ("rows", "name", "check"),
    [(1000, "all", True), (5, "none", True), (5, "sum", False), (1000, "none", False)],
)
def test_linear(rows: int, name: str, check: bool, lowered: str, monkeypatch: pytest.MonkeyPatch, close: Close) -> None:
    """Only numbers per row and the gradient of hidden travel, and no device holds more than a chunk of its logits."""
    options = OPTIONS[name]
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda *sizes: rows)
    arrays, target = problem(**options)
    given = *(arrays[n] for n in ("hidden", "weight", "bias")), target
    cuts = P(), P("model"), P("model")
    specs: Any = {"mesh": mesh_of((8,), ("model",)), "check_vma": check, "in_specs": (*cuts, P())}

    def function(h: Any, w: Any, b: Any, t: Any) -> Any:
        return VOCAB_PARALLEL_LINEAR(h, w, t, "model", b, **options)

    def by_hand(h: Any, w: Any, b: Any, t: Any) -> Any:
        return written_out(h @ w.T + b, t, "model", **options)

    outside = value_and_gradients(jax.shard_map(function, out_specs=P(), **specs), 3)
    compiled = jax.jit(outside).lower(*given).compile()
    close(compiled(*given), jax.jit(value_and_gradients(partial(on_one_device, **options), 3))(*given))
    text = compiled.as_text()
    found = collectives(text)
    assert found.keys() == {"all-reduce"}
    assert set(found["all-reduce"]) - {ROWS * H} <= set(range(3 * 8 * ROWS + 1))
    assert ("f32[12,40]" in text) == (rows > ROWS)
    assert "f32[12,320]" not in text

    out = P(), (cuts if check else (P("model"), *cuts[1:]))  # unchecked, devices keep their parts of hidden's gradient
    inside = [jax.shard_map(value_and_gradients(f, 3), out_specs=out, **specs) for f in (function, by_hand)]
    close(*(jax.jit(f)(*given) for f in inside))


def test_rows_and_classes_on_two_axes(close: Close) -> None:
    """Data and tensor parallel: the weight's gradient is the sum over all rows, for the device's own classes."""
    arrays, target = problem()
    hidden, weight = arrays["hidden"], arrays["weight"]

    def function(h: Any, w: Any, t: Any) -> Any:
        total = cute_ops_jax.vocab_parallel_linear_cross_entropy(h, w, t, "model", reduction="sum")
        return jax.lax.psum(total, "data") / jax.lax.psum(jnp.sum(t != -100), "data")

    specs = P("data"), P("model"), P("data")
    mapped = jax.shard_map(function, mesh=mesh_of((2, 4), ("data", "model")), in_specs=specs, out_specs=P())
    compiled = jax.jit(value_and_gradients(mapped, 2)).lower(hidden, weight, target).compile()
    zero = np.zeros(N, np.float32)
    one = jax.jit(value_and_gradients(partial(on_one_device, reduction="mean"), 3))
    out, (dhidden, dweight, _) = one(hidden, weight, zero, target)
    close(compiled(hidden, weight, target), (out, (dhidden, dweight)))
    assert collectives(compiled.as_text()).keys() == {"all-reduce"}


def test_classes_over_two_axes(close: Close) -> None:
    """Several axes are ordered as in a PartitionSpec."""
    arrays, target = problem()
    axes = ("data", "model")
    function = partial(cute_ops_jax.vocab_parallel_cross_entropy, axis_name=axes, reduction="none")
    mapped = jax.shard_map(function, mesh=mesh_of((2, 4), axes), in_specs=(P(None, axes), P()), out_specs=P())
    whole = jax.jit(value_and_gradients(partial(cute_ops_jax.cross_entropy, reduction="none"), 1))
    close(jax.jit(value_and_gradients(mapped, 1))(arrays["logits"], target), whole(arrays["logits"], target))


def test_gathered_rows(close: Close) -> None:
    """Sequence parallel: the result of ``all_gather`` is equal on all devices, which JAX does not know."""
    arrays, target = problem()
    rows = slice(0, 8)

    def function(h: Any, w: Any, t: Any) -> Any:
        h, t = (jax.lax.all_gather(a, "model", tiled=True) for a in (h, t))
        return cute_ops_jax.vocab_parallel_linear_cross_entropy(h, w, t, "model")

    cut = P("model")
    mapped = jax.shard_map(function, mesh=mesh_of((8,), ("model",)), in_specs=(cut,) * 3, out_specs=P())
    given = arrays["hidden"][rows], arrays["weight"], target[rows]
    got = jax.jit(value_and_gradients(mapped, 2))(*given)
    whole = jax.jit(value_and_gradients(lambda h, w, t: cute_ops_jax.linear_cross_entropy(h, w, t), 2))
    close(got, whole(*given))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_infinities_and_targets_that_are_no_class(lowered: str) -> None:
    """Eight devices have NaN and infinities where one device has them."""
    arrays, target = problem()
    logits = arrays["logits"]
    logits[1], logits[2, 0], logits[3, 5], logits[5, 7] = -np.inf, -np.inf, np.inf, np.nan
    logits[6, :40], target[6], target[7], target[8] = -np.inf, 20, N, -3
    logits[9, : N - 1], target[9] = -np.inf, N - 1
    logits[10, 0], target[10] = -np.inf, 50
    mesh = mesh_of((8,), ("model",))
    for options in (OPTIONS["none"], {"reduction": "none"}):  # with smoothing, and without
        function = partial(VOCAB_PARALLEL, axis_name="model", **options)
        mapped = jax.shard_map(function, mesh=mesh, in_specs=(P(None, "model"), P()), out_specs=P())
        got = jax.jit(value_and_gradients(mapped, 1))(logits, target)
        expected = jax.jit(value_and_gradients(partial(cute_ops_jax.cross_entropy, **options), 1))(logits, target)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_bfloat16_rounds_no_more_than_one_device() -> None:
    arrays, target = problem()
    logits = jnp.asarray(arrays["logits"], jnp.bfloat16)
    options = OPTIONS["none"]
    function = partial(cute_ops_jax.vocab_parallel_cross_entropy, axis_name="model", **options)
    mapped = jax.shard_map(function, mesh=mesh_of((8,), ("model",)), in_specs=(P(None, "model"), P()), out_specs=P())
    (loss, (got,)), (expected_loss, (expected,)) = (
        jax.jit(value_and_gradients(f, 1))(logits, target)
        for f in (mapped, partial(cute_ops_jax.cross_entropy, **options))
    )
    assert (loss.dtype, got.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-6)
    # Where float32 rounding decides a tie, the next number.
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (got, expected)), rtol=2**-7, atol=1e-9)


@pytest.mark.parametrize("lowered", ["kernel"], indirect=True)
def test_each_device_runs_kernels_on_its_classes(lowered: str, fake_kernels: Any) -> None:
    """Each device makes one forward and one backward call of the same variants; the gradient overwrites the logits."""
    arrays, target = problem()

    def function(h: Any, w: Any, t: Any) -> Any:
        return VOCAB_PARALLEL_LINEAR(h, w, t, "model", label_smoothing=0.1)

    mapped = jax.shard_map(function, mesh=mesh_of((8,), ("model",)), in_specs=(P(), P("model"), P()), out_specs=P())
    compiled = jax.jit(jax.grad(mapped, (0, 1))).lower(arrays["hidden"], arrays["weight"], target).compile()
    jax.block_until_ready(compiled(arrays["hidden"], arrays["weight"], target))
    assert sorted(v.op for v in fake_kernels.variants) == ["cross_entropy", "cross_entropy_bwd"]
    assert len(fake_kernels.calls) == 16
    assert {shapes[0] for _, shapes in fake_kernels.calls} == {(ROWS, N // 8)}
    text = compiled.as_text()
    assert re.search(r"custom-call\(.*output_to_operand_aliasing", text)
    assert not re.search(rf"f32\[{ROWS},{N // 8}\]\S* copy\(", text)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("axes", [(None, "model"), ("data", "model")], ids=str)
def test_without_a_shard_map(
    axes: tuple[str | None, str], kind: AxisType, fake_kernels: Any, ffi_primitive: Any, close: Close
) -> None:
    """The op itself runs on sharded classes, with explicit and with automatic axes, and nothing is gathered."""
    op = cross_entropy
    arrays, target = problem()
    mesh = jax.make_mesh((2, 4), ("data", "model"), (kind,) * 2, devices=jax.devices("cpu"))
    dloss = np.cos(np.arange(ROWS, dtype=np.float32))

    def run(call: Callable[..., Any], logits: Any, target: Any, dloss: Any) -> Any:
        given = {"logits": logits, "target": target}
        attrs = {"label_smoothing": 0.1, "z_loss": 1e-2}
        found = call(op)(given, attrs)
        return found, call(op.grad)({**given, **{n: found[n] for n in ("row_max", "log_sum")}, "dloss": dloss}, attrs)[
            "dlogits"
        ]

    with jax.set_mesh(mesh):
        logits = jax.device_put(arrays["logits"], jax.NamedSharding(mesh, P(*axes)))
        rows = [jax.device_put(a, jax.NamedSharding(mesh, P(axes[0]))) for a in (target, dloss)]
        compiled = jax.jit(partial(run, ffi_primitive)).lower(logits, *rows).compile()
        fake_kernels.calls.clear()
        found, dlogits = jax.block_until_ready(compiled(logits, *rows))
        assert dlogits.sharding.is_equivalent_to(logits.sharding, 2)
        assert found["loss"].sharding.is_equivalent_to(rows[0].sharding, 1)
    close(jax.device_get((found, dlogits)), run(primitive.primitive_of, arrays["logits"], target, dloss))
    assert {shapes[0] for _, shapes in fake_kernels.calls} == {(ROWS if axes[0] is None else ROWS // 2, N // 4)}
    assert collectives(compiled.as_text()).keys() == {"all-reduce"}


def test_the_function_on_explicit_axes(close: Close) -> None:
    """The function on explicit axes, its gradient and its reduction."""
    arrays, target = problem()
    mesh = jax.make_mesh((8,), ("model",), (AxisType.Explicit,), devices=jax.devices("cpu"))
    function = value_and_gradients(partial(cute_ops_jax.cross_entropy, **OPTIONS["all"]), 1)
    expected = jax.jit(function)(arrays["logits"], target)
    with jax.set_mesh(mesh):
        logits = jax.device_put(arrays["logits"], jax.NamedSharding(mesh, P(None, "model")))
        got = jax.jit(function)(logits, jax.device_put(target, jax.NamedSharding(mesh, P())))
        assert got[1][0].sharding.is_equivalent_to(logits.sharding, 2)
    close(jax.device_get(got), expected)


def test_errors() -> None:
    arrays, target = problem()
    logits = arrays["logits"]
    where = "is no axis of a jax.shard_map that this is called in; there: none."
    with pytest.raises(NameError, match=f"^cute.vocab_parallel_cross_entropy: axis 'model' {where}"):
        cute_ops_jax.vocab_parallel_cross_entropy(logits, target, "model")
    # The axis of a vmap has other conventions: gradients would be wrong.
    linear = partial(cute_ops_jax.vocab_parallel_linear_cross_entropy, axis_name="slice")
    with pytest.raises(NameError, match=f"^cute.vocab_parallel_linear_cross_entropy: axis 'slice' {where}"):
        jax.vmap(linear, (None, 0, None), axis_name="slice")(arrays["hidden"], arrays["weight"][None], target)
    with pytest.raises(
        ValueError, match=r"in cross_entropy: argument `target` has leading dims \(4,\), but \*m=\(12,\)"
    ):
        cute_ops_jax.vocab_parallel_cross_entropy(logits, target[:4], "model")
    with pytest.raises(ValueError, match=r"in cross_entropy: option `reduction` is 'max'"):
        cute_ops_jax.vocab_parallel_cross_entropy(logits, target, "model", reduction="max")
    with pytest.raises(ValueError, match=r"in linear_cross_entropy: argument `weight` has h=320, but h=20"):
        cute_ops_jax.vocab_parallel_linear_cross_entropy(arrays["hidden"], logits, target, "model")
