"""Attention in JAX: drawn calls against float64, transforms, and the bits of PyTorch on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cute_ops_jax
from cute_ops import mods
from tests.ops.attention_calls import (
    Call,
    arrays,
    assert_holds_with_functions,
    drawn,
    drawn_with_functions,
    expected,
)

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def given(call: Call, seed: int) -> list[Any]:
    q, k, v, sinks = arrays(call, seed)
    halves = [jnp.asarray(x, dtype=call.dtype) for x in (q, k, v)]
    return [*halves, None if sinks is None else jnp.asarray(sinks)]


def wide(x: Any) -> np.ndarray | None:
    return None if x is None else np.asarray(x, dtype=np.float32)


def with_gradients(call: Call, operands: list[Any], dout: Any, dlse: Any) -> list[Any]:
    """Results, and gradients of the operands."""

    @jax.jit
    def both(*x: Any) -> Any:
        results, back = jax.vjp(lambda *y: cute_ops_jax.attention(*y, **call.attrs), *x)
        return [*results, *back((dout, dlse))]

    return both(*operands)  # type: ignore[no-any-return]


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("seed", range(100, 112))
def test_drawn_calls(seed: int) -> None:
    call = drawn(seed, longest=60)
    operands = given(call, seed)
    rng = np.random.default_rng(seed)
    dout = jnp.asarray(rng.standard_normal((call.batch, call.s, call.h, call.e), np.float32), call.dtype)
    dlse = jnp.asarray(rng.standard_normal((call.batch, call.h, call.s), np.float32))

    found = dict(zip(NAMES, with_gradients(call, [x for x in operands if x is not None], dout, dlse), strict=False))
    for name, bound in expected(call, [*map(wide, operands)], (np.asarray(wide(dout)), np.asarray(dlse))).items():
        bound.assert_holds(np.asarray(wide(found[name])), f"{call.name}: {name}")


@pytest.mark.drawn(0.5)
@pytest.mark.parametrize("seed", range(100, 109))
def test_drawn_calls_with_functions(seed: int) -> None:
    call, functions = drawn_with_functions(seed, 50)
    named = {n: x for n, x in zip((*"qkv", "sinks"), given(call, seed), strict=True) if x is not None}
    read = {name: jnp.asarray(functions.captured[name]) for name in functions.differentiable}
    rng = np.random.default_rng(seed)
    dout = jnp.asarray(rng.standard_normal((call.batch, call.s, call.h, call.e), np.float32), call.dtype)
    dlse = jnp.asarray(rng.standard_normal((call.batch, call.h, call.s), np.float32))

    @jax.jit
    def both(named: Any, read: Any) -> Any:
        def run(named: Any, read: Any) -> Any:
            captured = {**functions.captured, **read}
            return cute_ops_jax.attention(**named, **call.attrs, **functions.options, captured=captured)

        (out, lse), back = jax.vjp(run, named, read)
        of_named, of_read = back((dout, dlse))
        return {"out": out, "lse": lse, **{f"d{name}": x for name, x in (of_named | of_read).items()}}

    operands = [wide(named.get(name)) for name in (*"qkv", "sinks")]
    right = expected(call, operands, (np.asarray(wide(dout)), np.asarray(dlse)), functions)
    found = {name: np.asarray(wide(x)) for name, x in both(named, read).items()}
    assert_holds_with_functions(functions, found, right, f"seed {seed}: {call.name}")


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_functions_give_the_bits_of_pytorch(part: int) -> None:
    torch = pytest.importorskip("torch")
    import cute_ops_torch

    for seed in range(3 * part, 3 * part + 3):
        call, functions = drawn_with_functions(seed)
        operands = [x for x in given(call, seed) if x is not None]
        options, captured = {**call.attrs, **functions.options}, functions.captured
        ours = jax.jit(lambda *x, o=options, c=captured: cute_ops_jax.attention(*x, **o, captured=c))(*operands)
        tensors = {name: torch.from_numpy(array).cuda() for name, array in captured.items()}
        theirs = cute_ops_torch.attention(*map(torch.from_dlpack, operands), **options, captured=tensors)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(torch.from_dlpack(one), other), f"seed {seed}: {call.name}"


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(8))
def test_the_bits_are_those_of_pytorch(part: int) -> None:
    torch = pytest.importorskip("torch")
    import cute_ops_torch

    for seed in range(3 * part, 3 * part + 3):
        call = drawn(seed)
        call.attrs["deterministic"] = True
        operands = [x for x in given(call, seed) if x is not None]
        dout = jax.random.normal(jax.random.key(seed), (call.batch, call.s, call.h, call.e), call.dtype)
        dlse = jax.random.normal(jax.random.key(seed), (call.batch, call.h, call.s), jnp.float32)
        tensors = [torch.from_dlpack(x).requires_grad_() for x in operands]
        theirs = cute_ops_torch.attention(*tensors, **call.attrs)
        theirs += torch.autograd.grad(theirs, tensors, [torch.from_dlpack(x) for x in (dout, dlse)])
        for ours, right in zip(with_gradients(call, operands, dout, dlse), theirs, strict=True):
            assert torch.equal(torch.from_dlpack(ours), right), f"seed {seed}: {call.name}"


def test_vmap_and_jit_over_sequences() -> None:
    q, k, v = (jax.random.normal(jax.random.key(i), (3, 2, 9, 2, 32), jnp.bfloat16) for i in range(3))
    out, lse = jax.jit(jax.vmap(lambda *x: cute_ops_jax.attention(*x, causal=True)))(q, k, v)
    for i in range(3):
        each = cute_ops_jax.attention(q[i], k[i], v[i], causal=True)
        assert (out[i] == each[0]).all()
        assert (lse[i] == each[1]).all()


def of_head(xp: Any, score: Any, batch: Any, head: Any, q: Any, k: Any) -> Any:
    return score * 2.0 ** (-head)


@pytest.mark.slow
@pytest.mark.parametrize("score_mod", [mods.alibi, of_head])
def test_devices_share_batches_and_heads_of_functions(score_mod: Any) -> None:
    """Arrays that are read by batch or head are shared with these; where a head's number counts, heads are not."""
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    q, k = (jax.random.normal(jax.random.key(0), (4, 20, heads, 32), jnp.bfloat16) for heads in (8, 4))
    arrays = {"document": jnp.arange(80).reshape(4, 20) // jnp.array([[3], [5], [7], [9]])}
    arrays |= {"slopes": jnp.arange(8) / 8.0} if score_mod is mods.alibi else {}
    options: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mods.documents, "causal": True}

    @jax.jit
    def run(q: Any, k: Any, arrays: Any) -> Any:
        return cute_ops_jax.attention(q, k, k, captured=arrays, **options)[0]

    right = run(q, k, arrays)
    placed = [jax.device_put(x, NamedSharding(mesh, P("b", None, "h", None))) for x in (q, k)]
    for of_batch, of_heads in ((P(), P()), (P("b"), P("h"))):
        specs = {"document": of_batch, "slopes": of_heads}
        shared = {name: jax.device_put(a, NamedSharding(mesh, specs[name])) for name, a in arrays.items()}
        np.testing.assert_allclose(wide(run(*placed, shared)), wide(right), rtol=0.01, atol=1e-4)
