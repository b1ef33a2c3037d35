"""Cross entropy in JAX beyond what every op is tested for: its fusion with a linear layer, gradients in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops import chunks


@pytest.fixture(params=[1000, 4, 5], ids=["one-chunk", "chunks", "uneven"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    jax.clear_caches()
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda *sizes: request.param)
    yield
    jax.clear_caches()


def linear() -> tuple[list[np.ndarray], np.ndarray]:
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(s, np.float32) for s in ((3, 4, 16), (67, 16), (67,))]
    target = rng.integers(0, 67, (3, 4)).astype(np.int32)
    target[0, 1] = -100
    return arrays, target


def by_hand(hidden: Any, weight: Any, target: Any, bias: Any, **options: Any) -> Any:
    return cute_ops_jax.cross_entropy(hidden @ weight.T + bias, target, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear(chunked: None, reduction: str, close: Callable[..., Any]) -> None:
    arrays, target = linear()
    results = []
    for function in (cute_ops_jax.linear_cross_entropy, by_hand):

        def loss(h: Any, w: Any, b: Any, function: Any = function) -> Any:
            return function(h, w, target, b, reduction=reduction, label_smoothing=0.1, z_loss=1e-2)

        out, pull = jax.jit(lambda *given, loss=loss: jax.vjp(loss, *given))(*arrays)
        results.append((out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))))
    close(*results)


def test_linear_holds_the_logits_of_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.clear_caches()
    monkeypatch.setattr(chunks, "rows_per_chunk", lambda *sizes: 4)
    arrays, target = linear()
    gradient = jax.grad(lambda h, w: cute_ops_jax.linear_cross_entropy(h, w, target), (0, 1))
    text = str(jax.make_jaxpr(gradient)(*arrays[:2]))
    assert "f32[4,67]" in text
    assert "f32[12,67]" not in text
    jax.clear_caches()


def test_linear_under_vmap(close: Callable[..., Any]) -> None:
    (hidden, weight, _), target = linear()
    got = jax.vmap(lambda h, t: cute_ops_jax.linear_cross_entropy(h, weight, t))(hidden, target)
    close(
        got, jnp.stack([cute_ops_jax.linear_cross_entropy(h, weight, t) for h, t in zip(hidden, target, strict=True)])
    )


def test_linear_errors() -> None:
    (hidden, weight, bias), target = linear()
    with pytest.raises(ValueError, match=r"argument `weight` has shape \(67, 8\), expected \(n, h\)"):
        cute_ops_jax.linear_cross_entropy(hidden, weight[:, :8], target)
    with pytest.raises(TypeError, match="argument `bias` has dtype float16, but `hidden` has float32"):
        cute_ops_jax.linear_cross_entropy(hidden, weight, target, bias.astype(np.float16))
    with pytest.raises(ValueError, match="option `reduction` is 'max'"):
        cute_ops_jax.linear_cross_entropy(hidden, weight, target, reduction="max")


def test_a_gradient_in_place_is_an_alias_that_xla_knows(fake_kernels: Any) -> None:
    """The backward call, and no other, may write its result over the logits."""
    logits, target = jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)

    def text(inplace: bool) -> str:
        loss = lambda x, t: cute_ops_jax.cross_entropy(x * 2, t, inplace_backward=inplace)  # noqa: E731
        return jax.jit(jax.grad(loss)).trace(logits, target).lower(lowering_platforms=("cuda",)).as_text()

    assert "output_operand_alias" not in text(False)
    (line,) = [line for line in text(True).splitlines() if "output_operand_alias" in line]
    assert "cross_entropy_bwd" in line
    assert "operand_index = 0" in line
