"""Cross entropy in JAX beyond the tests of every op: the fusion with a linear layer, and gradients in place."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import cute_ops_jax
from cute_ops.composite import chunks
from cute_ops.declaration.op import Op
from cute_ops_jax.primitive import primitive
from cute_ops_jax.primitive.row_chunks import Chunks

# The package has a function of that name.
module = importlib.import_module("cute_ops_jax.composite.losses")


@pytest.fixture(params=[1000, 4, 5], ids=["one-chunk", "chunks", "uneven"])
def chunked(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``linear_cross_entropy`` in chunks of so many rows."""
    return partial(cute_ops_jax.linear_cross_entropy, chunk_rows=request.param)


def never_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself: of one under ``jit`` JAX keeps traces, which what a test replaces would not change."""
    return inspect.unwrap(function)


def linear(lead: tuple[int, ...] = (3, 4), n: int = 67, h: int = 16) -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(s, np.float32) for s in ((*lead, h), (n, h), (n,))]
    target = rng.integers(0, n, lead).astype(np.int32)
    target.flat[1] = -100
    return arrays, target


def with_gradients(function: Any, reduction: str, h: Any, w: Any, b: Any, t: Any) -> Any:
    out, pull = jax.vjp(lambda h, w, b: function(h, w, t, b, reduction=reduction), h, w, b)
    return out, pull(jnp.cos(out))


def by_hand(hidden: Any, weight: Any, target: Any, bias: Any, **options: Any) -> Any:
    return cute_ops_jax.cross_entropy(hidden @ weight.T + bias, target, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear(chunked: Callable[..., Any], reduction: str, close: Callable[..., Any]) -> None:
    close(in_two_programs(chunked, reduction), in_two_programs_by_hand(reduction))


def in_two_programs(function: Callable[..., Any], reduction: str) -> Any:
    """The loss, and from what that program has saved the gradients."""
    arrays, target = linear()

    def loss(h: Any, w: Any, b: Any) -> Any:
        return function(h, w, target, b, reduction=reduction, label_smoothing=0.1, z_loss=1e-2)

    out, pull = jax.jit(lambda *given: jax.vjp(loss, *given))(*arrays)
    cotangent = np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)
    return out, jax.jit(lambda pull, cotangent: pull(cotangent))(pull, cotangent)


@cache
def in_two_programs_by_hand(reduction: str) -> Any:
    return in_two_programs(by_hand, reduction)


def test_linear_holds_the_logits_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many rows as are chosen where the call does not say."""
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda *sizes: 4)
    arrays, target = linear()
    gradient = jax.grad(lambda h, w: never_traced(cute_ops_jax.linear_cross_entropy)(h, w, target), (0, 1))
    text = jax.jit(gradient).lower(*arrays[:2]).as_text()
    assert "tensor<4x67xf32>" in text
    assert "tensor<12x67xf32>" not in text


def gradient(function: Any, wrt: tuple[int, ...], reduction: str) -> Any:
    arrays, target = linear()

    def loss(*some: Any) -> Any:
        h, w, b = (dict(zip(wrt, some, strict=True)).get(i, a) for i, a in enumerate(arrays))
        return jnp.sum(jnp.cos(function(h, w, target, b, reduction=reduction)))

    return jax.jit(jax.value_and_grad(loss, tuple(range(len(wrt)))))


@cache
def written_out(wrt: tuple[int, ...], reduction: str) -> Any:
    """The loss and its gradients equal those written by hand, for any chunks."""
    return gradient(by_hand, wrt, reduction)(*(linear()[0][i] for i in wrt))


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wrt", [(0,), (1,), (2,), (0, 2)], ids=["hidden", "weight", "bias", "hidden and bias"])
def test_what_is_frozen_costs_no_product(
    wrt: tuple[int, ...], reduction: str, chunked: Callable[..., Any], close: Callable[..., Any]
) -> None:
    """Logits, the gradient of hidden and that of weight take a product each; logits that are recomputed, one more."""
    arrays, _ = linear()
    some = [arrays[i] for i in wrt]
    lowered = gradient(chunked, wrt, reduction).lower(*some)
    close(lowered.compile()(*some), written_out(wrt, reduction))
    text = lowered.as_text()
    each = 1 + (reduction == "none") + len({0, 1} & set(wrt))
    assert text.count("stablehlo.dot_general") in (each, 2 * each)  # in the loop's body, and for a rest of rows


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_one_trace_serves_whatever_is_differentiated(reduction: str, close: Callable[..., Any]) -> None:
    """JAX keeps one structure of what a forward saves, that of its last trace, whichever inputs are differentiated."""
    arrays, target = linear((5, 2), 31)

    def gradients(function: Any, wrt: tuple[int, ...]) -> Any:
        def loss(h: Any, w: Any, b: Any) -> Any:
            return jnp.sum(jnp.cos(function(h, w, target, b, reduction=reduction)))

        return jax.jit(jax.grad(loss, wrt))(*arrays)

    expected = gradients(by_hand, (0, 1, 2))
    for wrt in ((0,), (0, 1, 2), (0,), (1,), (0, 2), (0, 1, 2)):
        close(gradients(cute_ops_jax.linear_cross_entropy, wrt), tuple(expected[i] for i in wrt))


