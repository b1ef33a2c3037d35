"""Sums of gradients in float32, to which CTAs add, and the kernels that round them."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from cute_ops.kernels.attention.config import MMA_ROWS
from cute_ops.kernels.attention.tensors import address_of, row_at
from cute_ops.kernels.attention.tiles import Sizes
from cute_ops.kernels.lib.copy import fragment, load, store
from cute_ops.kernels.tensor_core.sizes import MMA_M, WARP, WARPGROUP

CHUNK = 8  # elements of a row that a thread rounds
THREADS = 256  # of a CTA that rounds
TOGETHER = 4  # elements that a thread adds at once: two columns of two rows


class SumsOfQueries:
    """Base of kernels by warps that add to dq. A subclass has ``tiles``, ``d`` and ``_round_chunk``, which knows how
    sums lie in a tile. Sums have whole tiles.
    """

    @cute.jit
    def finish(self, mSums, outs: cutlass.Constexpr, packed: cutlass.Constexpr, stream):
        """Launch the kernel that rounds dq. ``packed``: sizes, where sums are those of packed sequences' tiles."""
        (mDq,) = outs
        vectors = elements_of(mDq if packed is None else mSums) // CHUNK
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
        if index < elements_of(rows) // CHUNK:
            row, head, batch = row_at(row_index, seqlen, heads)
            token, given = row, Boolean(True)
            if const_expr(packed is not None):
                token, given = self.tiles.token_of(row, Sizes(*packed))
            if given:
                self._round_chunk(mSums, mDq, (row, token, head, batch), chunk)


