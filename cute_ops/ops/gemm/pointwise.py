"""Ops of expressions that run beside products: an epilogue by itself, and the gradient of an epilogue.

The kernels of :mod:`cute_ops.ops.fused` compute them. Those that look at groups of columns have a kernel of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cute_ops.array_api import cast
from cute_ops.config import Config, Problem, Tuning
from cute_ops.expressions.graph import SHAPES, Graph, copied
from cute_ops.expressions.reference import evaluate
from cute_ops.kernels.epilogue.config import FusedConfig, FusedRowConfig
from cute_ops.op import Case, Op, Program, Sharding, Tensor, WhileFew
from cute_ops.ops.fused import KERNEL, Formula, space_of, sum_workspaces, summed
from cute_ops.ops.gemm.batches import CASES as BATCHES
from cute_ops.ops.gemm.batches import each
from cute_ops.shapes import FLOATS, Array

CASES = (Case("odd", {"m": (3, 5), "n": 999, "k": 8}), Case("aligned", {"m": (64,), "n": 4096, "k": 64}))
COLUMN = "*m"  # the shape of one number per row, as ``*m 1``
GROUPS_KERNEL = "cute_ops.kernels.epilogue.groups:FusedGroups"
# Shapes of what all rows share, and of the same where each row of a batch has its own.
OF_ROWS = {"n": "*m n", "2n": "*m 2n", "": "*m 1"}


def shape_of(tensor: Tensor) -> str:
    """A tensor's shape as expressions know it."""
    return "*m 1" if tensor.shape == COLUMN else "*m n" if period(tensor.shape) else tensor.shape


def period(shape: str) -> int:
    """Columns after which an operand of this shape repeats itself; 0 for other shapes."""
    lead, _, columns = shape.rpartition(" ")
    return int(columns) if lead in ("*m", "*#m") and columns.isdigit() and columns != "1" else 0


