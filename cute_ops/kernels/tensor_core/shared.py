"""A kernel's shared memory, laid out as its :class:`SharedStruct` says."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64


class SharedMemory:
    """The buffers of a kernel, by name. The compiler lays them out one after another, as the struct does."""

    def __init__(self, struct):
        smem = cutlass.utils.SmemAllocator()
        # One allocation for each: with offsets in one for all, the compiler does not join the mbarriers' loops.
        self.pointers = {b.name: smem.allocate(b.bytes, b.align) for b in struct.buffers if b.bytes}

    def tensor(self, name, dtype, layout):
        """A buffer as a tensor of this composed layout, whose swizzle is that of its pointer."""
        return cute.make_tensor(cute.recast_ptr(self.pointers[name], layout.inner, dtype=dtype), layout.outer)

    def mbarriers(self, name):
        """The first of a pipeline's mbarriers."""
        return cute.recast_ptr(self.pointers[name], dtype=Int64)
