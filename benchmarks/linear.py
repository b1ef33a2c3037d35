"""The products of a linear layer: time and TFLOPS of ours beside cuBLAS (torch.mm), alone or with an epilogue.

With an epilogue, cuBLAS is followed by PyTorch's eager functions, and torch.compile and what cuBLAS's library fuses
(torch.addmm with a full matrix, GELU in its product) are contenders. quack is one where it is installed, as it is
without tuning.

Contenders of a shape take turns in one process. A sample is one replay of a CUDA graph, or one run of JAX's program, of
calls that rotate through sets of buffers, larger together than three times the L2 cache; medians and extremes are kept.
Every result is compared with cuBLAS's first: a wrong one is not timed. A config that hangs ends the program, which then
says which one it was; `--configs` leaves it out. Inputs are random normal numbers: power, and with it the clock,
depends on the data.

    python benchmarks/linear.py --out out/benchmarks                        # what the model of cycles chooses
    python benchmarks/linear.py --out out/benchmarks --shapes 8b-gate-up --configs .     # every config
    python benchmarks/linear.py --out out/benchmarks --shapes 8b --set group=4 stages=3  # other numbers in it
    python benchmarks/linear.py --out out/benchmarks --epilogue gelu swiglu              # with epilogues
    python benchmarks/linear.py --out out/benchmarks --jax                  # beside XLA and ours in JAX, too
    python benchmarks/linear.py --out out/benchmarks --jax-only --shapes 8b-gate-up      # these, ours and cuBLAS alone

JAX's programs are those of device_time.py. Who comes first in a round comes last in the next, and all wait as long
before a sample: a large product is up to 10% faster on a card that has cooled for a while.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax_program
import torch
import torch.nn.functional as F
from common import Table, parse_for_gpu, spread
from rich.console import Console

from cute_ops import Op
from cute_ops.composite.gated_mlp import mlp_ops
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Config, Problem
from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.jit import cache, target
from cute_ops.jit.plan import Plan, configured, signature
from cute_ops.ops.gemm import config as gemm_config
from cute_ops.ops.gemm import mlp_products
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.linear import CASES, linear, linear_dweight, linear_dx
from cute_ops.ops.gemm.named import gated_linear, linear_add, linear_gelu
from cute_ops_torch.host.launch import planned_call
from cute_ops_torch.library.tensors import bind_tensors, memory
from cute_ops_torch.tools.measure import graph_sampler

try:
    from quack import gemm_interface as quack
except ImportError:
    quack = None

COLUMNS = (
    "op", "case", "m", "n", "k", "contender", "config", "status", "us", "us_min", "us_max", "tflops", "of_cublas",
)  # fmt: skip
OPS = (linear, linear_dx, linear_dweight)
CUBLAS, COMPILED, FUSED, QUACK, OURS = "cuBLAS", "torch.compile", "cuBLAS, fused", "quack", "ours"
XLA, OURS_JAX = "XLA", "ours (JAX)"
OTHERS = (CUBLAS, COMPILED, FUSED, QUACK, XLA, OURS_JAX)
LEAST_WORK = 2**30  # products and sums of a shape that is measured
SAMPLE_US, WARM_UP_SECONDS, HANG_SECONDS = 3000.0, 2.0, 20.0
WRONG = 2.0**-6  # of the largest element: a bfloat16 result that was summed in another order is closer
Call = Callable[[], Any]
Sampler = Callable[[], float]
Tensors = list[torch.Tensor]


class Turns(NamedTuple):
    """How contenders take turns.

    Attributes:
        rounds: samples of each.
        pause: seconds before each sample.
        jax: whether XLA and ours in JAX are among them.
        jax_only: whether only cuBLAS and ours are, beside these.
    """

    rounds: int
    pause: float = 0.0
    jax: bool = False
    jax_only: bool = False


class Epilogue(NamedTuple):
    """A product with an epilogue: the op, the same in PyTorch, in JAX, and by what cuBLAS's library fuses."""

    op: Op
    attrs: dict[str, Any]
    eager: Callable[..., Any]
    xla: Callable[..., Any]
    fused: Callable[..., Any] | None = None


