"""Every public function with arguments that lie anywhere: values, gradients, and the kernels that a GPU would run.

A sample of drawn calls; ``CUTE_OPS_SWEEP=NUMBER`` makes so many of each function and compiles as many kernels.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cute_ops_torch as ct
from cute_ops.autotune import dispatch
from cute_ops.declaration.binding import Binding
from cute_ops.hardware import sm
from cute_ops.jit import cache
from cute_ops.jit.target import parse
from cute_ops.jit.variant import Variant
from cute_ops_torch.library import reference
from cute_ops_torch.library.tensors import Tensors, memory
from tests.ops.drawn_layouts import place

Tensor = torch.Tensor
SEED = int(os.environ.get("CUTE_OPS_SEED", "34"))
SWEEP = int(os.environ.get("CUTE_OPS_SWEEP", "0"))
TARGETS = (parse("sm_90a"), parse("sm_80"))
LEADING = ((), (5,), (2, 3), (1, 4), (3, 1), (2, 1, 3), (1, 2, 2, 2))


class Arguments:
    """Draws the arguments of a call: what it gives is compact, and ``away`` has the same values anywhere."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.lead = rng, LEADING[int(rng.integers(len(LEADING)))]
        self.dtype = (torch.float32, torch.bfloat16, torch.float16)[int(rng.integers(3))]
        self.fused = ("auto", "never", "auto" if self.dtype is torch.float32 else "always")[int(rng.integers(3))]
        self.away: dict[int, Tensor] = {}

    def of(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.put(torch.tensor(self.rng.standard_normal(shape), dtype=torch.float32).to(dtype or self.dtype))

    def rows(self, *own: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.of(*self.lead, *own, dtype=dtype)

    def put(self, values: Tensor) -> Tensor:
        """Where a drawn stride is 0, all values along a dim are the first one."""
        where = place(tuple(values.shape), values.itemsize, self.rng)
        start, strides = where.address // values.itemsize, where.strides
        for dim, stride in enumerate(strides):
            if stride == 0:
                values = values.narrow(dim, 0, 1).expand_as(values).contiguous()
        size = start + 1 + sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True))
        away = torch.zeros(size, dtype=values.dtype).as_strided(values.shape, strides, start)
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        away[once].copy_(values[once])
        self.away[id(values)] = away
        return values

    def index(self, count: int) -> Tensor:
        return self.put(torch.tensor(self.rng.integers(0, count, self.lead)))


def row_sum_beside(xp: Any, acc: Any, residual: Any) -> Any:
    out = acc + residual
    return out, xp.sum(out * out, axis=-1, keepdims=True)


@ct.fused
def scaled(xp: Any, x: Any, y: Any, w: Any, c: Any) -> Any:
    return xp.silu(x) * y * w + c


