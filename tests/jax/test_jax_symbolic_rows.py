"""Programs of symbolic rows: of every function on CUDA, with the values of those that are made of several ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops_jax import exporting
from cute_ops_jax.primitive import any_size
from tests.jax.every_function import Function, every

COMPOSED = {
    f.name: f for f in every((2, 6)) if f.name.startswith(("linear_cross_entropy", "embedding", "append_kv"))
}  # fmt: skip


def symbolic(function: Function, text: str) -> list[jax.ShapeDtypeStruct]:
    """The arrays with these leading dims in place of the last ones."""
    lead = jax.export.symbolic_shape(text)
    return [
        jax.ShapeDtypeStruct((*lead[len(lead) - rows :], *a.shape[rows:]) if rows else a.shape, a.dtype)
        for a, rows in zip(function.arrays, function.rows, strict=True)
    ]


def both(function: Function) -> Callable[..., Any]:
    """The results and the gradients."""

    def call(*arrays: Any) -> Any:
        return function.call(*arrays), function.gradient(*arrays) if function.differentiable else ()

    return call


@pytest.mark.slow
def test_every_function_is_lowered_for_cuda(
    fake_kernels: Any, drawn: Callable[[Sequence[Any], float], Sequence[Any]]
) -> None:
    for function in drawn([*every((2, 6))], 0.5):
        data, text = exporting._serialized(both(function), ["cuda"], 0, symbolic(function, "b, s"), {})
        assert data, function.name
        assert "custom_call" in text, function.name


@pytest.mark.parametrize(
    ("deterministic", "kv_heads", "lead"),
    [(False, 8, "2, s"), (True, 8, "b, s"), (False, 2, "b, 512"), (True, 2, "2, s")],
)
def test_gradients_of_attention_to_any_number_of_sequences_of_any_length(
    fake_kernels: Any, deterministic: bool, kv_heads: int, lead: str
) -> None:
    """Sums lie in whole tiles of queries of each sequence; heads that share keys are not split."""

    def slopes(*given: Any) -> Any:
        out, back = jax.vjp(lambda *x: cute_ops_jax.attention(*x, deterministic=deterministic)[0], *given)
        return back(out)

    sizes = jax.export.symbolic_shape(lead)
    shapes = [jax.ShapeDtypeStruct((*sizes, heads, 128), jnp.bfloat16) for heads in (8, kv_heads, kv_heads)]
    text = exporting._serialized(slopes, ["cuda"], 0, shapes, {})[1]
    assert "attention_bwd" in text


@pytest.mark.parametrize(("deterministic", "tokens"), [(False, "s"), (True, "s"), (True, "1024")])
def test_gradients_of_any_number_of_packed_sequences(fake_kernels: Any, deterministic: bool, tokens: str) -> None:
    """Sums, and turns in which these are added to, lie in the tiles that tokens fill and one more for each sequence."""

    def slopes(q: Any, k: Any, offsets: Any) -> Any:
        given = {"causal": True, "deterministic": deterministic}
        out, back = jax.vjp(lambda q, k: cute_ops_jax.attention_packed(q, k, k, offsets, offsets, **given)[0], q, k)
        return back(out)

    count, ends = jax.export.symbolic_shape(f"{tokens}, b")
    shapes = [jax.ShapeDtypeStruct((count, heads, 128), jnp.bfloat16) for heads in (8, 2)]
    text = exporting._serialized(slopes, ["cuda"], 0, [*shapes, jax.ShapeDtypeStruct((ends,), jnp.int32)], {})[1]
    assert "attention_packed_bwd" in text


def test_decoding_from_any_number_of_pages(fake_kernels: Any) -> None:
    batch, pages, each = jax.export.symbolic_shape("b, p, t")
    lengths, table = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch,), (batch, each)))
    q, cache = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((batch, 1, 32, 128), (pages, 16, 8, 128)))
    text = exporting._serialized(cute_ops_jax.decode_attention, ["cuda"], 0, [q, cache, cache, lengths, table], {})[1]
    assert "cute_decode_attention" in text
    q, cache = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((batch, 1, 16, 576), (pages, 64, 576)))
    text = exporting._serialized(cute_ops_jax.mla_decode, ["cuda"], 0, [q, cache, lengths, table], {})[1]
    assert "cute_mla_decode" in text


def test_scratch_arrays_of_whole_tiles_are_no_longer() -> None:
    (length,) = jax.export.symbolic_shape("s")
    found = any_size._size(
        {"s": length}, 4224, {"s": 4099}, [({"s": s}, -(-s // 128) * 128) for s in (1, 67, 8209)], ["s"]
    )
    assert found == -(-length // 128) * 128


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize("name", COMPOSED)
def test_values_of_several_sizes(name: str, close: Any) -> None:
    """Fewer rows than a chunk has, exactly so many, and some that leave a rest."""
    function = COMPOSED[name]
    shapes = symbolic(function, "b, s")
    program = jax.export.export(jax.jit(both(function)), platforms=["cpu"])(*shapes)
    for rows in (1, 6, 7):
        given = [
            np.resize(a, (1, rows, *a.shape[2:])) if count == 2 else a
            for a, count in zip(function.arrays, function.rows, strict=True)
        ]
        close(program.call(*given), jax.jit(both(function))(*given))


def test_the_gradient_of_routes(close: Any) -> None:
    def slopes(logits: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(cute_ops_jax.route(x, k=2)[0] ** 2))(logits)

    shape = jax.ShapeDtypeStruct((*jax.export.symbolic_shape("b, s"), 5), jnp.float32)
    program = jax.export.export(jax.jit(slopes), platforms=["cpu"])(shape)
    logits = np.random.default_rng(0).standard_normal((2, 3, 5)).astype(np.float32)
    close(program.call(logits), jax.jit(slopes)(logits))


@pytest.mark.slow
def test_a_loss_is_exported_with_one_symbolic_dim_or_a_mixed_one(tmp_path: Any, fake_kernels: Any) -> None:
    loss = COMPOSED["linear_cross_entropy"]
    weight = loss.arrays[1]
    for k, (text, lead) in enumerate((("b", (5,)), ("b, 16", (3, 16)), ("8*b", (16,)))):
        dims = jax.export.symbolic_shape(text)
        shapes = jax.ShapeDtypeStruct((*dims, weight.shape[1]), jnp.float32), jax.ShapeDtypeStruct(dims, jnp.int32)
        where = tmp_path / str(k)
        cute_ops_jax.export(
            where, lambda h, t: cute_ops_jax.linear_cross_entropy(h, jnp.asarray(weight), t), *shapes,
            platforms="cpu", vjp_order=1,
        )  # fmt: skip
        hidden, target = jnp.ones((*lead, weight.shape[1])), jnp.zeros(lead, jnp.int32)
        got = cute_ops_jax.load(where)(hidden, target)
        np.testing.assert_allclose(got, loss.call(hidden, weight, target), rtol=1e-6)
