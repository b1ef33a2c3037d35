"""Host time per call: what Python, the framework and the adapter cost before the kernel starts.

Tensors are tiny, so the device is never the limit. A sample times calls that are only enqueued, waits for the device
outside of the timed region, and divides. There are 200 of them, or 20 of a composite: a launch waits for the device
where 1024 before it wait. A quarter as many run before, untimed. Samples of all entries are interleaved, in another
order in each round, so that none is always behind the same other one; the median counts.

Entries "in a graph" are the cost of one more op in a compiled graph: what 25 in a row take less what 5 take. Buffers of
such a row take turns, so no op allocates; an allocation is an entry of its own. Their `compile_ms` is what one more op
takes to compile, without caches. Those "in a program" are the same of a jitted JAX program, until its results are
there: as XLA runs it, in a command buffer (a CUDA graph), and launched op by op.

Composites stand beside their parts, called one by one, and the framework's functions. With a gradient, in PyTorch,
their time includes the backward, from no gradients to new ones, in the thread of the forward: autograd's own thread of
a device takes turns with it, for as long as the scheduler likes.

    python benchmarks/host_time.py --out out/benchmarks
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._inductor.config
import torch.nn.functional as F
from common import Table, first_line, parse, spread
from contenders import EPS
from rich.console import Console
from rich.table import Table as View

COLUMNS = ("call", "grad", "status", "us", "us_min", "us_max", "of_rms_norm", "compile_ms")
SHAPE = (16, 1024)
QKV = 1, 128, 4, 64  # batch, positions, heads, elements
CALLS = 200
OF_COMPOSITE = 20
YARDSTICK = "F.rms_norm"
COMPOSITES = "mlp", "gated_mlp", "rmsnorm_linear", "linear_add_rmsnorm", "qkv_rope", "linear_cross_entropy"
Call = Callable[[], Any]
CHAINS = (5, 25)


class Chain(NamedTuple):
    """Two calls, of which the second runs so many ops more.

    Attributes:
        ops: how many.
        first: another such call, for what a process pays for once when it compiles.
        finished: whether the time counts until the results are there.
    """

    short: Call
    long: Call
    ops: int
    first: Call
    finished: bool = False

    @classmethod
    def of(cls, chain: Callable[[int], Call], finished: bool = False) -> Chain:
        short, long = CHAINS
        return cls(chain(short), chain(long), long - short, chain(2), finished)


Maker = Callable[[], Call | Chain]


def compiled_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile`` of a function with a code of its own: variants of one share a limit, and are tried in turn."""
    function.__code__ = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return torch.compile(function, fullgraph=True)


_numbers = itertools.count()


def in_graph(op: Callable[..., Any], x: Any, weight: torch.Tensor) -> Chain:
    """The cost of one more op in a compiled graph: each takes what the one before returns."""

    def chain(length: int) -> Call:
        def function(x: Any, weight: torch.Tensor) -> Any:
            for _ in range(length):
                x = op(x, weight)
            return x

        compiled = compiled_alone(function)
        return lambda: compiled(x, weight)

    return Chain.of(chain)


