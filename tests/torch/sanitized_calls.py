"""Call every op and gradient once at each of some row lengths: for ``compute-sanitizer`` to watch.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/torch/sanitized_calls.py 129 4097

Every tensor is an allocation of its own then, which ends with the tensor's last element, so that a byte that is read
past the end is seen. Prints one line for each call that fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

import cute_ops_torch
from cute_ops import testing
from cute_ops.binding import bind
from cute_ops.dispatch import foresee, limit_static
from cute_ops.jit import cache, target
from cute_ops.lookup import ours
from cute_ops.op import Case, Op
from cute_ops.tools.sweep import memory, swept
from cute_ops_torch.tools.runner import laid_out, to_torch

DTYPES, BASES, ROWS = ("bfloat16", "float32"), ("aligned", "shifted", "slices"), (5, 260)


def calls(ops: list[Op], lengths: list[int]) -> Iterator[tuple[Op, Case, str, str]]:
    for op in ops:
        for n in lengths:
            if swept(op) == "d" and n > 512:
                continue
            for i, (dtype, base) in enumerate((d, b) for d in DTYPES for b in BASES):
                sizes = op.example((ROWS[i % len(ROWS)],), n)
                sizes |= {"d": n, "r": n // 2} if swept(op) == "d" else {}
                sizes |= {name: size(sizes, op.attrs) for name, size in op.derived.items()}
                yield op, Case(f"n={n}", sizes), dtype, base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="+", type=int)
    parser.add_argument("--op", action="append", help="only these; repeat")
    parser.add_argument("--build", action="store_true", help="compile the kernels, call none")
    args = parser.parse_args()
    limit_static(1 << 30)
    ops = [op for op in ours().values() if op.name != "sorted_embedding_bwd" and op.name in (args.op or ours())]
    problems = list(calls(ops, args.lengths))
    if args.build:
        variants = []
        for op, case, dtype, base in problems:
            arrays = testing.specs(op, case, dtype)
            variants.append(foresee(bind(op, arrays), memory(op, arrays, base), target.of_device()).variant)
        sys.exit(any(built.error for built in cache.build_all(variants)))
    failed = 0
    for op, case, dtype, base in problems:
        arrays = testing.inputs(op, case, dtype).values()
        tensors = [laid_out(to_torch(a), t, base) for a, t in zip(arrays, op.inputs.values(), strict=True)]
        try:
            cute_ops_torch.register(op)
            getattr(torch.ops.cute, op.name)(*tensors, **({"fused": "always"} if op.instead else {}))
            torch.cuda.synchronize()
        except RuntimeError as error:
            failed += 1
            print(f"{op.name} {case.name} {dtype} {base}: {str(error).splitlines()[0]}", flush=True)
    if "sorted_embedding_bwd" in (args.op or ours()):
        table = torch.randn(33, args.lengths[0], device="cuda", requires_grad=True)
        cute_ops_torch.embedding(torch.randint(33, (300,), device="cuda"), table).sum().backward()
        torch.cuda.synchronize()
    print(f"{len(problems) - failed} of {len(problems)} calls ended well")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
