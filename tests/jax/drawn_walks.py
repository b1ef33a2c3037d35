"""Random stacks of JAX's transformations around every public function: ``jit``, ``grad``, ``vmap``, ``scan``, ``map``,
``cond``, ``checkpoint``, ``custom_vjp``, ``shard_map``, donated arguments and ``export``.

A seed draws a function, its leading dims and two to four transformations. The expected results come from a loop over
examples without any of them. More of them than the suite runs: ``python -m tests.jax.drawn_walks --count 500``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cute_ops_jax import _compat
from cute_ops_jax.distributed.varying import varies
from tests.drawing import check_seeds
from tests.jax.every_function import Function, every

EXAMPLES = 2
LEADS = ((3,), (2, 3), (5,))


class Walk(NamedTuple):
    """A function within transformations.

    Attributes:
        said: the transformations, innermost first.
        run: the function within them.
        plain: computes the same without them.
        arrays: their arguments.
        differentiable: which of these may have gradients.
        done: transformations that are not drawn again.
    """

    said: tuple[str, ...]
    run: Callable[..., Any]
    plain: Callable[..., Any]
    arrays: tuple[Any, ...]
    differentiable: tuple[int, ...]
    done: frozenset[str] = frozenset()


def walk(seed: int) -> Walk:
    rng = np.random.default_rng([seed, 23])
    functions = _functions(LEADS[int(rng.integers(0, len(LEADS)))])
    function = functions[int(rng.integers(0, len(functions)))]
    arrays = tuple(jnp.asarray(a) for a in function.arrays)
    made = Walk((function.name,), function.call, function.call, arrays, function.differentiable)
    for _ in range(int(rng.integers(2, 4))):
        name = str(rng.choice([each for each in _WITHIN if each not in made.done]))
        if name != "grad" or made.differentiable:
            made = _WITHIN[name](made, rng)._replace(said=(*made.said, name))
    name = str(rng.choice(list(_OUTSIDE)))
    if name == "as it is" and "shard_map" in made.done:  # JAX has no checkpoint of it that is not compiled
        name = "jit"
    return _OUTSIDE[name](made, rng)._replace(said=(*made.said, name))


def check(seed: int) -> str:
    """Compare the results of a seed's walk; returns what it was."""
    made = walk(seed)
    what = f"seed {seed}: {' - '.join(made.said)}"
    want = jax.tree.leaves(made.plain(*made.arrays))
    got = jax.tree.leaves(made.run(*made.arrays))
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in want], what
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        wide = [np.asarray(each.astype(jnp.float32)) for each in (a, b)]
        size = max(1.0, float(np.max(np.abs(wide[1]), initial=0, where=np.isfinite(wide[1]))))
        np.testing.assert_allclose(*wide, rtol=2e-4, atol=2e-5 * size, err_msg=f"{what}, result {i}")
    return what


@cache
def _functions(lead: tuple[int, ...]) -> list[Function]:
    return every(lead)


def _jit(made: Walk, rng: np.random.Generator) -> Walk:
    return made._replace(run=jax.jit(made.run))


def _checkpoint(made: Walk, rng: np.random.Generator) -> Walk:
    policies = jax.checkpoint_policies
    policy = (None, policies.dots_saveable, policies.nothing_saveable)[int(rng.integers(0, 3))]
    return made._replace(run=jax.checkpoint(made.run, policy=policy))


def _cond(made: Walk, rng: np.random.Generator) -> Walk:
    def other(*arrays: Any) -> Any:  # with the types of the first branch
        return made.run(*arrays[:1], *arrays[1:])

    return made._replace(run=lambda *arrays: jax.lax.cond(jnp.asarray(True), made.run, other, *arrays))


def _custom(made: Walk, rng: np.random.Generator) -> Walk:
    function = jax.custom_vjp(lambda *arrays: made.run(*arrays))
    function.defvjp(lambda *arrays: jax.vjp(made.run, *arrays), lambda back, dout: back(dout))
    return made._replace(run=function)


def _grad(made: Walk, rng: np.random.Generator) -> Walk:
    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        def loss(*arrays: Any) -> Any:
            found = [a for a in jax.tree.leaves(function(*arrays)) if jnp.issubdtype(a.dtype, jnp.floating)]
            return sum(jnp.sum(jnp.sin(a.astype(jnp.float32)) * (i + 1)) for i, a in enumerate(found))

        return jax.grad(loss, made.differentiable)

    return made._replace(run=of(made.run), plain=of(made.plain), differentiable=(), done=made.done | {"grad"})


