"""Ops made from one Python function: declaration, reference, kernel and gradient follow from the traced expression."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn

from cute_ops.config import Config, Needs, Problem, Space, Tuning, vary
from cute_ops.errors import header_of, suggesting
from cute_ops.expressions.derivative import Source, differentiate, worth_saving
from cute_ops.expressions.graph import SHAPES, Expression
from cute_ops.expressions.groups import sizes
from cute_ops.expressions.reference import evaluate
from cute_ops.expressions.stages import stages
from cute_ops.expressions.text import text_of
from cute_ops.expressions.tracing import trace
from cute_ops.hardware import WARP
from cute_ops.kernels.epilogue.config import FusedConfig, FusedRowConfig, Texts
from cute_ops.op import Case, Op, Sharding, Tensor, WhileFew, defaults_of
from cute_ops.ops.fused_rows import RowExpression, needs, others
from cute_ops.ops.rows import row_of
from cute_ops.shapes import FLOATS, ITEMSIZE, Array

KERNEL = "cute_ops.kernels.epilogue.select:fused"
POINTWISE = vary(threads=(64, 128, 256, 512), unroll=(1, 2, 4))
# Threads of a CTA. With five streams (three inputs, two outputs) CTAs are small, as threads of large ones drift apart
# over memory pages.
THREADS, THREADS_OF_FIVE_STREAMS = 256, 128
# Partial sums that a sum over rows has in a kernel of elements.
PARTIALS = 64
CASES = (Case("odd", {"m": (3, 5), "n": 999}), Case("aligned", {"m": (64,), "n": 4096}))


@suggesting
def fused(
    function: Callable[..., Any],
    *,
    operands: Mapping[str, str],
    name: str = "",
    outputs: Sequence[str] = (),
    attrs: Mapping[str, Any] | None = None,
    no_gradient: tuple[str, ...] = (),
    cases: tuple[Case, ...] = CASES,
    doc: str = "",
    grad_doc: str = "",
) -> Op:
    """The op of a function, with its gradient. Its kernel computes the whole function in one pass.

        def gelu_add(xp, x, bias, residual):
            return xp.gelu(x + bias) + residual

        gelu_add_op = cute_ops.fused(gelu_add, operands={"x": "*m n", "bias": "n", "residual": "*m n"})

    Values are float32. Outputs have the tiles' dtype, rounded once, and the shape ``*m n``, or ``*m 1`` if they follow
    from reductions of rows alone. :mod:`cute_ops.expressions` says what a function may do.

    Args:
        function: ``function(xp, *operands, **attrs)`` in array-API style; returns a value or a tuple of values.
        operands: their shapes: ``*m n`` a tile, ``*m 2n`` two side by side, ``n`` or ``2n`` a row vector, ``*m 1`` a
            column vector, empty a scalar. Tiles share a dtype, vectors and scalars have their own.
        name: the op's name, the function's by default.
        outputs: their names, by default ``out``, or ``out0``, ``out1``, ...
        attrs: as in :class:`Op`; Python sees their values, and each combination has a kernel of its own.
        no_gradient: operands whose gradient is not computed.
        cases: named problems.
        doc: the op's docstring, the function's by default.
        grad_doc: the gradient's docstring.

    A gradient that is an output's cotangent itself, as that of ``residual`` above, is not written. A gradient that two
    operands share is written once. Where that reads fewer tiles, gradients read an output in place of the operands that
    it is the sum of, as it was rounded: ``x + residual`` of a function that returns it beside its norm.

    Raises:
        TraceError: the function does what an expression cannot say.
        ValueError: it does something that cannot be fused yet, or the declaration is wrong.
    """
    header_of(function, "cute_ops.fused: argument `function`")
    if not isinstance(operands, Mapping):
        came = type(operands).__name__  # type: ignore[unreachable]
        raise TypeError(f"cute_ops.fused: argument `operands` must be shapes by name, {{'x': '*m n'}}, got {came}.")
    made = _Fused(name or function.__name__, function, operands, outputs, attrs, cases, no_gradient)
    gradient = Op(
        f"{made.name}_bwd", inputs=made.grad_inputs, outputs=made.written_gradients,
        doc=grad_doc or f"Gradient of :func:`{made.name}`.", reference=made.reference_of(made.reference_bwd),
        tuning=made.tuning(made.backward, made.workspace), **made.common,
    )  # fmt: skip
    return Op(
        made.name, inputs=made.inputs, outputs=made.results, grad=gradient, handed_on=made.handed_on,
        no_gradient=no_gradient,
        doc=doc or inspect.getdoc(function) or f"``{made.name}`` in one pass.",
        reference=made.reference_of(made.reference), tuning=made.tuning(made.forward), **made.common,
    )  # fmt: skip


def fused_again(
    function: Callable[..., Any], *, operands: Mapping[str, str], name: str, cases: tuple[Case, ...], doc: str
) -> Op:
    """The op of a function's gradients together with its outputs, for a backward that needs both; it has no gradient.
    Arguments as in :func:`fused`.
    """
    made = _Fused(name, function, operands, (), None, cases)

    def both(xp: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
        return *made.reference_again(xp, arrays, attrs), *made.reference(xp, arrays[: len(operands)], attrs)

    return Op(
        name, inputs=made.inputs | made.cotangents, outputs=made.gradients | made.results, doc=doc,
        reference=made.reference_of(both), tuning=made.tuning(made.again), **made.common,
    )  # fmt: skip


def _is_tile(shape: str) -> bool:
    return shape in ("*m n", "*m 2n")


def _dtype(name: str, shape: str) -> str:
    return "T" if _is_tile(shape) else f"T_{name}"


def space_of(formula: Callable[[Problem], Formula]) -> Space:
    """The search space of the kernel of a call's formula."""

    def configs(problem: Problem, heuristic: Config) -> Iterable[Any]:
        if "form" in heuristic:
            return others(formula(problem).rows, problem, heuristic)
        return POINTWISE.configs(problem, heuristic)

    def taken(problem: Problem, config: Config) -> Needs:
        if "form" in config:
            return needs(formula(problem).rows, problem, config)
        return Needs(config["threads"])

    return Space(configs, taken)


