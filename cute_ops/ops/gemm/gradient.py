"""Gradients of products with epilogues: the ops that compute them, one after the other.

One pass computes ``dacc``, the gradient of the product, and the gradients of other tiles, by the derivative of the
epilogue's expression. The gradient of a vector or a scalar is a sum: of ``dacc`` itself where the operand is added to
the product, as a bias is. Sums of columns are added up in the same pass; those of scalars by kernels of rows alone,
which compute epilogues that reduce rows or look at groups of columns. Two products give the gradients of x and of the
weight. A gradient that is a cotangent, as that of a residual, is not computed. One that is another's, as that of what
is added before an activation, is that of the product, is computed once, and written once where dtypes allow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from cute_ops.declaration.attributes import defaults_of
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.derivative import differentiate
from cute_ops.expressions.graph import SHAPES, Expression, Graph, Node, copied, rebuilt
from cute_ops.ops.expression.formula import COLUMN, Attrs, ByAttrs, Formula, period, shape_of
from cute_ops.ops.expression.pointwise import pointwise
from cute_ops.ops.gemm.linear import linear_acc, product_gradients

ACC = "acc"  # the product, before the epilogue
MOST_SKIPPABLE = 3  # gradients of a step; each set of them that is wanted is an op
# Primitives whose derivative compares a result with arguments. Rounded, as a saved output is, it would equal none.
COMPARING = ("max", "min", "group_max")


class Forward(NamedTuple):
    """A product with an epilogue.

    Attributes:
        name: the op's name.
        weight: the weight.
        operands: the epilogue's other operands, by name.
        outputs: what it returns, by name.
        acc: the product, as it would be saved.
        expression: gives the epilogue with some attributes; its first operand is the product.
        attrs: the attributes, as in :class:`Op`.
        module: where the op is declared.
        by: what an element of an output depends on: the ``elements`` at its own place; its whole row (``rows``); or
            ``groups`` of columns, numbers of columns and operands that repeat themselves.
    """

    name: str
    weight: Tensor
    operands: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    acc: Tensor
    expression: Callable[[Attrs], Expression]
    attrs: Mapping[str, Any]
    module: str
    by: Literal["elements", "rows", "groups"] = "elements"

    @property
    def is_gradient(self) -> bool:
        """Whether an output is an operand's gradient: it has none itself."""
        return any(f"d{key}" in self.outputs for key in self.operands)

    @property
    def sources(self) -> dict[str, Tensor]:
        """Names that a derivative may read: the expression's operands, cotangents, outputs."""
        cotangents = {f"d{key}": tensor for key, tensor in self.outputs.items()}
        return {ACC: self.acc, **self.operands, **cotangents, **self.outputs}


class Gradient(NamedTuple):
    """The parts of a declaration that describe the gradient.

    Attributes:
        steps: the ops that compute it.
        handed_on: as in :class:`Op`.
        no_gradient: as in :class:`Op`.
        saves: whether it reads the product, which the forward saves for it.
    """

    steps: tuple[Op, ...] = ()
    handed_on: Mapping[str, str] = {}
    no_gradient: tuple[str, ...] = ()
    saves: bool = False


class EpilogueDerivative(NamedTuple):
    """The derivative of an epilogue: one node for each half of a packed operand, else one for each operand.

    Attributes:
        expression: computes all of them from what a derivative may read.
        of: for each operand the outputs that are its gradient, by index.
    """

    expression: Expression
    of: Mapping[str, tuple[int, ...]]

    def nodes(self, key: str) -> tuple[int, ...]:
        return tuple(self.expression.outputs[i] for i in self.of[key])

    def read(self, nodes: Sequence[int]) -> list[tuple[int, str]]:
        """The operands, with their halves, that these nodes are; empty if one of them is computed."""
        found = [self.expression.nodes[i] for i in nodes]
        return [(node.operand, node.half) for node in found] if all(n.primitive == "operand" for n in found) else []


