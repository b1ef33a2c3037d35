"""Ops of formulas: of an expression, and of the tensors that it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from cute_ops.constants import exact
from cute_ops.declaration.array_api import cast
from cute_ops.declaration.attributes import defaults_of
from cute_ops.declaration.config import Config, Needs, Problem, Space, Tuning, vary
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE, Array
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.static import WhileFew
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.graph import SHAPES, Expression
from cute_ops.expressions.philox import uniform
from cute_ops.expressions.reference import evaluate
from cute_ops.expressions.stages import stages
from cute_ops.expressions.text import text_of
from cute_ops.hardware import VECTOR_BYTES, WARP
from cute_ops.kernels.rows.config import COLUMN_CTAS, COLUMN_THREADS, FusedConfig, FusedRowConfig, Texts, column_width
from cute_ops.ops.expression.row_config import RowExpression, needs, others
from cute_ops.ops.rows import row_of

KERNEL = "cute_ops.kernels.rows.select:fused"
POINTWISE = vary(threads=(64, 128, 256, 512), unroll=(1, 2, 4))
# Threads of a CTA. With five streams (three inputs, two outputs) CTAs are small, as threads of large ones drift apart
# over memory pages.
THREADS, THREADS_OF_FIVE_STREAMS = 256, 128
# Partial sums that a sum over rows has in a kernel of elements, whose CTAs take a warp's vectors of columns, where the
# length of rows is not known; else as many as let COLUMN_CTAS run on each SM.
PARTIALS = 64
# Rows up to which one CTA adds up those of its columns: of sums alone, and beside a tile of the same pass.
# Sums over 256 rows of 1024, 4096 and 14336 bfloat16 columns take 3.1, 3.2 and 5.0 us so, by two kernels 4.9, 5.4 and
# 6.7; GELU's gradient of 32 rows with the bias' takes 2.4, 2.5 and 3.1 beside 4.1, 4.5 and 5.0 (H200).
FEW_ROWS, FEW_ROWS_OF_TILES = 256, 32
# Where each example has sums of its own: rows that a thread adds up, and the most partial sums of an example.
ROWS_OF_THREAD, MOST_PARTS = 16, 256
WHOLE, WHOLE_OF = ("int32", "int64", "uint8"), "I_"  # dtypes of whole numbers, and how variables of these begin
COLUMN = "*m"  # the shape of one number per row, as ``*m 1``
Attrs = Mapping[str, Any]
Made = TypeVar("Made")


class Formula(NamedTuple):
    """The computation of a kernel.

    Attributes:
        expression: the expression.
        by_rows: whether a kernel of rows computes it, since it reduces rows.
        reads: the names of the tensors that its operands are.
        writes: the names of the tensors that its outputs are, ``dx[:n]`` for a half of one.
        kinds: the kinds of the outputs, one letter each, as in the expression's text.
        tile: the name of a tile among the inputs.
        shared: the names of tensors of which the rows of an example, ``*b m n``, share one row.
        turns: whether rows ``*m h n`` take turns with those of the shared tensors, ``h n``, instead.
        stretched: of the shared tensors, those of which an element serves as many neighbouring columns, ``h d``.
        random: the names of integer scalars, which the expression reads as a random number for each element.
    """

    expression: Expression
    by_rows: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    kinds: str
    tile: str
    shared: tuple[str, ...] = ()
    turns: bool = False
    stretched: tuple[str, ...] = ()
    random: tuple[str, ...] = ()

    def config(self, problem: Problem) -> FusedConfig | FusedRowConfig:
        """The heuristic: that of rows, or one vector per thread. Vectors of 4-byte elements have half as many, so a CTA
        then has twice the threads; not for packed rows, whose CTAs are small if halves do not start on a vector.
        """
        rows = self.rows
        # A kernel of elements adds up rows of whole vectors for each example.
        by_rows = self.by_rows and not self._by_columns(problem, rows)
        if by_rows or (rows.summed and self.shared and not row_of(problem, rows.tiles).aligned):
            return rows.config(problem)
        small = rows.read + len(self.writes) >= 5 or (rows.packed and not row_of(problem, rows.tiles).aligned)
        wide = ITEMSIZE[problem.dtypes[self.tile]] == 4 and not rows.packed
        threads = (THREADS_OF_FIVE_STREAMS if small else THREADS) * (2 if wide else 1)
        return FusedConfig(threads, 1, **vars(self._texts), alone=self._alone(problem, rows))

    def _alone(self, problem: Problem, rows: RowExpression) -> bool:
        """Whether a CTA adds up all rows of its columns, if these are few: then there is no second kernel."""
        if self.shared or "r" not in self.kinds or {*self.kinds} - {"t", "r"} or rows.read > 2:
            return False
        most = FEW_ROWS if {*self.kinds} == {"r"} and rows.read == 1 else FEW_ROWS_OF_TILES
        return problem.m <= most and row_of(problem, rows.tiles).aligned

    def _by_columns(self, problem: Problem, rows: RowExpression) -> bool:
        """Whether a kernel of elements takes several sums over rows: of functions that cost little and reduce no row,
        if rows are whole vectors, alone or, where they follow on each other, several together.
        """
        cheap = not (stages(self.expression) or rows.special or rows.packed or self.shared)
        if not cheap or {*self.kinds} != {"t", "r"} or rows.sums < 2 or problem.n is None:
            return False
        sizes = {name: problem.n * ITEMSIZE[problem.dtypes[name]] for name in rows.tiles}
        follow = all(problem.aligns[name] == min(size & -size, VECTOR_BYTES) for name, size in sizes.items())
        return follow or row_of(problem, rows.tiles).aligned

    def of_outputs(self, names: Collection[str]) -> Formula:
        """This formula with only the named outputs."""
        kept = [i for i, name in enumerate(self.writes) if name.partition("[")[0] in names]
        outputs = tuple(self.expression.outputs[i] for i in kept)
        writes, kinds = tuple(self.writes[i] for i in kept), "".join(self.kinds[i] for i in kept)
        return self._replace(expression=self.expression._replace(outputs=outputs), writes=writes, kinds=kinds)

    def config_alone(self, problem: Problem) -> FusedConfig | FusedRowConfig:
        """The heuristic beside no product. A kernel of rows is faster although nothing is reduced for unaligned rows
        with row vectors, which a kernel of elements loads element by element and a kernel of rows realigns.
        """
        rows = self.rows
        if problem.n is None or not rows.weights or {*self.kinds} != {"t"}:
            return self.config(problem)
        row = rows.row(problem)
        return rows.config(problem) if not row.aligned and row.vectors > WARP else self.config(problem)

    def as_read(self, xp: Any, key: str, array: Any, shape: str, whole: tuple[Any, ...]) -> Any:
        """An operand, beside a tile of these sizes."""
        n = whole[-1]
        if key in self.random:
            return uniform(xp, array, whole)
        if key not in self.shared:
            return _of_rows(xp, array, shape, n)
        if key in self.stretched:
            each = n // array.shape[-1]
            return xp.reshape(xp.broadcast_to(array[..., None], (*array.shape, each)), (*array.shape[:-1], n))
        return array if self.turns else array[..., None, :]

    def width(self, problem: Problem) -> int:
        """Vectors of neighbouring columns that a column pass over examples takes."""
        names = [name for name, o in zip(self.reads, self.expression.operands, strict=True) if all(o.kind[:2])]
        vec = VECTOR_BYTES // max(ITEMSIZE[problem.dtypes[name]] for name in names)
        return WARP if problem.n is None else column_width(-(-problem.n // vec))

    @property
    def over(self) -> slice:
        """Of the leading dims those of rows that share one."""
        return slice(-1) if self.turns else slice(-1, None)

    @property
    def rows(self) -> RowExpression:
        """The formula as the heuristic of kernels of rows sees it."""
        nodes, operands = self.expression.nodes, self.expression.operands
        read = {self.reads[node.operand] + node.half for node in nodes if node.primitive == "operand"}
        tiles = {name for name, operand in zip(self.reads, operands, strict=True) if all(operand.kind[:2])}
        tiles -= {*self.stretched, *self.random}
        read = {name for name in read if name.partition("[")[0] in tiles}
        written = [name.partition("[") for name, kind in zip(self.writes, self.kinds, strict=True) if kind == "t"]
        packed = {name for name, half, _ in written if half} | {n.partition("[")[0] for n in read if "[" in n}
        names = {n.partition("[")[0] for n in read} | {name for name, *_ in written} or {self.tile}
        sums = self.kinds.count("r")
        if sums and not {*self.shared}.isdisjoint(name.partition("[")[0] for name in self.writes):
            read = {name for name in read if name.partition("[")[0] not in self.shared}  # others are read once
        return RowExpression(self.expression, sorted(names), sorted(packed), len(read), sums, self._texts)

    @property
    def _texts(self) -> Texts:
        written = {name.partition("[")[0] for name in self.writes}
        shared = " ".join(name for name in self.shared if name in {*self.reads, *written})
        turns, stretched = self.turns and bool(shared), " ".join(n for n in self.stretched if n in self.reads)
        return Texts(
            expression=text_of(self.expression), reads=" ".join(self.reads), writes=" ".join(self.writes),
            kinds=self.kinds, shared=shared, turns=turns, stretched=stretched,
            random=" ".join(name for name in self.random if name in self.reads),
        )  # fmt: skip


def declare(
    name: str,
    formula: Callable[[Attrs], Formula],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    attrs: Attrs,
    *,
    module: str,
    config: Callable[[Formula, Problem], FusedConfig | FusedRowConfig] = Formula.config,
    **more: Any,
) -> Op:
    """The op of a formula. An output without rows or columns is the sum of the values over these, in a fixed order.

    Args:
        name: the op's name.
        formula: gives what is computed with some attributes.
        inputs: those that are read, and ``unread`` ones, which only say shapes and dtypes.
        outputs: what is written, whole or by halves. One that is the ``same_as`` another has that one's values.
        attrs: the attributes, as in :class:`Op`.
        module: where the op is declared.
        config: the heuristic.
        more: other arguments of :class:`Op`.
    """
    same = any(tensor.same_as for tensor in outputs.values())
    dtypes = {tensor.dtype: key for key, tensor in reversed(list(inputs.items()))}

    def reference(xp: Any, *arrays: Any, **attrs: Any) -> tuple[Any, ...]:
        given, found = dict(zip(inputs, arrays, strict=True)), formula(attrs)
        tile = given[found.tile]
        whole = (*tile.shape[:-1], tile.shape[-1] // (1 + SHAPES[shape_of(inputs[found.tile].shape)].packed))
        read = [found.as_read(xp, key, given[key], inputs[key].shape, whole) for key in found.reads]
        # Without operands all values are 0.
        computed = evaluate(found.expression, xp, read) if read else [xp.zeros_like(tile[..., :1])] * len(found.writes)
        values, made = dict(zip(found.writes, computed, strict=True)), {}
        for key, tensor in outputs.items():
            shape, here = shape_of(tensor.shape), key in found.shared
            over = found.over if here else slice(None)
            sums = [
                summed(xp, values[f"{key}{half}"], whole, shape, found.by_rows, over) for half in SHAPES[shape].halves
            ]
            out = sums[0] if len(sums) == 1 else xp.concat(sums, axis=-1)
            out = out[..., None] if here and shape == "" else out
            out = out[..., 0] if tensor.shape in (COLUMN, "*b m", "*m h") else out
            like = dtypes.get(tensor.dtype)
            made[key] = cast(xp, out, tensor.dtype, out) if like is None else xp.astype(out, given[like].dtype)
        same = {key for key, t in outputs.items() if t.same_as and made[t.same_as].dtype == made[key].dtype}
        return tuple(None if key in same else out for key, out in made.items())

    def of_config(problem: Problem) -> FusedConfig | FusedRowConfig:
        return config(of_call(problem), whole_batch(problem))

    def of_call(problem: Problem) -> Formula:
        found = formula(problem.attrs)
        return found.of_outputs(problem.dtypes) if same else found

    def workspace(problem: Problem, config: Config) -> dict[str, Array | None]:
        written = {key: tensor for key, tensor in outputs.items() if not tensor.same_as or key in problem.dtypes}
        shapes = {key: shape_of(tensor.shape) for key, tensor in written.items()}
        return sum_workspaces(of_call(problem), shapes, problem, config)

    reference.__module__ = module
    if not {"static", "sharding"} <= more.keys():
        packed = any("2n" in tensor.shape for tensor in (*inputs.values(), *outputs.values()))
        more = dims_of(formula(defaults_of(attrs)), packed) | more
    return Op(
        name, inputs=inputs, outputs=outputs, reference=reference, attrs=attrs,
        tuning=Tuning(of_config, space_of(of_call), workspace),
        **{
            "dtypes": {t.dtype: choices(t.dtype) for t in inputs.values() if t.dtype not in ITEMSIZE}, "kernel": KERNEL,
            **more,
        },
    )  # fmt: skip


def dims_of(formula: Formula, packed: bool) -> dict[str, Any]:
    """Which dims of a formula's kernel are compile-time constants, and which several devices may share."""
    counts = any(node.primitive == "n" for node in formula.expression.nodes)
    return {
        "static": ("n",) if counts and not formula.by_rows else WhileFew("n"),
        "sharding": Sharding(parallel=() if formula.by_rows or packed else ("n",)),
    }


