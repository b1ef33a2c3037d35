"""A ring of row slots in shared memory that keeps the next rows' loads in flight.

Each thread copies the vectors it will read itself, so that the ring needs no barrier: the thread's own wait does.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.nvgpu import LoadCacheMode, cpasync

from cute_ops.kernels._rows import ITEMSIZE, VECTOR_BYTES, vector_address
from cute_ops.kernels._vectors import access_bits, fill_outside, fragment, gmem_vector, load, opaque


class RowRing:
    """``stages`` slots for each of the named row tensors.

    Shared memory: ``stages * threads * per_thread * vec`` elements of each tensor, and ``beyond`` vectors. Vectors lie
    by access, then by thread, so that neighbouring threads touch neighbouring 16 bytes.
    """

    def __init__(self, tile, keys, stages, beyond=0):
        self.tile = tile
        self.keys = keys
        self.stages = stages
        elements = (stages * tile.threads * tile.per_thread + beyond) * tile.vec
        self.offsets, size = {}, 0
        for key in keys:
            self.offsets[key.name] = size
            size += -(-elements * ITEMSIZE[key.dtype] // 16) * 16
        self.bytes = size

    def view(self, base, mX, name):
        """The slots of a tensor: (elements of an access, accesses, thread, vector, stage)."""
        dtype, vec, threads = mX.element_type, self.tile.vec, self.tile.threads
        width = access_bits(dtype, vec) // dtype.width
        count = vec // width
        layout = cute.make_layout(
            (width, count, threads, self.tile.per_thread, self.stages),
            stride=(1, threads * width, width, threads * vec, threads * vec * self.tile.per_thread),
        )
        return cute.make_tensor(cute.recast_ptr(base + self.offsets[name], dtype=dtype), layout)

    def allocate(self, smem, tensors, names):
        """The ring's memory, and the slots of each tensor, None where it is absent."""
        base = smem.allocate(self.bytes, 16)
        slots = [None if mX is None else self.view(base, mX, name) for mX, name in zip(tensors, names)]
        for sX in slots:
            if sX is not None:
                self.clear(sX)
        return base, slots

    @cute.jit
    def clear(self, sX: cute.Tensor, value: cutlass.Constexpr = 0):
        """Fill what no copy will ever write: vectors wholly past the row's end."""
        tidx = cute.arch.thread_idx()[0]
        for k in cutlass.range_constexpr(self.tile.per_thread):
            if const_expr(self.tile.ends_outside(k)):
                for stage in cutlass.range_constexpr(self.stages):
                    sX[None, None, tidx, k, stage].fill(value)

    @cute.jit
    def fetch(
        self, sX: cute.Tensor, address: Int64, first: cutlass.Constexpr, valid: Boolean, readable, stage: Int32,
        ks: cutlass.Constexpr = None,
    ):  # fmt: skip
        """Start copying this thread's vectors of a row, or some of them; the caller commits the group.

        Args:
            valid: whether the row is there.
            readable: from :meth:`RowTile.readable`.
        """
        tidx = cute.arch.thread_idx()[0]
        if const_expr(self.tile.v.shifted):
            # Once, not again under the condition of every vector.
            address, tidx = opaque(address), opaque(tidx)
        for k in range(self.tile.per_thread) if const_expr(ks is None) else ks:
            if valid and self.tile.wanted(k, first[k]):
                source = vector_address(sX, address, self.tile, first[k], k)
                target = sX[None, None, tidx, k, stage]
                if const_expr(self.tile.v.masked and self.tile.ends_outside(k)):
                    self.copy_first(source, target, readable - first[k])
                else:
                    self.copy(source, target)

    def copy_first(self, source, target, room):
        """Start copying a vector of which only the first ``room`` elements may be read: the rest become zeros."""
        dtype, bits = target.element_type, access_bits(target.element_type, self.tile.vec)
        size = bits // 8
        cache = "cg" if size == VECTOR_BYTES else "ca"
        for i in range(cute.size(target, mode=[1])):
            left = (room - i * (bits // dtype.width)) * (dtype.width // 8)
            count = cutlass.min(cutlass.max(left, Int32(0)), Int32(size))
            cute.arch.inline_ptx(
                f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
                read_only_args=[Int32(target[None, i].iterator.toint()), source + i * size, count],
            )

    def copy(self, source, target):
        """Start copying a vector."""
        dtype, vec = target.element_type, self.tile.vec
        bits = access_bits(dtype, vec)
        if bits >= 32:
            mode = LoadCacheMode.GLOBAL if bits == 128 else LoadCacheMode.ALWAYS
            atom = cute.make_copy_atom(cpasync.CopyG2SOp(mode), dtype, num_bits_per_copy=bits)
            cute.copy(atom, gmem_vector(dtype, source, vec), target)
        else:
            # Asynchronous copies move no less than 4 bytes.
            rX = fragment(dtype, vec)
            load(rX, source)
            cute.autovec_copy(cute.make_tensor(rX.iterator, target.layout.shape), target)

    @cute.jit
    def trim(
        self, slots: cutlass.Constexpr, k: cutlass.Constexpr, stage: Int32, first: Int32, value: cutlass.Constexpr = 0
    ):
        """Overwrite what this thread's k-th vector of some tensors holds of the row's neighbours."""
        if first < 0 or first + self.tile.vec > self.tile.n:
            for sX in slots:
                sV = sX[None, None, cute.arch.thread_idx()[0], k, stage]
                # Where it is, once, not again for every element.
                place = cute.make_ptr(sX.element_type, opaque(sV.iterator.toint()), cute.AddressSpace.smem)
                fill_outside(cute.make_tensor(place, cute.coalesce(sV.layout)), first, Int32(self.tile.n), value)

    def read(self, sX, k, stage):
        """This thread's k-th vector of a slot, in registers."""
        sV = sX[None, None, cute.arch.thread_idx()[0], k, stage]
        rX = fragment(sX.element_type, self.tile.vec)
        cute.autovec_copy(sV, cute.make_tensor(rX.iterator, cute.make_layout(sV.shape)))
        return rX