def apart_in_graph(op: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor) -> Chain:
    """The same of an op that Inductor generates: a row of them would be one kernel, so these share nothing."""

    def calls(length: int) -> Call:
        xs, weights = torch.stack([x] * length), torch.stack([weight] * length)

        def function(xs: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
            return [op(x, weight) for x, weight in zip(xs.unbind(), weights.unbind(), strict=True)]

        compiled = compiled_alone(function)
        return lambda: compiled(xs, weights)

    return Chain.of(calls)


def composites(device: torch.device, grad: bool) -> dict[str, Maker]:
    """Composites, their parts one by one, and torch's functions; where a gradient is wanted, backward included."""
    n, heads, columns = 512, 3, 64

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_(grad)

    # So few rows that products end before the host has started the next.
    x, residual, norm = made(16, n), made(16, n), made(n)
    # Two: of one tensor given twice a call is not written down.
    bias, shift = made(n), made(n)
    up, down, weight = made(2 * n, n), made(n, n), made(n, n)
    qkv, head = made((heads + 1) * columns, n), made(1024, n)
    leaves = x, residual, norm, bias, shift, up, down, weight, qkv, head
    cos, sin = torch.rand(2, 16, columns // 2, device=device, dtype=torch.bfloat16).unbind()
    target = torch.arange(16, device=device)

    def rotated(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return y * torch.cat([cos, cos], -1).unsqueeze(1) + turned * torch.cat([sin, sin], -1).unsqueeze(1)

    def by_torch(name: str) -> Any:
        def gated_mlp() -> Any:
            gate, value = F.linear(x, up).chunk(2, -1)
            return F.linear(F.silu(gate) * value, down)

        def linear_add_rmsnorm() -> Any:
            total = F.linear(x, weight) + residual
            return F.rms_norm(total, (n,), norm, EPS), total

        def qkv_rope() -> Any:
            return rotated(F.linear(x, qkv).unflatten(-1, (heads + 1, columns))[:, :heads])

        return {
            "mlp": lambda: F.linear(F.gelu(F.linear(x, weight, bias)), down, shift),
            "gated_mlp": gated_mlp, "linear_add_rmsnorm": linear_add_rmsnorm, "qkv_rope": qkv_rope,
            "rmsnorm_linear": lambda: F.linear(F.rms_norm(x, (n,), norm, EPS), weight, bias),
            "linear_cross_entropy": lambda: F.cross_entropy(F.linear(x, head), target),
        }[name]  # fmt: skip

    def by_parts(name: str) -> Any:
        import cute_ops_torch as ours

        def qkv_rope() -> Any:
            return ours.rope(ours.linear(x, qkv).unflatten(-1, (heads + 1, columns))[:, :heads], cos, sin)

        return {
            "mlp": lambda: ours.linear(ours.linear_gelu(x, weight, bias), down, shift, epilogue="bias"),
            "gated_mlp": lambda: ours.linear(ours.gated_linear(x, up), down), "qkv_rope": qkv_rope,
            "linear_add_rmsnorm": lambda: ours.add_rmsnorm(ours.linear(x, weight), residual, norm, eps=EPS),
            "rmsnorm_linear": lambda: ours.linear(ours.rmsnorm(x, norm, eps=EPS), weight, bias, epilogue="bias"),
            "linear_cross_entropy": lambda: ours.cross_entropy(ours.linear(x, head), target),
        }[name]  # fmt: skip

    def as_one(name: str) -> Any:
        import cute_ops_torch as ours

        given: dict[str, tuple[Any, ...]] = {
            "mlp": (x, weight, bias, down, shift), "gated_mlp": (x, up, down),
            "linear_add_rmsnorm": (x, weight, residual, norm, EPS),
            "qkv_rope": (x, qkv, cos, sin, heads), "rmsnorm_linear": (x, norm, weight, bias),
            "linear_cross_entropy": (x, head, target),
        }  # fmt: skip
        return partial(getattr(ours, name), *given[name])

    def entry(make: Callable[[str], Call], name: str) -> Callable[[], Call]:
        if not grad:
            return lambda: make(name)

        def both() -> Call:
            forward = make(name)

            def outputs() -> list[torch.Tensor]:
                return [out] if isinstance(out := forward(), torch.Tensor) else list(out)

            given = [torch.ones_like(o) for o in outputs()]

            def run() -> None:
                for leaf in leaves:
                    leaf.grad = None
                with torch.autograd.set_multithreading_enabled(False):
                    torch.autograd.backward(outputs(), given)

            return run

        return both

    kinds: dict[str, Callable[[str], Call]] = {"": as_one, ", its parts": by_parts, ", by torch": by_torch}
    return {f"cute_ops_torch.{name}{kind}": entry(make, name) for name in COMPOSITES for kind, make in kinds.items()}


def torch_entries(device: torch.device, grad: bool) -> dict[str, Maker]:
    """Makers of calls by name; a maker may raise where its package is missing."""
    only_forward = {} if grad else kernels_alone(device) | in_graphs(device)
    of_rows = composites(device, grad) | norms(device, grad)
    return only_forward | of_rows | products(device, grad) | attentions(device, grad)


def random_tensor(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def kernels_alone(device: torch.device) -> dict[str, Maker]:
    """What a call takes at least: the compiled function with its output there, an allocation, a kernel of Triton."""
    x, residual, weight = random_tensor(device, *SHAPE), random_tensor(device, *SHAPE), random_tensor(device, SHAPE[-1])

    def into(name: str, *tensors: torch.Tensor | None) -> Callable[..., None]:
        from cute_ops.ops import OPS
        from cute_ops_torch.registry import define

        (op,) = (op for op in OPS if op.name == name)
        call = define(op).launcher.find(tensors, (EPS, 0.0))
        return call.fill(tuple(op.outputs))

    def alone() -> Call:
        call, out = into("rmsnorm", x, weight, None), torch.empty_like(x)
        return lambda: call(x, weight, out)

    def alone_with_two_outputs() -> Call:
        call, outs = into("add_rmsnorm", x, residual, weight, None), (torch.empty_like(x), torch.empty_like(x))
        return lambda: call(x, residual, weight, *outs)

    def allocation() -> Call:
        new = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}")
        return lambda: new(SHAPE, (SHAPE[-1], 1), torch.bfloat16)

    def user_kernel() -> Call:
        from triton_rmsnorm import rmsnorm

        return lambda: rmsnorm(x, weight, EPS)

    return {
        "the compiled function alone": alone,
        "the compiled function alone: add_rmsnorm": alone_with_two_outputs,
        "an output's allocation, as in a graph": allocation,
        "Triton kernel": user_kernel,
    }


def in_graphs(device: torch.device) -> dict[str, Maker]:
    """What one more op of a compiled graph takes."""
    x, residual = random_tensor(device, *SHAPE), random_tensor(device, *SHAPE)
    weight = torch.nn.Parameter(random_tensor(device, SHAPE[-1]), False)  # as in a model

    def of_ours() -> Chain:
        from cute_ops_torch import rmsnorm

        return in_graph(lambda x, weight: rmsnorm(x, weight, eps=EPS), x, weight)

    def of_two_outputs() -> Chain:
        from cute_ops_torch import add_rmsnorm

        # Both are read, as in a model: one that nobody reads would be allocated for the kernel in every call.
        return in_graph(lambda both, weight: add_rmsnorm(*both, weight, eps=EPS), (x, residual), weight)

    def of_user_kernel() -> Chain:
        from triton_rmsnorm import rmsnorm

        return in_graph(lambda x, weight: rmsnorm(x, weight, EPS), x, weight)

    def of_quack() -> Chain:
        from quack import rmsnorm

        return in_graph(lambda x, weight: rmsnorm(x, weight, eps=EPS), x, weight)

    def of_rms_norm() -> Chain:
        return apart_in_graph(lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, EPS), x, weight)

    def of_liger() -> Chain:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return in_graph(lambda x, w: LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", False), x, weight)

    return {
        "in a graph: cute_ops_torch.rmsnorm": of_ours,
        "in a graph: cute_ops_torch.add_rmsnorm": of_two_outputs,
        "in a graph: Triton kernel": of_user_kernel,
        "in a graph: quack.rmsnorm": of_quack,
        "in a graph: Liger RMSNorm": of_liger,
        "in a graph: F.rms_norm": of_rms_norm,
    }


def attentions(device: torch.device, grad: bool) -> dict[str, Maker]:
    """Causal attention, ours and PyTorch's, each with its inputs as it takes them."""
    q, k, v = (random_tensor(device, *QKV).requires_grad_(grad) for _ in range(3))

    def ours() -> Call:
        from cute_ops_torch import attention

        return lambda: attention(q, k, v, causal=True)

    def own() -> Call:
        heads_first = [x.detach().transpose(1, 2).requires_grad_(grad) for x in (q, k, v)]
        return lambda: F.scaled_dot_product_attention(*heads_first, is_causal=True)

    return {"cute_ops_torch.attention": ours, "F.scaled_dot_product_attention": own}


def norms(device: torch.device, grad: bool) -> dict[str, Maker]:
    """RMS norms called by themselves, ours and the others'."""
    x = random_tensor(device, *SHAPE).requires_grad_(grad)
    weight = torch.nn.Parameter(random_tensor(device, SHAPE[-1]), grad)  # as in a model

    def raw() -> Call:
        import cute_ops_torch  # noqa: F401 (registers the op)

        op = torch.ops.cute.rmsnorm
        return lambda: op(x, weight, None, EPS)

    def front() -> Call:
        from cute_ops_torch import rmsnorm

        return lambda: rmsnorm(x, weight, eps=EPS)

    def module() -> Call:
        from cute_ops_torch.nn import RMSNorm

        norm = RMSNorm(SHAPE[-1], EPS, device=device, dtype=torch.bfloat16).requires_grad_(grad)
        return lambda: norm(x)

    def own_module() -> Call:
        norm = torch.nn.RMSNorm(SHAPE[-1], EPS, device=device, dtype=torch.bfloat16).requires_grad_(grad)
        return lambda: norm(x)

    def compiled() -> Call:
        from cute_ops_torch import rmsnorm

        function = torch.compile(lambda x, weight: rmsnorm(x, weight, eps=EPS), fullgraph=True)
        return lambda: function(x, weight)

    def own_compiled() -> Call:
        function = torch.compile(lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, EPS), fullgraph=True)
        return lambda: function(x, weight)

    def quack() -> Call:
        from quack import rmsnorm

        return lambda: rmsnorm(x, weight, eps=EPS)

    def liger() -> Call:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        return lambda: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)

    return {
        "torch.add": lambda: lambda: torch.add(x, x),
        YARDSTICK: lambda: lambda: F.rms_norm(x, x.shape[-1:], weight, EPS),
        "torch.nn.RMSNorm": own_module,
        "torch.ops.cute.rmsnorm": raw,
        "cute_ops_torch.rmsnorm": front,
        "cute_ops_torch.nn.RMSNorm": module,
        "torch.compile of F.rms_norm": own_compiled,
        "torch.compile of cute_ops_torch.rmsnorm": compiled,
        "quack.rmsnorm": quack,
        "Liger RMSNorm": liger,
    }


def products(device: torch.device, grad: bool) -> dict[str, Maker]:
    """Linear layers of so few rows that ``fused="auto"`` takes the framework's product, forward and backward."""
    rows = random_tensor(device, 128, SHAPE[-1]).requires_grad_(grad)
    matrix = torch.nn.Parameter(random_tensor(device, SHAPE[-1], SHAPE[-1]), grad)
    bias = torch.nn.Parameter(random_tensor(device, SHAPE[-1]), grad)

    def linear(fused: str) -> Callable[[], Call]:
        def make() -> Call:
            from cute_ops_torch import linear

            return lambda: linear(rows, matrix, fused=fused)

        return make

    def linear_with_bias() -> Call:
        from cute_ops_torch import linear

        return lambda: linear(rows, matrix, bias, epilogue="bias")

    def linear_gelu() -> Call:
        from cute_ops_torch import linear_gelu

        return lambda: linear_gelu(rows, matrix, bias)

    return {
        "F.linear": lambda: lambda: F.linear(rows, matrix),
        "cute_ops_torch.linear": linear("auto"),
        'cute_ops_torch.linear, fused="always"': linear("always"),
        "F.linear, with a bias": lambda: lambda: F.linear(rows, matrix, bias),
        "cute_ops_torch.linear, with a bias": linear_with_bias,
        "F.gelu of F.linear": lambda: lambda: F.gelu(F.linear(rows, matrix, bias)),
        "cute_ops_torch.linear_gelu": linear_gelu,
    }


# XLA makes command buffers of at least so many operations.
LAUNCHED = {"xla_gpu_graph_min_graph_size": 1_000_000}


def jax_entries() -> dict[str, Maker]:
    import jax
    import jax.numpy as jnp

    x, weight = jnp.ones(SHAPE, jnp.bfloat16), jnp.ones(SHAPE[-1], jnp.bfloat16)

    def ours(jit: bool) -> Callable[[], Call]:
        def make() -> Call:
            from cute_ops_jax import rmsnorm

            function = jax.jit(lambda x, weight: rmsnorm(x, weight, eps=EPS)) if jit else rmsnorm
            return lambda: function(x, weight)

        return make

    def own() -> Call:
        from contenders import make

        function = jax.jit(make("XLA (jit)", "rmsnorm"))
        return lambda: function(x, weight)

    def in_program(op: Callable[..., Any], options: dict[str, Any] | None = None) -> Chain:
        def chain(length: int) -> Call:
            def function(x: Any, weight: Any) -> Any:
                for _ in range(length):
                    x = op(x, weight)
                return x

            compiled = jax.jit(function, compiler_options=options)
            return lambda: compiled(x, weight)

        return Chain.of(chain, finished=True)

    def program_of_ours(options: dict[str, Any] | None = None) -> Callable[[], Chain]:
        def make() -> Chain:
            from cute_ops_jax import rmsnorm

            return in_program(lambda x, weight: rmsnorm(x, weight, eps=EPS), options)

        return make

    def program_of_jnp(options: dict[str, Any] | None = None) -> Callable[[], Chain]:
        def make_it() -> Chain:
            from contenders import make

            return in_program(make("XLA (jit)", "rmsnorm"), options)

        return make_it

    return {
        "jnp.add": lambda: lambda: jnp.add(x, x),
        "jax.jit of jnp": own,
        "cute_ops_jax.rmsnorm": ours(jit=False),
        "jax.jit of cute_ops_jax.rmsnorm": ours(jit=True),
        "in a program: cute_ops_jax.rmsnorm": program_of_ours(),
        "in a program, launched: cute_ops_jax.rmsnorm": program_of_ours(LAUNCHED),
        "in a program: jnp": program_of_jnp(),
        "in a program, launched: jnp": program_of_jnp(LAUNCHED),
    }


def jax_composites() -> dict[str, Callable[[], Call]]:
    """Composites, their parts one by one, and jax.numpy's functions, dispatched op by op."""
    import jax
    import jax.numpy as jnp

    import cute_ops_jax as ours

    n, heads, columns = 512, 3, 64

    def made(*shape: int) -> Any:
        return jax.random.normal(jax.random.key(sum(shape)), shape, jnp.bfloat16)

    x, residual, norm, bias, shift = made(16, n), made(16, n), made(n), made(n), made(n)
    up, down, weight, qkv, head = made(2 * n, n), made(n, n), made(n, n), made((heads + 1) * columns, n), made(1024, n)
    cos, sin, target = made(16, columns // 2), made(16, columns // 2), jnp.arange(16)

    def rmsnorm(y: Any) -> Any:
        return y * jax.lax.rsqrt(jnp.mean(jnp.square(y.astype(jnp.float32)), -1, keepdims=True) + EPS) * norm

    def gated() -> Any:
        gate, value = jnp.split(x @ up.T, 2, -1)
        return (jax.nn.silu(gate) * value) @ down.T

    def rotated() -> Any:
        first, second = jnp.split((x @ qkv.T).reshape(16, heads + 1, columns)[:, :heads], 2, -1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], -1)

    def loss() -> Any:
        logits = (x @ head.T).astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, target[:, None], -1)[:, 0])

    calls: dict[str, tuple[Call, Call, Call]] = {
        "mlp": (
            lambda: ours.mlp(x, weight, bias, down, shift),
            lambda: ours.linear(ours.linear_gelu(x, weight, bias), down, shift, epilogue="bias"),
            lambda: jax.nn.gelu(x @ weight.T + bias) @ down.T + shift,
        ),
        "gated_mlp": (
            lambda: ours.gated_mlp(x, up, down), lambda: ours.linear(ours.gated_linear(x, up), down), gated,
        ),
        "rmsnorm_linear": (
            lambda: ours.rmsnorm_linear(x, norm, weight, bias),
            lambda: ours.linear(ours.rmsnorm(x, norm), weight, bias, epilogue="bias"),
            lambda: rmsnorm(x) @ weight.T + bias,
        ),
        "linear_add_rmsnorm": (
            lambda: ours.linear_add_rmsnorm(x, weight, residual, norm)[0],
            lambda: ours.add_rmsnorm(ours.linear(x, weight), residual, norm)[0],
            lambda: rmsnorm(x @ weight.T + residual),
        ),
        "qkv_rope": (
            lambda: ours.qkv_rope(x, qkv, cos, sin, heads),
            lambda: ours.rope(ours.linear(x, qkv).reshape(16, heads + 1, columns)[:, :heads], cos, sin), rotated,
        ),
        "linear_cross_entropy": (
            lambda: ours.linear_cross_entropy(x, head, target),
            lambda: ours.cross_entropy(ours.linear(x, head), target), loss,
        ),
    }  # fmt: skip
    kinds = "", ", its parts", ", by jax.numpy"
    return {
        f"cute_ops_jax.{name}{kind}": lambda call=call: call
        for name, each in calls.items() for kind, call in zip(kinds, each, strict=True)
    }  # fmt: skip


