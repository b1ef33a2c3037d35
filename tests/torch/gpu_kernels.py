"""Compile ahead, on a machine without a GPU, what the GPU tests of the declared cases call.

Most of the time of ``pytest -m gpu`` goes to compiling. A cache folder that this fills can be copied to the machine
with the GPU (some 2000 kernels, 5 MB compressed), whose tests then find them there.

CUTE_OPS_CACHE_DIR=out/kernels python -m tests.torch.gpu_kernels --arch sm_90a:132
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from rich.progress import Progress

from cute_ops import FLOATS, testing
from cute_ops.autotune.dispatch import foresee
from cute_ops.declaration.shapes import Array
from cute_ops.declaration.tensor import Tensor
from cute_ops.jit import cache, target
from cute_ops.jit.variant import Variant
from cute_ops.ops import OPS, PARTS
from cute_ops_torch.library.tensors import DTYPES, bind_tensors, memory

LAYOUTS = ("compact", "slices", "shifted slices")


def laid_out(declared: Tensor, spec: Array, layout: str) -> torch.Tensor:
    """An input, laid out as the tests lay it out; its values do not matter."""
    shape, kind, shift = spec.shape, DTYPES[spec.dtype], int(layout == "shifted slices")
    if layout == "compact" or not (declared.rows or shift):
        return torch.empty(shape, dtype=kind)
    if not declared.rows:
        return torch.empty(shape[0] + 1, *shape[1:], dtype=kind)[1:]
    if not declared.dims:
        return torch.empty(*shape, 3, dtype=kind)[..., 1]
    n = shape[-1]
    return torch.empty(*shape[:-1], n + 8 - n % 8 + 8, dtype=kind)[..., shift : shift + n]


def variants(arch: target.Target) -> Iterator[Variant]:
    """The variants of every declared case, dtype and layout."""
    for layout in LAYOUTS:
        for dtype in FLOATS:
            steps = [step for op in OPS for step in op.steps]
            narrowed = [each for step in steps for each in step.narrowed] if layout == "compact" else []
            for op in (*OPS, *PARTS, *steps, *narrowed):
                for case in op.cases:
                    tensors = [
                        None if spec is None else laid_out(op.inputs[name], spec, layout)
                        for name, spec in testing.specs(op, case, dtype).items()
                    ]
                    binding = bind_tensors(op, tensors, list(testing.attributes(op, case).values()))
                    if not binding.empty:
                        yield foresee(binding, memory(op, tensors), arch).variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90a:132", help="the GPU, with its number of SMs")
    found = {v.symbol: v for v in variants(target.parse(parser.parse_args().arch))}
    with Progress() as progress:
        task = progress.add_task("compiling", total=len(found))
        built = cache.build_all(found.values(), lambda _: progress.advance(task))
    for one in built:
        if one.error:
            print(one.error)


if __name__ == "__main__":
    main()