@ct.fused
def normed(xp: Any, x: Any, w: Any) -> Any:
    return x * xp.rsqrt(xp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w


# From drawn arguments to a function and what it is called with.
CALLS: dict[str, Callable[[Arguments], tuple[Callable[..., Any], list[Any]]]] = {
    "linear": lambda a: (lambda *t: ct.linear(*t, fused=a.fused), [a.rows(24), a.of(16, 24)]),
    "linear transposed": lambda a: (
        lambda *t: ct.linear(*t, fused=a.fused, transposed=True, epilogue="gelu"), [a.rows(24), a.of(24, 16), a.of(16)]
    ),
    "linear of a residual": lambda a: (
        lambda *t: ct.linear(*t, fused=a.fused, epilogue="add"), [a.rows(24), a.of(16, 24), a.of(16), a.rows(16)]
    ),
    "linear of rows": lambda a: (
        lambda *t: ct.linear(*t, fused=a.fused, epilogue=row_sum_beside), [a.rows(24), a.of(16, 24), a.rows(16)]
    ),
    "linear batched": lambda a: (
        lambda *t: ct.linear(*t, fused=a.fused, epilogue="silu"), [a.rows(7, 24), a.of(*a.lead, 16, 24)]
    ),
    "gated_linear": lambda a: (lambda *t: ct.gated_linear(*t, fused=a.fused), [a.rows(24), a.of(32, 24)]),
    "gated_mlp": lambda a: (lambda *t: ct.gated_mlp(*t, fused=a.fused), [a.rows(24), a.of(32, 24), a.of(24, 16)]),
    "mlp": lambda a: (
        lambda *t: ct.mlp(*t, fused=a.fused), [a.rows(24), a.of(32, 24), a.of(32), a.of(16, 32), a.of(16)]
    ),
    "rmsnorm_linear": lambda a: (
        lambda *t: ct.rmsnorm_linear(*t, fused=a.fused), [a.rows(24), a.of(24), a.of(16, 24), a.of(16)]
    ),
    "linear_add_rmsnorm": lambda a: (
        lambda *t: ct.linear_add_rmsnorm(*t, fused=a.fused), [a.rows(24), a.of(16, 24), a.rows(16), a.of(16)]
    ),
    "qkv_rope": lambda a: (
        lambda *t: ct.qkv_rope(*t, 2, fused=a.fused), [a.rows(24), a.of(3 * 64, 24), a.rows(32), a.rows(32)]
    ),
    "linear_cross_entropy": lambda a: (
        ct.linear_cross_entropy, [a.rows(24), a.of(50, 24), a.index(50)]
    ),
    "embedding": lambda a: (ct.embedding, [a.index(9), a.of(9, 16)]),
    "rmsnorm": lambda a: (ct.rmsnorm, [a.rows(24), a.of(24)]),
    "layernorm": lambda a: (ct.layernorm, [a.rows(24), a.of(24), a.of(24)]),
    "add_rmsnorm": lambda a: (ct.add_rmsnorm, [a.rows(24), a.rows(24), a.of(24)]),
    "swiglu": lambda a: (ct.swiglu, [a.rows(48)]),
    "silu_mul": lambda a: (ct.silu_mul, [a.rows(24), a.rows(24)]),
    "softmax": lambda a: (ct.softmax, [a.rows(24)]),
    "sum": lambda a: (ct.sum, [a.rows(24)]),
    "cross_entropy": lambda a: (ct.cross_entropy, [a.rows(24), a.index(24)]),
    "quantize_fp8": lambda a: (torch.no_grad()(ct.quantize_fp8), [a.rows(24)]),
    "fused": lambda a: (scaled, [a.rows(24), a.rows(24), a.of(24), a.rows(1)]),
    "fused rows": lambda a: (normed, [a.rows(24), a.of(24)]),
}  # fmt: skip

PRODUCTS = ("linear", "gated", "rmsnorm_linear", "qkv_rope")


class Planned:
    """What each op that runs on the CPU would run on a GPU."""

    def __init__(self, target: Any) -> None:
        self.target, self.kernels, self.late = target, dict[str, Variant](), list[str]()

    def check_strides(self, binding: Binding, tensors: Tensors, addresses: bool = False) -> None:
        real_check_strides(binding, tensors, addresses)
        if binding.empty or binding.op.program or sm(self.target.arch) < binding.op.least_sm:
            return
        places = memory(binding.op, tensors)
        try:
            if dispatch.fallback(binding, places, self.target) is None:
                found = dispatch.choose(binding, places, self.target).variant
                self.kernels[found.symbol] = found
        except Exception as error:
            self.late.append(f"{type(error).__name__}: {error}")


real_check_strides = reference.check_strides


def results(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
    found = function(*leaves)
    outs = list(found) if isinstance(found, tuple) else [found]
    wanted = [out for out in outs if out.requires_grad]
    asked = [t for t in leaves if t.requires_grad]
    grads = torch.autograd.grad([out.float().sum() for out in wanted], asked, allow_unused=True) if wanted else ()
    return [*outs, *(g for g in grads if g is not None)]


@pytest.mark.parametrize("name", CALLS)
def test_arguments_lie_anywhere(name: str, monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> None:
    """A call has the values of compact arguments, or is refused by name; nothing that it
    would run on a GPU is refused later.
    """
    rng, kernels, ran = np.random.default_rng([SEED, *name.encode()]), dict[str, Variant](), 0
    for _ in range(max(SWEEP, 8)):
        arguments, planned = Arguments(rng), Planned(TARGETS[int(rng.integers(2))])
        function, compact = CALLS[name](arguments)
        away = [arguments.away[id(t)] for t in compact]
        said = f"seed {SEED}, {[(tuple(t.shape), t.stride(), t.storage_offset()) for t in away]} {arguments.dtype}"
        expected = results(function, compact)
        with monkeypatch.context() as patched:
            patched.setattr(reference, "check_strides", planned.check_strides)
            try:
                found, refusal = results(function, away), ""
            except ValueError as error:
                found, refusal = [], str(error)
        assert not planned.late, f"{said}\n{planned.late}"
        if refusal:
            # The framework's product takes operands anywhere, and what stands beside them is copied.
            assert not name.startswith(PRODUCTS) or arguments.fused == "always", f"{said}\n{refusal}"
            assert re.match(r"cute\.\w+: argument `\w+` has strides? .*, expected ", refusal), f"{said}\n{refusal}"
            continue
        ran += 1
        for one, other in zip(found, expected, strict=True):
            loose = 0.1 if one.dtype in (torch.bfloat16, torch.float16) else 1e-4
            torch.testing.assert_close(one.float(), other.float(), rtol=loose, atol=loose, msg=said)
        kernels |= planned.kernels
    assert ran
    built = cache.build_all([kernels[symbol] for symbol in sorted(kernels)[:SWEEP]])
    assert not [each for each in built if each.error], "\n".join(str(each) for each in built if each.error)
