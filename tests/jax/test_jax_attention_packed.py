"""Attention of packed sequences in JAX: drawn calls against float64, and transforms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from tests.ops.attention_sequences import drawn_sequences


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_drawn_calls(seed: int) -> None:
    """In one program, which gets the offsets as an array."""
    packed, given = drawn_sequences(seed, 40)
    call = packed.call
    named = {n: jnp.asarray(x, call.dtype) for n, x in zip("qkv", given, strict=False)}
    named |= {} if given[3] is None else {"sinks": jnp.asarray(given[3])}
    rng = np.random.default_rng(seed)
    dout = jnp.asarray(rng.standard_normal((call.s, call.h, call.e)), call.dtype)
    dlse = jnp.asarray(rng.standard_normal((call.h, call.s)), jnp.float32)
    captured = {name: jnp.asarray(x) for name, x in packed.functions.captured.items()}

    @jax.jit
    def run(named: Any, offsets: Any) -> Any:
        def attend(x: Any) -> Any:
            return cute_ops_jax.attention(
                **x, **call.attrs, **packed.functions.options, captured=captured, cu_seqlens_q=offsets[0],
                cu_seqlens_k=offsets[1],
            )  # fmt: skip

        (out, lse), pull = jax.vjp(attend, named)
        return {"out": out, "lse": lse, **{f"d{n}": g for n, g in pull((dout, dlse))[0].items()}}

    found = run(named, [jnp.asarray(x) for x in packed.offsets])
    wide = lambda each: {n: np.asarray(x, np.float64) for n, x in each.items()}  # noqa: E731
    packed.assert_right(wide(named) | wide({"dout": dout, "dlse": dlse}), wide(found), f"seed {seed}")


@pytest.mark.slow
def test_vmap_and_devices_that_share_heads() -> None:
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.standard_normal((2, 30, h, 32)), jnp.bfloat16) for h in (4, 2, 2))
    cu = jnp.asarray([[0, 11, 30], [0, 29, 30]], jnp.int32)
    attend = lambda *x: cute_ops_jax.attention(*x[:3], causal=True, cu_seqlens_q=x[3])[0]  # noqa: E731
    found, each = jax.vmap(attend)(q, k, v, cu), [attend(*x) for x in zip(q, k, v, cu, strict=True)]
    assert (found == jnp.stack(each)).all()
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    heads = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    shared = jax.jit(attend)(*(jax.device_put(x[0], heads) for x in (q, k, v)), cu[0])
    assert shared.sharding.is_equivalent_to(heads, 3)
    np.testing.assert_allclose(np.asarray(shared, np.float32), np.asarray(each[0], np.float32), atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(2))
def test_the_bits_are_those_of_pytorch(part: int) -> None:
    torch = pytest.importorskip("torch")
    import cute_ops_torch

    for seed in range(part * 6, part * 6 + 6):
        packed, given = drawn_sequences(seed)
        call, attrs = packed.call, {**packed.call.attrs, "deterministic": True}
        named = {n: x.astype(np.float32) for n, x in zip("qkv", given, strict=False)}
        x = {n: torch.from_numpy(a).to("cuda", getattr(torch, call.dtype)).requires_grad_() for n, a in named.items()}
        cu = [torch.from_numpy(o).cuda() for o in packed.offsets]
        out, lse = cute_ops_torch.attention(**x, **attrs, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
        grads = torch.autograd.grad(out, [*x.values()], torch.ones_like(out))

        @jax.jit
        def run(y: Any, offsets: Any, attrs: Any = attrs) -> Any:
            attend = lambda y: cute_ops_jax.attention(  # noqa: E731
                **y, **attrs, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1]
            )
            (out, lse), pull = jax.vjp(attend, y)
            (gradients,) = pull((jnp.ones_like(out), jnp.zeros_like(lse)))
            return out, lse, *(gradients[name] for name in "qkv")  # JAX sorts the keys of a dict

        found = run({n: jnp.asarray(a, call.dtype) for n, a in named.items()}, [jnp.asarray(o) for o in packed.offsets])
        for a, b in zip((out, lse, *grads), found, strict=True):
            assert np.array_equal(a.detach().cpu().float().numpy(), np.asarray(b, np.float32)), f"seed {seed}"
