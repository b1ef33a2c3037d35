"""A reduction over each row and what follows from it, for rows that outgrow registers or whose length is not known."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_ops.kernels._chain import can_chain, let_next_start, wait_for_previous
from cute_ops.kernels._long import MAX_GRID, LongTile
from cute_ops.kernels._rows import Vectors, row_address, row_count
from cute_ops.kernels._vectors import fragment, load, load_if, narrow, store, store_masked, trim


class WalkedRows:
    """A CTA walks a row once for its reduction and, where there are outputs, once more for them.

    Tile: vector ``i`` of thread ``t`` is ``i * threads + t``.
    Shared memory: 4 bytes per value and warp, twice. Bytes moved per element: every input once, and with outputs
    every input again, from L2 where the row fits, and every output.
    """

    def __init__(self, variant, function):
        self.variant = variant
        self.function = function
        names = (*function.inputs, *function.outputs)
        self.tile = LongTile(Vectors(variant, names, variant.dims["n"]), variant.tile)
        self.sum = function.reduction.across(self.tile, 2)
        self.chained = can_chain(variant.arch)

    @cute.jit
    def __call__(self, inputs, outputs, numbers, stream):
        rows = row_count(inputs[0])
        self.kernel(inputs, outputs, numbers).launch(
            grid=[Int32(cutlass.min(rows, Int64(MAX_GRID))), 1, 1],
            block=[self.tile.threads, 1, 1],
            stream=stream,
            use_pdl=self.chained,
        )

    @cute.kernel
    def kernel(self, inputs, outputs, numbers):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        smem = cutlass.utils.SmemAllocator()
        sSum, mbar = self.sum.allocate(smem)
        long_n = inputs[0].shape[len(inputs[0].shape) - 1]
        n, vec = Int32(long_n), self.tile.vec
        wait_for_previous(self.chained)
        let_next_start(self.chained)
        steps = Int32((row_count(inputs[0]) - bidx + (grid - 1)) // Int64(grid))
        for step in cutlass.range(steps, unroll=1):
            row = Int64(bidx) + Int64(step) * Int64(grid)
            context, wanted = self.function.begin(self.variant, numbers, row, row >= 0)
            shift = self.tile.v.shift(row, long_n)
            count = (n + shift + (vec - 1)) // vec
            bases = self._bases(inputs, self.function.inputs, row, long_n)
            targets = self._bases(outputs, self.function.outputs, row, long_n)
            state = self.function.reduction.start()
            last = cutlass.select_(wanted, count, Int32(0))
            for v in cutlass.range(tidx, last, self.tile.threads, unroll=4):
                state = self._add(state, inputs, bases, v * vec - shift, n)
            results = self.sum(state, sSum, mbar, step)
            if tidx == 0:
                self.function.finish(self.variant, numbers, inputs, results, context, row)
            if const_expr(len(outputs) > 0):
                for v in cutlass.range(tidx, count, self.tile.threads, unroll=2):
                    self._emit(inputs, outputs, bases, targets, results, context, v * vec - shift, n)

    def _bases(self, tensors, names, row, n):
        return [row_address(m, self.variant.tensors[name], row, n) for m, name in zip(tensors, names)]

    def _emit(self, inputs, outputs, bases, targets, results, context, first, n):
        values = self._read(inputs, bases, first, n, self.function.reduction.empty)
        for x, mX, base in zip(self.function.emit(values, results, context), outputs, targets):
            self._write(x, mX, base, first, n)

    def _add(self, state, inputs, bases, first, n):
        return self.function.reduction.add(
            state,
            lambda: self._read(inputs, bases, first, n, self.function.reduction.empty),
            lambda: self._read(inputs, bases, first, n, 0),
        )

    def _read(self, inputs, bases, first, n, empty):
        """The inputs' vectors in fp32, ``empty`` outside the row."""
        values = []
        for mX, base in zip(inputs, bases):
            rX = fragment(mX.element_type, self.tile.vec)
            address = base + Int64(first) * (mX.element_type.width // 8)
            if self.tile.v.shifted:
                rX.fill(empty)
                load_if(first + self.tile.vec > 0, rX, address)
            else:
                load(rX, address)
            if self.tile.v.masked:
                trim(rX, first, n, empty)
            values.append(rX.load().to(cutlass.Float32))
        return tuple(values)

    def _write(self, x, mX, base, first, n):
        rX = narrow(x, mX.element_type, self.tile.vec)
        address = base + Int64(first) * (mX.element_type.width // 8)
        if self.tile.v.masked:
            store_masked(rX, address, first, n)
        else:
            store(rX, address)


def run_rows(variant, function):
    """The form of a row function's kernel that a variant gets."""
    from cute_ops.kernels._held import HeldRows

    walks = variant.dims["n"] is None or bool(variant.tile.get("long", 0))
    return (WalkedRows if walks else HeldRows)(variant, function)