def gradient(forward: Forward, save: bool) -> Gradient:
    """How the gradient of a product with an epilogue is computed; with ``save`` the product is saved where the gradient
    needs it, else it is recomputed.
    """
    made = _Gradient(forward)
    d_acc, first = made.d_acc, made.first()
    pointwise_steps = ([made.step(f"{forward.name}_bwd", first)] if first else []) + made.vectors(first)
    again = not save and any(ACC in step.inputs for step in pointwise_steps)
    across = forward.weight.shape.startswith("k")
    steps = [linear_acc(forward.acc.dtype, across=across)] if again else []
    products = product_gradients(d_acc, across=across) if d_acc else ()
    # Without a product in the gradient there is nothing that `fused` decides.
    flat = made.zero - {ACC} | made.repeated | ({"x", "weight"} if not d_acc else set())
    if pointwise_steps and not (again or products):
        flat.add("fused")
    saves = save and any(ACC in step.inputs for step in pointwise_steps)
    return Gradient((*steps, *pointwise_steps, *products), made.handed_on, tuple(sorted(flat)), saves)


class _Gradient:
    """The parts of a gradient: which operands get a cotangent, zeros or a step's output.

    Attributes:
        handed_on: operands whose gradient is an output's cotangent.
        zero: those of the operands and the product that no output depends on.
        repeated: operands that repeat themselves, which have no gradient.
        d_acc: the name of the product's gradient: ``dacc``, or the cotangent that it equals; empty where it is 0.
        same_as: operands whose gradient is computed as that of another one, or of the product.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward, self.terms = forward, ByAttrs(self._terms)
        self.repeated = {key for key, tensor in forward.operands.items() if period(tensor.shape)}
        self.operands = {key: tensor for key, tensor in forward.operands.items() if key not in self.repeated}
        first, every = self.terms(defaults_of(forward.attrs)), (ACC, *self.operands)
        # Other attributes may change which gradients are zero or a cotangent.
        known = {} if forward.attrs else {key: first.read(first.nodes(key)) for key in every}
        self.handed_on = {key: out for key, read in known.items() if (out := self._cotangent(key, read))}
        zeros = [Node("constant", (), "0.0")]
        self.zero = {key for key in known if [first.expression.nodes[i] for i in {*first.nodes(key)}] == zeros}
        out = self.handed_on.pop(ACC, "")
        if out and forward.outputs[out].dtype != "T":
            out = ""
        self.d_acc = f"d{out}" if out else "" if ACC in self.zero else f"d{ACC}"
        # Vectors and scalars whose gradient is a sum of the product's.
        same = [key for key in known if key != ACC and first.nodes(key) == first.nodes(ACC)]
        self.like_acc = [key for key in same if not _is_tile(forward.operands[key])]
        self.same_as = self._same_as(first, known)

    def _cotangent(self, key: str, read: list[tuple[int, str]]) -> str:
        """The output whose cotangent is this operand's gradient; empty where there is none."""
        sources = self.forward.sources
        names, tensor = list(sources), sources[key]
        for out, other in self.forward.outputs.items():
            whole = [(names.index(f"d{out}"), half) for half in SHAPES[shape_of(other.shape)].halves]
            if other.shape == tensor.shape and read == whole:
                return out
        return ""

    def _same_as(self, derivative: EpilogueDerivative, known: Iterable[str]) -> dict[str, str]:
        """Operands by the first one, or the product, that has their shape and their gradient."""
        firsts: dict[tuple[str, tuple[int, ...]], str] = {}
        found: dict[str, str] = {}
        for key in known:
            if key in {*self.zero, *self.handed_on} or (key == ACC and self.d_acc != f"d{ACC}"):
                continue
            shape = self.forward.sources[key].shape
            other = firsts.setdefault((shape, derivative.nodes(key)), key)
            if other != key:
                found[key] = other
        return found

    def first(self) -> tuple[str, ...]:
        """The operands whose gradients one pass computes: tiles, and sums of columns beside them. Kernels of rows also
        add up those of a few scalars.
        """
        other = {*self.zero, *self.handed_on, *self.like_acc}
        every = [*([ACC] if self.d_acc == f"d{ACC}" else []), *(key for key in self.operands if key not in other)]
        if self.forward.by != "elements" and len(every) <= MOST_SKIPPABLE:
            return tuple(every)
        tiles = [key for key in every if _is_tile(self.forward.sources[key])]
        if not tiles or self.forward.by != "elements":
            return tuple(tiles)
        beside, found = {*self.zero, *self.handed_on, *self.same_as}, tiles
        for key, tensor in self.operands.items():
            together = self._with_same(key)
            if key not in beside and tensor.shape in ("n", "2n") and len(found) + len(together) <= MOST_SKIPPABLE:
                found = [*found, *together]
        return tuple(found)

    def _with_same(self, key: str) -> tuple[str, ...]:
        return (key, *(each for each, other in self.same_as.items() if other == key))

    def vectors(self, first: Collection[str]) -> list[Op]:
        """A step for each vector or scalar that is not among the first, and those with the same gradient."""
        given = self.operands.items()
        beside = {*self.zero, *first, *self.same_as}
        names = [key for key, tensor in given if not _is_tile(tensor) and key not in beside]
        return [
            self.of_acc(every) if key in self.like_acc else self.step(f"{self.forward.name}_bwd_{key}", every)
            for key in names
            for every in [self._with_same(key)]
        ]

    def step(self, name: str, wanted: tuple[str, ...]) -> Op:
        """The op that computes the gradients of these operands and of the product."""
        forward = self.forward
        formula = ByAttrs(lambda attrs: self._formula(attrs, wanted))
        inputs = self._read(wanted, formula(defaults_of(forward.attrs)).reads)
        outputs = {
            f"d{key}": forward.acc._replace(dtype="T", hidden=False) if key == ACC else forward.operands[key]
            for key in wanted
        }
        same_as = {f"d{key}": f"d{self.same_as[key]}" for key in wanted if self.same_as.get(key) in wanted}
        if 1 < len(wanted) <= MOST_SKIPPABLE:
            serving = set(same_as.values())
            outputs = {key: tensor._replace(skippable=key not in serving) for key, tensor in outputs.items()}
        outputs = {key: tensor._replace(same_as=same_as.get(key)) for key, tensor in outputs.items()}

        def narrow(name: str, left: tuple[str, ...]) -> Op:
            return self.step(name, tuple(key.removeprefix("d") for key in left))

        return pointwise(
            name, formula, inputs, outputs, forward.attrs, groups=self.in_groups, narrow=narrow, module=forward.module,
            doc=f"A step of the gradient of :func:`{forward.name}`.",
        )  # fmt: skip

    def _read(self, wanted: Sequence[str], used: Collection[str]) -> dict[str, Tensor]:
        """The inputs of the step that computes these gradients: what it uses, and what says the dtype of an output."""
        forward = self.forward
        # With other attributes it may read other tensors.
        reads = [key for key in forward.sources if key in used or (forward.attrs and key not in forward.outputs)]
        inputs = {key: forward.sources[key]._replace(hidden=False) for key in reads}
        for key in wanted:
            if key == ACC and all(tensor.dtype != "T" for tensor in inputs.values()):
                inputs["weight"] = forward.weight._replace(unread=True, contiguous=())
            elif key != ACC:
                inputs.setdefault(key, forward.operands[key]._replace(unread=True))
        return inputs | {key: inputs[key]._replace(otherwise="copy") for key in inputs if key in forward.operands}

    def of_acc(self, wanted: tuple[str, ...]) -> Op:
        """The op that sums up the product's gradient to that of a vector or a scalar, and of those that share it."""
        forward, (first, *same_as) = self.forward, wanted
        given = {key: t._replace(shape=t.shape.replace("2n", "n")) for key in wanted for t in [forward.operands[key]]}
        graph = Graph([SHAPES["*m n"]])
        expression, kind = graph.finish([graph.operand(0)] * len(wanted)), SHAPES[shape_of(given[first].shape)].kind
        writes = tuple(f"d{key}" for key in wanted)
        formula = Formula(expression, False, (self.d_acc,), writes, str(kind) * len(wanted), self.d_acc)
        outputs = {f"d{key}": t._replace(same_as=f"d{first}" if key in same_as else None) for key, t in given.items()}
        shapes = {key: t._replace(unread=True, otherwise="copy") for key, t in given.items()}
        return pointwise(
            f"{forward.name}_bwd_{first}", lambda attrs: formula, {self.d_acc: Tensor("*m n", "T"), **shapes}, outputs,
            {}, module=forward.module, doc=f"A step of the gradient of :func:`{forward.name}`: a sum.",
        )  # fmt: skip

    @property
    def in_groups(self) -> bool:
        """Whether the kernel of groups computes it. That one also takes column vectors ``*m`` in any layout."""
        tensors = self.forward.sources.values()
        return self.forward.by == "groups" or (self.forward.by == "rows" and COLUMN in [t.shape for t in tensors])

    def _formula(self, attrs: Attrs, wanted: tuple[str, ...]) -> Formula:
        """The expression of the step for these operands."""
        terms, sources = self.terms(attrs), self.forward.sources
        names, nodes, expression = list(sources), [i for key in wanted for i in terms.nodes(key)], terms.expression
        needed = rebuilt(expression, outputs=nodes)
        # At least one cotangent, or the product, is read: it says how many rows and columns there are.
        read = {node.operand for node in needed.nodes if node.primitive == "operand"}
        cotangents = [names.index(f"d{out}") for out, tensor in self.forward.outputs.items() if _is_tile(tensor)]
        cotangents = cotangents or [names.index(ACC)]
        kept = sorted(read if read.intersection(cotangents) else read | {cotangents[0]})
        tile = next(names[i] for i in kept if i in cotangents)
        writes, kinds = [], ""
        for key in wanted:
            operand = SHAPES[shape_of(sources[key].shape)]
            writes += [f"d{key}{half}" for half in operand.halves]
            kinds += str(operand.kind) * len(operand.halves)
        reads, by_rows = tuple(names[i] for i in kept), self.forward.by != "elements"
        return Formula(rebuilt(needed, kept=kept), by_rows, reads, tuple(writes), kinds, tile)

    def _terms(self, attrs: Attrs) -> EpilogueDerivative:
        forward = self.forward
        expression = forward.expression(attrs)
        halves = [(key, half) for key, t in forward.outputs.items() for half in SHAPES[shape_of(t.shape)].halves]
        # Which outputs a derivative can use may depend on attributes; which ones are saved may not.
        compares = any(node.primitive in COMPARING for node in expression.nodes)
        saved = () if forward.attrs or compares else range(len(halves))
        wanted = [0, *(i for i, key in enumerate(forward.operands, 1) if key in self.operands)]
        found = differentiate(expression, wanted, saved, sum_columns=forward.by != "elements")
        names = list(forward.sources)
        graph = Graph(SHAPES[shape_of(tensor.shape)] for tensor in forward.sources.values())

        def operand(node: Node) -> int:
            role, position = found.sources[node.operand]
            if role == "operand":
                return graph.operand(position, node.half)
            key, half = halves[position]
            return graph.operand(names.index(f"d{key}" if role == "cotangent" else key), half)

        nodes = copied(found.expression, graph, operand)
        outputs = [nodes[i] for i in found.expression.outputs]
        grouped = groupby(range(len(outputs)), key=lambda i: found.addends[i].operand)
        return EpilogueDerivative(graph.finish(outputs), {names[key]: tuple(group) for key, group in grouped})


def _is_tile(tensor: Tensor) -> bool:
    return "*m" in tensor.shape and "n" in tensor.shape