def repeated(xp: Any, array: Any, n: int) -> Any:
    """The array repeated along its columns until it has n of them."""
    return xp.concat([array] * -(-n // array.shape[-1]), axis=-1)[..., :n] if n else array[..., :0]


def pointwise(
    name: str,
    formula: Callable[[Mapping[str, Any]], Formula],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    attrs: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    groups: bool = False,
    **more: Any,
) -> Op:
    """The op of an expression. An output without rows or columns is the sum of the values over these, in a fixed order.

    Args:
        name: the op's name.
        formula: gives what is computed with some attributes.
        inputs: those that are read, and ``unread`` ones, which only say shapes and dtypes.
        outputs: what is written, whole or by halves. One that is the ``same_as`` another has that one's values.
        attrs: the attributes, as in :class:`Op`.
        defaults: their defaults.
        groups: whether the expression uses groups of columns, numbers of columns or operands that repeat themselves.
            Then ``formula`` is computed by rows.
        more: other arguments of :class:`Op`.
    """
    first, twins = formula(defaults), any(tensor.same_as for tensor in outputs.values())
    dtypes = {tensor.dtype: key for key, tensor in reversed(list(inputs.items()))}

    def reference(xp: Any, *arrays: Any, **attrs: Any) -> tuple[Any, ...]:
        given, found = dict(zip(inputs, arrays, strict=True)), formula(attrs)
        tile = given[found.tile]
        whole = (*tile.shape[:-1], tile.shape[-1] // (1 + SHAPES[inputs[found.tile].shape].packed))
        read = [
            given[key][..., None] if inputs[key].shape == COLUMN
            else repeated(xp, given[key], whole[-1]) if period(inputs[key].shape) else given[key]
            for key in found.reads
        ]  # fmt: skip
        values = dict(zip(found.writes, evaluate(found.expression, xp, read), strict=True))
        results = []
        for key, tensor in outputs.items():
            halves = [f"{key}[:n]", f"{key}[n:]"] if "2n" in tensor.shape else [key]
            sums = [summed(xp, values[half], whole, shape_of(tensor), found.by_rows) for half in halves]
            out = sums[0] if len(sums) == 1 else xp.concat(sums, axis=-1)
            out = out[..., 0] if tensor.shape == COLUMN else out
            like = dtypes.get(tensor.dtype)
            results.append(cast(xp, out, tensor.dtype, out) if like is None else xp.astype(out, given[like].dtype))
        made = dict(zip(outputs, results, strict=True))
        for key, tensor in outputs.items():
            if tensor.same_as and results[list(outputs).index(tensor.same_as)].dtype == made[key].dtype:
                made[key] = None
        return tuple(made.values())

    def of_call(problem: Problem) -> Formula:
        found = formula(problem.attrs)
        return found.of_outputs(problem.dtypes) if twins else found

    def workspace(problem: Problem, config: Config) -> dict[str, Array | None]:
        shapes = {
            key: shape_of(tensor) for key, tensor in outputs.items() if not tensor.same_as or key in problem.dtypes
        }
        return sum_workspaces(of_call(problem), shapes, problem, config)

    def config(problem: Problem) -> FusedConfig | FusedRowConfig:
        found = of_call(problem)
        return found.rows.of_groups(problem) if groups else found.config(problem)

    def batched() -> Op:
        return _of_batch(_Arguments(name, formula, inputs, outputs, attrs, defaults, reference.__module__))

    reference.__module__ = more.pop("module", __name__)
    tensors = (*inputs.values(), *outputs.values())
    counts = any(node.word == "n" for node in first.expression.nodes)
    return Op(
        name, inputs=inputs, outputs=outputs, reference=reference, attrs=attrs, cases=CASES,
        kernel=GROUPS_KERNEL if groups else KERNEL,
        dtypes={t.dtype: FLOATS for t in inputs.values() if t.dtype not in FLOATS},
        static=("n",) if counts and not first.by_rows else WhileFew("n"),
        sharding=Sharding(parallel=() if first.by_rows or any("2n" in t.shape for t in tensors) else ("n",)),
        tuning=Tuning(config, space_of(of_call), workspace), batched=None if first.by_rows else batched, **more,
    )  # fmt: skip


class _Arguments(NamedTuple):
    """What :func:`pointwise` takes, and the module of the declaration."""

    name: str
    formula: Callable[[Mapping[str, Any]], Formula]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    attrs: Mapping[str, Any]
    defaults: Mapping[str, Any]
    module: str


def _of_batch(given: _Arguments) -> Op:
    """The op for each example of a batch: one pass over all rows, each of which reads its example's vectors. What the
    rows of an example share is then summed over them in float32.
    """
    sums = {key for key, tensor in given.outputs.items() if tensor.shape in OF_ROWS}
    first = given.formula(given.defaults)
    (alone, *more), one_pass = first.expression.nodes, None
    # The sum of an input needs no pass. With other attributes it may be the sum of something else.
    direct = sums and not given.attrs and not more and alone.word == "operand"
    if not direct:
        one_pass = _of_rows(given)

    def run(xp: Any, call: Any, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        if one_pass is None:
            made = dict.fromkeys(sums, arrays[first.reads[alone.operand]])
        else:
            rows = arrays[first.tile].shape[:-1]
            read = {key: _each_row(xp, arrays[key], given.inputs[key].shape, rows) for key in one_pass.inputs}
            made = one_pass.with_twins(call(one_pass, read, attrs))
        axes = {key: (-2, -1) if given.outputs[key].shape == "" else (-2,) for key in sums}
        return made | {key: xp.sums(made[key], axes[key], arrays[key.removeprefix("d")]) for key in sums}

    run.__module__ = given.module
    return Op(
        f"{given.name}_batched", inputs=each(given.inputs), attrs=given.attrs, static=(),
        outputs={key: tensor._replace(same_as=None) for key, tensor in each(given.outputs).items()},
        kernel=Program(run, (one_pass,) if one_pass else ()), cases=BATCHES,
        dtypes={t.dtype: FLOATS for t in given.inputs.values() if t.dtype not in FLOATS},
        doc=f"``{given.name}`` for each example of a batch.", called=given.name,
    )  # fmt: skip


def _of_rows(given: _Arguments) -> Op:
    """The op of that pass: an output that the rows of an example share becomes a float32 tile."""
    read, made = {}, {}
    for key, tensor in given.inputs.items():
        if "k" in tensor.shape:  # a weight, which says an output's dtype
            read[key] = tensor._replace(shape=f"*w {tensor.shape}")
        elif tensor.rows or not tensor.unread:
            read[key] = tensor._replace(shape=OF_ROWS.get(tensor.shape, tensor.shape))
    for key, tensor in given.outputs.items():
        made[key] = tensor._replace(skippable=False)
        if tensor.shape in OF_ROWS:
            made[key] = Tensor("*m 2n" if tensor.shape == "2n" else "*m n", "float32")

    def formula(attrs: Mapping[str, Any]) -> Formula:
        found = given.formula(attrs)
        shapes = [given.outputs[written.partition("[")[0]].shape for written in found.writes]
        kinds = "".join("t" if shape in OF_ROWS else kind for shape, kind in zip(shapes, found.kinds, strict=True))
        graph = Graph(SHAPES[shape_of(read[key])] for key in found.reads)
        nodes = copied(found.expression, graph, lambda node: graph.operand(node.operand, node.half))
        expression = graph.finish([nodes[i] for i in found.expression.outputs])
        return found._replace(expression=expression, kinds=kinds)

    return pointwise(
        f"{given.name}_of_rows", formula, read, made, given.attrs, given.defaults, module=given.module,
        doc=f"The pass of ``{given.name}_batched``.",
    )  # fmt: skip


def _each_row(xp: Any, array: Any, shape: str, rows: tuple[Any, ...]) -> Any:
    """An example's tensor as the pass reads it: with rows."""
    if "k" in shape:
        return array.reshape(-1, *array.shape[-2:])[:1]
    if shape == "":
        return xp.broadcast_to(array[..., None, None], (*rows, 1))
    return xp.broadcast_to(array[..., None, :], (*rows, array.shape[-1])) if shape in OF_ROWS else array