@pytest.mark.parametrize("chunk_rows", [1, 5, 100])
def test_linear_in_chunks_of_so_many_rows(chunk_rows: int, close: Callable[..., Any]) -> None:
    arrays, target = linear()

    def gradients(rows: int | None) -> Any:
        loss = partial(cute_ops_jax.linear_cross_entropy, target=target, chunk_rows=rows)
        return jax.jit(jax.value_and_grad(lambda h, w, b: loss(h, w, bias=b), (0, 1, 2)))

    close(gradients(chunk_rows)(*arrays), gradients(None)(*arrays))
    assert f"tensor<{min(chunk_rows, 12)}x67xf32>" in gradients(chunk_rows).lower(*arrays).as_text()
    with pytest.raises(ValueError, match=r"^cute\.linear_cross_entropy: option `chunk_rows` is 0, expected at least 1"):
        cute_ops_jax.linear_cross_entropy(*arrays[:2], target, chunk_rows=0)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_cost_the_weights_gradient_no_digits(reduction: str) -> None:
    """The weight's gradient is summed in float32 and rounded once."""
    rng = np.random.default_rng(5)
    rows, h, n = 1024, 64, 256
    hidden, weight = (
        jnp.asarray(scale * rng.standard_normal(s, np.float32)).astype(jnp.bfloat16)
        for s, scale in (((rows, h), 1.0), ((n, h), h**-0.5))
    )
    target = rng.integers(0, n, rows)
    x, w = (np.asarray(a).astype(np.float64) for a in (hidden, weight))
    slope = np.exp(x @ w.T)
    slope = slope / slope.sum(-1, keepdims=True) - np.eye(n)[target]
    exact = slope.T @ x / rows

    def error(count: int, **options: Any) -> float:
        def loss(w: Any) -> Any:
            each = {"reduction": reduction, "chunk_rows": rows // count, **options}
            return jnp.mean(cute_ops_jax.linear_cross_entropy(hidden, w, target, **each))

        found = np.asarray(jax.jit(jax.grad(loss))(weight)).astype(np.float64)
        return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))

    one = error(1)
    assert one < 4e-3
    for count in (4, 16, 64, 256):
        assert error(count) < 1.1 * one
    assert error(16, accum_dtype=jnp.float32) < 1.1 * one
    assert error(256, accum_dtype="bfloat16") > 3 * one
    with pytest.raises(
        ValueError, match="`accum_dtype` is float64, expected float32 or the dtype of `weight`, bfloat16"
    ):
        error(4, accum_dtype="float64")


def test_a_cotangent_that_16_bits_do_not_hold() -> None:
    """Gradients are scaled in float32 and rounded once."""
    arrays, target = linear()
    arrays = [jnp.asarray(a).astype(jnp.bfloat16) for a in arrays]
    plain, scaled = (
        jax.grad(lambda w, s=s: s * cute_ops_jax.linear_cross_entropy(arrays[0], w, target))(arrays[1])
        for s in (jnp.float32(1.0), jnp.float32(1.00390625))  # halfway between two bfloat16
    )
    expected = (plain.astype(jnp.float32) * 1.00390625).astype(jnp.bfloat16)
    np.testing.assert_array_equal(scaled.astype(jnp.float32), expected.astype(jnp.float32))


