"""Rotary position embedding kernels."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.lib.copy import gmem_elements
from cute_ops.kernels.lib.index import nan_unless, trap_unless
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import number_or
from cute_ops.kernels.lib.row_layout import extent, row_count
from cute_ops.kernels.rotary.config import RotaryConfig
from cute_ops.kernels.rotary.layout import (
    Rotary,
    head_address,
    head_count,
    sequence_and_block,
    split_index,
    table_grid,
    wide,
)


class Rope:
    """``out[j], out[j + r] = x[j] * cos[j] - x[j + r] * sin[j], x[j + r] * cos[j] + x[j] * sin[j]``.

    Tile: a thread holds one chunk (two vectors) of ``heads`` heads of a token, of more if vectors have less than 16
    bytes; it computes its place and reads cosines and sines once. Neighbouring threads hold neighbouring chunks, then
    heads, then tokens. CTAs that read the same row of the tables, for different sequences, run at the same time.
    No shared memory. Bytes moved per element: x, out and the tables once.

    Args:
        variant: the kernel's variant.
        sources, out: names of the tensors to rotate and of the rotated one.
        sign: -1 rotates back.
        heads: how many these are where they are no dim; None where that is dynamic.
    """

    def __init__(self, variant, sources=("x",), out="out", sign=1.0, heads=None):
        self.sources, self.out = [variant.tensors[name] for name in sources], variant.tensors[out]
        self.rotary = Rotary(variant, (*sources, out), variant.attrs["interleaved"])
        self.sign, self.heads = sign, variant.dims.get("h", heads)
        self.rotated = variant.attrs.get("heads")
        config = RotaryConfig.of(variant.config)
        self.threads = config.threads
        most = VECTOR_BYTES // ITEMSIZE[self.out.dtype] // self.rotary.vec
        self.per_thread = min(config.heads_per_thread * max(most, 1), self.heads or 1)
        self.pdl = can_use_pdl(variant.arch)

    @cute.jit
    def __call__(self, *arguments):
        *sources, mCos, mSin, mOut, stream = arguments
        d, r = self.rotary.sizes(sources[0], mCos)
        blocks = (row_count(mCos) * self._items(mOut, d, r) + (self.threads - 1)) // self.threads
        self.kernel(tuple(sources), mCos, mSin, mOut).launch(
            grid=table_grid(blocks, sources[0], mCos),
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    def _groups(self, mX):
        return (self._heads(mX) + (self.per_thread - 1)) // self.per_thread

    def _heads(self, mX):
        return head_count(mX) if self.heads is None else Int32(self.heads)

    def _items(self, mX, d, r):
        """Threads of a token."""
        return self._groups(mX) * self.rotary.chunks(d, r)

    def _place(self, mX, mCos, d, r):
        """(row of the tables, token, whether there is such a row, chunk, heads) of this thread."""
        sequence, block = sequence_and_block()
        items, chunks, groups = self._items(mX, d, r), self.rotary.chunks(d, r), self._groups(mX)
        row, item = split_index(block * self.threads, cute.arch.thread_idx()[0], items)
        token = sequence * row_count(mCos) + row
        group = item // chunks
        heads = [group + u * groups for u in range(self.per_thread)]
        return row, token, row < row_count(mCos), item - group * chunks, heads

    @cute.kernel
    def kernel(self, sources, mCos, mSin, mOut):
        rotary = self.rotary
        d, r = rotary.sizes(sources[0], mCos)
        row, token, valid, index, heads = self._place(mOut, mCos, d, r)
        chunk = rotary.chunk(index, d, r)
        inside = [valid & (head < self._heads(mOut)) for head in heads]
        wait_for_previous(self.pdl)
        loaded = []
        for head, here in zip(heads, inside):
            address = self._source(sources, token, head, d)
            loaded.append(wide(rotary.load(sources[0].element_type, address, here, chunk)))
        some = self._rotates(sources, valid & chunk.rotated, heads[0])  # the first head is the lowest
        rCos, rSin = self._angles(sources, (mCos, mSin), row, chunk, some)
        let_next_start(self.pdl)
        for rX, head, here in zip(loaded, heads, inside):
            rotary.rotate(rX, rCos, rSin, self._rotates(sources, chunk.rotated, head), self.sign)
            self._finish(rX, sources)
            # What comes next reads it. Marked as read no more, 671 MB in place took 187 us in place of 181.
            address = head_address(mOut, self.out, token, head, d)
            rotary.store(rX, mOut.element_type, address, here, chunk, streaming=False)

    def _angles(self, sources, tables, row, chunk, wanted):
        """Cosines and sines of a chunk's pairs, in fp32."""
        return [wide(self.rotary.table(mTable, i, row, chunk, wanted)) for i, mTable in enumerate(tables)]

    def _finish(self, rX, sources):
        """Change rotated elements before they are stored; subclasses do."""

    def _source(self, sources, token, head, d):
        """Byte address of a head of the output in the source that has it."""
        return head_address(sources[0], self.sources[0], token, head, d)

    def _rotates(self, sources, rotated, head):
        """Whether a chunk of a head is rotated, if it is ``rotated`` in heads that are."""
        return rotated if self.rotated is None else rotated & (head < self.rotated)