class Formula(NamedTuple):
    """What a kernel computes.

    Attributes:
        expression: the expression.
        by_rows: whether a kernel of rows computes it, since it reduces rows.
        reads: the names of the tensors that its operands are.
        writes: the names of the tensors that its outputs are, ``dx[:n]`` for a half of one.
        kinds: the kinds of the outputs, one letter each, as in the expression's text.
        tile: the name of a tile among the inputs.
    """

    expression: Expression
    by_rows: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kinds: str
    tile: str

    def config(self, problem: Problem) -> FusedConfig | FusedRowConfig:
        """The heuristic: that of rows, or one vector per thread. Vectors of 4-byte elements have half as many, so a CTA
        then has twice the threads; not for packed rows, whose CTAs are small if halves do not start on a vector.
        """
        rows = self.rows
        if self.by_rows:
            return rows.config(problem)
        small = rows.read + len(self.writes) >= 5 or (rows.packed and not row_of(problem, rows.tiles).aligned)
        wide = ITEMSIZE[problem.dtypes[self.tile]] == 4 and not rows.packed
        return FusedConfig((THREADS_OF_FIVE_STREAMS if small else THREADS) * (2 if wide else 1), 1, *self._texts)

    def of_outputs(self, names: Collection[str]) -> Formula:
        """What is left of it where only these tensors are written, of which one has each value that it computes."""
        kept = [i for i, name in enumerate(self.writes) if name.partition("[")[0] in names]
        outputs = tuple(self.expression.outputs[i] for i in kept)
        writes, kinds = tuple(self.writes[i] for i in kept), "".join(self.kinds[i] for i in kept)
        return self._replace(expression=self.expression._replace(outputs=outputs), writes=writes, kinds=kinds)

    def loads_vectors_once(self, problem: Problem) -> bool:
        """Whether a kernel of rows is faster although nothing is reduced: for unaligned rows with row vectors, which a
        kernel of elements loads element by element and a kernel of rows realigns.
        """
        nodes, kinds = self.expression.nodes, self.expression.kinds
        vectors = any(node.word == "operand" and str(kind) == "r" for node, kind in zip(nodes, kinds, strict=True))
        if problem.n is None or not vectors or {*self.kinds} != {"t"}:
            return False
        row = self.rows.row(problem)
        return not row.aligned and row.vectors > WARP

    @property
    def rows(self) -> RowExpression:
        """The formula as the heuristic of kernels of rows sees it."""
        nodes, operands = self.expression.nodes, self.expression.operands
        read = {self.reads[node.operand] + node.half for node in nodes if node.word == "operand"}
        tiles = {name for name, operand in zip(self.reads, operands, strict=True) if all(operand.kind[:2])}
        read = {name for name in read if name.partition("[")[0] in tiles}
        written = [name.partition("[") for name, kind in zip(self.writes, self.kinds, strict=True) if kind == "t"]
        packed = {name for name, half, _ in written if half} | {n.partition("[")[0] for n in read if "[" in n}
        names = {n.partition("[")[0] for n in read} | {name for name, *_ in written} or {self.tile}
        sums = self.kinds.count("r")
        return RowExpression(self.expression, sorted(names), sorted(packed), len(read), sums, self._texts)

    @property
    def _texts(self) -> Texts:
        return Texts(text_of(self.expression), " ".join(self.reads), " ".join(self.writes), self.kinds)


