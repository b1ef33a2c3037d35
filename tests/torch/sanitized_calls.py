"""Call every op and gradient once at each of some row lengths: for ``compute-sanitizer`` to watch.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/torch/sanitized_calls.py 129 4097

Every tensor is an allocation of its own then, which ends with the tensor's last element, so that a byte that is read
past the end is seen. Prints one line for each call that fails. With ``--seed`` each op is called once, at a length, in
a dtype and in a layout that the seed draws.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

import cute_ops_torch
from cute_ops import testing
from cute_ops.autotune.dispatch import foresee, limit_static
from cute_ops.calls.lookup import ours
from cute_ops.cli.author import NOT_SWEPT
from cute_ops.declaration.binding import bind
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Config
from cute_ops.declaration.op import Op
from cute_ops.jit import cache, target
from cute_ops.jit.plan import Plan, plan, signature
from cute_ops.ops.gemm.accumulate import linear_dweight_add
from cute_ops.tools.sweep import memory, swept
from cute_ops_torch.tools import measure
from cute_ops_torch.tools.runner import laid_out, to_torch

DTYPES, BASES, ROWS = ("bfloat16", "float32"), ("aligned", "shifted", "slices"), (5, 260)
# Rows, columns and terms of products, and how their operands lie: few rows; rows and columns that fill no tile, of more
# and more tiles; odd terms and addresses, which TMA does not take.
PRODUCTS = (
    (5, 136, 72, "aligned"), (64, 131, 328, "aligned"), (67, 333, 200, "aligned"), (1029, 2056, 136, "aligned"),
    (65, 640, 648, "aligned"), (67, 129, 71, "aligned"), (131, 136, 72, "slices"), (1, 9, 7, "shifted"),
)  # fmt: skip
# Sizes with which a product may run in cooperative tiles of clusters, and those of the call that does.
LARGE, CUT = {"m": 8192, "n": 5120, "k": 4096}, {"m": 267, "n": 640, "k": 136}
T = TypeVar("T")
TURNED = 640  # columns of products that look at them in groups of 64 or 128, of which heads are rotated


def every_op() -> dict[str, Op]:
    """What is called, by name: all that have a kernel."""
    every = (*ours().values(), linear_dweight_add, linear_dweight_add.batched)
    return {op.name: op for op in every if op and not op.program and op.name not in NOT_SWEPT}


def some(every: Sequence[T], seed: str | None, name: str) -> Sequence[T]:
    """All, or with a seed one of them."""
    return every if seed is None or not every else [random.Random(f"{seed} {name}").choice(every)]


def calls(ops: list[Op], lengths: list[int], seed: str | None = None) -> Iterator[tuple[Op, Case, str, str]]:
    for op in ops:
        if op.fallback:
            yield from some([*calls_of_product(op)], seed, op.name)
            continue
        integers = {var: "int32" for var, choices in op.dtypes.items() if all("int" in each for each in choices)}
        layouts = [*enumerate((d, b) for d in DTYPES for b in BASES)]
        short = swept(op) == "d" or op.name.startswith("group_norm_examples")  # a group's channels have a thread each
        every = [(n, *layout) for n in lengths if n <= 512 or not short for layout in layouts]
        for n, i, (dtype, base) in some(every, seed, op.name):
            sizes = op.example((ROWS[i % len(ROWS)],), n)
            sizes |= {"d": n, "r": n // 2} if swept(op) == "d" else {}
            sizes |= {"d": n} if op.name.startswith("group_norm_rows") else {}  # heads are whole groups
            sizes |= {"g": 1} if op.name.startswith("group_norm_examples") and "g" in sizes else {}
            sizes |= {name: size(sizes, op.attrs) for name, size in op.derived.items()}
            attrs = {"heads": sizes["h"] // 2 + 1} if op.name.startswith("rope_packed") else {}
            yield op, Case(f"n={n}", sizes, integers, attrs=attrs), dtype, base


def calls_of_product(op: Op) -> Iterator[tuple[Op, Case, str, str]]:
    for m, n, k, base in PRODUCTS:
        yield op, _case(op, m, TURNED if "heads" in op.attrs else n, k), "bfloat16", base


def _case(op: Op, m: int, n: int, k: int) -> Case:
    attrs = {}
    if "heads" in op.attrs:
        size = 2 * max(t.dims[-1].of({}) for t in op.inputs.values() if t.broadcast)
        attrs = {"heads": n // size * 3 // 5}
    sizes = {"b": (3,), "m": m} if op.name.endswith("_batched") else {"m": (m,)}
    return Case(f"m={m} n={n} k={k}", {**sizes, "n": n, "k": k}, attrs=attrs)


def cooperative(op: Op, where: target.Target) -> list[tuple[Op, Case, Config]]:
    """Calls of a product with configs that its heuristic takes for large ones alone."""
    if not op.fallback or not op.space:
        return []
    large, cut = (_case(op, sizes["m"], sizes["n"], sizes["k"]) for sizes in (LARGE, CUT))
    call = signature(bind(op, testing.specs(op, large, "bfloat16"), testing.attributes(op, large)), {}, where)
    found = op.space.others(call.problem, op.config(call.problem))
    clusters = [c for c in found if c["form"] == "cooperative" and {c.get("cluster_m"), c.get("cluster_n")} - {1, None}]
    return [(op, cut, config) for config in clusters[:2]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="+", type=int)
    parser.add_argument("--op", action="append", help="only these; repeat")
    parser.add_argument("--seed", help="draw one call of each op")
    parser.add_argument("--build", action="store_true", help="compile the kernels, call none")
    args = parser.parse_args()
    limit_static(1 << 30)
    ops = [op for op in every_op().values() if op.name in (args.op or every_op())]
    problems = list(calls(ops, args.lengths, args.seed))
    others = [
        call for op in ops for call in some(cooperative(op, target.of_device()), args.seed, f"{op.name} clusters")
    ]
    if args.build:
        variants = [_planned(*call).variant for call in others]
        for op, case, dtype, base in problems:
            arrays, attrs = testing.specs(op, case, dtype), testing.attributes(op, case)
            variants.append(foresee(bind(op, arrays, attrs), memory(op, arrays, base), target.of_device()).variant)
        sys.exit(any(built.error for built in cache.build_all(variants)))
    failed = 0
    for op, case, dtype, base in problems:
        arrays = testing.inputs(op, case, dtype).values()
        tensors = [laid_out(to_torch(a), t, base) for a, t in zip(arrays, op.inputs.values(), strict=True)]
        try:
            cute_ops_torch.register(op)
            attrs = testing.attributes(op, case) | ({"fused": "always"} if op.fallback else {})
            getattr(torch.ops.cute, op.name)(*tensors, **attrs)
            torch.cuda.synchronize()
        except RuntimeError as error:
            failed += 1
            print(f"{op.name} {case.name} {dtype} {base}: {str(error).splitlines()[0]}", flush=True)
    for op, case, config in others:
        try:
            chosen = _planned(op, case, config)
            arrays = testing.inputs(op, case, "bfloat16")
            measure.run(bind(op, testing.specs(op, case, "bfloat16"), testing.attributes(op, case)), chosen, arrays)
        except RuntimeError as error:
            failed += 1
            print(f"{op.name} {case.name} {config}: {str(error).splitlines()[0]}", flush=True)
    if "sorted_embedding_bwd" in (args.op or ours()):
        table = torch.randn(33, args.lengths[0], device="cuda", requires_grad=True)
        cute_ops_torch.embedding(torch.randint(33, (300,), device="cuda"), table).sum().backward()
        torch.cuda.synchronize()
    count = len(problems) + len(others)
    print(f"{count - failed} of {count} calls ended well")
    sys.exit(failed > 0)


def _planned(op: Op, case: Case, config: Config) -> Plan:
    binding = bind(op, testing.specs(op, case, "bfloat16"), testing.attributes(op, case))
    return plan(binding, {}, target.of_device(), config=config)


if __name__ == "__main__":
    main()