def choices(variable: str) -> tuple[str, ...]:
    """The dtypes that a variable may stand for: those of whole numbers, or of floats."""
    return WHOLE if variable.startswith(WHOLE_OF) else FLOATS


class ByAttrs(Generic[Made]):
    """A function of attributes that makes each of its values once."""

    def __init__(self, make: Callable[[Attrs], Made]) -> None:
        self.make = make
        self._made: dict[Hashable, Made] = {}

    def __call__(self, attrs: Attrs) -> Made:
        key = exact(tuple(attrs.items()))
        if key not in self._made:
            self._made.setdefault(key, self.make(attrs))
        return self._made[key]

    def __getstate__(self) -> Any:
        """Its identity: the values that calls have made so far are no part of it."""
        return {"make": self.make}

    def __deepcopy__(self, memo: dict[int, Any]) -> ByAttrs[Made]:
        """Itself, as of any function: Inductor copies its config, in which ops are."""
        return self


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


def sum_workspaces(
    formula: Formula, outputs: Mapping[str, str], problem: Problem, config: Config
) -> dict[str, Array | None]:
    """Workspaces for the partial sums of outputs, shapes by name, that are sums over rows. Those of a scalar are sums
    over rows of each column, which need a second workspace for their totals, unless the formula sums each row first.
    """
    made: dict[str, Array | None] = {}
    if config.get("alone"):
        return made
    vectors, scalars = PARTIALS, 0
    if problem.n is not None:
        strips = -(-problem.n * ITEMSIZE[problem.dtypes[formula.tile]] // (VECTOR_BYTES * WARP))
        vectors = max(problem.sm_count * COLUMN_CTAS // max(strips, 1), 1)
        # Rows that are whole vectors together have their sums in workspaces' rows of their own.
        vec = VECTOR_BYTES // min(ITEMSIZE[dtype] for dtype in problem.dtypes.values())
        fold = vec // math.gcd(problem.n, vec)
        vectors = max(vectors // fold, 1) * fold
    by_rows = "form" in config
    if by_rows:
        vectors, scalars = formula.rows.partials(whole_batch(problem), FusedRowConfig.of(config))
    if formula.shared and vectors:  # the rows of an example share their own sums
        examples = max(problem.size("h" if formula.turns else "b"), 1)
        # By elements an example's parts follow from its own rows alone, and so do the bits of its sums.
        each_part = ROWS_OF_THREAD * COLUMN_THREADS // formula.width(problem)
        parts = min(-(-problem.size("m") // each_part), MOST_PARTS)
        each = max(vectors // examples if by_rows else parts, 1)
        vectors, scalars = each * examples, scalars // vectors * each * examples
    for name, shape in outputs.items():
        if SHAPES[shape].kind.rows:
            continue
        n, of_rows = problem.size("n") * (1 + SHAPES[shape].packed), by_rows and shape == ""
        made[f"{name}_partials"] = Array((scalars,) if of_rows else (vectors, n), "float32")
        if shape == "" and not of_rows:
            made[f"{name}_totals"] = Array((n,), "float32")
    return made


def whole_batch(problem: Problem) -> Problem:
    """The problem with the rows of all examples, or all heads of tokens, as its rows."""
    of = next((dim for dim in ("b", "h") if dim in problem.dims), None)
    return problem if of is None else problem._replace(m=problem.size(of) * problem.size("m"))


def summed(
    xp: Any, terms: Any, whole: tuple[int, ...], shape: str, by_rows: bool, over: slice = slice(None)
) -> Any:  # fmt: skip
    """The sum of a gradient's terms, broadcast to ``whole``, over the dims that its operand, of this shape, lacks. With
    ``by_rows`` the terms of an operand without columns are sums over the columns already. ``over``: which of the
    leading dims are summed.
    """
    kind, lead = SHAPES[shape].kind, tuple(range(len(whole) - 1))[over]
    if kind.columns or not by_rows:
        terms = xp.broadcast_to(terms, whole)
    else:
        terms = xp.broadcast_to(terms, (*whole[:-1], 1))
    if not kind.columns:
        terms = xp.sum(terms, axis=-1, keepdims=kind.rows)
    return xp.sum(terms, axis=lead) if lead and not kind.rows else terms


def shape_of(shape: str) -> str:
    """A tensor's shape as expressions know it; of an example's own vector or number that of what all rows share."""
    shape = shape.replace("*b m", "*m").replace("*b ", "").replace("*m h", "*m").removeprefix("h ")
    return "" if shape == "1" else "*m 1" if shape == COLUMN else "*m n" if period(shape) or shape == "d" else shape


def period(shape: str) -> int:
    """Columns after which an operand of this shape repeats itself; 0 for other shapes."""
    lead, _, columns = shape.rpartition(" ")
    return int(columns) if lead in ("*m", "*#m") and columns.isdigit() and columns != "1" else 0


def _of_rows(xp: Any, array: Any, shape: str, n: int) -> Any:
    """An operand as the expression reads it: with columns, as many as there are if it repeats itself."""
    return array[..., None] if shape == COLUMN else repeated(xp, array, n) if period(shape) else array


def repeated(xp: Any, array: Any, n: int) -> Any:
    """The array repeated along its columns until it has n of them."""
    return xp.concat([array] * -(-n // array.shape[-1]), axis=-1)[..., :n] if n else array[..., :0]