def eager_swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.silu(gate) * up


def xla_swiglu(x: Any, weight: Any) -> Any:
    import jax

    gate, up = jax.numpy.split(x @ weight.T, 2, -1)
    return jax.nn.silu(gate) * up


def eager_gated_dgrad(dout: torch.Tensor, weight: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    cotangent, (gate, up) = dout @ weight, pre.chunk(2, -1)
    s = gate.sigmoid()
    return torch.cat([cotangent * up * (s + gate * s * (1 - s)), cotangent * gate * s], -1)


def xla_gated_dgrad(dout: Any, weight: Any, pre: Any) -> Any:
    import jax

    cotangent, (gate, up) = dout @ weight, jax.numpy.split(pre, 2, -1)
    s = jax.nn.sigmoid(gate)
    return jax.numpy.concatenate([cotangent * up * (s + gate * s * (1 - s)), cotangent * gate * s], -1)


def eager_gelu_dgrad(dout: torch.Tensor, weight: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(dout @ weight, pre)


def xla_gelu_dgrad(dout: Any, weight: Any, pre: Any) -> Any:
    import jax

    return jax.vjp(lambda x: jax.nn.gelu(x, approximate=False), pre)[1](dout @ weight)[0]


def xla_gelu(x: Any, weight: Any, bias: Any) -> Any:
    import jax

    return jax.nn.gelu(x @ weight.T + bias, approximate=True)


def xla_softcap(x: Any, weight: Any) -> Any:
    import jax

    return 30.0 * jax.numpy.tanh(x @ weight.T / 30.0)


EPILOGUES = {
    "bias": Epilogue(
        fused_linear(lambda xp, acc, bias: acc + bias, operands={"bias": "n"}, name="linear_bias"), {}, F.linear,
        lambda x, weight, bias: x @ weight.T + bias,
    ),
    "gelu": Epilogue(
        linear_gelu, {"approximate": "tanh"},
        lambda x, weight, bias: F.gelu(F.linear(x, weight, bias), approximate="tanh"),
        xla_gelu,
        lambda x, weight, bias: torch._addmm_activation(bias, x.flatten(0, -2), weight.T, use_gelu=True),
    ),
    "softcap": Epilogue(  # step 8 of docs/own_kernel.md
        fused_linear(lambda xp, acc: 30.0 * xp.tanh(acc / 30.0), name="linear_softcap"), {},
        lambda x, weight: 30.0 * torch.tanh(F.linear(x, weight) / 30.0),
        xla_softcap,
    ),
    "residual": Epilogue(
        linear_add, {},
        lambda x, weight, residual: F.linear(x, weight) + residual,
        lambda x, weight, residual: x @ weight.T + residual,
        lambda x, weight, residual: torch.addmm(residual.flatten(0, -2), x.flatten(0, -2), weight.T),
    ),
    "swiglu": Epilogue(gated_linear, {}, eager_swiglu, xla_swiglu),
    "gated-dgrad": Epilogue(mlp_ops(transposed=False).dgrad, {}, eager_gated_dgrad, xla_gated_dgrad),
    "gelu-dgrad": Epilogue(mlp_products.dgrad(transposed=False, again=False), {}, eager_gelu_dgrad, xla_gelu_dgrad),
}  # fmt: skip


def attributes(op: Op) -> dict[str, Any]:
    """What is given for an op's attributes."""
    mine = next((each.attrs for each in EPILOGUES.values() if each.op is op), {})
    return {**op.attrs, **mine, "fused": "always"}


def contenders(op: Op) -> Mapping[str, Callable[..., Any]]:
    """The others by name: ``call(*inputs, out)``; with an epilogue they make their own output."""
    found = next((each for each in EPILOGUES.values() if each.op is op), None)
    if found is None:
        return {CUBLAS: partial(matrix_product, op)} | ({QUACK: partial(by_quack, op)} if quack else {})
    torch.compiler.reset()  # it compiles no function for more than eight shapes
    calls = {CUBLAS: found.eager, COMPILED: torch.compile(found.eager, dynamic=False)}
    if found.fused:
        calls[FUSED] = found.fused
    return {label: lambda *given, call=call: call(*given[:-1]) for label, call in calls.items()}


def matrices(op: Op, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whose product an op is."""
    rows = first.flatten(0, -2)
    if op is linear_dweight:
        return rows.T, second.flatten(0, -2)
    return rows, second.T if op is linear else second


def matrix_product(op: Op, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
    """The product of an op by cuBLAS."""
    torch.mm(*matrices(op, first, second), out=out.flatten(0, -2))


def by_quack(op: Op, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> None:
    quack.gemm(*matrices(op, first, second), out=out.flatten(0, -2), tuned=False)


def in_jax(op: Op) -> dict[str, Callable[..., Any]]:
    """The contenders of JAX by name."""
    import cute_ops_jax

    plain = {
        linear: lambda x, weight: x @ weight.T,
        linear_dx: lambda dout, weight: dout @ weight,
        linear_dweight: lambda dout, x: dout.reshape(-1, dout.shape[-1]).T @ x.reshape(-1, x.shape[-1]),
    }
    xla = plain[op] if op in plain else next(each.xla for each in EPILOGUES.values() if each.op is op)
    ours = cute_ops_jax.register(op)
    return {XLA: lambda *given: (xla(*given),), OURS_JAX: lambda *given: (ours(*given, **attributes(op)),)}


def inputs(op: Op, case: Case, device: torch.device) -> Tensors:
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    return [torch.randn(tensor.of(case.dims), **options) for tensor in op.inputs.values()]


def filling(binding: Binding, chosen: Plan, device: torch.device) -> Callable[..., Any]:
    """``fill(*inputs, out)`` by our kernel."""
    return planned_call(binding, chosen, device).fill(tuple(binding.op.outputs))


def name(config: Config) -> str:
    cluster = f"{config.get('cluster_m', 1)}x{config.get('cluster_n', 1)}"
    return f"{config['form']}-{config['tile_m']}x{config['tile_n']}-cluster{cluster}"


def plans(binding: Binding, tensors: Tensors, wanted: str | None, numbers: Mapping[str, int]) -> dict[str, Plan]:
    """Ours by name: the config that is chosen, or all whose names a pattern finds; with these numbers in them."""
    call = signature(binding, memory(binding.op, tensors), target.of_device())
    found = [binding.op.config(call.problem)] if wanted is None else every_config(binding.op, call.problem)
    more = "".join(f" {key}={value}" for key, value in numbers.items())
    return {
        name(config) + more: configured(call, {**config, **numbers})
        for config in found
        if wanted is None or re.search(wanted, name(config))
    }


def every_config(op: Op, problem: Problem) -> Iterator[Config]:
    """What an op chooses where it has one tile and one cluster to choose from."""
    tiles, clusters, shared = gemm_config.TILES, gemm_config.CLUSTERS, gemm_config.TILES_K
    try:
        gemm_config.TILES_K = ()  # whose clusters share terms
        for tile in tiles:
            for cluster in clusters:
                gemm_config.TILES, gemm_config.CLUSTERS = (tile,), (cluster,)
                gemm_config.configs.cache_clear()
                config = op.config(problem)
                if config["form"] != "mma_sync":
                    yield config
    finally:
        gemm_config.TILES, gemm_config.CLUSTERS, gemm_config.TILES_K = tiles, clusters, shared
        gemm_config.configs.cache_clear()


def finish(what: str) -> None:
    """Wait for the GPU; end the program where it hangs."""
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + HANG_SECONDS
    while not event.query():
        if time.monotonic() > deadline:
            print(f"HANGS: {what}", flush=True)
            os._exit(3)
        time.sleep(1e-4)


def in_turns(samplers: Mapping[str, Sampler], turns: Turns) -> dict[str, list[float]]:
    """Samples of all: who comes first in a round comes last in the next."""
    found: dict[str, list[float]] = {label: [] for label in samplers}
    order = list(samplers)
    for _ in range(turns.rounds):
        for label in order:
            time.sleep(turns.pause)
            found[label].append(samplers[label]())
        order.reverse()
    return found


def sampler(calls: Sequence[Call], stream: torch.cuda.Stream, sample_us: float = SAMPLE_US) -> Sampler:
    """Microseconds of a call, from samples of about ``sample_us``."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        start.record()
        for call in calls:
            call()
        end.record()
    end.synchronize()
    once = start.elapsed_time(end) * 1e3 / len(calls)
    return graph_sampler(calls, len(calls) * math.ceil(sample_us / once / len(calls)), stream)


def difference(got: torch.Tensor, wanted: torch.Tensor) -> str:
    """Where a result is wrong, empty where it is not."""
    error = (got.float() - wanted.float()).abs().nan_to_num(math.inf).flatten(0, -2)
    at = divmod(int(error.argmax()), error.shape[1])
    relative = error[at].item() / wanted.float().abs().max().item()
    return f"wrong: relative error {relative:.2g} at {at}" if relative > WRONG else ""


def attempt(call: Call) -> str:
    """``ok``, or why this contender cannot do it."""
    try:
        call()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0][:100]
    return "ok"


def measure(
    op: Op, case: Case, ours: Callable[[Binding, Tensors], dict[str, Plan]], turns: Turns, table: Table,
    console: Console,
) -> None:  # fmt: skip
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    first = inputs(op, case, device)
    binding = bind_tensors(op, first, [*attributes(op).values()])
    (made,) = binding.outputs.values()
    assert made is not None
    moved = sum(t.nbytes for t in first) + math.prod(made.shape) * ITEMSIZE[made.dtype]
    count = max(2, -(-3 * torch.cuda.get_device_properties(device).L2_cache_size // moved))
    sets = [first, *(inputs(op, case, device) for _ in range(count - 1))]
    outputs = [torch.empty(made.shape, dtype=torch.bfloat16, device=device) for _ in sets]
    chosen_plans = ours(binding, first)
    for built in cache.build_all(each.variant for each in chosen_plans.values()):
        if built.error is not None:
            raise built.error

    others, exact = contenders(op), torch.empty_like(outputs[0])
    others = {CUBLAS: others[CUBLAS]} if turns.jax_only else others
    made_anew = others[CUBLAS](*first, exact)
    exact = exact if made_anew is None else made_anew
    rotation = list(zip(sets, outputs, strict=True))
    calls: dict[str, list[Call]]
    calls = {label: [partial(other, *given, out) for given, out in rotation] for label, other in others.items()}
    status = {label: attempt(each[0]) for label, each in calls.items()}
    calls = {label: each for label, each in calls.items() if status[label] == "ok"}
    for label, chosen in chosen_plans.items():
        fill = filling(binding, chosen, device)
        outputs[0].fill_(torch.nan)
        fill(*first, outputs[0])
        finish(f"{op.name} {case.name} {label}")
        status[label] = difference(outputs[0], exact) or "ok"
        if status[label] == "ok":
            calls[label] = [partial(fill, *given, out) for given, out in rotation]
    stream.wait_stream(torch.cuda.current_stream())
    samplers = {label: sampler(each, stream) for label, each in calls.items()}
    if turns.jax:
        programs = {label: program(call, sets) for label, call in in_jax(op).items()}
        for label, each in programs.items():
            status[label] = difference(jax_program.to_torch(each.run()[0][0]), exact) or "ok"
        samplers |= {label: each.sample for label, each in programs.items() if status[label] == "ok"}
    begin = time.monotonic()
    while time.monotonic() - begin < WARM_UP_SECONDS:
        samplers[CUBLAS]()
    write(op, case, binding, status, in_turns(samplers, turns), table, console)


def program(call: Callable[..., Any], sets: Sequence[Tensors]) -> jax_program.Program:
    """One of JAX, of a few milliseconds."""
    return jax_program.of_calls(call, [tuple(map(jax_program.to_jax, each)) for each in sets], [0])


def write(
    op: Op, case: Case, binding: Binding, status: dict[str, str], samples: dict[str, list[float]], table: Table,
    console: Console,
) -> None:  # fmt: skip
    """A row for each contender, and a line for the fastest of ours."""
    packed = any("2n" in tensor.shape for tensor in [*op.inputs.values()][:2])
    sizes = {"m": binding.rows, "n": binding.dims["n"] * (1 + packed), "k": binding.dims["k"]}
    times = {label: spread(each) for label, each in samples.items()}
    for label, state in status.items():
        row: dict[str, Any] = {"op": op.name, "case": case.name, **sizes, "status": state}
        other = label in OTHERS
        row |= {"contender": label if other else OURS, "config": "" if other else label}
        if label in times:
            us = times[label]
            row |= {"us": us.median, "us_min": us.low, "us_max": us.high}
            row |= {"tflops": tflops(sizes, us.median), "of_cublas": times[CUBLAS].median / us.median}
        table.add(row)
        figures = f"{row['us']:.1f} us, {row['tflops']:.0f} TFLOPS" if label in times else state
        ahead = f", {row['of_cublas']:.1%} of cuBLAS's speed" if label in times and label != CUBLAS else ""
        console.print(f"{op.name} {case.name} {'x'.join(map(str, sizes.values()))} {label}: {figures}{ahead}")


def tflops(sizes: dict[str, int], us: float) -> float:
    return 2 * math.prod(sizes.values()) / us / 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for linear.csv")
    parser.add_argument("--ops", nargs="*", default=[op.name for op in OPS], choices=[op.name for op in OPS])
    parser.add_argument("--shapes", default="", help="only cases in whose names this pattern is found")
    parser.add_argument("--configs", help="of ours those whose names this pattern finds, instead of the chosen one")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="numbers of every config of ours")
    parser.add_argument("--jax", action="store_true", help="XLA and ours in JAX, too")
    parser.add_argument("--jax-only", action="store_true", help="these beside cuBLAS and ours, and no other contender")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="before each sample")
    parser.add_argument(
        "--epilogue", nargs="*", choices=[*EPILOGUES], help="products with these epilogues, instead of --ops"
    )
    given = parse_for_gpu(parser, arguments, torch.cuda.is_available())
    numbers = {key: int(value) for key, _, value in (text.partition("=") for text in given.set)}
    ours = partial(plans, wanted=given.configs, numbers=numbers)
    turns = Turns(given.rounds, given.pause, given.jax or given.jax_only, given.jax_only)
    cases = wanted_cases(given.shapes)
    if not cases:
        parser.error(f"no case is named {given.shapes}: {', '.join(case.name for case in wanted_cases(''))}")
    table, console = Table(given.out / "linear.csv", COLUMNS), Console()
    ops = [EPILOGUES[name].op for name in given.epilogue or ()] or [op for op in OPS if op.name in given.ops]
    for case in cases:
        for op in ops:
            try:
                measure(op, of_halves(op, case), ours, turns, table, console)
            except NotImplementedError as refused:
                console.print(f"{op.name} {case.name}: {str(refused).splitlines()[0]}")


def wanted_cases(pattern: str) -> list[Case]:
    """The cases that are large enough, in whose names a pattern is found."""
    return [
        case for case in CASES
        if re.search(pattern, case.name) and math.prod((*case.dims["m"], case.dims["n"], case.dims["k"])) >= LEAST_WORK
    ]  # fmt: skip


def of_halves(op: Op, case: Case) -> Case:
    """A case of an op whose columns come in two halves."""
    halves = 1 + any("2n" in tensor.shape for tensor in op.inputs.values())
    return case._replace(dims={**case.dims, "n": case.dims["n"] // halves})


if __name__ == "__main__":
    main()
