"""Parts that the kernels of latent attention share: the work of CTAs, where latents lie, and the results of rows."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_ops.kernels.attention.combine import Combine, Results, store_pairs
from cute_ops.kernels.attention.config import MlaConfig
from cute_ops.kernels.attention.pages import page_of, table_entry
from cute_ops.kernels.lib.activation import LOG2_E
from cute_ops.kernels.lib.pdl import can_use_pdl


class Tensors(NamedTuple):
    """The op's arguments."""

    q: Any
    latent_cache: Any
    lengths: Any
    page_table: Any
    out: Any
    lse: Any
    partial: Any
    partial_lse: Any


class Work(NamedTuple):
    """The work of a CTA: a block of a sequence's rows, and the blocks of its keys from ``begin`` to ``end``."""

    batch: Any
    block: Any
    split: Any
    splits: Any
    keys: Any
    begin: Any
    end: Any


class Latent:
    """A kernel of latent attention. A CTA has ``config.rows`` rows, the queries of a sequence's heads, and blocks of
    ``config.keys`` keys.
    """

    def __init__(self, variant):
        self.variant, self.config = variant, MlaConfig.of(variant.config)
        dims = variant.dims
        self.d, self.heads, self.queries, self.e = dims["d"], dims["h"], dims["s"], variant.attrs["rank"]
        self.rows, self.blocks = self.heads * self.queries, -(-self.heads * self.queries // self.config.rows)
        self.log2_scale = variant.attrs["scale"] * LOG2_E
        self.pdl = can_use_pdl(variant.arch)
        self.combine = Combine(self.e, self.pdl)

    @cute.jit
    def combine_parts(self, tensors: cutlass.Constexpr, splits, stream):
        """Combine the results of splits of keys."""
        if splits > 1:
            results = Results(tensors.partial, tensors.partial_lse, None, tensors.out, tensors.lse)
            self.combine(results, splits, stream)

    def work(self, tensors, splits):
        """The CTA's part; blocks of rows that read the same keys run together."""
        bidx = cute.arch.block_idx()[0]
        index = bidx // self.blocks
        batch, size = index // splits, Int32(tensors.latent_cache.shape[1])
        if self.config.paged:
            size = size * Int32(tensors.page_table.shape[1])
        # In 64 bits, before it is cut: a length may be any number.
        keys = Int32(cutlass.max(cutlass.min(Int64(tensors.lengths[batch]), Int64(size)), Int64(0)))
        count, split = cute.ceil_div(keys, self.config.keys), index - batch * splits
        if self.config.split_keys:
            per_split = Int32(self.config.split_keys // self.config.keys)
        else:
            per_split = cute.ceil_div(count, splits)
        begin = split * per_split
        return Work(
            batch, bidx - index * self.blocks, split, splits, keys, begin, cutlass.min(count, begin + per_split)
        )

    def entry(self, tensors, work, key):
        """What the table has for a key, or the sequence; -1 where there is none. See :meth:`page`."""
        return self.found(tensors, work, self.place(tensors, key)[0], key)

    def found(self, tensors, work, index, key):
        """:meth:`entry` of a key in a known one of the table's pages."""
        if not self.config.paged:
            return cutlass.select_(key < work.keys, work.batch, Int32(-1))
        return table_entry(tensors.page_table, work.batch, index, key < work.keys)

    def place(self, tensors, key):
        """Which of the table's pages a key is in, and its slot; of contiguous caches the slot is the key."""
        size = Int32(tensors.latent_cache.shape[1])
        return (key // size, key % size) if self.config.paged else (Int32(0), key)

    def page(self, tensors, entry):
        """The page of a key, or the sequence; -1 where there is none."""
        return page_of(entry, tensors.latent_cache) if self.config.paged else entry

    def entries(self, tensors, count):
        """Registers for as many entries."""
        return cute.make_rmem_tensor(count, tensors.page_table.element_type if self.config.paged else Int32)

    def latent(self, mX, entry, slot):
        """Byte address of the latent in a slot of a page, or of a sequence."""
        return mX.iterator.toint() + (Int64(entry) * mX.stride[0] + Int64(slot) * mX.stride[1]) * 2

    def address(self, mX, work, row, column):
        """Byte address of an element of q or out."""
        token, head = row // self.heads, row % self.heads
        at = Int64(work.batch) * mX.stride[0] + Int64(token) * mX.stride[1] + Int64(head) * mX.stride[2] + column
        return mX.iterator.toint() + at * 2

    @cute.jit
    def leave_out(self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, tidx):
        """Say that a part has no key."""
        if tidx < self.config.rows:
            row = work.block * self.config.rows + tidx
            if row < self.rows:
                tensors.partial_lse[Int64(work.batch) * self.rows + row, work.split] = -Float32.inf

    @cute.jit
    def store(
        self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, found: cutlass.Constexpr, of_row: cutlass.Constexpr
    ):
        """Divide a row's sums of values by its sum of weights, and store two columns at once.

        Args:
            found: the row's largest score, of base 2, and its sum of weights.
            of_row: the thread's accumulators by row, which of its rows, and the row, the first column and whether this
                thread stores the log-sum-exp. Columns are pairs, 8 apart.
        """
        (largest, total), (values, r, (row, column, one)) = found, of_row
        if row < self.rows:
            if work.splits == 1:
                lse, factor = self.combine.finish(largest, total, None)
                if one:
                    tensors.lse[work.batch, row % self.heads, row // self.heads] = lse
                store_pairs(values, r, factor, self.address(tensors.out, work, row, column), tensors.out.element_type)
            else:
                lse, factor = self.combine.of_part(largest, total)
                place = Int64(work.batch) * self.rows + row
                if one:
                    tensors.partial_lse[place, work.split] = lse
                address = tensors.partial.iterator.toint()
                address = address + ((place * work.splits + work.split) * self.e + column) * 4
                store_pairs(values, r, factor, address, Float32)
