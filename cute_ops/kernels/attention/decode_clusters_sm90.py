"""Attention of a few queries to caches by clusters of CTAs, which combine parts of the keys in shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_ops.kernels.attention.decode_attention_sm90 import DecodeAttentionSm90
from cute_ops.kernels.lib.copy import fragment


class DecodeAttentionInClusters(DecodeAttentionSm90):
    """:class:`DecodeAttentionSm90` whose cluster has all parts of a row's keys.

    A CTA keeps its part's results where the first warp's sums were, and their log-sum-exp where factors of queries
    were. Each CTA then has some columns of the rows, reads them from all CTAs, and adds them from the first part to the
    last.
    """

    @cute.jit
    def _keep_nothing(self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, of: cutlass.Constexpr, tidx):
        _, sScores = of
        if tidx < self.config.rows:
            sScores[tidx] = -Float32.inf

    @cute.jit
    def _store_part(
        self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, results: cutlass.Constexpr, at: cutlass.Constexpr,
        rX: cutlass.Constexpr,
    ):  # fmt: skip
        (sValues, _, sScores), (row, column, lse) = results, at
        # No other thread reads these columns of the row.
        for j in cutlass.range_constexpr(4):
            sValues[row, column + j, 0] = rX[j]
        if column == 0:
            sScores[row] = lse

    @cute.jit
    def _combine_parts(self, tensors: cutlass.Constexpr, work: cutlass.Constexpr, shared: cutlass.Constexpr, tidx):
        (sValues, sScores), across, parts = shared, self.e // 4, self.config.cluster
        threads, first = self.threads + self.producers, work.block * self.config.rows
        # All CTAs have kept their part.
        meet()
        for start in cutlass.range_constexpr(0, self.config.rows * across, parts * threads):
            index = start + work.split * threads + tidx
            at, column = index // across, index % across * 4
            if (index < self.config.rows * across) & (first + at < self.rows):
                scores = [load_of_peer(sScores.iterator + at, i, 1)[0] for i in range(parts)]
                values = [load_of_peer(sValues.iterator + (at * self.e + column), i, 4) for i in range(parts)]
                largest, total, rX = -Float32.inf, Float32(0.0), fragment(Float32, 4, 0)
                for i in cutlass.range_constexpr(parts):
                    largest = cute.arch.fmax(largest, scores[i])
                for i in cutlass.range_constexpr(parts):
                    share = self.combine.share(scores[i], largest)
                    total = total + share
                    for j in cutlass.range_constexpr(4):
                        # A part without a key has no result.
                        rX[j] = rX[j] + cutlass.select_(share > 0.0, share * values[i][j], Float32(0.0))
                token, head = self._of_row(first + at, work)
                sink = None if tensors.sinks is None else Float32(tensors.sinks[head])
                found = self.combine.finish(largest, total, sink)
                self._store_row(tensors, (work.batch, token, head, column), rX, found)
        # A CTA's shared memory is there until all have read it.
        meet()


def meet():
    """Wait until all CTAs of the cluster are here, and see what they have stored in shared memory."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def load_of_peer(pointer, peer, count):
    """One float32 number, or four, of the shared memory of a CTA of the cluster, where this CTA has ``pointer``."""
    names = [f"{{$w{i}}}" for i in range(count)]
    vector, to = (".v4", "{" + ", ".join(names) + "}") if count == 4 else ("", names[0])
    found = cute.arch.inline_ptx(
        f"ld.shared::cluster{vector}.f32 {to}, [{{$r0}}];", write_only_types=[Float32] * count,
        read_only_args=[Int32(cute.arch.map_dsmem_ptr(pointer, Int32(peer)).toint())],
    )  # fmt: skip
    return found if count > 1 else (found,)
