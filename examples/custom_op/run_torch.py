"""Call the op of softcap.py from PyTorch: values, gradients and torch.compile.

python examples/custom_op/run_torch.py
"""

import torch
from softcap import softcap

import cute_ops_torch

softcap_torch = cute_ops_torch.register(softcap)


def main() -> None:
    """On a GPU if there is one: there the kernel runs, on a CPU the reference."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.linspace(-100, 100, 4 * 64, device=device).reshape(4, 64).requires_grad_()
    out = torch.compile(softcap_torch, fullgraph=True)(x, cap=30.0)
    (dx,) = torch.autograd.grad(out.sum(), x)
    print(f"PyTorch, {x.device}: out[0, 0] = {out[0, 0].item():.6f}   dx[0, 0] = {dx[0, 0].item():.6f}")
    torch.testing.assert_close(out, 30 * torch.tanh(x / 30))


if __name__ == "__main__":
    main()
