"""What is measured: a grid of problems, their tensors and the least bytes they move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cute_ops.binding import Binding, bind
from cute_ops.op import ITEMSIZE, Array, Op
from cute_ops.ops import OPS

BY_NAME = {op.name: op for op in OPS}
DIRECTIONS = ("fwd", "bwd")


@dataclass(frozen=True)
class Problem:
    """One op on one shape.

    Args:
        op: name of the op.
        rows: number of rows.
        n: size of a row.
        dtype: dtype of activations.
        weight: dtype of the weight, that of the activations where None.
        residual: dtype of the residual, likewise.
        strided: rows are a slice of rows three times as long.
        hot: one buffer set only, so that what fits stays in L2.
    """

    op: str
    rows: int
    n: int
    dtype: str = "bfloat16"
    weight: str | None = None
    residual: str | None = None
    strided: bool = False
    hot: bool = False

    @property
    def declaration(self) -> Op:
        return BY_NAME[self.op]

    @property
    def layout(self) -> str:
        return ("strided" if self.strided else "flat") + (", hot" if self.hot else "")

    @property
    def label(self) -> str:
        """``32768x4096 bfloat16 W=float32``."""
        extra = "".join(f" {k}={v}" for k, v in (("W", self.weight), ("R", self.residual)) if v)
        return f"{self.rows}x{self.n} {self.dtype}{extra}" + ("" if self.layout == "flat" else f" {self.layout}")

    def arrays(self) -> dict[str, Array]:
        """The inputs: all that are declared but the bias."""
        by_variable = {"T": self.dtype, "W": self.weight or self.dtype, "R": self.residual or self.dtype}
        return {
            name: Array(((self.rows,) if t.rows else ()) + (self.n,), by_variable[t.dtype])
            for name, t in self.declaration.inputs.items()
            if name != "bias"
        }

    def binding(self, direction: str) -> Binding:
        """The forward or the backward call."""
        forward = bind(self.declaration, self.arrays())
        if direction == "fwd":
            return forward
        grad = self.declaration.grad
        if grad is None:
            raise ValueError(f"{self.op} has no gradient")
        known = {**forward.inputs, **forward.outputs, **{f"d{n}": a for n, a in forward.outputs.items()}}
        return bind(grad, {name: known.get(name) for name in grad.inputs})

    def bytes(self, direction: str) -> int:
        """The least bytes that must move: every input read once, every output written once."""
        binding = self.binding(direction)
        arrays = [a for a in (*binding.inputs.values(), *binding.outputs.values()) if a]
        return sum(math.prod(a.shape) * ITEMSIZE[a.dtype] for a in arrays)

    def tensors(self, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        """Random inputs; weights around one."""
        generator = torch.Generator(device).manual_seed(seed)
        made = {}
        for name, (shape, dtype) in self.arrays().items():
            stretch = 3 if self.strided and len(shape) > 1 else 1
            full = (*shape[:-1], stretch * shape[-1])
            values = torch.randn(full, generator=generator, device=device, dtype=torch.float32)
            if name == "weight":
                values = 1 + values / 4
            made[name] = values.to(getattr(torch, dtype))[..., : shape[-1]]
        return made

    def cotangents(self, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
        """Random gradients of the outputs."""
        generator = torch.Generator(device).manual_seed(1000 + seed)
        outputs = [a for a in self.binding("fwd").outputs.values() if a]
        return tuple(
            torch.randn(a.shape, generator=generator, device=device).to(getattr(torch, a.dtype)) for a in outputs
        )


def grid(ops: Sequence[str], quick: bool = False) -> list[Problem]:
    """The problems, those of the README first."""
    found: list[Problem] = []
    if "rmsnorm" in ops:
        found += [Problem("rmsnorm", *s) for s in (_NORM[:4] if quick else _NORM)]
    if "add_rmsnorm" in ops:
        found += [Problem("add_rmsnorm", *s) for s in (_NORM[1:3] if quick else _NORM)]
    if "silu_mul" in ops:
        found += [Problem("silu_mul", *s) for s in (_GATED[:2] if quick else _GATED)]
    if not quick:
        found += [p for p in _SPECIAL if p.op in ops]
    return found


def smoke(ops: Sequence[str]) -> list[Problem]:
    """Tiny problems that take every path, for machines without a GPU."""
    return [Problem(op, 6, 64) for op in ops] + [Problem(op, 5, 33, dtype="float32", strided=True) for op in ops]


_NORM = (
    (32768, 4096), (32768, 1024), (16384, 8192), (4096, 32768), (65536, 128), (2048, 131072), (16384, 4097),
)  # fmt: skip
_GATED = ((32768, 4096), (16384, 14336), (131072, 768), (16384, 4097))
_SPECIAL = (
    Problem("rmsnorm", 64, 4096, hot=True),
    Problem("rmsnorm", 64, 4096),
    Problem("rmsnorm", 8, 16384),
    Problem("rmsnorm", 32768, 4096, weight="float32"),
    Problem("rmsnorm", 32768, 4096, strided=True),
    Problem("rmsnorm", 16384, 4096, dtype="float32"),
    Problem("rmsnorm", 32768, 2304),
    Problem("rmsnorm", 4096, 50257),
    Problem("rmsnorm", 1024, 262144),
    Problem("add_rmsnorm", 64, 4096),
    Problem("add_rmsnorm", 16384, 4096, residual="float32", weight="float32"),
    Problem("add_rmsnorm", 16384, 4096, strided=True),
    Problem("silu_mul", 64, 14336),
    Problem("silu_mul", 16384, 4096, dtype="float32"),
    Problem("silu_mul", 16384, 4096, strided=True),
)
