"""Ops of expressions that run beside products: an epilogue by itself, and the gradient of an epilogue.

The kernels of :mod:`cute_ops.ops.expression.formula` compute them. Those that look at groups of columns have a kernel
of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cute_ops.declaration.attributes import defaults_of
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops.declaration.tensor import Tensor
from cute_ops.expressions.graph import SHAPES, rebuilt
from cute_ops.ops.batches import CASES as BATCHES
from cute_ops.ops.batches import each
from cute_ops.ops.expression.formula import Attrs, Formula, declare, shape_of

CASES = (Case("odd", {"m": (3, 5), "n": 999, "k": 8}), Case("aligned", {"m": (64,), "n": 4096, "k": 64}))
GROUPS_KERNEL = "cute_ops.kernels.rows.groups:FusedGroups"
# Shapes of what all rows share, and of the same where each row of a batch has its own.
OF_ROWS = {"n": "*m n", "2n": "*m 2n", "": "*m 1"}


def pointwise(
    name: str,
    formula: Callable[[Attrs], Formula],
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    attrs: Attrs,
    *,
    groups: bool = False,
    module: str = __name__,
    **more: Any,
) -> Op:
    """The op of an expression: as :func:`declare` takes and makes it, and for batches of examples, too.

    ``groups``: whether the expression uses groups of columns, numbers of columns or operands that repeat themselves.
    Then ``formula`` is computed by rows.
    """
    if groups:
        more |= {"kernel": GROUPS_KERNEL, "config": lambda formula, problem: formula.rows.of_groups(problem)}

    def batched() -> Op:
        return _of_batch(op, formula)

    if not formula(defaults_of(attrs)).by_rows:
        more["batched"] = batched
    op = declare(name, formula, inputs, outputs, attrs, module=module, cases=CASES, **more)
    return op


def _of_batch(op: Op, formula: Callable[[Attrs], Formula]) -> Op:
    """The op for each example of a batch: one pass over all rows, each of which reads its example's vectors. What the
    rows of an example share is then summed over them in float32.
    """
    sums = {key for key, tensor in op.outputs.items() if tensor.shape in OF_ROWS}
    first = formula(op.attrs)
    # With other attributes a sum may be that of something else.
    tiles = {} if op.attrs else _tiles_summed(op, first)
    (alone, *more), one_pass = first.expression.nodes, None
    # The sum of an input needs no pass. With other attributes it may be the sum of something else.
    direct = sums and not op.attrs and not more and alone.primitive == "operand"
    if tiles:
        op_of_rows = op.only(*(key for key in op.outputs if key not in tiles))
        one_pass = _of_rows(op_of_rows, lambda attrs: formula(attrs).of_outputs(op_of_rows.outputs))
    elif not direct:
        one_pass = _of_rows(op, formula)

    def run(xp: Any, call: Any, arrays: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        if one_pass is None:
            made = dict.fromkeys(sums, arrays[first.reads[alone.operand]])
        else:
            rows = arrays[first.tile].shape[:-1]
            read = {key: _each_row(xp, arrays[key], op.inputs[key].shape, rows) for key in one_pass.inputs}
            made = one_pass.with_same_as(call(one_pass, read, attrs))
        made |= {key: made[tile] for key, tile in tiles.items()}
        axes = {key: (-2, -1) if op.outputs[key].shape == "" else (-2,) for key in sums}
        return made | {key: xp.sums(made[key], axes[key], arrays[key.removeprefix("d")]) for key in sums}

    run.__module__ = op.reference.__module__
    return Op(
        f"{op.name}_batched", inputs=each(op.inputs), attrs=op.declared_attrs, static=(),
        outputs={key: tensor._replace(same_as=None) for key, tensor in each(op.outputs).items()},
        kernel=Program(run, (one_pass,) if one_pass else ()), cases=BATCHES, dtypes=op.dtypes,
        doc=f"``{op.name}`` for each example of a batch.", called=op.name,
    )  # fmt: skip


def _tiles_summed(op: Op, formula: Formula) -> dict[str, str]:
    """Outputs that are sums over rows, or columns, of another output, by that."""
    written = {key: [] for key in op.outputs}  # type: dict[str, list[int]]
    for name, node in zip(formula.writes, formula.expression.outputs, strict=True):
        written[name.partition("[")[0]].append(node)
    tiles = {tuple(nodes): key for key, nodes in written.items() if op.outputs[key].shape not in OF_ROWS}
    sums = [key for key in written if op.outputs[key].shape in OF_ROWS]
    return {key: tiles[tuple(written[key])] for key in sums if tuple(written[key]) in tiles}


def _of_rows(op: Op, of_example: Callable[[Attrs], Formula]) -> Op:
    """The op of that pass: an output that the rows of an example share becomes a float32 tile."""
    read, made = {}, {}
    for key, tensor in op.inputs.items():
        if "k" in tensor.shape:  # a weight, which says an output's dtype
            read[key] = tensor._replace(shape=f"*w {tensor.shape}")
        elif tensor.rows or not tensor.unread:
            read[key] = tensor._replace(shape=OF_ROWS.get(tensor.shape, tensor.shape))
    for key, tensor in op.outputs.items():
        made[key] = tensor._replace(skippable=False)
        if tensor.shape in OF_ROWS:
            made[key] = Tensor("*m 2n" if tensor.shape == "2n" else "*m n", "float32")

    def formula(attrs: Attrs) -> Formula:
        found = of_example(attrs)
        shapes = [op.outputs[written.partition("[")[0]].shape for written in found.writes]
        kinds = "".join("t" if shape in OF_ROWS else kind for shape, kind in zip(shapes, found.kinds, strict=True))
        operands = [SHAPES[shape_of(read[key].shape)] for key in found.reads]
        return found._replace(expression=rebuilt(found.expression, operands=operands), kinds=kinds)

    return pointwise(
        f"{op.name}_of_rows", formula, read, made, op.declared_attrs, module=op.reference.__module__,
        doc=f"The pass of ``{op.name}_batched``.",
    )  # fmt: skip


def _each_row(xp: Any, array: Any, shape: str, rows: tuple[Any, ...]) -> Any:
    """An example's tensor as the pass reads it: with rows."""
    if "k" in shape:
        return array.reshape(-1, *array.shape[-2:])[:1]
    if shape == "":
        return xp.broadcast_to(array[..., None, None], (*rows, 1))
    return xp.broadcast_to(array[..., None, :], (*rows, array.shape[-1])) if shape in OF_ROWS else array
