"""Heuristics and search space of the kernels of expressions with reductions of rows.

Lengths are in 16-byte vectors of the tiles, which share a dtype. A span is what one CTA holds of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

from cute_ops.declaration.config import Config, Needs, Problem
from cute_ops.expressions.graph import Expression
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.expressions.stages import awaited, stages
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.rows.config import FusedRowConfig, Texts
from cute_ops.ops.rows import (
    CTA_VECTORS,
    LEAST_REGISTERS,
    LINE_VECTORS,
    MORE_VECTORS,
    RESERVED_BYTES,
    SHORTEST_ROW,
    SMEM_BYTES_IN_FLIGHT,
    SMEM_PER_THREAD,
    SMEM_SM_THREADS,
    SMEM_THREADS,
    SMEM_VECTORS,
    TWO_PASS_LONG_THREADS,
    TWO_PASS_THREADS,
    UNEVEN_THREADS,
    WIDEST_VECTOR,
    Ladder,
    RowProblem,
    alignment_in_step,
    cluster_for,
    even_threads,
    in_step,
    of_scheduler,
    period_of,
    resident_clusters,
    row_of,
    row_threads,
    step,
    threads_for,
    uneven_share,
    uneven_threads,
    vary_cluster,
    vary_resident,
    vary_threads,
)

# The most values that a thread keeps in float32 from stage to stage, besides the operands.
MOST_KEPT = 32
# Rows of several tiles in registers: the most threads of a CTA with one vector of each tile per thread. With 64
# registers per thread two CTAs fit an SM, so one loads while the other computes.
PAIR_THREADS = 512
# With random numbers, whose computation takes as long as the loads, longer rows than RANDOM_THREADS have two vectors a
# thread, in REGISTER_THREADS of an SM, others one, in SHORT_RANDOM_THREADS: dropout_add_rmsnorm of 16384 x 4096
# takes 134 us instead of 188, of 32768 x 1024 70 instead of 81.
RANDOM_THREADS, SHORT_RANDOM_THREADS = 128, 1536
# With MANY_REDUCTIONS it has two: every warp exchanges what it has reduced by shuffles, of which an SM does one in a
# cycle. An SM then has MANY_REDUCED_THREADS.
MANY_REDUCTIONS, MANY_REDUCED_THREADS = 3, 768
# Persistent clusters, by span: vectors of a thread, and threads of an SM that have registers for the sums of one row
# vector, as in the norms' backward. A thread adds up at most MOST_SUMMED vectors.
MOST_SUMMED = 10
PERSISTENT = ((384, (1, 1024)), (768, (2, 640)), (float("inf"), (4, 512)))
# Three sums and more: a thread's vectors, by span, with SEVERAL_SUMS threads of an SM for each that it adds up, or with
# PAIRS_OF_SUMS where it has two vectors; 0 for PERSISTENT's, with which shorter rows spill. The gradients of a gate, a
# shift, a scale and a bias, 16384 x 1152, run at 0.67 of a copy's rate, with PERSISTENT's at 0.34; of 3072 columns at
# 0.77, with one vector at 0.47; of 2048 at 0.67, with two at 0.66.
SUMMED_VECTORS = ((4 * WARP, 1), (7 * WARP, 2), (8 * WARP, 1), (12 * WARP, 2), (float("inf"), 0))
SEVERAL_SUMS, PAIRS_OF_SUMS = 2048, 400
# Threads of an SM where rows of 16 bits of up to a warp's vectors are reduced and two row vectors of sums taken: the
# gradient of a layer norm of heads of 64 runs at 0.92 of a copy's rate, by 1024, which spill, at 0.61.
SHORT_PAIRS_OF_SUMS = 768
# Two tiles beside what the rows of examples share, of up to so many vectors: two vectors of a thread, all of which keep
# their values. x + gate * y and its modulated norm run at 0.87 - 0.96 of a copy's rate, by one vector at 0.67 - 0.92.
SHARING_VECTORS = 20 * WARP
# Expressions that reduce rows and add up two row vectors: vectors of a thread. Of these numbers the one counts with
# which the busiest of an SM's schedulers has the fewest vectors; a thread has several, because each warp of a row takes
# part in each reduction.
SUMS_VECTORS = (3, 4, 5)
# Their threads of an SM: rows of 16 bits that take a whole CTA of SUMS_THREADS have as many, other rows of 16 bits
# SUMS_FEWER_THREADS. The sums of 32 bits take half as many registers: SUMS_WIDE_THREADS. CTAs of unaligned rows have
# SUMS_UNALIGNED_THREADS.
SUMS_THREADS, SUMS_FEWER_THREADS, SUMS_WIDE_THREADS, SUMS_UNALIGNED_THREADS = 256, 384, 512, 128
# Rows for which FEWER_CTAS of CTA_VECTORS each would be needed are shared by fewer, of up to LONG_SPAN vectors: two
# that share an SM, and wait for their clusters, take longer. 728 x 61440 takes 0.65 of a copy's rate instead of 0.35.
FEWER_CTAS, LONG_SPAN = 8, 1920
# Threads of an SM, times row vectors of sums, up to which one more CTA has registers where clusters would be idle.
IDLE_THREADS = 896
# Sums over short unaligned rows: threads of a row by its vectors and those of an SM. Of rows that are not reduced those
# of FEW_SUMS vectors: with one vector a thread, most would mask it.
SHORT_SUMS = ((24, (8, 384)), (32, (16, 512)), (48, (16, 384)))
FEW_SUMS, FEW_SUMS_THREADS = (WARP, 80), (16, 512)
# Sums of one row vector that nothing waits for, of rows of at least STREAMED_VECTORS: a thread has one vector, and two
# CTAs share an SM's STREAMED_THREADS, so that warps which wait for special functions leave others to run.
STREAMED_VECTORS, STREAMED_THREADS = 384, 1088
# Expressions with SLOW special instructions or more take many registers: a thread then has at most SLOW_VECTORS vectors
# in registers, and an SM has fewer threads where rows are in shared memory, in one slot or in persistent clusters.
SLOW, SLOW_VECTORS, SLOW_SM_THREADS, SLOW_PERSISTENT_THREADS = 4, 2, 1024, 640
# Expressions with DEAR special instructions per element take longer to compute than to load, unless a thread has many
# vectors, which share its overhead, an SM has REGISTER_THREADS threads with 64 registers each, and nothing is computed
# twice, for which longer rows stay in the registers of a cluster.
DEAR, REGISTER_THREADS = 3, 1024
# Two tiles with DEAR special instructions and more than two stages have four vectors of each per thread, too: without
# outputs that have columns nothing is kept, with them DEEP_KEPT values, for which an SM has DEEP_THREADS. With them
# rows of up to DEEP_PAIRS vectors have two vectors a thread, in REGISTER_THREADS.
# In clusters they have DEEP_CLUSTER_THREADS: 3475 x 11264 takes 0.65 of a copy's rate by three CTAs, by two 0.53.
# Without idle threads longer rows have two as well: the gradient of 15287 x 2560 runs at 0.89 of a copy's rate, by
# three vectors in four warps, of which some have none, at 0.72.
DEEP_KEPT, DEEP_THREADS, DEEP_CLUSTER_THREADS, DEEP_PAIRS, DEEP_EVEN_PAIRS = 64, 512, 576, 256, 320
# Two tiles of which only numbers are stored, longer than CTA_VECTORS: up to NUMBERS_ROW in registers of one CTA, longer
# or unaligned ones in shared memory of up to NUMBERS_CTAS, NUMBERS_SPAN vectors each. Soft cross entropies of 9216
# classes run at 0.98 of a copy's rate, by clusters of two at 0.68, of 10240 to 16384 at 0.97 - 1.00, 0.61 - 0.79, of
# 32000 at 0.84, 0.58, of 50257 at 0.62, in registers of eight CTAs at 0.39, of 128256 at 0.71, of sixteen at 0.40.
# Gradients of unaligned ones of more than RING_OF_TWO vectors: those of 5003 to 8190 classes run at 0.88 - 0.91 by
# NUMBERS_THREADS, in registers at 0.79 - 0.90.
NUMBERS_ROW, NUMBERS_SPAN, NUMBERS_THREADS, NUMBERS_RESIDENT, NUMBERS_CTAS = 1152, 2048, 256, 4, 8
RING_OF_TWO, RING_OF_TWO_RESIDENT = 600, 5
# Of unaligned rows of which DEEP_RING_THREADS in each of more than DEEP_RING_CTAS store numbers only, all spill: then
# the row is in shared memory, for DEEP_RING_RESIDENT CTAs of an SM. A divergence of 1062 x 124874 runs at 0.37 of a
# copy's rate, in registers at 0.16.
DEEP_RING_THREADS, DEEP_RING_CTAS, DEEP_RING_RESIDENT = 256, 2, 6
# Two tiles in the registers of clusters, whose reductions take longer: a thread has four vectors of each in 80
# registers, so 1.5 times as many bytes are in flight. With one stage it has 64 registers: WIDE_ONCE.
WIDE_THREADS, WIDE_ONCE_THREADS, WIDE_ONCE_CTAS = 768, 960, 5
# Vectors of a thread in an unaligned row: from UNALIGNED_LEAST to UNALIGNED_MOST, the number that leaves the fewest
# vectors past the row's end. 64 threads for the 139 vectors of 1039 columns run at 0.75 of a copy's rate, 32 at 0.95.
# A dear tile raises the upper bound by one, and several dear tiles lower it by one. A row vector lowers the bound of
# one tile, since it takes registers. Two tiles from which only numbers of the row are stored have up to UNALIGNED_DEEP.
# UNALIGNED_THREADS: threads of an SM, by (several tiles, dear), then by the vectors of a thread; beside several row
# vectors at most UNALIGNED_WEIGHTED_THREADS.
UNALIGNED_LEAST, UNALIGNED_MOST, UNALIGNED_DEEP = 3, 5, 9
UNALIGNED_THREADS: Mapping[tuple[bool, bool], Ladder[int]] = {
    (False, False): ((math.inf, 1152),), (False, True): ((4, 1152), (math.inf, 768)),
    (True, False): ((4, 768), (math.inf, 640)), (True, True): ((3, 768), (math.inf, 512)),
}  # fmt: skip
UNALIGNED_WEIGHTED_THREADS = 896
# With two outputs a thread has four vectors, since nothing is kept.
UNALIGNED_TWO, UNALIGNED_TWO_THREADS = 4, 512
# Vectors of a thread in unaligned rows whose threads wait for their own sums alone.
ALONE_LEAST, ALONE_MOST = 4, 9
# Unaligned rows of 129 to 256 vectors of which nothing is reduced: vectors of a thread and threads of an SM.
UNALIGNED_ALONE = (1, 1792)
# Longer unaligned rows of which nothing is reduced, shared by a cluster: CTAs of an SM, and vectors of a thread.
UNREDUCED_CTAS, UNREDUCED_VECTORS = 2, 2
# Threads of an SM where they take no special instructions: modulate of 1041 x 50950 runs at 0.78 of a copy's rate, from
# shared memory at 0.58; layer_scale of 1954 x 20033 at 0.94, at 0.85.
# In float32 dequantized of 1624 x 36681 takes 109 us in place of 120, layer_scale of 9001 columns 103 in place of 123.
UNREDUCED_THREADS, WIDE_UNREDUCED_THREADS, MOST_UNREDUCED_CLUSTER = 1344, 896, 8
# Such rows of 32-bit elements in the registers of one CTA: vectors of a thread, and the most threads. layer_scale of
# 2855 x 6854 runs at 0.997 of a copy's rate, from shared memory at 0.79.
WIDE_ALONE_VECTORS, WIDE_ALONE_THREADS = 3, 576
# Longer aligned rows of one tile of 32 bits, in registers: vectors of a thread, the most threads, and those of an SM. A
# softmax of 7688 x 8192 with a temperature runs at 0.97 of a copy's rate, from shared memory at 0.95, RMS norms of 7168
# at 0.98, from there at 0.965.
WIDE_VECTORS, WIDE_THREADS, WIDE_SM_THREADS = 4, 512, 1536
# The longest of them: a CTA of 384 threads, two or three of which share an SM.
UNALIGNED_VECTORS = 1152
# One dear tile in the registers of clusters: threads of an SM.
DEAR_CLUSTER_THREADS = 1280
# Threads of an SM where a cluster shares rows of two tiles, of which nothing is reduced: a vector each. The gradient of
# gelu(x + shift), 4247 x 9216, runs at 0.91 of a copy's rate, by two CTAs of half as many threads at 0.80.
SHARED_SUMS_THREADS = 1024
# Persistent CTAs of ALONE_THREADS, one per SM, with three slots: for three tiles of at least ALONE_VECTORS, and for two
# with a span above HALVED_VECTORS. Two tiles longer than that are shared by two CTAs.
ALONE_THREADS, ALONE_VECTORS, HALVED_VECTORS = 512, 384, 768
# Rows of one tile of 16 bits in a CTA's shared memory beside several row vectors, which L1 is to hold: bytes in flight.
# Layer norms of 4250 x 16384 run at 0.92 of a copy's rate by four CTAs, at 0.87 by five.
SEVERAL_WEIGHTS_BYTES = 128 << 10
# Aligned rows of up to three warps' vectors beside several row vectors: threads of an SM. 44900 x 768 with a weight of
# 32 bits runs at 0.89 of a copy's rate, without a bound of registers at 0.75.
SHORT_WEIGHTED_THREADS = 1024
# Short unaligned rows of two tiles of 16 bits of which only numbers are stored: threads of a row and of a CTA, and
# vectors of a row up to which values are kept. Soft cross entropies of 90 to 246 columns run at 0.83 - 0.94 of a copy's
# rate, by twice as many threads at 0.66 - 0.82.
SHORT_PAIR_THREADS, SHORT_PAIR_CTA, SHORT_PAIR_KEPT = 4, 128, 12
# Rows of one tile in shared memory and one row vector: CTAs of an SM where they fit, which bounds the registers of the
# row vectors on their way. Without row vectors as many run without a bound.
WEIGHTED_CTAS = 3
# Rows of 16 bits of up to a warp's vectors that take turns, where one reduction waits for another: vectors of a thread,
# and by these CTAs of an SM: of bfloat16 and of float16, each where some of a thread's vectors lie past the row's end
# and where none does. Layer norms of heads of 128 run at 0.975 of a copy's rate, by three vectors at 0.93, of 208 at
# 0.93 instead of 0.81, of 112 at 0.945 instead of 0.86. In float16 more than three whole vectors would spill, and run
# at 0.44 of a copy's rate: these rows have twice as many threads.
TURN_VECTORS: Ladder[int] = ((12, 3), (16, 4), (20, 5), (24, 3), (WARP, 4))
TURN_CTAS: Mapping[int, tuple[int, int, int, int]] = {2: (8,) * 4, 3: (8, 8, 8, 6), 4: (7, 6, 6, 8), 5: (5, 5, 5, 8)}
# Halves that do not all start on ASYNC_BYTES go to shared memory through registers, which threads wait for: an SM then
# has SYNC_PERSISTENT_THREADS in persistent clusters.
ASYNC_BYTES, SYNC_PERSISTENT_THREADS = 4, 896

# Expressions with groups of columns: columns of a thread, threads of a CTA at most; with sums over rows, threads and
# CTAs of an SM.
GROUP_COLUMNS, GROUP_THREADS, GROUP_SM_THREADS, GROUP_SM_CTAS = 8, 512, 1536, 8


Form = Literal["one_pass", "ring", "passes"]


class RowExpression(NamedTuple):
    """The operands and outputs of an expression, per row.

    Attributes:
        expression: the expression.
        tiles: the names of the tiles that it reads and writes.
        packed: the packed ones among them.
        read: number of tiles that are read; halves count separately.
        sums: number of row vectors that are sums over rows; halves count separately.
        texts: the expression's fields of a config.
    """

    expression: Expression
    tiles: Sequence[str]
    packed: Sequence[str]
    read: int
    sums: int
    texts: Texts

    def config(self, problem: Problem) -> FusedRowConfig:
        """The heuristic. Rows up to :data:`CTA_VECTORS`, unaligned ones a little further, are held in registers; longer
        ones in a cluster's, if the expression is costly, else in its shared memory; the longest, and rows of unknown
        length, are read again for each stage. Sums over rows take persistent clusters.
        """
        if problem.n is None:
            return self._in_passes(problem, TWO_PASS_THREADS, 1)
        row = self.row(problem)
        if self.summed:
            return self._persistent(problem, row)
        if self._short_pair(row):
            keep = row.vectors <= SHORT_PAIR_KEPT
            return self._config(
                "one_pass", SHORT_PAIR_CTA, SHORT_PAIR_THREADS, align_vectors=row.align_vectors, keep=keep
            )
        if self._beside_shared(row):
            return self._in_pairs(row)
        if row.vectors <= (UNALIGNED_VECTORS if self._uneven(row) else CTA_VECTORS):
            return self._of_one_cta(problem, row)
        cluster = cluster_for(row.touched, CTA_VECTORS, row.max_cluster)
        if found := self._unreduced_in_clusters(problem, row, cluster) or self._without_a_cluster(row):
            return found
        costs = self.special >= DEAR or (self.special and self.read > 1)
        if costs and row.touched <= cluster * CTA_VECTORS:
            return self._in_clusters(row, cluster)
        if found := self._wide_of_one_cta(problem, row):
            return found
        return self._in_ring(row) or self._in_passes(problem, TWO_PASS_LONG_THREADS, row.align_vectors)

    def of_groups(self, problem: Problem) -> FusedRowConfig:
        """The heuristic with groups of columns: passes over rows by threads with :data:`GROUP_COLUMNS` columns, as few
        threads as do not add steps. With sums over rows, as many CTAs as fit the GPU.
        """
        vectors = GROUP_THREADS if problem.n is None else -(-problem.n // GROUP_COLUMNS)
        steps = -(-vectors // GROUP_THREADS)
        threads = max(threads_for(vectors, steps), WARP)
        config = self._in_passes(problem, threads, 1)
        if not self.summed:
            return config
        return replace(config, clusters=problem.sm_count * min(GROUP_SM_THREADS // threads, GROUP_SM_CTAS))

    @property
    def own(self) -> int:
        """Tiles that are read of which no rows share one."""
        shared = self.texts.shared.split()
        return sum(name in self.tiles and name not in shared for name in self.texts.reads.split())

    @property
    def summed(self) -> bool:
        """Whether outputs are sums over rows."""
        return bool({*self.texts.kinds} & {"r", "s"})

    def _unreduced(self, row: RowProblem, cluster: int) -> bool:
        """Whether nothing of one or two tiles of 16 bits is reduced, nor takes special instructions."""
        plain = not (stages(self.expression) or self.special or self.packed)
        return plain and row.itemsize == 2 and self.read <= 2 and cluster <= MOST_UNREDUCED_CLUSTER

    def _wide_unreduced(self, row: RowProblem) -> bool:
        """Whether nothing is reduced of a row of 32 bits off a vector that is too long for the registers of one CTA."""
        long = threads_for(row.touched, WIDE_ALONE_VECTORS) > WIDE_ALONE_THREADS
        return row.itemsize == 4 and not row.aligned and long and self._unreduced(row._replace(itemsize=2), 1)

    def _unreduced_in_clusters(self, problem: Problem, row: RowProblem, cluster: int) -> FusedRowConfig | None:
        """A row of which nothing is reduced in the registers of a cluster; None for others."""
        fits = self._unreduced(row, cluster) or self._wide_unreduced(row)
        if not fits or row.touched > cluster * CTA_VECTORS:
            return None
        share = threads_for(-(-row.touched // cluster), UNREDUCED_VECTORS)
        wide = "float32" in problem.dtypes.values()  # row vectors, which take registers
        resident = max((WIDE_UNREDUCED_THREADS if wide else UNREDUCED_THREADS) // share, 1)
        return self._config("one_pass", share, share, cluster, resident, align_vectors=row.align_vectors)

    def _wide_of_one_cta(self, problem: Problem, row: RowProblem) -> FusedRowConfig | None:
        """A row of one tile of 32 bits in the registers of one CTA; None for others: see :data:`WIDE_VECTORS`."""
        share = threads_for(row.vectors, WIDE_VECTORS)
        wide = all(problem.dtypes.get(name, "float32") == "float32" for name in self.tiles) and row.aligned
        plain = self.read == 1 and self.texts.kinds == "t" and 0 < self.depth <= 2 and self.special < 2
        if not wide or not plain or self.texts.random or self.packed or share > WIDE_THREADS:
            return None
        resident = WIDE_SM_THREADS // share
        return self._config("one_pass", share, share, 1, resident, align_vectors=row.align_vectors, keep=True)

    def _without_a_cluster(self, row: RowProblem) -> FusedRowConfig | None:
        return self._numbers_of_two(row) or self._wide_alone(row)

    def _wide_alone(self, row: RowProblem) -> FusedRowConfig | None:
        """A row of 32 bits off a vector of which nothing is reduced, in the registers of one CTA; None for others."""
        share = threads_for(row.touched, WIDE_ALONE_VECTORS)
        if row.aligned or share > WIDE_ALONE_THREADS or not self._unreduced(row._replace(itemsize=2), 1):
            return None
        return (
            self._config("one_pass", share, share, 1, 2, align_vectors=row.align_vectors) if row.itemsize == 4 else None
        )

    def _numbers_of_two(self, row: RowProblem) -> FusedRowConfig | None:
        """Longer rows of two tiles of 16 bits of which only numbers are stored, by up to eight CTAs; None of others."""
        plain = row.itemsize == self.read == 2 and {*self.texts.kinds} == {"c"} and 0 < self.special < DEAR
        if plain and row.aligned and row.vectors <= NUMBERS_ROW:
            share = threads_for(row.vectors, 3)
            return self._config("one_pass", share, share, resident=3, align_vectors=row.align_vectors)
        cluster = min(cluster_for(row.touched, NUMBERS_SPAN, row.max_cluster), NUMBERS_CTAS)
        span = -(-row.touched // cluster)
        threads, align = NUMBERS_THREADS, row.align_vectors
        slot = threads * -(-span // threads) * VECTOR_BYTES * 2
        resident = min((row.ring_bytes - RESERVED_BYTES) // slot, NUMBERS_RESIDENT)
        if not plain or span > NUMBERS_SPAN or not resident:
            return None
        return self._config("ring", threads, threads, cluster, resident, align_vectors=align)

    def _short_pair(self, row: RowProblem) -> bool:
        """Whether few threads hold a row of two tiles: see :data:`SHORT_PAIR_THREADS`."""
        short = not row.aligned and row.itemsize == 2 and SHORTEST_ROW < row.vectors <= WARP
        return short and self.read == 2 and {*self.texts.kinds} == {"c"} and 0 < self.special < DEAR

    @property
    def depth(self) -> int:
        """Stages of reductions that outputs with columns wait for."""
        return awaited(self.expression, self.texts.kinds)

    @property
    def late(self) -> bool:
        """Whether it reduces more once outputs with columns are stored, from operands that are needed until then."""
        return bool({*self.texts.kinds} & {"t", "r"}) and self.depth < len(stages(self.expression))

    @property
    def few(self) -> bool:
        """Whether a few special instructions and at most two stages leave a thread registers for what it keeps."""
        return (self.depth or len(stages(self.expression))) <= 2 and 0 < self.special < SLOW

    @property
    def deep(self) -> bool:
        """Whether two tiles take many special instructions and more than two stages: divergences of distributions."""
        return self.read == 2 and self.special >= DEAR and (self.depth or len(stages(self.expression))) > 2

    @property
    def many(self) -> bool:
        """Whether rows of several tiles have many reductions."""
        return self.read > 1 and sum(map(len, stages(self.expression))) >= MANY_REDUCTIONS

    @property
    def slow(self) -> bool:
        """Whether it takes many special instructions."""
        return self.expression.cost[0] >= SLOW

    @property
    def special(self) -> int:
        """Special instructions per element, without those for column vectors, which are computed once per row."""
        nodes, kinds = self.expression.nodes, self.expression.kinds
        return sum(
            PRIMITIVES[node.primitive].mufu
            for node, kind in zip(nodes, kinds, strict=True)
            if kind.columns
            and node.primitive in PRIMITIVES
            and not (node.primitive == "divide" and not kinds[node.args[1]].columns)
        )

    @property
    def weights(self) -> int:
        """Row vectors that are read."""
        nodes, kinds = self.expression.nodes, self.expression.kinds
        return sum(node.primitive == "operand" and str(kind) == "r" for node, kind in zip(nodes, kinds, strict=True))

    def row(self, problem: Problem) -> RowProblem:
        """The row; packed ones are aligned only if their halves have whole vectors."""
        row = row_of(problem, self.tiles)
        packed = any(name in problem.dtypes for name in self.packed)
        return row._replace(aligned=row.aligned and not (packed and row.n * row.itemsize % VECTOR_BYTES))

    def _of_one_cta(self, problem: Problem, row: RowProblem) -> FusedRowConfig:
        """A row in the registers of one CTA. Of those that take turns a thread with more vectors has more registers;
        float16 is widened in pairs, which takes some, too.
        """
        found = self._in_registers(row)
        if row.itemsize == 4 or not self._turns(row, found.threads_per_row):
            return found
        vectors, pairs = -(-row.vectors // found.threads_per_row), "float16" in problem.dtypes.values()
        full = vectors * found.threads_per_row == row.vectors
        if pairs and full and vectors > 3:
            return replace(found, threads_per_row=2 * found.threads_per_row)
        return replace(found, resident=TURN_CTAS[vectors][2 * pairs + full])

    def _in_registers(self, row: RowProblem, cluster: int = 1) -> FusedRowConfig:
        alone = self._sums_alone(row, cluster)
        if self._uneven(row) and row.vectors > WARP and cluster == 1 and not alone:
            return self._unaligned(row)
        span = -(-row.touched // cluster)
        share = self._threads_of_row(row, span, cluster)
        few = row.vectors <= WARP and cluster == 1 and share == self._few_threads(row)
        room = max(256 if row.vectors <= WARP and not few else 128, share)
        threads = room // share * share
        read = 1 if few else max(self.read, 1)
        keep = -(-span // share) * row.vector_elements * read <= self._most_kept(row, cluster, span, share)
        if row.vectors > WARP and self._deep_pairs(span):
            resident = max(REGISTER_THREADS // threads, 1)
        elif row.vectors > WARP and self._in_fours(span):
            most = DEEP_CLUSTER_THREADS if cluster > 1 else DEEP_THREADS
            resident = max((most if self.depth else REGISTER_THREADS) // max(128, share), 1)
        else:
            resident = self._resident(row, cluster, share, threads, keep)
        return self._config("one_pass", threads, share, cluster, resident, align_vectors=row.align_vectors, keep=keep)

    def _in_clusters(self, row: RowProblem, cluster: int) -> FusedRowConfig:
        """Costly rows that a cluster shares: in registers, where these hold what a thread has of a row."""
        span = -(-row.touched // cluster)
        share = self._threads_of_row(row, span, cluster)
        crowded = cluster > DEEP_RING_CTAS and share >= DEEP_RING_THREADS and not row.aligned and row.itemsize == 2
        if crowded and self._in_fours(span) and not self.depth:
            align = row.align_vectors
            return self._config("ring", share, share, cluster, DEEP_RING_RESIDENT, align_vectors=align)
        return self._in_registers(row, cluster)

    def _in_pairs(self, row: RowProblem) -> FusedRowConfig:
        """Two vectors of each tile a thread, whose values are kept."""
        share = threads_for(row.touched, 2)
        resident = max(REGISTER_THREADS // share, 1)
        return self._config("one_pass", share, share, 1, resident, align_vectors=row.align_vectors, keep=True)

    def _beside_shared(self, row: RowProblem) -> bool:
        """Whether two tiles are read, and two stored, beside what the rows of examples share."""
        shared = len({*self.texts.shared.split()} & {*self.texts.reads.split()})
        plain = not (self.special or self.texts.random or self.texts.turns or self.packed) and self.depth == 2
        fits = row.aligned and row.itemsize == 2 and 2 * WARP < row.vectors <= SHARING_VECTORS
        return bool(plain and fits and shared > 1 and self.read - shared == self.texts.kinds.count("t") == 2)

    def _most_kept(self, row: RowProblem, cluster: int, span: int, share: int) -> int:
        """The most values that a thread of a row in registers keeps from stage to stage."""
        longer = row.vectors > WARP
        if self.deep and longer:
            return DEEP_KEPT * bool(self.depth)
        if longer and self.special and self.texts.kinds.count("t") > 1:
            return 0  # what is kept for two outputs would not fit registers
        if self.read > 1 and not self._wide(cluster) and (self._dealt(span) or self._full(row, share)):
            return 0
        if self._turns(row, share):
            return max(TURN_CTAS) * row.vector_elements
        return MOST_KEPT << self._keeps_twice(cluster, share) << (self._sums_alone(row, cluster) and row.aligned)

    def _threads_of_row(self, row: RowProblem, span: int, cluster: int) -> int:
        """Threads of a row, or of what a CTA of a cluster has of it, held in registers."""
        dear = self.special >= DEAR
        if self._sums_alone(row, cluster):
            if not row.aligned:
                return even_threads(row.touched, ALONE_LEAST, ALONE_MOST)
            per_thread = 4 if self.read == 2 else 7 if row.vectors > 4 * WARP else 5
            return threads_for(row.touched, per_thread)
        if row.vectors <= WARP:
            if not row.aligned:
                return self._threads_of_short_row(row)
            return threads_for(row.vectors, 2) if dear else self._few_threads(row) or row_threads(row)
        if 2 * WARP < span <= 3 * WARP and row.aligned and self.special < SLOW:
            return WARP  # two vectors each would leave a quarter of two warps idle
        if self._deep_pairs(span):
            return threads_for(span, 2)
        if self._in_fours(span):
            return threads_for(span, min((4, 3), key=partial(of_scheduler, span)) if cluster == 1 else 4)
        if self.read > 1 and not self._wide(cluster):
            return self._threads_of_tiles(span)
        if self.special >= SLOW:
            return threads_for(span, SLOW_VECTORS)
        if cluster > 1 and not stages(self.expression):
            return threads_for(span, UNREDUCED_VECTORS)
        return threads_for(span, 4) if cluster > 1 or (dear and row.aligned) else row_threads(row)

    def _few_threads(self, row: RowProblem) -> int | None:
        """Threads of a reduced row of one tile of up to a warp's vectors, if they have several each: of heads of 96 a
        norm runs at 0.97 of a copy's rate, by a vector each at 0.82. Where one reduction waits for another, also of
        16: layer norms of heads of 128 run at 0.93 instead of 0.87.
        """
        if self.own != 1 or not stages(self.expression):
            return None
        deep = self.depth > 1 and row.aligned
        if deep and self.texts.turns and row.itemsize == 2 and SHORTEST_ROW < row.vectors <= WARP:
            return threads_for(row.vectors, step(TURN_VECTORS, row.vectors))
        return threads_for(row.vectors, 3) if deep and row.vectors == WARP // 2 else uneven_share(row)

    def _threads_of_tiles(self, span: int) -> int:
        """Threads of a row of several tiles."""
        if self._dealt(span):
            return 1 << (span // 4).bit_length() - 1  # each reduction takes every warp's shuffles
        most = RANDOM_THREADS if self.texts.random else PAIR_THREADS
        # Without outputs that have columns threads wait for nothing but their sums.
        single = span <= most and not self.special and not self.many and {*self.texts.kinds} != {"c"}
        return threads_for(span, 1 if single else 2)

    def _threads_of_short_row(self, row: RowProblem) -> int:
        """Threads of an unaligned row of up to a warp's vectors: with a vector each they would mostly mask it and
        exchange sums.
        """
        return uneven_threads(row) if self.read == 1 and self.special < DEAR else UNEVEN_THREADS

    def _sums_alone(self, row: RowProblem, cluster: int) -> bool:
        """Whether nothing but numbers of a row is stored, and its threads wait for their sums alone."""
        plain = {*self.texts.kinds} == {"c"} and self.special < DEAR and not self.texts.random
        fits = SHORTEST_ROW < row.vectors <= (3 * WARP if self.read == 2 else 4 * ALONE_VECTORS // 3)
        return plain and fits and cluster == 1 and self.read <= 2 and (self.read == 1 or row.aligned)

    def _turns(self, row: RowProblem, share: int) -> bool:
        """Whether short rows take turns, with several vectors a thread, and one reduction waits for another."""
        return self.texts.turns and self.depth > 1 and row.vectors <= WARP and share == self._few_threads(row)

    def _resident(self, row: RowProblem, cluster: int, share: int, threads: int, keep: bool) -> int:
        """CTAs of an SM, which bound a thread's registers; 1 for no bound."""
        longer = row.vectors > WARP
        if cluster > 1 and not stages(self.expression):
            return UNREDUCED_CTAS
        if self._turns(row, share):  # of heads of 96 layer norms run at 0.97 of a copy's rate, without a bound at 0.85
            return REGISTER_THREADS // threads
        if longer and self.texts.random:
            most = REGISTER_THREADS if row.touched > RANDOM_THREADS else SHORT_RANDOM_THREADS
            return max(most // max(128, share), 1)
        once = self._wide(cluster) and self.depth == 1
        if longer and self.few and (keep or self.late or once) and (self.special >= DEAR or self.read > 1):
            most = WIDE_THREADS if self._wide(cluster) else REGISTER_THREADS
            if once:
                return max(min(WIDE_ONCE_THREADS // share, WIDE_ONCE_CTAS), 1)
            if cluster > 1 and self.read == 1:
                most = DEAR_CLUSTER_THREADS
            return max(most // max(128, share), 1)
        if longer and self.many and not self.special and -(-row.touched // cluster) <= PAIR_THREADS and cluster == 1:
            return max(MANY_REDUCED_THREADS // threads, 1)
        if self._short_weighted(row):
            return SHORT_WEIGHTED_THREADS // threads
        return 2 if self._pairs_share(share, keep) else 1

    def _short_weighted(self, row: RowProblem) -> bool:
        """Whether a warp has three vectors a thread of an aligned row of one tile beside several row vectors."""
        return self.read == 1 and self.weights > 1 and row.aligned and 2 * WARP < row.vectors <= 3 * WARP

    def _full(self, row: RowProblem, share: int) -> bool:
        """Whether registers of two CTAs have no room for what several tiles of 16 bits would keep: a sum of 5239 x 8192
        and its norm take 58 us, with what is kept 69.
        """
        plain = not (self.special or self.texts.random) and self.depth == 1
        return plain and row.itemsize == 2 and share == PAIR_THREADS < row.vectors

    def _dealt(self, span: int) -> bool:
        """Whether a thread has four vectors and more of each of several tiles with many reductions."""
        return self.many and not self.special and span > PAIR_THREADS

    def _in_fours(self, span: int) -> bool:
        """Whether a thread has four vectors of each of two tiles of a deep expression."""
        return self.deep and not self._deep_pairs(span)

    def _deep_pairs(self, span: int) -> bool:
        """Whether a thread has two of them."""
        even = span <= DEEP_EVEN_PAIRS and span % (2 * WARP) == 0
        return self.deep and self.depth > 0 and (span <= DEEP_PAIRS or even)

    def _pairs_share(self, share: int, keep: bool) -> bool:
        """Whether two CTAs of several tiles share an SM: one loads while the other computes."""
        return self.read > 1 and share == PAIR_THREADS and not self.slow and not (self.special and keep)

    def _wide(self, cluster: int) -> bool:
        """Whether two tiles, not dear ones, are in the registers of clusters."""
        return cluster > 1 and self.read == 2 and self.special < DEAR

    def _keeps_twice(self, cluster: int, share: int) -> bool:
        """Whether a thread of clusters keeps twice as many values: with one stage, computing them again takes less time
        if more CTAs fit.
        """
        if not self._wide(cluster) or not self.few or self.late or not self.depth:
            return False
        return self.depth > 1 or WIDE_ONCE_THREADS // share <= WIDE_THREADS // share

    def _uneven(self, row: RowProblem) -> bool:
        """Whether :meth:`_unaligned` serves such rows."""
        return not row.aligned and self.special < SLOW and self.read <= 2

    def _unaligned(self, row: RowProblem) -> FusedRowConfig:
        dear, several = self.special >= DEAR, self.read > 1
        two = bool(several and self.special and self.texts.kinds.count("t") > 1)
        if self._two_in_ring(row):
            threads, align = NUMBERS_THREADS, row.align_vectors
            return self._config("ring", threads, threads, 1, RING_OF_TWO_RESIDENT, align_vectors=align)
        if not stages(self.expression) and 4 * WARP < row.touched <= 8 * WARP:
            per_thread, most = UNALIGNED_ALONE
            share = threads_for(row.touched, per_thread + two)
        elif two:
            share = threads_for(row.touched, UNALIGNED_TWO)
        else:
            share = even_threads(row.touched, *self._vectors_of_unaligned(row))
            most = step(UNALIGNED_THREADS[several, dear], -(-row.touched // share))
            if self.weights > 1 and stages(self.expression):
                most = min(most, UNALIGNED_WEIGHTED_THREADS)
        threads = max(128 // share, 1) * share
        most = UNALIGNED_TWO_THREADS if two else most
        resident = max((most + threads // 3) // threads, 1)  # nearly one more is one more
        few = (dear and not several) or -(-row.touched // share) * row.vector_elements <= MOST_KEPT
        keep = few and not (self.late or two or (self.deep and not self.depth))
        return self._config("one_pass", threads, share, 1, resident, align_vectors=row.align_vectors, keep=keep)

    def _two_in_ring(self, row: RowProblem) -> bool:
        """Whether two outputs with columns wait for what is reduced of two tiles of 16 bits, in longer rows."""
        two = self.read > 1 and self.special and self.texts.kinds.count("t") > 1
        return bool(two and self.depth and row.itemsize == 2 and row.vectors > RING_OF_TWO)

    def _vectors_of_unaligned(self, row: RowProblem) -> tuple[int, int]:
        """The least and the most vectors that a thread has of an unaligned row."""
        dear, several = self.special >= DEAR, self.read > 1
        if row.itemsize == 4:  # half as many elements
            least = 2 * UNALIGNED_LEAST if dear and not several else UNALIGNED_LEAST
            return least, least
        if several:
            if self.deep:
                return UNALIGNED_LEAST, UNALIGNED_MOST if self.depth else UNALIGNED_DEEP
            return UNALIGNED_LEAST, UNALIGNED_MOST - dear
        if self.weights and not dear:
            return UNALIGNED_LEAST, min(UNALIGNED_LEAST + self.weights, UNALIGNED_MOST) - 1
        return UNALIGNED_LEAST, UNALIGNED_MOST + dear

    def _in_ring(self, row: RowProblem) -> FusedRowConfig | None:
        """One slot of a cluster's shared memory; None where a row does not fit."""
        vector = VECTOR_BYTES * max(self.read, 1)
        room = row.ring_bytes - RESERVED_BYTES
        most_span = min(SMEM_VECTORS, room // (vector * SMEM_PER_THREAD * WARP) * SMEM_PER_THREAD * WARP)
        cluster = cluster_for(row.touched, most_span, row.max_cluster)
        span = -(-row.touched // cluster)
        threads = threads_for(span, SMEM_PER_THREAD, SMEM_THREADS)
        slot = threads * SMEM_PER_THREAD * vector
        if span > threads * SMEM_PER_THREAD or slot > room:
            return None
        most = SLOW_SM_THREADS if self.slow else SMEM_SM_THREADS
        several = self.read == 1 and self.weights > 1 and row.itemsize == 2 and cluster == 1
        flying = SEVERAL_WEIGHTS_BYTES if several else SMEM_BYTES_IN_FLIGHT
        resident = min(min(flying, room) // slot, most // threads)
        if self.read == 1 and self.weights == 1 and WEIGHTED_CTAS * slot <= room:
            resident = max(resident, min(WEIGHTED_CTAS, most // threads))
        return self._config("ring", threads, threads, cluster, max(resident, 1), align_vectors=row.align_vectors)

    def _persistent(self, problem: Problem, row: RowProblem) -> FusedRowConfig:
        """Persistent clusters with two or more slots, and the sums of a thread's columns in registers."""
        vector, room = VECTOR_BYTES * max(self.read, 1), row.ring_bytes - RESERVED_BYTES
        cluster = cluster_for(row.touched, min(CTA_VECTORS, room // (2 * vector)), row.max_cluster)
        if cluster >= FEWER_CTAS and self._sums_two(row.touched) and row.aligned and row.itemsize < 4:
            cluster = cluster_for(row.touched, min(LONG_SPAN, room // (2 * vector)), row.max_cluster)
        halved = self._halved(row, cluster)
        cluster += halved
        span = -(-row.touched // cluster)
        alone = self._alone(row, span, cluster)
        per_thread, sm_threads = self._vectors_and_threads(row, span, cluster, alone)
        share = threads_for(span, per_thread, 1024)
        per_thread = -(-span // share)
        small = not row.aligned and (self._short_sums(row, span) or self._sums_two(span))
        narrow = self._sums_two(span) and row.aligned and row.itemsize < 4
        # With fewer than three vectors per thread the rows of 384 threads are to be on their way, in two CTAs.
        several = share if self._summed_vectors(row, span) == 2 else 256
        several = SUMS_UNALIGNED_THREADS if small else SUMS_FEWER_THREADS // 2 if narrow and per_thread < 3 else several
        threads = share if cluster > 1 else max(several // share, 1) * share
        slot = threads * per_thread * vector
        if per_thread * max(self.sums, 1) > MOST_SUMMED or 2 * slot > room:
            return self._in_passes(problem, TWO_PASS_THREADS, row.align_vectors)
        if narrow and threads == SUMS_THREADS and span <= CTA_VECTORS:
            # Of two pairs of CTAs one waits, the other one computes; two clusters of four take 12% longer than one.
            sm_threads = SUMS_THREADS * (2 if cluster == 2 else 1)
        if self._pairs_of_sums_share(row, cluster):
            sm_threads = max(sm_threads, 2 * threads)
        slots = 3 if self._deeper(row, span, cluster - halved, share) and 3 * slot <= room else 2
        resident = max(1, min(room // (slots * slot), sm_threads // threads))
        fits = room // (2 * slot) > resident and threads * (resident + 1) * self.sums <= IDLE_THREADS
        if fits and self._needs_another(row, span, cluster, self._running(problem, cluster, resident)):
            slots, resident = 2, resident + 1
        running = self._running(problem, cluster, resident)
        align = alignment_in_step(running, row)
        return self._config(
            "ring", threads, share, cluster, resident, align_vectors=align, stages=slots,
            clusters=in_step(running, row, align),
        )  # fmt: skip

    def _deeper(self, row: RowProblem, span: int, cluster: int, share: int) -> bool:
        """Whether three rows of a CTA are on their way, not two."""
        if self._alone(row, span, cluster):
            return True
        if span > CTA_VECTORS:
            return False
        if cluster > 1:
            return bool(self.depth) or row.aligned or cluster > 2
        few = -(-span // share) <= 3 or share > SUMS_THREADS // 2 or bool(span % (4 * WARP))
        return self._sums_two(span) and row.aligned and row.itemsize < 4 and span >= 4 * WARP and few

    def _sums_two(self, span: int) -> bool:
        """Whether rows of more than a warp's vectors are reduced, and two row vectors of sums taken."""
        return bool(self.sums == 2 and self.depth and span > WARP)

    def _short_sums(self, row: RowProblem, span: int) -> bool:
        """Whether sums over rows are taken of unaligned ones of a few vectors."""
        least, most = (SHORTEST_ROW, SHORT_SUMS[-1][0]) if self.depth else FEW_SUMS
        return bool((self.sums or not self.depth) and not row.aligned and least < span <= most)

    def _needs_another(self, row: RowProblem, span: int, cluster: int, running: int) -> bool:
        """Whether one more CTA of an SM gains: one waits for its cluster, the other one loads; or clusters are idle."""
        waits = cluster > 1 and not row.aligned and self._sums_two(span)
        return waits or self._idle(row, running)

    def _idle(self, row: RowProblem, running: int) -> bool:
        """Whether a fifth of so many clusters would do nothing: those of unaligned rows are as many as these start at
        places of a vector, or a multiple of that.
        """
        return running % period_of(row, 1) > running / 5

    def _running(self, problem: Problem, cluster: int, resident: int) -> int:
        """Clusters that run at once. Without reductions CTAs exchange nothing, and each runs on any SM."""
        if stages(self.expression):
            return resident_clusters(problem, cluster) * resident
        return max(problem.sm_count * resident // cluster, 1)

    def _vectors_and_threads(self, row: RowProblem, span: int, cluster: int, alone: bool) -> tuple[int, int]:
        """Vectors of a thread and threads of an SM, in persistent clusters."""
        per_thread, sm_threads = step(PERSISTENT, span)
        if self._short_sums(row, span):
            share, sm_threads = step(SHORT_SUMS, span) if self.depth else FEW_SUMS_THREADS
            return -(-span // share), sm_threads
        if self._sums_two(span):
            wide = row.itemsize == 4 and row.aligned
            threads = SUMS_WIDE_THREADS if wide else SUMS_FEWER_THREADS
            if cluster == FEWER_CTAS // 2 and span > CTA_VECTORS:
                return SUMS_VECTORS[-1], threads
            return min(SUMS_VECTORS, key=partial(of_scheduler, span)) if row.aligned else 3, threads
        if self._shares_sums(row, cluster):
            return 1, SHARED_SUMS_THREADS
        if alone:
            return -(-span // ALONE_THREADS), ALONE_THREADS
        if self._streams(span, cluster):
            return 1, STREAMED_THREADS
        if self.packed and row.n * row.itemsize % ASYNC_BYTES:
            sm_threads = max(sm_threads, SYNC_PERSISTENT_THREADS)
        elif self.slow:
            sm_threads = min(sm_threads, SLOW_PERSISTENT_THREADS)
        if vectors := self._summed_vectors(row, span):
            return vectors, SEVERAL_SUMS // self.sums if vectors == 1 else PAIRS_OF_SUMS
        if self.sums == 2 and self.depth and span <= WARP and row.aligned and row.itemsize == 2:
            sm_threads = SHORT_PAIRS_OF_SUMS
        return max(per_thread // max(self.sums, 1), 1), sm_threads

    def _summed_vectors(self, row: RowProblem, span: int) -> int:
        """Vectors of a thread that adds up three row vectors of 16 bits or more; 0 where it has as many as others."""
        vectors = step(SUMMED_VECTORS, span) if self.sums > 2 and row.itemsize == 2 else 0
        return vectors if row.aligned and vectors * self.sums <= MOST_SUMMED else min(vectors, span <= SUMS_THREADS)

    def _pair(self, row: RowProblem) -> bool:
        """Whether persistent CTAs hold two tiles and the sums of one row vector."""
        return self.read == 2 and self.sums == 1 and row.aligned and not self.slow

    def _shares_sums(self, row: RowProblem, cluster: int) -> bool:
        """Whether CTAs of a cluster have a vector a thread, and an SM each."""
        return self._pair(row) and not self.depth and 1 < cluster <= 4

    def _pairs_of_sums_share(self, row: RowProblem, cluster: int) -> bool:
        """Whether CTAs of two clusters share an SM where nothing is reduced."""
        return cluster == 2 and not (self.depth or self._shares_sums(row, cluster))

    def _halved(self, row: RowProblem, cluster: int) -> bool:
        """Whether two CTAs share a row of two tiles that one could hold."""
        longer = cluster == 1 and row.touched > HALVED_VECTORS and row.max_cluster > 1
        return bool(self._pair(row) and self.depth and longer)

    def _alone(self, row: RowProblem, span: int, cluster: int) -> bool:
        """Whether one CTA has an SM for itself."""
        three = self.read > 2 and self.sums == 1 and row.aligned and cluster == 1 and span >= ALONE_VECTORS
        return three or (self._pair(row) and span > HALVED_VECTORS)

    def _streams(self, span: int, cluster: int) -> bool:
        """Whether sums over rows of so many vectors wait for nothing, and two CTAs fit an SM."""
        fits = STREAMED_VECTORS < span <= STREAMED_THREADS // 2
        return fits and not (self.depth or self.slow) and self.sums == cluster == 1

    def _in_passes(self, problem: Problem, threads: int, align_vectors: int) -> FusedRowConfig:
        clusters = 0
        if self.summed:
            clusters = max(2 * problem.sm_count // PERIOD, 1) * PERIOD
        return self._config("passes", threads, align_vectors=align_vectors, clusters=clusters)

    def _config(
        self, form: Form, threads: int, threads_per_row: int = 0, cluster: int = 1, resident: int = 1, **more: Any
    ) -> FusedRowConfig:
        """The config of this expression; ``more``: its other fields."""
        return FusedRowConfig(form, threads, threads_per_row, cluster, resident, **more, **vars(self.texts))

    def partials(self, problem: Problem, config: FusedRowConfig) -> tuple[int, int]:
        """Partial sums of a row vector, one per cluster, and of a scalar, one per row that clusters hold at a time."""
        rows = max(config.threads // config.threads_per_row, 1) if config.threads_per_row else 1
        groups = -(-max(problem.m, 1) // rows)
        clusters = config.clusters
        if groups < clusters:
            clusters = groups
            period = PERIOD if problem.n is None else period_of(self.row(problem), config.align_vectors)
            clusters = min(-(-groups // period) * period, config.clusters)
        return clusters, clusters * rows


# After PERIOD rows, rows of any length start at the same place of a cache line again.
PERIOD = WIDEST_VECTOR * LINE_VECTORS


def others(rows: RowExpression, problem: Problem, flat: Config) -> Iterator[FusedRowConfig]:
    """Other configs to try: threads per row, CTAs per SM, slots, and values kept or not."""
    config = FusedRowConfig.of(flat)
    if config.form == "one_pass":
        row = rows.row(problem)
        for each in vary_threads(row, config) if config.cluster == 1 else vary_cluster(row, config, MORE_VECTORS):
            yield from (replace(each, keep=keep) for keep in (False, True))
    elif config.form == "ring" and not config.clusters:
        yield from vary_resident(config)
    elif config.form == "ring":
        one = max(config.clusters // config.resident, 1)
        for resident in {max(config.resident - 1, 1), config.resident, config.resident + 1}:
            for stages in (2, 3, 4):
                clusters = in_step(one * resident, rows.row(problem), config.align_vectors)
                yield replace(config, stages=stages, resident=resident, clusters=clusters)
    else:
        yield from (replace(config, threads=threads) for threads in (256, 512, 1024))


def needs(rows: RowExpression, problem: Problem, flat: Config) -> Needs:
    """The resources of an SM that a CTA takes."""
    config = FusedRowConfig.of(flat)
    if config.form == "passes":
        return Needs(config.threads, LEAST_REGISTERS)
    row = rows.row(problem)
    per_thread = -(-row.touched // (config.threads_per_row * config.cluster))
    sums = rows.sums * row.vector_elements * per_thread
    if config.form == "one_pass":
        return Needs(config.threads, LEAST_REGISTERS + 4 * per_thread * rows.read, resident=config.resident)
    slot = config.threads * per_thread * VECTOR_BYTES * rows.read
    return Needs(config.threads, LEAST_REGISTERS + sums, config.stages * slot, config.resident)