def sampler(call: Call | Chain, wait: Callable[[Any], None], calls: int, finished: bool = False) -> Callable[[], float]:
    if isinstance(call, Chain):
        # Few calls: a launch queue that is full would be timed.
        short, long = (sampler(one, wait, max(calls // 10, 1), call.finished) for one in call[:2])
        return lambda: (long() - short()) / call.ops

    def sample() -> float:
        for _ in range(calls // 4):  # behind calls of other entries the first ones take longer
            call()
        begin = time.perf_counter()
        for _ in range(calls):
            last = call()
        if finished:
            wait(last)
        seconds = time.perf_counter() - begin
        wait(last)
        return seconds * 1e6 / calls

    return sample


def compile_ms(chain: Chain, wait: Callable[[Any], None]) -> float:
    """Milliseconds that one more op of a chain takes to compile: its calls are the first."""
    seconds = []
    with torch._inductor.config.patch(force_disable_caches=True):
        wait(chain.first())
        for call in chain[:2]:
            begin = time.perf_counter()
            wait(call())
            seconds.append(time.perf_counter() - begin)
    return (seconds[1] - seconds[0]) / chain.ops * 1e3


def measure(table: Table, device: torch.device, rounds: int, calls: int, only: str, console: Console) -> None:
    def wait_torch(last: Any) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def wait_jax(last: Any) -> None:
        last.block_until_ready()

    groups = [("no", torch_entries(device, False), wait_torch), ("yes", torch_entries(device, True), wait_torch)]
    try:
        groups.append(("no", jax_entries() | jax_composites(), wait_jax))
    except ImportError:
        console.print("JAX is not installed")
    entries: dict[tuple[str, str], tuple[Maker, Callable[[Any], None]]] = {
        (name, grad): (make, wait)
        for grad, makers, wait in groups
        for name, make in makers.items()
        if name == YARDSTICK or re.search(only, name)
    }
    status: dict[tuple[str, str], str] = {}
    samplers, compiling = {}, {}
    for key, (make, wait) in entries.items():
        try:
            call = make()
            if isinstance(call, Chain):
                compiling[key] = compile_ms(call, wait)
            for _ in range(3):
                for one in call[:2] if isinstance(call, Chain) else (call,):
                    wait(one())
        except Exception as failure:  # a contender's failure is a result
            status[key] = "not available" if isinstance(failure, ImportError) else f"failed: {first_line(failure)}"
            continue
        status[key] = "ok"
        of_composite = key[0].split(",")[0].split(".")[-1] in COMPOSITES
        samplers[key] = sampler(call, wait, min(calls, OF_COMPOSITE) if of_composite else calls)
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in samplers}
    order = list(samplers)
    for k in range(rounds):
        random.Random(k).shuffle(order)
        for key in order:
            samples[key].append(samplers[key]())
    view = View(
        "call",
        "grad",
        "us",
        "spread",
        f"x {YARDSTICK}",
        "compile ms",
        title=f"host time per call, bfloat16 {list(SHAPE)}",
    )
    for key, state in status.items():
        row: dict[str, Any] = {"call": key[0], "grad": key[1], "status": state}
        cells = [state, "", "", ""]
        if key in samples:
            us = spread(samples[key])
            row |= {"us": us.median, "us_min": us.low, "us_max": us.high}
            cells[:2] = f"{us.median:.2f}", f"{us.low:.2f} to {us.high:.2f}"
            yardstick = samples.get((YARDSTICK, key[1]))
            if yardstick and "jax" not in key[0] and "jnp" not in key[0]:
                row["of_rms_norm"] = us.median / spread(yardstick).median
                cells[2] = f"{row['of_rms_norm']:.2f}"
        if key in compiling:
            row["compile_ms"], cells[3] = compiling[key], f"{compiling[key]:.0f}"
        table.add(row)
        view.add_row(*key, *cells)
    console.print(view)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for host_time.csv")
    parser.add_argument("--rounds", type=int, default=25, help="samples per entry")
    parser.add_argument("--only", default="", help="regular expression of names; the yardstick is always there")
    options = parse(parser, arguments, torch.cuda.is_available())
    console = Console(width=110)
    device = torch.device("cpu" if options.cpu_smoke else "cuda")
    rounds, calls = (3, 5) if options.cpu_smoke else (options.rounds, CALLS)
    table = Table(options.out / "host_time.csv", COLUMNS)
    measure(table, device, rounds, calls, options.only, console)


if __name__ == "__main__":
    main()