@pytest.fixture
def linear_through_ffi(through_ffi: Any, ffi_primitive: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``linear_cross_entropy``, whose CUDA lowering runs on the CPU."""
    monkeypatch.setattr(module, "register", through_ffi)
    monkeypatch.setattr(primitive, "primitive_of", ffi_primitive)
    return never_traced(cute_ops_jax.linear_cross_entropy)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_devices_run_the_loop_on_their_rows(
    kind: AxisType, reduction: str, linear_through_ffi: Callable[..., Any], fake_kernels: Any,
    monkeypatch: pytest.MonkeyPatch, close: Callable[..., Any],
) -> None:  # fmt: skip
    """With two chunks per device nothing is gathered, shared inputs' gradients are summed, kernels are known early."""
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda rows, *sizes: max(rows // 2, 1))
    arrays, target = linear((16, 4))
    expected = jax.jit(partial(with_gradients, by_hand, reduction))(*arrays, target)
    mesh = jax.make_mesh((4, 2), ("data", "seq"), (kind,) * 2, devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        specs = (jax.P("data", "seq"), jax.P(), jax.P(), jax.P("data", "seq"))
        given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((*arrays, target), specs, strict=True)]
        lowered = jax.jit(partial(with_gradients, linear_through_ffi, reduction)).lower(*given)
        known = len(fake_kernels.variants)
        compiled = lowered.compile()
        got = jax.block_until_ready(compiled(*given))
    assert got[1][0].sharding.is_equivalent_to(given[0].sharding, 3)
    close(jax.device_get(got), jax.device_get(expected))
    # Rows of one chunk of one device; a forward and a backward call where each row has a cotangent of its own.
    assert {shapes[0] for _, shapes in fake_kernels.calls} == {(4, 67)}
    assert len(fake_kernels.calls) == 8 * 2 * (1 if reduction == "mean" else 2)
    assert len(fake_kernels.variants) == known
    text = compiled.as_text()
    assert "all-reduce" in text
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    if kind == AxisType.Auto:  # XLA's cache must tell programs of other kernels apart
        assert all(v.symbol in lowered.as_text() for v in fake_kernels.variants)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    ("kind", "rows"), [(AxisType.Auto, "data"), (AxisType.Explicit, "data"), (AxisType.Auto, "model")], ids=str
)
def test_devices_keep_their_classes(
    kind: AxisType, rows: str, reduction: str, linear_through_ffi: Callable[..., Any], fake_kernels: Any,
    close: Callable[..., Any],
) -> None:  # fmt: skip
    """Logits and weights stay where they are; if the axis shards rows too, the weight is gathered, as in FSDP."""
    arrays, target = linear((16,), 320, 20)
    expected = jax.jit(partial(with_gradients, by_hand, reduction))(*arrays, target)
    mesh = jax.make_mesh((2, 4), ("data", "model"), (kind,) * 2, devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        specs = (jax.P(rows), jax.P("model"), jax.P("model"), jax.P(rows))
        given = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((*arrays, target), specs, strict=True)]
        compiled = jax.jit(partial(with_gradients, linear_through_ffi, reduction)).lower(*given).compile()
        got = jax.block_until_ready(compiled(*given))
    close(jax.device_get(got), jax.device_get(expected))
    assert {shapes[0] for _, shapes in fake_kernels.calls} == {(8, 80) if rows == "data" else (4, 320)}
    assert ("all-gather" in compiled.as_text()) == (rows == "model")
    if rows == "data":
        assert "f32[320,20]" not in compiled.as_text()


def test_linear_under_vmap(close: Callable[..., Any]) -> None:
    (hidden, weight, _), target = linear()
    got = jax.vmap(lambda h, t: cute_ops_jax.linear_cross_entropy(h, weight, t))(hidden, target)
    close(
        got, jnp.stack([cute_ops_jax.linear_cross_entropy(h, weight, t) for h, t in zip(hidden, target, strict=True)])
    )


def test_a_gradient_in_place_is_an_alias_that_xla_knows(fake_kernels: Any) -> None:
    """Only the backward call may write its result over the logits."""
    logits, target = jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)

    def text(inplace: bool) -> str:
        loss = lambda x, t: cute_ops_jax.cross_entropy(x * 2, t, inplace_backward=inplace)  # noqa: E731
        return jax.jit(jax.grad(loss)).trace(logits, target).lower(lowering_platforms=("cuda",)).as_text()

    assert "output_operand_alias" not in text(False)
    (line,) = [line for line in text(True).splitlines() if "output_operand_alias" in line]
    assert "cross_entropy_bwd" in line
    assert "operand_index = 0" in line


@pytest.mark.parametrize(
    ("rows", "dtype", "ours"),
    [(16, "bfloat16", True), (256, "float16", True), (257, "bfloat16", False), (16, "float32", False)],
)
def test_few_rows_of_16_bits_go_by_our_products_or_the_frameworks(rows: int, dtype: str, ours: bool) -> None:
    called: list[str] = []

    def call(op: Op, inputs: dict[str, jax.Array], attrs: dict[str, str]) -> dict[str, jax.Array]:
        called.append(op.name)
        return {"out": inputs["x"] @ inputs["weight"].T}

    inputs = {"hidden": jnp.ones((rows, 8), dtype), "weight": jnp.ones((24, 8), dtype), "bias": None}
    found = Chunks(inputs, {"chunk_rows": 0, "accum_dtype": "auto"}, (), call=call)  # type: ignore[arg-type]
    assert found.logits((0, rows)).shape == (rows, 24)
    assert called == ["linear"] * ours