class SumsOfTiles:
    """Base of kernels by warpgroups that add to gradients. A subclass has ``tiles``, ``d`` and ``scale``. Sums have
    whole tiles, in which accumulators lie as threads have them, :data:`TOGETHER` of each thread side by side.

    Attributes:
        width: columns of sums.
        axis: whether tiles are of queries, 0, or of keys, 1.
        sharing: warpgroups that share the columns of a tile.
        apart: rows between two of which a thread has numbers side by side.
        shares: parts of a tile that lie behind one another, each a warpgroup's: of its columns where they are shared,
            else of its rows; or 1.
    """

    axis, sharing, shares, apart = 0, 1, 1, 8

    @property
    def width(self):
        return self.d

    @cute.jit
    def finish(self, mSums, outs: cutlass.Constexpr, packed: cutlass.Constexpr, stream, parts=None):
        """Launch the kernel that rounds gradients.

        Args:
            mSums: (tokens, d, heads, batches); batches of one gradient follow those of the other.
            outs: gradients: of queries; or of keys, and of values.
            packed: sizes, where sums are those of packed sequences' tiles.
            parts: how many sums are added, all gradients of one after those of another; None is one.
        """
        pairs = elements_of(mSums) // (2 * CHUNK)
        if const_expr(parts is not None):
            pairs = pairs // parts
        self.round(mSums, tuple(outs), packed, parts).launch(
            grid=[Int32((pairs + (THREADS - 1)) // THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def round(self, mSums, outs, packed, parts):
        """Write a chunk of two rows, 8 apart, with each thread."""
        index = Int64(cute.arch.block_idx()[0]) * THREADS + cute.arch.thread_idx()[0]
        length, heads, batches = (Int32(mSums.shape[i]) for i in (0, 2, 3))
        pairs = elements_of(mSums) // (2 * CHUNK)
        if const_expr(parts is not None):
            batches, pairs = batches // parts, pairs // parts
        pair_index, chunk = index // (self.width // CHUNK), Int32(index % (self.width // CHUNK))
        if index < pairs:
            pair, head, which = row_at(pair_index, length // 2, heads)
            apart = self.apart
            row, last = pair // apart * (2 * apart) + pair % apart, batches
            rows, batches = self._load_rows(mSums, (row, head, which), chunk), batches // len(outs)
            if const_expr(parts is not None):
                for part in cutlass.range(1, parts, unroll=1):
                    for rX, rMore in zip(rows, self._load_rows(mSums, (row, head, part * last + which), chunk)):
                        rX.store(rX.load() + rMore.load())
            for i, rX in enumerate(rows):
                token, given = row + apart * i, row + apart * i < Int32(outs[0].shape[0])
                if const_expr(packed is not None):
                    token, given = self.tiles.token_of(row + apart * i, Sizes(*packed), self.axis)
                for j, (mOut, scale) in enumerate(zip(outs, (self.scale, 1.0))):
                    if given & (len(outs) == 1 or (which >= batches) == bool(j)) & (chunk < mOut.shape[1] // CHUNK):
                        rOut = fragment(mOut.element_type, CHUNK)
                        rOut.store((rX.load() * Float32(scale)).to(mOut.element_type))
                        store(rOut, address_of(mOut, (token, chunk * CHUNK, head, which - j * batches)))

    def _load_rows(self, mSums, at, chunk):
        """A chunk of two rows, which four threads have; ``at``: the first row, the head and the batch."""
        row, head, which = at
        size, columns = (self.tiles.tile_q, self.tiles.tile_k)[self.axis], self.width // CHUNK // self.sharing
        if self.shares > self.sharing:  # a share has rows of a tile
            size = size // self.shares
        place = row % size
        threads = size // MMA_ROWS * WARP
        number = place // MMA_ROWS * WARP + place % 8 * 4
        if self.sharing > self.shares:  # warpgroups' columns lie side by side
            number += chunk % columns * (self.sharing * threads) + chunk // columns * threads
        else:
            number += chunk * threads
        first = address_of(mSums, (row - place, 0, head, which), number * TOGETHER)
        rows, rX = [fragment(Float32, CHUNK) for _ in range(2)], fragment(Float32, TOGETHER)
        for i in range(CHUNK // 2):
            load(rX, first + i * (TOGETHER * Float32.width // 8))
            for j in range(TOGETHER):
                rows[j // 2][2 * i + j % 2] = rX[j]
        return rows


class PartsOfKeys(SumsOfTiles):
    """Gradients of keys and values of which each of several CTAs has a part, of some of the heads that share them."""

    axis = 1

    def __init__(self, tiles, d, scale):
        self.tiles, self.d, self.scale = tiles, d, scale

    @property
    def threads(self):
        """That have a tile."""
        return self.tiles.tile_k // MMA_ROWS * WARP

    def put(self, mParts, gradients, place, thread):
        """Write a part of a tile. ``place``: the tile, the head, and the number of the first gradient's batch and of
        the other's.
        """
        tile, head, batches = place
        rX = fragment(Float32, TOGETHER)
        for rSums, batch in zip(gradients, batches):
            address = address_of(mParts, (tile * self.tiles.tile_k, 0, head, batch), thread * TOGETHER)
            for block in range(cute.size(rSums) // TOGETHER):
                for i in range(TOGETHER):
                    rX[i] = rSums[TOGETHER * block + i]
                store(rX, address + block * (self.threads * TOGETHER * Float32.width // 8))


class PartsByColumns(PartsOfKeys):
    """:class:`PartsOfKeys` of gradients that warpgroups have transposed: each of them that of half of a tile's keys."""

    apart = 1

    @property
    def threads(self):
        return 2 * WARPGROUP

    def _load_rows(self, mSums, at, chunk):
        """A chunk of two neighbouring rows, which eight threads have: each two columns, 8 apart, of both."""
        row, head, which = at
        keys, place = self.tiles.tile_k // 2, row % self.tiles.tile_k
        part, column, own = chunk * CHUNK // MMA_M, chunk * CHUNK % MMA_M, place % keys
        thread = place // keys * WARPGROUP + column // MMA_ROWS * WARP + own % 8 // 2
        number = (part * (keys // 8) + own // 8) * (2 * WARPGROUP) + thread
        at = row - place, 0, head, which
        return neighbouring_rows(address_of(mSums, at, number * TOGETHER + column % MMA_ROWS // 8 * 2))


def neighbouring_rows(first):
    """What :meth:`SumsOfTiles._load_rows` returns of transposed sums, from the address of both rows' first column on:
    eight threads, each the fourth behind the one before, have a column of both rows side by side.
    """
    rows, rX = [fragment(Float32, CHUNK) for _ in range(2)], fragment(Float32, 2)
    for i in range(CHUNK):
        load(rX, first + i * (WARP // 8 * TOGETHER * Float32.width // 8))
        for j in range(2):
            rows[j][i] = rX[j]
    return rows


@cute.jit
def add_bytes(address: Int64, source: Int32, count: cutlass.Constexpr):
    """Let TMA add so many bytes of numbers in float32 in shared memory to neighbours in memory. All lanes of a warp
    call it.
    """
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
            read_only_args=[address, source, Int32(count)],
        )


def elements_of(m):
    """How many elements a tensor has: ``cute.size`` of sizes in 32 bits wraps from 2^31 on."""
    count = Int64(1)
    for size in m.shape:
        count *= size
    return count


@dsl_user_op
def add_four(address, values, *, loc=None, ip=None):
    """Add four numbers in float32 to neighbours in memory, 16 bytes that are aligned."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), *(Float32(x).ir_value(loc=loc, ip=ip) for x in values)]
    llvm.inline_asm(
        None, operands, "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};", "l,f,f,f,f",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
    )  # fmt: skip
