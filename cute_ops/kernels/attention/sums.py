"""Sums of the gradient of queries in float32, to which CTAs add, and the kernel that rounds them."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_ops.kernels.attention.tiles import Sizes, address_of, row_at
from cute_ops.kernels.lib.copy import fragment, load, store

CHUNK = 8  # elements of dq that stay neighbours in the workspace
THREADS = 256  # of a CTA that rounds dq


class SumsOfQueries:
    """What kernels have that add to dq: ``tiles``, ``d``, ``scale``. Sums have whole tiles.

    Attributes:
        chunks: neighbouring chunks that change places by the row.
    """

    chunks = 1

    @cute.jit
    def finish(self, mSums, mDq, packed: cutlass.Constexpr, stream):
        """Launch the kernel that rounds dq. ``packed``: sizes, where sums are those of packed sequences' tiles."""
        vectors = Int64(cute.size(mDq if packed is None else mSums)) // CHUNK
        self.round(mSums, mDq, packed).launch(
            grid=[Int32((vectors + (THREADS - 1)) // THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def round(self, mSums, mDq, packed):
        """Write a chunk of dq with each thread."""
        index = Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
        rows = mDq if const_expr(packed is None) else mSums
        seqlen, heads = Int32(rows.shape[0]), Int32(rows.shape[2])
        row_index, chunk = index // (self.d // CHUNK), Int32(index % (self.d // CHUNK))
        if index < Int64(cute.size(rows)) // CHUNK:
            row, head, batch = row_at(row_index, seqlen, heads)
            token, given = row, Boolean(True)
            if const_expr(packed is not None):
                token, given = self.tiles.token_of(row, Sizes(*packed))
            if given:
                self._round_chunk(mSums, mDq, (row, token, head, batch), chunk)

    def _round_chunk(self, mSums, mDq, at, chunk):
        row, token, head, batch = at
        rX, rOut = fragment(Float32, CHUNK), fragment(mDq.element_type, CHUNK)
        load(rX, address_of(mSums, (row, (chunk ^ (row % self.chunks)) * CHUNK, head, batch)))
        rOut.store((rX.load() * Float32(self.scale)).to(mDq.element_type))
        store(rOut, address_of(mDq, (token, chunk * CHUNK, head, batch)))


@dsl_user_op
def add_four(address, values, *, loc=None, ip=None):
    """Add four numbers in float32 to neighbours in memory, 16 bytes that are aligned."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in values)]
    llvm.inline_asm(
        None, operands, "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
