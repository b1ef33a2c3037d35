"""Random PyTorch programs: products, functions of elements and rows, casts, views, dropout, writes in place and modes.

A program is a list of steps on a pool of tensors, so that it means the same however often it runs. By hand:
``python tests/torch/drawn_programs.py SEED COUNT`` compares COUNT programs, compiled on our ops, with eager, and
``... SEED COUNT after`` those whose graphs are rewritten after autograd alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from cute_ops_torch import inductor

Tensor = torch.Tensor
B, S, N, H = 2, 3, 16, 8  # batch, length, columns, and columns of a head


def _rms(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def _rotated(x: Tensor, w: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * w.cos() + torch.cat((-b, a), -1) * w.sin()


# Functions of a tile [B, S, N], another one, a row [N], a column [B, S, 1] and a matrix [N, N], that give a tile.
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "add": lambda x, y, r, c, m: x + y,
    "scaled difference": lambda x, y, r, c, m: torch.sub(x, y, alpha=0.5),
    "product": lambda x, y, r, c, m: x * y.tanh(),
    "row": lambda x, y, r, c, m: x * (1 + r) + r.sin(),
    "column": lambda x, y, r, c, m: x * c.sigmoid(),
    "silu": lambda x, y, r, c, m: F.silu(x) * y,
    "gelu": lambda x, y, r, c, m: F.gelu(x, approximate="tanh") * 0.5,
    "written gelu": lambda x, y, r, c, m: 0.5 * x * (1 + torch.erf(x * 0.7071067811865476)),
    "clamped": lambda x, y, r, c, m: torch.where(x > 0, x, 0.1 * x).clamp(-3, 3),
    "rms norm": lambda x, y, r, c, m: _rms(x, r),
    "torch's rms norm": lambda x, y, r, c, m: F.rms_norm(x, (N,), r),
    "layer norm": lambda x, y, r, c, m: F.layer_norm(x, (N,), r, r, 1e-5),
    "modulated norm": lambda x, y, r, c, m: F.layer_norm(x, (N,)) * (1 + y[:, :1]) + y[:, 1:2],
    "softmax": lambda x, y, r, c, m: torch.softmax(x, dim=-1),
    "centred": lambda x, y, r, c, m: x - x.mean(-1, keepdim=True),
    "sum of rows": lambda x, y, r, c, m: x + 0.1 * y.sum(-1, keepdim=True),
    "greatest": lambda x, y, r, c, m: x - y.amax(-1, keepdim=True),
    "mean over length": lambda x, y, r, c, m: x - y.mean(1, keepdim=True),
    "linear": lambda x, y, r, c, m: F.linear(x, m),
    "linear gelu": lambda x, y, r, c, m: F.gelu(F.linear(x, m, r)),
    "linear residual": lambda x, y, r, c, m: F.linear(x, m, r) + y,
    "matmul": lambda x, y, r, c, m: (x @ m) * c,
    "addmm": lambda x, y, r, c, m: torch.addmm(r, x.reshape(-1, N), m).view(B, S, N).relu(),
    "gate": lambda x, y, r, c, m: F.silu(F.linear(x, m)) * F.linear(x, m.t()),
    "gated mlp": lambda x, y, r, c, m: F.linear(F.silu(F.linear(x, m)) * F.linear(x, 0.5 * m), m),
    "mlp": lambda x, y, r, c, m: F.linear(F.gelu(F.linear(x, m, r)), m, r),
    "end of a block": lambda x, y, r, c, m: _rms(F.linear(x, m) + y, r),
    "packed gate": lambda x, y, r, c, m: _packed(F.linear(x, torch.cat((m, m.t())))),
    "attention": lambda x, y, r, c, m: torch.softmax(x @ y.transpose(1, 2) * 0.25, -1) @ y,
    "heads": lambda x, y, r, c, m: _rms(x.view(B, S, -1, H).transpose(1, 2), r[:H]).transpose(1, 2).reshape(B, S, N),
    "rotation": lambda x, y, r, c, m: _rotated(x, r),
    "turned": lambda x, y, r, c, m: (x.transpose(0, 1) * 2).transpose(0, 1) + y,
    "narrow": lambda x, y, r, c, m: (x.bfloat16() * 1.5).float() + y,
    "flat": lambda x, y, r, c, m: (x.view(-1, N) * r).sin().view(B, S, N),
    "flipped": lambda x, y, r, c, m: x.flip(-1) + r,
    "cumulated": lambda x, y, r, c, m: x.cumsum(1) * 0.3,
    "detached": lambda x, y, r, c, m: x + (y * r).detach(),
    "no_grad": lambda x, y, r, c, m: x * _without_grad(y, r),
    "dropout": lambda x, y, r, c, m: F.dropout(x, 0.25, True) + y,
    "noise": lambda x, y, r, c, m: x + 0.1 * torch.rand_like(y),
    "no dropout": lambda x, y, r, c, m: F.dropout(x * 2, 0.25, False) + y,
    "in place": lambda x, y, r, c, m: (x * 1.0).add_(y).mul_(0.5),
    "relu in place": lambda x, y, r, c, m: F.relu(x + y, inplace=True) + x,
    "written slice": lambda x, y, r, c, m: _written(x + r, y),
    "view that is written": lambda x, y, r, c, m: _through_a_view(x, y, r),
    "read before and after": lambda x, y, r, c, m: _twice(x, y, r),
}  # fmt: skip


def _packed(both: Tensor) -> Tensor:
    return F.silu(both[..., :N]) * both[..., N:]


def _without_grad(y: Tensor, r: Tensor) -> Tensor:
    with torch.no_grad():
        return F.silu(y * r) + 1


def _written(x: Tensor, y: Tensor) -> Tensor:
    x[:, 0] = y[:, 1]
    return x * 2 + y


def _through_a_view(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    made = x * r
    before = made + 1
    made.view(-1, N).add_(1.0)
    return made * before.sigmoid() + y


def _twice(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    made = y.sin()
    first = made * 2 + r
    made += x
    return first + made * 2


class Program:
    """A function of inputs, drawn from a seed.

    Attributes:
        steps: the names of its steps.
    """

    def __init__(self, seed: int, length: int = 6) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.steps = [rng.choice([*STEPS]) for _ in range(rng.randint(2, length))]
        self.places = [[rng.random() for _ in range(2)] for _ in self.steps]
        self.outputs = rng.randint(1, 3)

    def __call__(self, x: Tensor, y: Tensor, rows: Tensor, column: Tensor, matrices: Tensor) -> tuple[Tensor, ...]:
        pool = [x, y]
        for k, (name, (first, second)) in enumerate(zip(self.steps, self.places, strict=True)):
            # The latest results are read most.
            one, other = pool[-1 - int(first * first * len(pool))], pool[int(second * len(pool))]
            pool.append(STEPS[name](one, other, rows[k % len(rows)], column, matrices[k % len(matrices)]))
        return tuple(pool[-self.outputs :])

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(dtype).requires_grad_()

        return [draw(B, S, N), draw(B, S, N), draw(3, N), draw(B, S, 1), draw(2, N, N, scale=N**-0.5)]

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers: AOTAutograd draws them otherwise."""
        return not {"dropout", "noise"}.isdisjoint(self.steps)

    def __repr__(self) -> str:
        return f"program {self.seed}: {', '.join(self.steps)}"