class RopeFP8(Rope):
    """The rotation, divided by a scale and rounded to fp8. Bytes moved per element: x, half of it, and the tables."""

    @cute.jit
    def __call__(self, mX, mCos, mSin, mScale, mOut, stream):
        d, r = self.rotary.sizes(mX, mCos)
        blocks = (row_count(mCos) * self._items(mOut, d, r) + (self.threads - 1)) // self.threads
        self.kernel((mX, mScale), mCos, mSin, mOut).launch(
            grid=table_grid(blocks, mX, mCos), block=[self.threads, 1, 1], stream=stream, use_pdl=self.pdl
        )

    def _finish(self, rX, sources):
        mScale = sources[1]
        factor = 1.0 / gmem_elements(mScale.element_type, mScale.iterator.toint(), 1)[0]
        for j in range(cute.size(rX)):
            rX[j] = rX[j] * factor


class RopeBackward(Rope):
    """The rotation back: ``dx`` is ``dout`` rotated by the negative angles."""

    def __init__(self, variant):
        super().__init__(variant, ("dout",), "dx", -1.0)


class RopeBackwardJoined(Rope):
    """``dq`` and ``dk`` rotated by the negative angles, then ``dv`` as it is: heads of one tensor.

    Tile as :class:`Rope`, over the heads of the output. Bytes moved per element: as :class:`Rope`.
    """

    def __init__(self, variant):
        of_q, of_k = variant.dims["hq"], variant.dims["hk"]
        heads = None if of_q is None else of_q + 2 * of_k
        super().__init__(variant, ("dq", "dk", "dv"), "dqkv", -1.0, heads)

    def _source(self, sources, token, head, d):
        # For a head that a source does not have, its address is not used.
        of_q = head_count(sources[0])
        rotated = of_q + head_count(sources[1])
        q, k, v = (
            head_address(m, key, token, head - begin, d)
            for m, key, begin in zip(sources, self.sources, (0, of_q, rotated))
        )
        return cutlass.select_(head < of_q, q, cutlass.select_(head < rotated, k, v))

    def _rotates(self, sources, rotated, head):
        return rotated & (head < head_count(sources[0]) + head_count(sources[1]))


class GatheredRope(Rope):
    """The rotation by the rows of the tables that the tokens' positions name, or back with ``inverse``.

    Tile as :class:`Rope`: a thread loads the position of its token while its heads are in flight. Tables of a few
    thousand positions stay in L2. Bytes moved per element: x, out and the positions once.
    """

    def __init__(self, variant):
        super().__init__(variant, sign=-1.0 if variant.attrs["inverse"] else 1.0)
        self.positions, self.strict = variant.tensors["positions"], variant.attrs["strict"]

    @cute.jit
    def __call__(self, mX, mPositions, mCos, mSin, mOut, stream):
        d, r = self.rotary.sizes(mX, mCos)
        blocks = (row_count(mOut, inner=2) * self._items(mOut, d, r) + (self.threads - 1)) // self.threads
        self.kernel((mX, mPositions), mCos, mSin, mOut).launch(
            grid=[Int32(blocks), 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.pdl
        )

    def _place(self, mX, mCos, d, r):
        tidx, bidx, chunks = cute.arch.thread_idx()[0], cute.arch.block_idx()[0], self.rotary.chunks(d, r)
        token, item = split_index(Int64(bidx) * self.threads, tidx, self._items(mX, d, r))
        group, groups = item // chunks, self._groups(mX)
        heads = [group + u * groups for u in range(self.per_thread)]
        return token, token, token < row_count(mX, inner=2), item - group * chunks, heads

    def _angles(self, sources, tables, row, chunk, wanted):
        position = Int64(number_or(sources[1], self.positions, row, wanted, 0))
        there = (position >= 0) & (position < extent(tables[0], 0))
        if const_expr(self.strict):
            trap_unless(there)
        found = super()._angles(sources, tables, position, chunk, wanted & there)
        for rTable in found:
            nan_unless(there, rTable)
        return found
