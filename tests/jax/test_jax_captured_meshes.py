"""Attention with functions that read arrays, on meshes over batch and heads, against the formula in float32."""

from __future__ import annotations

import importlib
import inspect
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import cute_ops_jax
from cute_ops_jax.primitive import function, vjp

B, S, H, G, D = 4, 6, 8, 4, 16
AXES = ("data", "model")


class Reads(NamedTuple):
    """A function of scores and the arrays that it reads.

    Attributes:
        score: the function.
        arrays: of each array the shape and what its first dims are: examples ("m"), heads ("h") or neither ("-").
        whole: whether the function computes with the number of a head, so that devices have all heads.
        index: which array is of integers.
    """

    score: Callable[..., Any]
    arrays: tuple[tuple[tuple[int, ...], str], ...]
    whole: bool = False
    index: int = -1


READS = {
    "bias": Reads(lambda xp, s, b, h, q, k, x: s + x[b, h, q, k], (((B, H, S, S), "mh"),)),
    "bias of heads": Reads(lambda xp, s, b, h, q, k, x: s + x[h, q, k], (((H, S, S), "h"),)),
    "bias of all": Reads(lambda xp, s, b, h, q, k, x: s + x[q, k], (((S, S), ""),)),
    "table": Reads(lambda xp, s, b, h, q, k, x: s + x[h, q - k + S], (((H, 2 * S), "h"),)),
    "table of all": Reads(lambda xp, s, b, h, q, k, x: s + x[q - k + S], (((2 * S,), ""),)),
    "slopes": Reads(lambda xp, s, b, h, q, k, x: s + x[h] * (k - q), (((H,), "h"),)),
    "of examples": Reads(lambda xp, s, b, h, q, k, x: s * x[b, 0] + x[b, 1], (((B, 2), "m"),)),
    "of keys": Reads(lambda xp, s, b, h, q, k, x, y: s + x[b, k] * y[h], (((B, S), "m"), ((H,), "h"))),
    "number of heads": Reads(lambda xp, s, b, h, q, k, x: s + x[k] * h, (((S,), ""),), whole=True),
    "another head": Reads(lambda xp, s, b, h, q, k, x: s + x[h // 2, k], (((H // 2, S), ""),), whole=True),
    "documents": Reads(
        lambda xp, s, b, h, q, k, x, y: xp.where(x[b, q] == x[b, k], s + y[h], s - 9.0),
        (((B, S), "m"), ((H,), "h")), index=0,
    ),
    "pages": Reads(lambda xp, s, b, h, q, k, x, y: s + y[x[b, k], h], (((B, S), "m"), ((3, H), "-h")), index=0),
}  # fmt: skip


def plain(reads: Reads, q: Any, k: Any, v: Any, *arrays: Any) -> Any:
    k, v = (jnp.repeat(x, H // G, 2) for x in (k, v))
    at = [jnp.arange(n).reshape([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate((B, H, S, S))]
    scores = reads.score(jnp, jnp.einsum("bshd,bthd->bhst", q, k, precision="highest") * D**-0.5, *at, *arrays)
    scores = jnp.where(at[3] <= at[2], scores, -jnp.inf)
    out = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1), v, precision="highest")
    return out, jax.nn.logsumexp(scores, -1)


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map"])
@pytest.mark.parametrize("name", READS)
def test_arrays_that_functions_read(
    name: str, kind: str, ffi_primitive: Any, fake_kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, draw = READS[name], np.random.default_rng(len(name))
    cuts = [("data", None)] if reads.whole and kind != "auto" else [("data", None), (None, "model"), AXES]
    axes = dict(zip("mh-", (*random.Random(f"{name} {kind}").choice(cuts), None), strict=True))
    arrays = [
        draw.integers(0, 3, shape).astype(np.int32) if i == reads.index else draw.normal(size=shape).astype(np.float32)
        for i, (shape, _) in enumerate(reads.arrays)
    ]
    qkv = [jnp.asarray(draw.normal(size=(B, S, n, D)), jnp.bfloat16) for n in (H, G, G)]
    cotangents = [jnp.asarray(draw.normal(size=shape), jnp.float32) for shape in ((B, S, H, D), (B, H, S))]
    count = 3 + len(arrays)
    floats = [i for i in range(count) if i != 3 + reads.index or reads.index < 0]

    def gradients(function: Callable[..., Any], given: Any, cotangents: Any) -> Any:
        def of_floats(*wanted: Any) -> Any:
            whole = dict(enumerate(given)) | dict(zip(floats, wanted, strict=True))
            return [x.astype(jnp.float32) for x in function(*whole.values())]

        results, pull = jax.vjp(of_floats, *(given[i] for i in floats))
        return results, pull(cotangents)

    wide = [*(x.astype(jnp.float32) for x in qkv), *map(jnp.asarray, arrays)]
    want = gradients(lambda *given: plain(reads, *given), wide, cotangents)

    def ours(q: Any, k: Any, v: Any, *arrays: Any) -> Any:
        return cute_ops_jax.attention(q, k, v, causal=True, score_mod=reads.score, captured=arrays)

    attending: Any = importlib.import_module("cute_ops_jax.composite.attending")
    monkeypatch.setattr(vjp, "primitive_of", ffi_primitive)
    monkeypatch.setattr(attending, "register", inspect.unwrap(function.register))
    monkeypatch.setattr(attending.attend, "_known", {})
    heads = jax.P(axes["m"], None, axes["h"], None)
    specs = [heads] * 3 + [jax.P(*(axes[each] for each in dims)) for _, dims in reads.arrays]
    of_results = [heads, jax.P(axes["m"], axes["h"], None)]
    types = (AxisType.Explicit if kind == "explicit" else AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), AXES, types, devices=jax.devices("cpu")[:4])

    def local(given: Any, cotangents: Any) -> Any:
        results, found = gradients(ours, given, cotangents)
        shared = [tuple(a for a in axes.values() if a and a not in specs[i]) for i in floats]
        return results, tuple(jax.lax.psum(d, over) if over else d for d, over in zip(found, shared, strict=True))

    def program(given: Any, cotangents: Any) -> Any:
        if kind != "shard_map":
            return gradients(ours, given, cotangents)
        out_specs = of_results, tuple(specs[i] for i in floats)
        return jax.shard_map(local, in_specs=(specs, of_results), out_specs=out_specs, check_vma=False)(
            given, cotangents
        )

    with jax.set_mesh(mesh):
        put = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((*qkv, *arrays), specs, strict=True)]
        cut = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(cotangents, of_results, strict=True)]
        got = jax.block_until_ready(jax.jit(program)(put, cut))
    assert fake_kernels.calls
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        error = np.abs(np.asarray(a, np.float32) - np.asarray(b)).max() / max(1.0, np.abs(b).max())
        assert error < 0.03, (axes, a.shape, error)
