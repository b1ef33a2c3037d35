"""An expression of accumulators: products, scores of attention, of any MMA."""

import cutlass.cute as cute
from cutlass import Float32

from cute_ops.expressions.groups import REDUCTIONS, reads
from cute_ops.kernels.emit.emitter import computed
from cute_ops.kernels.emit.primitives import COMBINE, DEVICE, NEUTRAL
from cute_ops.kernels.lib.copy import fragment


class AccumulatorEmitter:
    """Computes an expression whose first operand is accumulators, chunk by chunk.

    Attributes:
        read: how the other operands are read, in order: :class:`cute_ops.expressions.groups.Read`.
    """

    def __init__(self, expression, device=DEVICE):
        self.expression, self.device = expression, device
        self.read = [read for read in reads(expression) if read.operand]

    def __call__(self, accumulators, operands, chunk, groups):
        """The outputs of a chunk in fp32, a fragment each.

        Args:
            accumulators: from ``(half, v, distance)`` to the accumulator ``distance`` columns after the chunk's v-th,
                in the half of gate_up columns, see :meth:`AccumulatorTile.values`.
            operands: for each of :attr:`read`, from v to its fp32 element for the chunk's v-th accumulator.
            chunk: the coordinates, a :class:`cute_ops.kernels.tensor_core.accumulators.Chunk`.
            groups: results of groups of columns in these rows, as far as they are known; more are added.
        """
        results = [fragment(Float32, chunk.size) for _ in self.expression.outputs]
        row = dict(zip(self.read, operands))
        self._reduce_groups(accumulators, row, chunk, groups)
        for v in range(chunk.size):
            element = Element(self, (accumulators, row, groups), chunk, v)
            for rX, x in zip(results, [element(i) for i in self.expression.outputs]):
                rX[v] = x
        return results

    def _reduce_groups(self, accumulators, operands, chunk, groups):
        """Reduce the groups of columns that a chunk lies in; four lanes have those of a row."""
        nodes = self.expression.nodes
        for i, size in [(i, int(node.value)) for i, node in enumerate(nodes) if node.primitive in REDUCTIONS]:
            primitive = nodes[i].primitive.removeprefix("group_")
            for group in sorted({c // size for c in chunk.tile_columns} - {group for j, group in groups if i == j}):
                results = []
                for r in range(2):
                    x = Float32(NEUTRAL[primitive])
                    for column in range(group * size, (group + 1) * size, 8):
                        for j in range(2):
                            shift = column - chunk.tile_columns[0]
                            element = Element(self, (accumulators, operands, groups), chunk, 2 * r + j, shift)
                            x = COMBINE[primitive](x, element(nodes[i].args[0]))
                    results.append(cute.arch.warp_reduction(x, COMBINE[primitive], threads_in_group=4))
                groups[i, group] = results


class Element:
    """The values of an expression's nodes for one accumulator of a thread, or the one ``shift`` columns after it. Each
    is computed on first use.
    """

    def __init__(self, emitter, values, chunk, v, shift=0):
        self.emitter, self.chunk, self.v, self.shift = emitter, chunk, v, shift
        self.accumulators, self.operands, self.groups = values
        self.values = {}

    def __call__(self, i, rotate=0):
        """A node's value here, or in the other half of its group of ``rotate`` columns."""
        if (i, rotate) not in self.values:
            self.values[i, rotate] = self._value(i, rotate)
        return self.values[i, rotate]

    def _value(self, i, rotate):
        expression = self.emitter.expression
        node, column = expression.nodes[i], self.chunk.tile_columns[self.v // 4] + self.shift
        distance = self.shift + partner(column, rotate)
        if node.primitive == "operand" and node.operand == 0:
            return self.accumulators(int(node.half == "[n:]"), self.v, distance)
        if node.primitive == "operand":
            return self.operands[node.operand, node.half, rotate if expression.kinds[i].columns else 0](self.v)
        if node.primitive == "rotate_half":
            x = self(node.args[0], int(node.value))
            return x if partner(column, int(node.value)) < 0 else x * -1.0
        if node.primitive in REDUCTIONS:
            return self.groups[i, column // int(node.value)][self.v // 2 % 2]
        at = self.chunk.columns[self.v // 4] + self.v % 2 + distance
        args = [self(arg, rotate) for arg in node.args]
        return computed(node, args, self.chunk.shape[1], self.emitter.device, column=at)


def partner(column, rotate):
    """The distance from a column of a tile to its partner in the other half of its group of ``rotate`` columns."""
    if not rotate:
        return 0
    return rotate // 2 if 2 * (column % rotate) < rotate else -(rotate // 2)
