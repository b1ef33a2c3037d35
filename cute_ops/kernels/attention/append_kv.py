"""Stores keys and values of new tokens in a cache: see :mod:`cute_ops.ops.attention.append_kv`."""

import math
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.attention.config import AppendConfig
from cute_ops.kernels.lib.arguments import named
from cute_ops.kernels.lib.copy import fragment, load_if, store_if
from cute_ops.kernels.lib.fp8 import to_fp8
from cute_ops.kernels.lib.pdl import can_use_pdl, let_next_start, wait_for_previous
from cute_ops.kernels.lib.row_copy import load_number
from cute_ops.kernels.lib.row_layout import extent, row_count, strided_offset
from cute_ops.kernels.rotary.layout import Rotary, wide


class Tensors(NamedTuple):
    """The op's arguments; without a rotation the tables are None, and so are scales that the call does not have."""

    k_cache: Any
    v_cache: Any
    k: Any
    v: Any
    slots: Any
    cos: Any
    sin: Any
    k_scale: Any
    v_scale: Any


class Work(NamedTuple):
    """What a thread copies: a segment of one token's heads, to the slot of the caches that the token has."""

    token: Any
    slot: Any
    segment: Any


class Heads:
    """The heads, of ``size`` elements each, at one index of the dims before them: those of a token, or of a slot of a
    cache.
    """

    def __init__(self, mX, key, index, size):
        lead, itemsize = len(mX.shape) - 2, ITEMSIZE[key.dtype]
        if key.layout == "flat":
            offset, step = index * (extent(mX, lead) * size), Int64(size)
        else:
            offset, step = strided_offset(mX, index, lead), Int64(mX.stride[lead])
        self.start, self.step, self.itemsize = mX.iterator.toint() + offset * itemsize, step * itemsize, itemsize

    def address(self, head, column):
        return self.start + Int64(head) * self.step + Int64(column) * self.itemsize


