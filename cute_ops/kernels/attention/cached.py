"""Parts that attention to caches adds to attention: lengths, scales, and parts of keys."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.kernels.attention.combine import Combine, Results, store_pairs
from cute_ops.kernels.attention.lazy_softmax import LazySoftmax
from cute_ops.kernels.attention.mods import by_index
from cute_ops.kernels.attention.registers import by_row
from cute_ops.kernels.attention.softmax import OnlineSoftmax
from cute_ops.kernels.attention.tiles import Sizes
from cute_ops.kernels.lib.arguments import by_name
from cute_ops.kernels.lib.matrix import folded
from cute_ops.kernels.lib.pdl import can_use_pdl

OWN_NAMES = {"q", "k", "v", "cu_seqlens_q", "lengths", "page_table", "sinks", "k_scale", "v_scale", "out", "lse",
             "partial", "partial_lse"}  # fmt: skip


class Cached:
    """A mixin for kernels of keys in caches; the next base is the kernel without caches, a
    :class:`~cute_ops.kernels.attention.forward.ForwardKernel`.

    Each sequence has as many keys as its length says. If there are few blocks of queries, the keys of each are split: a
    CTA takes one part, and :class:`Combine` combines the results of all parts in a fixed order.
    """

    def __init__(self, variant):
        super().__init__(variant)
        self.variant, self.float8 = variant, ITEMSIZE[variant.tensors["k"].dtype] == 1
        # Never a :class:`CappedSoftmax`, which takes products before they are scaled and missing keys are hidden.
        if not isinstance(self.softmax, LazySoftmax):
            self.softmax = OnlineSoftmax(*self.mods.outer, self.softmax.growth)
        self.combine = Combine(self.dv, can_use_pdl(variant.arch))

    def _given(self, arguments):
        """The arguments by name."""
        return by_name(self.variant, arguments)

    def _sizes(self, given, mQ):
        """The sizes of a call, of queries (seqlen, d, heads, batch)."""
        captured = [given[name] for name in given if name not in OWN_NAMES and not name.startswith("ranges_of_")]
        mK, mTable = given["k"], given.get("page_table")
        capacity = Int32(mK.shape[1])
        if mTable is not None:
            capacity = capacity * Int32(mTable.shape[1])
        heads, kv_heads = Int32(cute.size(mQ, mode=[2])), Int32(mK.shape[2])
        return Sizes(
            Int32(cute.size(mQ, mode=[0])), capacity, heads, heads // kv_heads, Int32(cute.size(given["lengths"])),
            by_index(captured, self.mods), (given["ranges_of_queries"], given["ranges_of_keys"]),
            (given["cu_seqlens_q"], None) if self.packed else None, keys=given["lengths"],
            scales=(given.get("k_scale"), given.get("v_scale")), parts=(given["partial"], given["partial_lse"]),
        )  # fmt: skip

    @cute.jit
    def _combine(self, given: cutlass.Constexpr, sizes: cutlass.Constexpr, stream):
        """Combine the results of parts."""
        if sizes.splits > 1:
            out, lse = folded(given["out"], own=3), folded(given["lse"], own=2)
            self.combine(Results(*sizes.parts, given.get("sinks"), out, lse), sizes.splits, stream)

    def _count(self, sizes):
        return super()._count(sizes) * sizes.splits

    def _together(self, sizes):
        return super()._together(sizes) * sizes.splits

    def _tile(self, index, sizes):
        number = index // sizes.splits
        tile, own = super()._tile(number, sizes)
        return tile, own._replace(part=index - number * sizes.splits)

    def _keys_of(self, tile, own):
        """The first and the last tile of a block's part; all parts but the last have equally many tiles."""
        first, last = super()._keys_of(tile, own)
        each = cutlass.max(cute.ceil_div(last - first + 1, own.splits), 0)
        last = last - own.part * each
        return cutlass.max(first, last - each + 1), last

    @cute.jit
    def _scale_scores(self, rS, tile: cutlass.Constexpr, sizes: cutlass.Constexpr):
        mScale = sizes.scales[0]
        if const_expr(mScale is not None):
            rS.store(rS.load() * mScale[tile.head // sizes.heads_per_kv])

    def _of_values(self, factors, at):
        (tile, sizes, _), mScale = at, at[1].scales[1]
        if mScale is not None:
            for r in range(2):
                factors[r] = factors[r] * mScale[tile.head // sizes.heads_per_kv]

    @cute.jit
    def _store_part(self, rX, sums: cutlass.Constexpr, row, at: cutlass.Constexpr):
        """Divide a part's sums of two rows, 8 apart, by their sums of weights, and store them.

        Args:
            rX: sums of values.
            sums: of each row the largest score and the thread's sum of weights.
            row: the first of the two queries.
            at: tile, sizes, and the thread's lane.
        """
        (rMax, rSum), (tile, sizes, lane), values = sums, at, by_row(rX)
        (mPartial, mPartialLse), factors = sizes.parts, cute.make_rmem_tensor(2, Float32)
        for r in cutlass.range_constexpr(2):
            total = rSum[r]
            for offset in (2, 1):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            lse, factors[r] = self.combine.of_part(self.softmax.log2(rMax[r]), total)
            query = row + 8 * r
            if (lane % 4 == 0) & (query < sizes.seqlen_q):
                mPartialLse[sizes.row_of_query(tile, query), sizes.part] = lse
        self._of_values(factors, at)
        for r in cutlass.range_constexpr(2):
            query = row + 8 * r
            if query < sizes.seqlen_q:
                place = sizes.row_of_query(tile, query) * sizes.splits + sizes.part
                address = mPartial.iterator.toint() + (Int64(place) * self.dv + lane % 4 * 2) * 4
                store_pairs(values, r, factors[r], address, Float32)


@cute.jit
def hide_missing(scores, there: cutlass.Constexpr, keys: cutlass.Constexpr, lane):
    """Hide keys whose page is outside of the pool.

    Args:
        scores: a thread's, by row.
        there: words with a bit for each of ``keys`` keys: whether the key is there; None if all are.
        keys: of a word.
        lane: of the thread.
    """
    if const_expr(there is not None):
        every = Int32(-1 if keys == 32 else (1 << keys) - 1)
        whole = cutlass.Boolean(True)
        for word in there:
            whole = whole & ((word & every) == every)
        if not whole:
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                column = 8 * (c // 2)
                bits = there[column // keys] >> (column % keys + lane % 4 * 2 + c % 2)
                for r in cutlass.range_constexpr(2):
                    scores[r, c] = cutlass.select_((bits & 1) != 0, scores[r, c], -Float32.inf)
