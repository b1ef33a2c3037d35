"""Gradients of biases: sums of columns alone, and in the pass of an activation's gradient, beside torch and a copy.

Sizes are drawn, m of 1024 to 32768 rows and n of models or any; a seed draws the same ones. Every line has the time of
each contender and the part of the copy rate that ours reaches by the least bytes that it can move.

    python benchmarks/bias_gradients.py [--seed 7] [--points 12]
"""

from __future__ import annotations

import argparse
import random
import secrets
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console

import cute_ops_torch
from cute_ops.ops.gemm.named import linear_gelu
from cute_ops.ops.gemm.sums import column_sum
from cute_ops_torch import registry
from cute_ops_torch.tools import measure

# Rows and columns that were slow once, and columns of models.
KNOWN = ((8224, 5120), (12000, 3840), (8224, 5121))
COLUMNS = (384, 768, 1024, 1280, 1600, 3072, 4096, 5120, 6400, 9216, 14336)


def draw(seed: int, points: int) -> list[tuple[int, int]]:
    rng = random.Random(f"{seed} bias gradients")
    return [
        *KNOWN,
        *(
            (rng.randint(1024, 32768), rng.choice(COLUMNS) if rng.random() < 0.75 else rng.randint(64, 16384))
            for _ in range(points)
        ),
    ]


def contenders(m: int, n: int) -> dict[str, tuple[tuple[Any, ...], dict[str, Callable[..., Any]]]]:
    """What is compared, by name: the inputs, and functions of these."""
    total = registry.define(column_sum()).overload
    (gelu,) = (step for step in linear_gelu.steps if step.name == "linear_gelu_bwd")
    both = registry.define(gelu).overload

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def plain(acc: torch.Tensor, bias: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dacc = torch.ops.aten.gelu_backward(dout, acc + bias)
        return dacc, dacc.sum(0)

    torch.compiler.reset()
    compiled = torch.compile(plain, dynamic=False)
    return {
        "sum": ((made(m, n), made(n)), {"ours": total, "torch": lambda dout, bias: dout.sum(0)}),
        "gelu, sum": ((made(m, n), made(n), made(m, n)), {"ours": both, "torch": plain, "torch.compile": compiled}),
    }


def training(m: int, k: int, n: int) -> dict[str, float]:
    """Microseconds of a training step of a whole MLP, forward and backward."""

    def made(*shape: int) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if len(shape) > 1 and shape[0] != m else 1.0
        return (torch.randn(shape, device="cuda") * scale).bfloat16().requires_grad_()

    given = made(m, k), made(n, k), made(n), made(k, n), made(k)
    dout = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)

    def step(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        return lambda *t: torch.autograd.grad(function(*t), t, dout)

    def plain(x: Any, up: Any, b: Any, down: Any, c: Any) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, up, b)), down, c)

    functions: dict[str, Any] = {"ours": cute_ops_torch.mlp, "torch": plain}
    functions["torch.compile"] = torch.compile(plain, dynamic=False)
    found = measure.functions(given, {name: step(function) for name, function in functions.items()})
    return {name: each.us for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--points", type=int, default=12)
    given, console = parser.parse_args(), Console()
    rate = measure.copy_rate()
    console.print(f"{measure.device()}, copy {rate:.0f} GB/s, seed {given.seed}")
    for m, n in draw(given.seed, given.points):
        for name, (inputs, functions) in contenders(m, n).items():
            found = measure.functions(inputs, functions)
            others = ", ".join(f"{key} {each.us:.1f}" for key, each in found.items() if key != "ours")
            ours = found["ours"]
            console.print(f"{m}x{n} {name}: ours {ours.us:.1f} us, {ours.rate / rate:.2f} of the copy rate; {others}")
    for m, k, n in ((8192, 1024, 4096), (8224, 1280, 5120), (12000, 1280, 5120), (8192, 1600, 6400)):
        times = training(m, k, n)
        console.print(f"mlp {m}x{k}x{n}, training: " + ", ".join(f"{key} {us:.0f} us" for key, us in times.items()))


if __name__ == "__main__":
    main()