class AppendKV:
    """``k_cache[slots[token]] = k[token]``, and v likewise, for each token whose slot is in the cache; k is rotated if
    there are tables of cosines and sines. Where there are scales, numbers are divided by that of their head.

    Tile: ``threads_per_token`` threads copy a segment of one token's keys or values, ``unroll`` vectors each, and a CTA
    takes the same segment of several tokens. All loads of a segment are issued before the token's slot is known. A
    vector lies within a head and is as wide as the alignment of the new tensor and the cache allows. For keys that are
    rotated a thread takes chunks of two vectors, see :class:`Rotary`. No shared memory.
    Bytes moved per element: k and v are read once and written to the caches once; no cache is read.
    """

    def __init__(self, variant):
        self.variant, self.keys = variant, variant.tensors
        config = AppendConfig.of(variant.config)
        self.lanes, self.unroll = config.threads_per_token, config.unroll
        self.depth = max(config.threads // self.lanes, 1)
        self.size = {"k": variant.dims["d"], "v": variant.dims["e"]}
        self.vec = {name: self._elements(name) for name in self.size}
        rotated = self.keys.get("cos") is not None
        self.rotary = Rotary(variant, ("k", "k_cache"), variant.attrs["interleaved"]) if rotated else None
        self.pairs = max(self.unroll // 2, 1)
        self.pdl, self.float8 = can_use_pdl(variant.arch), ITEMSIZE[self.keys["k_cache"].dtype] == 1

    def _elements(self, name):
        """Elements of a vector."""
        keys = self.keys[name], self.keys[f"{name}_cache"]
        return math.gcd(self.size[name], *(min(VECTOR_BYTES, k.align, k.row_align) // ITEMSIZE[k.dtype] for k in keys))

    @cute.jit
    def __call__(self, *arguments):
        tensors = named(Tensors, self.variant, arguments)
        groups = (row_count(tensors.slots, inner=0) + (self.depth - 1)) // self.depth
        segments = self._of_keys(tensors.k) + self._segments(tensors.v, "v")
        self.kernel(tensors).launch(
            grid=[Int32(groups * segments), 1, 1],
            block=[self.lanes, self.depth, 1],
            stream=arguments[-1],
            use_pdl=self.pdl,
        )

    def _vectors(self, mX, name):
        """Vectors of a token."""
        return Int32(extent(mX, len(mX.shape) - 2)) * (self.size[name] // self.vec[name])

    def _segments(self, mX, name):
        span = self.lanes * self.unroll
        return (self._vectors(mX, name) + (span - 1)) // span

    def _chunks(self, mK):
        """Chunks of a token's keys."""
        return Int32(extent(mK, len(mK.shape) - 2)) * self.rotary.chunks(self.rotary.d, self.rotary.r)

    def _of_keys(self, mK):
        """Segments of a token's keys."""
        if self.rotary is None:
            return self._segments(mK, "k")
        span = self.lanes * self.pairs
        return (self._chunks(mK) + (span - 1)) // span

    @cute.kernel
    def kernel(self, tensors):
        _, level, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        of_keys, of_values = self._of_keys(tensors.k), self._segments(tensors.v, "v")
        group = bidx // (of_keys + of_values)
        segment = bidx - group * (of_keys + of_values)
        token = Int64(group) * self.depth + level
        let_next_start(self.pdl)
        wait_for_previous(self.pdl)
        if token < row_count(tensors.slots, inner=0):
            slot = Int64(load_number(tensors.slots, self.keys["slots"], token))
            if segment < of_keys:
                work = Work(token, slot, segment)
                if const_expr(self.rotary is None):
                    self._append("k", (tensors.k, tensors.k_cache, tensors.k_scale), work)
                else:
                    self._append_rotated(tensors, work)
            else:
                values = tensors.v, tensors.v_cache, tensors.v_scale
                self._append("v", values, Work(token, slot, segment - of_keys))

    def _append(self, name, tensors, work):
        """Copy a segment of a token's heads to its slot, if the cache has that slot."""
        lane, _, _ = cute.arch.thread_idx()
        (mX, mCache, mScale), (token, slot, segment) = tensors, work
        size, vec, count = self.size[name], self.vec[name], self._vectors(mX, name)
        source, held = Heads(mX, self.keys[name], token, size), []
        for u in range(self.unroll):
            vector, rX = (segment * self.unroll + u) * self.lanes + lane, fragment(mX.element_type, vec)
            head = vector // (size // vec)
            column = vector * vec - head * size
            load_if(vector < count, rX, source.address(head, column))
            held.append((rX, vector < count, head, column))
        target = Heads(mCache, self.keys[f"{name}_cache"], slot, size)
        wanted = self._has_slot(slot, mCache)
        for rX, there, head, column in held:
            if const_expr(self.float8 or mScale is not None):
                rX = self._rounded(rX.load().to(Float32) * self._inverse(mScale, there, head), mCache, vec)
            store_if(there & wanted, rX, target.address(head, column))

    def _append_rotated(self, tensors, work):
        """Rotate a segment of a token's keys by the token's angles and copy it to the token's slot."""
        lane, _, _ = cute.arch.thread_idx()
        mK, mCache, (token, slot, segment) = tensors.k, tensors.k_cache, work
        rotary, dtype, count = self.rotary, mCache.element_type, self._chunks(mK)
        d, r = rotary.sizes(mK, tensors.cos)
        source, held = Heads(mK, self.keys["k"], token, d), []
        for u in range(self.pairs):
            index = (segment * self.pairs + u) * self.lanes + lane
            head = index // rotary.chunks(d, r)
            chunk = rotary.chunk(index - head * rotary.chunks(d, r), d, r)
            rX = rotary.load(mK.element_type, source.address(head, 0), index < count, chunk)
            held.append((rX, index < count, head, chunk))
        # As they are: to widen one would wait for it before the next one is asked for.
        row, tables = rotary.row(tensors.cos, token), []
        for _, there, _, chunk in held:
            each = enumerate((tensors.cos, tensors.sin))
            tables.append([rotary.table(m, i, row, chunk, there & chunk.rotated) for i, m in each])
        target, wanted = Heads(mCache, self.keys["k_cache"], slot, d), self._has_slot(slot, mCache)
        for (rX, there, head, chunk), rTables in zip(held, tables):
            rX = wide(rX)
            rotary.rotate(rX, *map(wide, rTables), chunk.rotated)
            if const_expr(tensors.k_scale is not None):
                rX.store(rX.load() * self._inverse(tensors.k_scale, there, head))
            rotary.store(rX, dtype, target.address(head, 0), there & wanted, chunk, streaming=False)

    @cute.jit
    def _inverse(self, mScale, there, head):
        """The factor of a head's numbers on their way to the cache."""
        inverse = Float32(1.0)
        if const_expr(mScale is not None):
            if there:
                inverse = 1.0 / mScale[head]
        return inverse

    def _rounded(self, x, mCache, vec):
        """A vector as a fragment of the cache's numbers."""
        if self.float8:
            return to_fp8(x, vec)
        rX = fragment(mCache.element_type, vec)
        rX.store(x.to(mCache.element_type))
        return rX

    def _has_slot(self, slot, mCache):
        """Whether the cache has the slot."""
        return (slot >= 0) & (slot < extent(mCache, 0) * extent(mCache, 1))