class _Fused:
    """A function, traced once per combination of attributes, and the fields of its declarations."""

    def __init__(
        self, name: str, function: Callable[..., Any], operands: Mapping[str, str], outputs: Sequence[str],
        attrs: Mapping[str, Any] | None, cases: tuple[Case, ...], no_gradient: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.name, self.function, self.operands = name, function, dict(operands)
        self.wanted = {key: shape for key, shape in operands.items() if key not in no_gradient}
        self._forward, self._backward = cache(self._traced), cache(self._differentiated)
        defaults = defaults_of(attrs or {})
        kinds = trace(function, operands, defaults).output_kinds
        names = tuple(outputs) or (("out",) if len(kinds) == 1 else tuple(f"out{i}" for i in range(len(kinds))))
        # Tiles; column vectors for values without columns.
        self.outputs = dict.fromkeys(names, "*m n")
        self.outputs |= {name: "*m 1" for name, kind in zip(names, kinds, strict=False) if not kind.columns}
        if bools := [key for key, shape in operands.items() if "bool" in shape]:
            self._refuse(f"operand `{bools[0]}` holds bools: give numbers, and compare them, `{bools[0]} != 0`")
        if not any(map(_is_tile, operands.values())):
            self._refuse("it has no tile, '*m n' or '*m 2n', whose dtype outputs have")
        self.tile = next(key for key, shape in operands.items() if _is_tile(shape))
        forward = self.forward(defaults)
        # Other values of attributes may give other gradients.
        self.handed_on, self.twins = ({}, {}) if attrs else self._passed_on(forward.expression)
        computed, by_rows = self._computed(), self._backward_by_rows(forward)
        self.saved = () if attrs else worth_saving(forward.expression, computed, sum_columns=by_rows)
        backward = self.backward(defaults)
        self.inputs = {key: Tensor(shape, _dtype(key, shape)) for key, shape in operands.items()}
        self.results = {out: Tensor(shape, "T") for out, shape in self.outputs.items()}
        self.gradients = {f"d{key}": self.inputs[key] for key in self.wanted}
        written = {key: tensor for key, tensor in self.gradients.items() if key[1:] not in self.handed_on}
        twins = {f"d{key}": f"d{other}" for key, other in self.twins.items()}
        self.written_gradients = {key: tensor._replace(same_as=twins.get(key)) for key, tensor in written.items()}
        self.cotangents = {f"d{out}": tensor for out, tensor in self.results.items()}
        self.grad_inputs = self._kept(operands.keys() if attrs else {*backward.reads}) | self.cotangents
        counts = any(node.word == "n" for each in (forward, backward) for node in each.expression.nodes)
        alone = forward.by_rows or any("2n" in shape for shape in operands.values())
        self.common: dict[str, Any] = {
            "dtypes": {tensor.dtype: FLOATS for tensor in self.inputs.values()}, "attrs": attrs, "cases": cases,
            "static": ("n",) if counts and not forward.by_rows else WhileFew("n"), "kernel": KERNEL,
            "sharding": Sharding(parallel=() if alone else ("n",)),
        }  # fmt: skip

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"cute_ops.fused: {self.name} cannot be fused: {why}")

    def _kept(self, needed: Collection[str]) -> dict[str, Tensor]:
        """What the gradient gets beside cotangents. A tile that it does not read is left out, so that nothing keeps it,
        if a cotangent says the shape and the dtype of tiles.
        """
        told = "*m n" in self.outputs.values()
        kept = {
            key: tensor._replace(unread=key not in needed) for key, tensor in self.inputs.items()
            if key in needed or not (told and _is_tile(tensor.shape))
        }  # fmt: skip
        return kept | {name: self.results[name] for i, name in enumerate(self.outputs) if i in self.saved}

    def forward(self, attrs: Mapping[str, Any]) -> Formula:
        """The function itself."""
        return self._forward(tuple(attrs.items()))

    def backward(self, attrs: Mapping[str, Any]) -> Formula:
        """The gradients of the operands that have one, before sums over the dims that operands lack."""
        return self._backward(tuple(attrs.items()))

    def again(self, attrs: Mapping[str, Any]) -> Formula:
        """The gradients of all operands, and the function itself."""
        return self._backward(tuple(attrs.items()), again=True)

    def _passed_on(self, expression: Expression) -> tuple[dict[str, str], dict[str, str]]:
        """Tiles whose gradient needs no memory of its own: with the output whose cotangent it is, and with the operand
        whose gradient it is, too. At least one gradient is left to compute.
        """
        names, outputs = [*self.operands], [*self.outputs]
        found = differentiate(expression, [i for i, key in enumerate(names) if key in self.wanted])
        nodes, whole = found.expression.nodes, {key for key, shape in self.operands.items() if shape == "*m n"}
        cotangents: dict[str, str] = {}
        twins: dict[str, str] = {}
        firsts: dict[int, str] = {}
        for addend, i in zip(found.addends, found.expression.outputs, strict=True):
            name, node = names[addend.operand], nodes[i]
            last = len(cotangents) + len(twins) + 1 == len(self.wanted)
            if name not in whole or addend.rows or addend.columns or last:
                continue
            source = found.sources[node.operand] if node.word == "operand" else None
            if source and source.role == "cotangent" and self.outputs[outputs[source.position]] == "*m n":
                cotangents[name] = outputs[source.position]
            elif firsts.setdefault(i, name) != name:
                twins[name] = firsts[i]
        return cotangents, twins

    def tuning(self, formula: Callable[[Mapping[str, Any]], Formula], workspace: Any = None) -> Tuning:
        """The tuning of a formula's kernel."""

        def config(problem: Problem) -> FusedConfig | FusedRowConfig:
            found = formula(problem.attrs)
            return found.rows.config(problem) if found.loads_vectors_once(problem) else found.config(problem)

        return Tuning(config, space_of(lambda problem: formula(problem.attrs)), workspace)

    def reference_of(self, computed: Callable[[Any, Sequence[Any], Mapping[str, Any]], tuple[Any, ...]]) -> Any:
        """A function with the signature of a declaration's reference."""

        def reference(xp: Any, *arrays: Any, **attrs: Any) -> tuple[Any, ...]:
            return computed(xp, arrays, attrs)

        reference.__module__ = self.function.__module__  # where the op is declared
        return reference

    def _traced(self, attrs: tuple[tuple[str, Any], ...]) -> Formula:
        expression = trace(self.function, self.operands, dict(attrs))
        if sizes(expression) or any(node.word == "column" for node in expression.nodes):
            self._refuse("columns by their number or in groups are for epilogues of products, cute_ops.fused_linear")
        if len(expression.outputs) != len(self.outputs):
            self._refuse(f"it returns {len(expression.outputs)} values for the outputs {', '.join(self.outputs)}")
        for (out, shape), kind in zip(self.outputs.items(), expression.output_kinds, strict=True):
            if kind.dtype == "bool":
                self._refuse(f"{out} holds bools; return xp.where({out}, 1.0, 0.0)")
            if not kind.rows or kind.columns != SHAPES[shape].kind.columns:
                self._refuse(f"{out} does not have the shape {shape!r}: compute it from a tile")
        by_rows = bool(stages(expression)) or "*m 1" in self.outputs.values()
        kinds = "".join(str(SHAPES[shape]) for shape in self.outputs.values())
        return Formula(expression, by_rows, tuple(self.operands), tuple(self.outputs), kinds, self.tile)

    def _differentiated(self, attrs: tuple[tuple[str, Any], ...], again: bool = False) -> Formula:
        forward = self._forward(attrs)
        by_rows, wanted = self._backward_by_rows(forward), self._computed(again)
        saved = () if again else self.saved
        found = differentiate(forward.expression, wanted, saved, sum_columns=by_rows, again=again)
        tensors, outputs = [*self.operands], [*self.outputs]
        names = {"operand": tensors, "output": outputs, "cotangent": [f"d{out}" for out in outputs]}

        def source(each: Source) -> str:
            return names[each.role][each.position]

        writes = tuple(f"d{tensors[addend.operand]}{addend.half}" for addend in found.addends)
        kinds = "".join(str(SHAPES[self.operands[tensors[addend.operand]]].kind) for addend in found.addends)
        if again:
            writes, kinds = writes + forward.writes, kinds + forward.kinds
        reads = tuple(map(source, found.sources))
        tile = next((f"d{out}" for out, shape in self.outputs.items() if shape == "*m n"), self.tile)
        return Formula(found.expression, by_rows, reads, writes, kinds, tile)

    def _computed(self, again: bool = False) -> list[int]:
        """The operands, by index, whose gradient the backward op computes; with ``again`` all that have one."""
        idle = set() if again else {*self.handed_on, *self.twins}
        return [i for i, key in enumerate(self.operands) if key in self.wanted.keys() - idle]

    def _backward_by_rows(self, forward: Formula) -> bool:
        """For gradients that are sums, kernels of rows read each tile only once."""
        return forward.by_rows or not all(map(_is_tile, self.wanted.values()))

    def workspace(self, problem: Problem, config: Config) -> dict[str, Array | None]:
        gradients = {f"d{name}": shape for name, shape in self.wanted.items()}
        return sum_workspaces(self.backward(problem.attrs), gradients, problem, config)

    def reference(self, xp: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The outputs."""
        dtype = arrays[tuple(self.operands).index(self.tile)].dtype
        return tuple(xp.astype(out, dtype) for out in evaluate(self.forward(attrs).expression, xp, arrays))

    def reference_bwd(self, xp: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The gradients that the backward op writes; None for one that another output stands for."""
        found = self._gradients(xp, self.backward(attrs), dict(zip(self.grad_inputs, arrays, strict=True)))
        return tuple(found.get(name) for name in self.written_gradients)

    def reference_again(self, xp: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The gradients of all operands."""
        given = dict(zip((*self.inputs, *self.cotangents), arrays, strict=True))
        return tuple(self._gradients(xp, self.again(attrs), given).values())

    def _gradients(self, xp: Any, formula: Formula, given: Mapping[str, Any]) -> dict[str, Any]:
        """The gradients that a formula computes, by name."""
        tile, gradients = given[formula.tile], {}
        packed = SHAPES[self.operands.get(formula.tile, "*m n")].packed
        shape = (*tile.shape[:-1], tile.shape[-1] // (1 + packed))
        terms = dict.fromkeys(formula.writes, xp.zeros_like(given[next(iter(self.cotangents))]))
        if formula.reads:  # else all gradients are 0
            found = evaluate(formula.expression, xp, [given[name] for name in formula.reads])
            terms = dict(zip(formula.writes, found, strict=True))
        for name, operand in self.operands.items():
            halves = [f"d{name}[:n]", f"d{name}[n:]"] if SHAPES[operand].packed else [f"d{name}"]
            if halves[0] in terms:
                sums = [summed(xp, terms[half], shape, operand, formula.by_rows) for half in halves]
                whole = sums[0] if len(sums) == 1 else xp.concat(sums, axis=-1)
                gradients[f"d{name}"] = xp.astype(whole, (tile if _is_tile(operand) else given[name]).dtype)
        return gradients


def sum_workspaces(
    formula: Formula, outputs: Mapping[str, str], problem: Problem, config: Config
) -> dict[str, Array | None]:
    """Workspaces for the partial sums of outputs that are sums over rows. Those of a scalar are sums over rows of each
    column, which need a second workspace for their totals, unless the formula sums each row first.

    Args:
        formula: the formula.
        outputs: shapes by name.
        problem: the call.
        config: the kernel's config.
    """
    made: dict[str, Array | None] = {}
    vectors, scalars = PARTIALS, 0
    if formula.by_rows:
        vectors, scalars = formula.rows.partials(problem, FusedRowConfig.of(config))
    for name, shape in outputs.items():
        if SHAPES[shape].kind.rows:
            continue
        n, of_rows = problem.size("n") * (1 + SHAPES[shape].packed), formula.by_rows and shape == ""
        made[f"{name}_partials"] = Array((scalars,) if of_rows else (vectors, n), "float32")
        if shape == "" and not of_rows:
            made[f"{name}_totals"] = Array((n,), "float32")
    return made


def summed(xp: Any, terms: Any, whole: tuple[int, ...], shape: str, by_rows: bool) -> Any:
    """The sum of a gradient's terms, broadcast to ``whole``, over the dims that its operand, of this shape, lacks. With
    ``by_rows`` the terms of an operand without columns are sums over the columns already.
    """
    kind, lead = SHAPES[shape].kind, tuple(range(len(whole) - 1))
    if kind.columns or not by_rows:
        terms = xp.broadcast_to(terms, whole)
    else:
        terms = xp.broadcast_to(terms, (*whole[:-1], 1))
    if not kind.columns:
        terms = xp.sum(terms, axis=-1, keepdims=kind.rows)
    return xp.sum(terms, axis=lead) if lead and not kind.rows else terms