def _examples(made: Walk, rng: np.random.Generator) -> tuple[tuple[bool, ...], Walk]:
    """Which arguments have one for each example, and the loop over these."""
    batched = [bool(rng.random() < 0.6) for _ in made.arrays]
    if not any(batched):
        batched[int(rng.integers(0, len(batched)))] = True

    def more(array: Any) -> Any:
        floats = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > 1
        return jnp.stack([array, (array * 0.75).astype(array.dtype) if floats else array])

    def plain(*arrays: Any) -> Any:
        each = [made.plain(*(a[k] if b else a for a, b in zip(arrays, batched, strict=True))) for k in range(EXAMPLES)]
        return jax.tree.map(lambda *outs: jnp.stack(outs), *each)

    arrays = tuple(more(a) if b else a for a, b in zip(made.arrays, batched, strict=True))
    return tuple(batched), made._replace(arrays=arrays, plain=plain)


def _vmap(made: Walk, rng: np.random.Generator) -> Walk:
    batched, examples = _examples(made, rng)
    return examples._replace(run=jax.vmap(made.run, tuple(0 if b else None for b in batched)))


def _each(made: Walk, batched: Sequence[bool], arrays: Sequence[Any]) -> tuple[list[Any], Callable[[Any], Any]]:
    """The arguments that examples have, and the function of those of one example."""

    def one(own: Any) -> Any:
        own = iter(own)
        return made.run(*(next(own) if b else a for a, b in zip(arrays, batched, strict=True)))

    return [a for a, b in zip(arrays, batched, strict=True) if b], one


def _map(made: Walk, rng: np.random.Generator) -> Walk:
    batched, examples = _examples(made, rng)

    def run(*arrays: Any) -> Any:
        own, one = _each(made, batched, arrays)
        return jax.lax.map(one, own)

    return examples._replace(run=run)


def _scan(made: Walk, rng: np.random.Generator) -> Walk:
    batched, examples = _examples(made, rng)
    unroll, reverse = int(rng.integers(1, 3)), bool(rng.random() < 0.5)

    def run(*arrays: Any) -> Any:
        own, one = _each(made, batched, arrays)
        return jax.lax.scan(lambda count, x: (count + 1, one(x)), 0, own, unroll=unroll, reverse=reverse)[1]

    return examples._replace(run=run)


def _shard_map(made: Walk, rng: np.random.Generator) -> Walk:
    """Each of two devices has one example."""
    if len(jax.devices()) < EXAMPLES:
        return made
    batched, examples = _examples(made, rng)
    mesh = jax.make_mesh((EXAMPLES,), ("example",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    spec, check_vma = jax.sharding.PartitionSpec, bool(rng.random() < 0.5)

    def body(*arrays: Any) -> Any:
        out = made.run(*(a[0] if b else a for a, b in zip(arrays, batched, strict=True)))
        return jax.tree.map(lambda a: (vary(a) if check_vma and not varies(a, "example") else a)[None], out)

    def vary(a: Any) -> Any:
        return _compat.vary(a, frozenset({"example"}))

    specs = {"in_specs": tuple(spec("example") if b else spec() for b in batched), "out_specs": spec("example")}
    run = jax.shard_map(body, mesh=mesh, check_vma=check_vma, **specs)
    return examples._replace(run=run, done=made.done | {"shard_map"})


def _donated(made: Walk, rng: np.random.Generator) -> Walk:
    places = tuple(i for i in range(len(made.arrays)) if rng.random() < 0.5)
    step = jax.jit(made.run, donate_argnums=places)
    return made._replace(run=lambda *arrays: step(*(jnp.array(a) if i in places else a for i, a in enumerate(arrays))))


def _export(made: Walk, rng: np.random.Generator) -> Walk:
    def run(*arrays: Any) -> Any:
        exported = jax.export.export(jax.jit(made.run))(*arrays)
        return jax.export.deserialize(exported.serialize()).call(*arrays)

    return made if "shard_map" in made.done else made._replace(run=run)


_WITHIN: dict[str, Callable[[Walk, np.random.Generator], Walk]] = {
    "jit": _jit, "checkpoint": _checkpoint, "cond": _cond, "custom_vjp": _custom, "grad": _grad, "vmap": _vmap,
    "map": _map, "scan": _scan, "shard_map": _shard_map,
}  # fmt: skip
_OUTSIDE: dict[str, Callable[[Walk, np.random.Generator], Walk]] = {
    "jit": _jit, "donated": _donated, "export": _export, "as it is": lambda made, rng: made,
}  # fmt: skip


if __name__ == "__main__":
    check_seeds(check, "walks", lambda seed: f"{' - '.join(walk(seed).said)}, seed {seed}")
