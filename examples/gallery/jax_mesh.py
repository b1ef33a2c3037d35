"""A JAX mesh: rows over one axis, the vocabulary over the other. The same function runs on one device and on many.

python examples/gallery/jax_mesh.py             # on a CPU: eight devices of it
"""

from __future__ import annotations

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cute_ops_jax


def loss_of(params: dict[str, jax.Array], hidden: jax.Array, target: jax.Array) -> jax.Array:
    """A norm, and a loss over the vocabulary whose logits never exist as a whole."""
    x = cute_ops_jax.rmsnorm(hidden, params["norm"])
    return cute_ops_jax.linear_cross_entropy(x, params["head"], target)


def main() -> tuple[float, float]:
    """Loss and largest error of a gradient, sharded against one device."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"norm": jnp.ones(64), "head": jax.random.normal(keys[0], (512, 64)) / 8}
    hidden, target = jax.random.normal(keys[1], (64, 64)), jax.random.randint(keys[2], (64,), 0, 512)
    step = jax.jit(jax.value_and_grad(loss_of))
    expected, expected_grads = step(params, hidden, target)

    rows, classes = (2, 4) if jax.device_count() >= 8 else (1, jax.device_count())
    mesh = jax.make_mesh((rows, classes), ("rows", "classes"), axis_types=(AxisType.Auto,) * 2)
    specs = {"norm": P(), "head": P("classes")}
    placed = {n: jax.device_put(a, NamedSharding(mesh, specs[n])) for n, a in params.items()}
    batch = [jax.device_put(a, NamedSharding(mesh, P("rows"))) for a in (hidden, target)]
    loss, grads = step(placed, *batch)

    error = max(float(jnp.max(jnp.abs(grads[n] - expected_grads[n]))) for n in params)
    print(
        f"loss {float(loss):.5f} on {mesh.size} devices, {float(expected):.5f} on one; gradients differ by {error:.1e}"
    )
    print(f"the head's gradient stays sharded: {grads['head'].sharding.spec}")
    return abs(float(loss - expected)), error


if __name__ == "__main__":
    main()
