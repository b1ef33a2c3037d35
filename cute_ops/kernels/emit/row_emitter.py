"""An expression with reductions of rows, computed in registers, one stage of reductions after another."""

from cutlass import Float32

from cute_ops.expressions.stages import awaited, levels, stages
from cute_ops.expressions.text import parse
from cute_ops.kernels.emit.emitter import computed
from cute_ops.kernels.emit.primitives import DEVICE, EXACT, SHORT_DEVICE


class RowEmitter:
    """The order in which an expression with reductions of rows is computed.

    Attributes:
        stages: the nodes of the reductions of each stage.
        primitives: their primitives.
        read: the nodes of the operands that are read.
        reduced: those with columns that reductions are computed from.
        exact: what the largest or smallest number of a row is looked for in, if elements are compared with that: they
            are computed again, and equal it only if every operation rounds as it did.
        short: exponentials of what lies below the maximum of its row, ``exp(x - max(x))``, if ``narrow``: if tiles have
            16 bits. The short form is off by as much as rounding the difference is, also in a float32 sum.
    """

    def __init__(self, text, device=DEVICE, narrow=False):
        self.expression, self.device = parse(text), device
        self.short = {node for node in self.expression.nodes if narrow and self._below_maximum(node)}
        self.levels, self.stages = levels(self.expression), stages(self.expression)
        nodes = self.expression.nodes
        self.primitives = [[nodes[i].primitive for i in stage] for stage in self.stages]
        self.read = [i for i, node in enumerate(nodes) if node.primitive == "operand"]
        self.bools = [i for i in self.read if self.expression.kinds[i].dtype == "bool"]
        seen = self._with_columns([nodes[i].args[0] for stage in self.stages for i in stage])
        self.reduced = [i for i in self.read if i in seen]
        self.exact = {nodes[i] for i in self._with_columns(self._compared())}

    def _with_columns(self, nodes):
        """These nodes and what they are computed from, as far as it has columns."""
        waiting, seen = [*nodes], set()
        while waiting:
            i = waiting.pop()
            if i not in seen and self.expression.kinds[i].columns:
                seen.add(i)
                waiting += self.expression.nodes[i].args
        return seen

    def _compared(self):
        """The nodes that are compared with their row's largest or smallest number."""
        nodes = self.expression.nodes
        pairs = [pair for n in nodes if n.primitive == "equal" for pair in (n.args, n.args[::-1])]
        return [x for x, y in pairs if nodes[y].primitive in ("max", "min") and nodes[y].args[0] == x]

    def table(self, node):
        """The device functions that compute a node."""
        if node in self.exact:
            return {**self.device, **EXACT}
        return SHORT_DEVICE if node in self.short else self.device

    def _below_maximum(self, node):
        nodes = self.expression.nodes
        inner = nodes[node.args[0]] if node.primitive == "exp" else node
        return inner.primitive == "subtract" and nodes[inner.args[1]] == inner._replace(
            primitive="max", args=inner.args[:1]
        )

    def awaited(self, kinds):
        """How many stages outputs with columns wait for; ``kinds``: the outputs' letters."""
        return awaited(self.expression, kinds)

    def begin(self, numbers, length):
        """A row before its first stage; ``numbers``: the operands of which a row has one number, by node."""
        return RowValues(self, numbers, length)


class RowValues:
    """The values of one row: those without columns are computed once, as soon as possible, others on every use."""

    def __init__(self, emitter, numbers, length):
        self.emitter, self.length = emitter, length
        self.known = self._given(numbers)
        self._settle(0)

    def _given(self, operands):
        """Operands by node, those of bools as conditions."""
        return {i: x != 0.0 if i in self.emitter.bools else x for i, x in operands.items()}

    def _settle(self, level):
        """Compute the values without columns that are known after so many stages."""
        nodes, kinds = self.emitter.expression.nodes, self.emitter.expression.kinds
        for i, node in enumerate(nodes):
            if not kinds[i].columns and self.emitter.levels[i] == level and i not in self.known:
                self.known[i] = self._computed(node, [self.known[arg] for arg in node.args])

    def reduced(self, stage, totals):
        """Take the results of a stage's reductions, means as sums."""
        for i, primitive, total in zip(self.emitter.stages[stage], self.emitter.primitives[stage], totals):
            self.known[i] = total * (1.0 / Float32(self.length)) if primitive == "mean" else total
        self._settle(stage + 1)

    def terms(self, stage, elements):
        """The terms of a stage's reductions in one column; ``elements``: of operands with columns, by node."""
        nodes, found = self.emitter.expression.nodes, self._given(elements)
        return [self._value(nodes[i].args[0], found) for i in self.emitter.stages[stage]]

    def outputs(self, places, elements):
        """Some outputs in one column, after the last stage."""
        found = self._given(elements)
        return [self._value(self.emitter.expression.outputs[i], found) for i in places]

    def number(self, place):
        """An output without columns."""
        return self.known[self.emitter.expression.outputs[place]]

    def _value(self, i, found):
        if i in self.known:
            return self.known[i]
        if i not in found:
            node = self.emitter.expression.nodes[i]
            found[i] = self._computed(node, [self._value(arg, found) for arg in node.args])
        return found[i]

    def _computed(self, node, args):
        return computed(node, args, self.length, self.emitter.table(node))