def compare(program: Program, backend: Any, dynamic: bool | None = None, beside: Any = "eager") -> None:
    """Raise AssertionError where outputs or gradients of the program on a backend are not those of another one."""
    results: list[list[Tensor]] = []
    for each in (beside, backend):
        torch._dynamo.reset()
        function = torch.compile(program.__call__, backend=each, fullgraph=True, dynamic=dynamic)
        given = program.inputs()
        torch.manual_seed(program.seed)
        outputs = function(*given)
        total = sum(out.float().cos().sum() for out in outputs)
        gradients = torch.autograd.grad(total, given, allow_unused=True)
        zeros = zip(gradients, given, strict=True)
        results.append([*outputs, *(torch.zeros_like(x) if g is None else g for g, x in zeros)])
    assert all(entry.what != "a graph" for entry in inductor.report()), f"{program}: {inductor.report()}"
    for i, (got, want) in enumerate(zip(results[1], results[0], strict=True)):
        assert got.dtype == want.dtype, f"{program}: {got.dtype}, expected {want.dtype}"
        assert got.shape == want.shape, f"{program}: {got.shape}, expected {want.shape}"
        error = (got.double() - want.double()).abs().max().item()
        # Values of 8 bits that are not rounded differ, and a cosine of them multiplies that.
        bound = 0.2 if "narrow" in program.steps else 3e-5
        assert error <= bound * max(1.0, want.abs().max().item()), f"{program}: value {i} is {error} off"


def only_the_pass(module: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend that runs the graph as the pass leaves it."""
    torch._inductor.config.pre_grad_custom_pass(module.graph)
    module.recompile()
    return module


def through_autograd(module: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend that also lets AOTAutograd trace it."""
    from torch._dynamo.backends.debugging import aot_eager

    return aot_eager(only_the_pass(module, inputs), inputs)


def with_graphs_after_autograd(rewritten: bool) -> Any:
    """A backend that runs the graphs which Inductor gets, with or without the pass after autograd."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def run(module: torch.fx.GraphModule, inputs: Any) -> Any:
        if rewritten:
            torch._inductor.config.post_grad_custom_pre_pass(module.graph)
            module.recompile()
        return make_boxed_func(module.forward)

    return aot_autograd(
        fw_compiler=run, decompositions=select_decomp_table(), partition_fn=min_cut_rematerialization_partition
    )


@contextmanager
def enabled(**options: Any) -> Iterator[None]:
    with inductor.enable(devices=("cpu",), **options):
        yield


def main(seed: int, count: int, after: bool = False) -> int:
    wrong = 0
    with enabled():
        for k in range(seed, seed + count):
            torch._dynamo.reset()
            program = Program(k, 9 if after else 6)
            dynamic = k % 3 == 0 or None
            try:
                if after:
                    beside, rewritten = map(with_graphs_after_autograd, (False, True))
                    compare(program, rewritten, dynamic, beside)
                else:
                    backend = through_autograd if k % 2 and not program.is_random else only_the_pass
                    compare(program, backend, dynamic)
            except Exception as error:
                wrong += 1
                print(program, type(error).__name__, str(error)[:600], flush=True)
            if k % 20 == 19:
                print(f"{k + 1 - seed} done, {wrong} wrong", flush=True)
        print(f"{count} programs, {wrong} wrong; put in: {dict(inductor.replaced)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3]), after=sys.argv[3:] == ["after"]))
