"""Handling of an index that names no row: it ends the kernel, or gives NaN."""

import cutlass.cute as cute
from cutlass import Boolean


@cute.jit
def trap_unless(valid: Boolean):
    """End the kernel with an error, which destroys the CUDA context, unless ``valid``."""
    if not valid:
        cute.arch.inline_ptx("trap;", read_only_args=[])


@cute.jit
def nan_unless(valid: Boolean, rX: cute.Tensor):
    if not valid:
        rX.fill(float("nan"))
