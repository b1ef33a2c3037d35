"""Call the op of softcap.py from PyTorch and from JAX: values, gradients, torch.compile and jit.

python examples/custom_op/run.py
"""

import jax
import numpy as np
import torch
from softcap import softcap_jax, softcap_torch


def main() -> None:
    """On a GPU if there is one: there the kernel runs, on a CPU the reference."""
    values = np.linspace(-100, 100, 4 * 64, dtype=np.float32).reshape(4, 64)

    x = torch.tensor(values, device="cuda" if torch.cuda.is_available() else "cpu", requires_grad=True)
    out = torch.compile(softcap_torch, fullgraph=True)(x, cap=30.0)
    (dx,) = torch.autograd.grad(out.sum(), x)

    jax_out = jax.jit(softcap_jax, static_argnames="cap")(values, cap=30.0)
    jax_dx = jax.grad(lambda x: softcap_jax(x, cap=30.0).sum())(values)

    print(f"PyTorch, {x.device}: out[0, 0] = {out[0, 0].item():.6f}   dx[0, 0] = {dx[0, 0].item():.6f}")
    print(f"JAX, {jax_out.device}: out[0, 0] = {jax_out[0, 0]:.6f}   dx[0, 0] = {jax_dx[0, 0]:.6f}")
    np.testing.assert_allclose(out.detach().cpu(), jax_out, rtol=1e-5)
    np.testing.assert_allclose(dx.cpu(), jax_dx, rtol=1e-4, atol=1e-7)


if __name__ == "__main__":
    main()
