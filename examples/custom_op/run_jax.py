"""Call the op of softcap.py from JAX: values, gradients and jit.

python examples/custom_op/run_jax.py
"""

import jax
import jax.numpy as jnp
import numpy as np
from softcap import softcap

import cute_ops_jax

softcap_jax = cute_ops_jax.register(softcap)


def main() -> None:
    """On a GPU if there is one: there the kernel runs, on a CPU the reference."""
    x = jnp.linspace(-100, 100, 4 * 64).reshape(4, 64)
    out = jax.jit(softcap_jax, static_argnames="cap")(x, cap=30.0)
    dx = jax.grad(lambda x: softcap_jax(x, cap=30.0).sum())(x)
    print(f"JAX, {out.device}: out[0, 0] = {out[0, 0]:.6f}   dx[0, 0] = {dx[0, 0]:.6f}")
    np.testing.assert_allclose(out, 30 * jnp.tanh(x / 30), rtol=1e-5)


if __name__ == "__main__":
    main()
