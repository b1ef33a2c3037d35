"""Vectors of fp32 in shared memory that overwrite the inputs from which they were computed."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import fragment

FLOATS = VECTOR_BYTES // 4


# The compiler takes frozen dataclasses for values that loops do not change.
@dataclass(frozen=True)
class KeptVectors:
    """A thread's vectors in parts of 16 bytes, each of a tensor of such parts."""

    parts: Any

    @classmethod
    def over(cls, *tensors):
        """In place of tensors whose first mode is 16 bytes."""
        return cls([_in_floats(sX) for sX in tensors])

    @classmethod
    def beside(cls, smem, sX):
        """In place of a tensor whose first mode is 16 bytes, and where its elements are narrower than fp32 in memory of
        its own.

        Shared memory: 16 bytes for each vector of a 16-bit dtype.
        """
        first = _in_floats(sX)
        more = (
            [smem.allocate_tensor(Float32, first.layout, byte_alignment=VECTOR_BYTES)] if sX.shape[0] > FLOATS else []
        )
        return cls([first, *more])

    def store(self, rX, *place):
        for rPart, part in zip(self._pieces(rX), self.parts):
            cute.autovec_copy(rPart, part[None, *place])

    def load(self, *place):
        rX = fragment(Float32, FLOATS * len(self.parts))
        for rPart, part in zip(self._pieces(rX), self.parts):
            cute.autovec_copy(part[None, *place], rPart)
        return rX

    def _pieces(self, rX):
        layout = cute.make_layout((FLOATS,))
        return [cute.make_tensor(rX.iterator + FLOATS * i, layout) for i in range(len(self.parts))]


def _in_floats(sX):
    """Shared memory of another dtype, in fp32."""
    vec, *shape = sX.shape
    layout = cute.make_layout((FLOATS, *shape), stride=(1, *(FLOATS * step // vec for step in sX.stride[1:])))
    return cute.make_tensor(cute.recast_ptr(sX.iterator, dtype=Float32), layout)
