"""Cross entropy of a linear layer's output that never holds all logits.

Rows go in chunks: their logits by a matrix product, the loss and, in the logits' own memory, their gradient by our
kernel, the gradients of the inputs by two more products. So the gradients are there when the forward is over, and the
backward scales them. With ``reduction="none"`` each row's gradient has a factor of its own, which the
weight's gradient cannot be given afterwards: there the backward makes the logits again. So it does in float16, whose
gradients are nothing unless the loss is scaled: what has underflown, no factor brings back.

These loops are ops of their own (:mod:`cute_ops_jax.composite`): devices that have some of the rows each run the whole
loop on theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from cute_ops.composite import chunks
from cute_ops.composite.docstrings import continued
from cute_ops.composite.linear_cross_entropy import DOC, check
from cute_ops.op import Op, Sharding, Tensor
from cute_ops.ops.reduction.cross_entropy import cross_entropy as op
from cute_ops_jax.composite.primitive import Call, Composite, by_stage
from cute_ops_jax.distributed import sharding
from cute_ops_jax.distributed.vocab_parallel import (
    Axis,
    Setting,
    check_axis,
    gradient,
    loss_and_gradient,
    losses,
    reduced,
    spread,
    summed,
)

Array = jax.Array
Arrays = Mapping[str, Any]


@partial(
    jax.jit,
    static_argnames=("ignore_index", "label_smoothing", "z_loss", "reduction", "chunk_rows", "accum_dtype"),
    inline=True,
)
@continued(DOC)
def linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array,
    bias: Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    accum_dtype: Any = None,
) -> Array:
    """Cross entropy of ``hidden @ weight.T + bias``, without ever holding all logits.

    ``logits = hidden @ weight.T + bias``, rounded to the dtype of hidden; the rest as :func:`cross_entropy`.

    What is not differentiated costs no product: a frozen weight, for one. Where ``chunk_rows`` is None, up to 2048, as
    long as their logits take no more than four times the memory of the weight; more of them make products faster where
    h is small.

    The loop carries the weight's gradient in ``accum_dtype``: in float32 it takes, until it is rounded, twice the
    memory of a 16-bit weight beside that of the result.

    Where devices have some of the rows, each runs the loop on its own. Where they have some of the classes, each keeps
    those, as in :func:`vocab_parallel_linear_cross_entropy`, which is for programs inside of a ``shard_map``.
    """
    setting = Setting(ignore_index, label_smoothing, z_loss, reduction, chunk_rows=chunk_rows)
    return _checked("linear_cross_entropy", setting, hidden, weight, target, bias, accum_dtype)


@partial(
    jax.jit,
    static_argnames=(
        "axis_name",
        "ignore_index",
        "label_smoothing",
        "z_loss",
        "reduction",
        "chunk_rows",
        "accum_dtype",
    ),
    inline=True,
)
def vocab_parallel_linear_cross_entropy(
    hidden: Array,
    weight: Array,
    target: Array,
    axis_name: Axis,
    bias: Array | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_rows: int | None = None,
    accum_dtype: Any = None,
) -> Array:
    """:func:`linear_cross_entropy` inside ``jax.shard_map``, each device with its share of the weight's rows.

    Devices exchange three numbers per row; the gradient of hidden is the sum of what they give. Neither logits
    nor weights are gathered, and no device holds more than a chunk of its own logits.

    Args:
        hidden: ``T[*m h]``, the same on all devices of the axis; float32, float16 or bfloat16.
        weight: ``T[n h]``, the classes ``i * n`` to ``(i + 1) * n`` on device ``i`` of the axis.
        target: integers ``[*m]``, counted over the classes of all devices; the same on all of them.
        axis_name: the mesh axis that the classes are spread over, or several, the first one outermost.
        bias: ``T[n]``, cut like the weight; -inf for classes that only fill up.
        ignore_index, label_smoothing, z_loss: as in :func:`linear_cross_entropy`, over all classes.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``, of the rows that this device has.
        chunk_rows, accum_dtype: as in :func:`linear_cross_entropy`.

    Returns:
        float32: a scalar, or ``[*m]``, the same on all devices of the axis. Gradients are those of the written-out
        program, with and without ``check_vma``.

    Raises:
        TypeError: dtypes that differ or are not listed.
        ValueError: shapes that do not fit, an unknown reduction, ``chunk_rows`` below 1, another ``accum_dtype``.
        NameError: no such axis of a ``shard_map``.
    """
    setting = Setting(ignore_index, label_smoothing, z_loss, reduction, axis_name, chunk_rows=chunk_rows)
    return _checked("vocab_parallel_linear_cross_entropy", setting, hidden, weight, target, bias, accum_dtype)


def _checked(
    what: str, setting: Setting, hidden: Array, weight: Array, target: Array, bias: Array | None, accum_dtype: Any
) -> Array:  # fmt: skip
    hidden, weight, target = jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(target)
    bias = None if bias is None else jnp.asarray(bias)
    accum, float32 = None if accum_dtype is None else jnp.dtype(accum_dtype), jnp.dtype(jnp.float32)
    check(what, hidden, weight, target, bias, setting.reduction, setting.chunk_rows, accum, float32)
    setting = setting._replace(accum_dtype=(accum or float32).name)
    if setting.axis is not None:
        check_axis(setting.axis, what)
    (hidden, weight, bias), target = spread((hidden, weight, bias), target, setting.axis)
    return _loss(setting, (hidden, weight, bias), target)


# --- chunks --------------------------------------------------------------------------------------------------------

Inputs = tuple[Any, Any, Any]


def _each(setting: Setting, inputs: Inputs, start: Any, body: Callable[[Any, Any, int], Any]) -> Any:
    """``state = body(state, first row, rows)`` for every chunk: a loop over whole ones, then the rest."""
    hidden, weight, _ = inputs
    rows = hidden.shape[0]
    size = setting.chunk_rows or chunks.rows_per_chunk(
        rows, hidden.shape[1], weight.shape[0], hidden.dtype.itemsize, chunks.ENOUGH
    )
    size = min(size, rows)
    whole, rest = divmod(rows, size)
    state = start
    if whole == 1:
        state = body(state, 0, size)
    elif whole:
        state = jax.lax.fori_loop(0, whole, lambda i, s: body(s, i * size, size), state)
    return body(state, whole * size, rest) if rest else state


def _cut(a: Array, first: Any, rows: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(a, first, rows)


def _put(a: Array, part: Any, first: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(a, part.astype(a.dtype), first, 0)


def _logits(inputs: Inputs, first: Any, rows: int) -> Array:
    hidden, weight, bias = inputs
    logits = _cut(hidden, first, rows) @ weight.T
    return logits if bias is None else logits + bias


def _add(gradients: Inputs, inputs: Inputs, first: Any, rows: int, dlogits: Any) -> Inputs:
    """The gradients of the inputs with those of one more chunk."""
    hidden, weight, _ = inputs
    dhidden, dweight, dbias = gradients
    if dhidden is not None:
        dhidden = _put(dhidden, dlogits @ weight, first)
    if dweight is not None:
        product = partial(jnp.matmul, preferred_element_type=dweight.dtype)
        dweight = dweight + product(dlogits.T, _cut(hidden, first, rows))
    if dbias is not None:
        dbias = dbias + jnp.sum(dlogits, axis=0, dtype=jnp.float32)
    return dhidden, dweight, dbias


def _nothing(setting: Setting, inputs: Inputs) -> Inputs:
    """Gradients before the first chunk, None for those that nobody wants."""

    def zeros(name: str, a: Any, dtype: Any = None) -> Any:
        return sharding.varying_like(jnp.zeros(a.shape, dtype or a.dtype), a) if name in setting.wanted else None

    hidden, weight, bias = inputs
    # The others are sums over rows, rounded once at the end.
    dbias = None if bias is None else zeros("dbias", bias, jnp.float32)
    return zeros("dhidden", hidden), zeros("dweight", weight, setting.accum_dtype), dbias


def _zeros(target: Array) -> Array:
    return sharding.varying_like(jnp.zeros(target.shape, jnp.float32), target)


def _rows(setting: Setting, inputs: Inputs, target: Array, call: Call = by_stage) -> tuple[Array, ...]:
    """Loss of each row, and its lse in two parts."""

    def body(state: tuple[Array, ...], first: Any, rows: int) -> tuple[Array, ...]:
        found = losses(setting, _logits(inputs, first, rows), _cut(target, first, rows), call)
        return tuple(_put(s, a, first) for s, a in zip(state, found, strict=True))

    return _each(setting, inputs, (_zeros(target),) * 3, body)  # type: ignore[no-any-return]


def _step(setting: Setting, inputs: Inputs, target: Array, dloss: Array, call: Call = by_stage) -> tuple[Array, Inputs]:
    """Loss of each row, and the gradients of the inputs."""

    def body(state: tuple[Array, Inputs], first: Any, rows: int) -> tuple[Array, Inputs]:
        total, gradients = state
        logits, classes, share = _logits(inputs, first, rows), _cut(target, first, rows), _cut(dloss, first, rows)
        loss, dlogits = loss_and_gradient(setting, logits, classes, share, call)
        return _put(total, loss, first), _add(gradients, inputs, first, rows, dlogits)

    loss, gradients = _each(setting, inputs, (_zeros(target), _nothing(setting, inputs)), body)
    return loss, _rounded(gradients, inputs)


def _rows_bwd(
    setting: Setting, inputs: Inputs, target: Array, row_max: Array, log_sum: Array, dloss: Array,
    call: Call = by_stage,
) -> Inputs:  # fmt: skip
    """The gradients of the inputs, from logits that are made again."""

    def body(gradients: Inputs, first: Any, rows: int) -> Inputs:
        classes, *lse, share = (_cut(a, first, rows) for a in (target, row_max, log_sum, dloss))
        logits = _logits(inputs, first, rows)
        dlogits = gradient(setting, logits, classes, lse, share, inplace=True, call=call)
        return _add(gradients, inputs, first, rows, dlogits)

    return _rounded(_each(setting, inputs, _nothing(setting, inputs), body), inputs)


def _rounded(gradients: Inputs, inputs: Inputs) -> Inputs:
    dhidden, dweight, dbias = gradients
    _, weight, bias = inputs
    dweight = None if dweight is None else dweight.astype(weight.dtype)
    return dhidden, dweight, None if dbias is None else dbias.astype(bias.dtype)


# --- as ops, whose rows devices share ------------------------------------------------------------------------------

ROW = Tensor("*m", "float32")
LOSSES = dict.fromkeys(op.outputs, ROW)
GIVEN = {
    "hidden": Tensor("*m h", "T"),
    "weight": Tensor("n h", "T"),
    "target": Tensor("*m", "I"),
}
BIAS = {"bias": Tensor("n", "T", optional=True)}
GRADIENTS = {
    "dhidden": Tensor("*m h", "T"),
    "dweight": Tensor("n h", "T"),
    "dbias": Tensor("n", "T", given="bias"),
}


def _rows_named(*given: Any) -> Arrays:
    return dict(zip(LOSSES, _rows(*given), strict=True))


def _step_named(*given: Any) -> Arrays:
    loss, gradients = _step(*given)
    return {"loss": loss, **dict(zip(GRADIENTS, gradients, strict=True))}


def _rows_bwd_named(*given: Any) -> Arrays:
    return dict(zip(GRADIENTS, _rows_bwd(*given), strict=True))


PROGRAMS: dict[str, tuple[Callable[..., Arrays], dict[str, Tensor], dict[str, Tensor]]] = {
    "rows": (_rows_named, {}, LOSSES),
    "step": (_step_named, {"dloss": ROW}, {"loss": ROW, **GRADIENTS}),
    "rows_bwd": (_rows_bwd_named, {"row_max": ROW, "log_sum": ROW, "dloss": ROW}, GRADIENTS),
}


@cache
def _composite(name: str, wanted: tuple[str, ...], chunk_rows: int | None, accum_dtype: str) -> Composite:
    run, inputs, outputs = PROGRAMS[name]

    def body(call: Call, given: Arrays, attrs: Arrays, axes: sharding.Axes = ()) -> Arrays:
        setting = Setting(
            **attrs, reduction="none", axis=axes or None, chunk_rows=chunk_rows, accum_dtype=accum_dtype, wanted=wanted
        )
        if not axes:
            return _flat(run, setting, given, call)
        layer = tuple(given[n] for n in ("hidden", "weight", "bias"))
        layer, target = spread(layer, given["target"], axes)
        rows = {n: sharding.varying_like(given[n], layer[0], axes) for n in inputs}
        given = {**dict(zip(("hidden", "weight", "bias"), layer, strict=True)), "target": target, **rows}
        found = _flat(run, setting, given, call)
        # The one that is a sum over classes.
        return {n: jax.lax.psum(a, axes) if n == "dhidden" and a is not None else a for n, a in found.items()}

    # The name is all that XLA's cache sees of the program.
    names = [name, *wanted, accum_dtype, *([f"rows{chunk_rows}"] if chunk_rows else [])]
    declared = Op(
        "_".join(["linear_cross_entropy", *names]),
        inputs={**GIVEN, **inputs, **BIAS},
        outputs={n: t for n, t in outputs.items() if n not in GRADIENTS or n in wanted},
        dtypes=op.dtypes,
        attrs={n: op.attrs[n] for n in ("ignore_index", "label_smoothing", "z_loss")},
        static=("n", "h"),
        reference=body,
        kernel=op.kernel,  # the one that it is about; a composite asks for none
        sharding=Sharding(split=op.split),  # its dim is what counts
    )
    return Composite(declared, body)


def _flat(run: Callable[..., Arrays], setting: Setting, given: Arrays, call: Call) -> Arrays:
    """``run`` on flat rows; what it gives has the leading dims that were there."""
    hidden, lead = given["hidden"], given["target"].shape
    rows = [given[n].reshape(-1) for n in ("target", "row_max", "log_sum", "dloss") if given.get(n) is not None]
    found = run(setting, (hidden.reshape(-1, hidden.shape[-1]), given["weight"], given["bias"]), *rows, call)
    shapes = {"dhidden": hidden.shape, **dict.fromkeys(LOSSES, lead)}
    return {n: a.reshape(shapes[n]) if n in shapes and a is not None else a for n, a in found.items()}


def _run(name: str, setting: Setting, inputs: Inputs, target: Array, **rows: Array) -> Arrays:
    given = {**dict(zip(("hidden", "weight", "bias"), inputs, strict=True)), "target": target, **rows}
    if setting.axis is not None:  # inside of a shard_map, and what devices exchange is written out
        return _flat(PROGRAMS[name][0], setting, given, by_stage)
    wanted = tuple(n for n in setting.wanted if n in PROGRAMS[name][2])
    composite = _composite(name, wanted, setting.chunk_rows, setting.accum_dtype)
    return composite(given, {n: setting.attrs[n] for n in composite.op.attrs})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(setting: Setting, inputs: Inputs, target: Array) -> Array:
    return reduced(setting, _run("rows", setting, inputs, target)["loss"], target)


# In place of a gradient that nobody wants. JAX takes what a forward saves to have one structure, whatever is
# differentiated; shapes may differ.
NOT_WANTED = (0,)


def _forward(setting: Setting, inputs: Inputs, target: Any) -> tuple[Array, Any]:
    """Of what nobody differentiates there is no gradient to make."""
    given = {n: a for n, a in zip(GRADIENTS, inputs, strict=True) if a is not None}
    setting = setting._replace(wanted=tuple(n for n, a in given.items() if a.perturbed))
    inputs, target = jax.tree.map(lambda a: a.value, (inputs, target), is_leaf=lambda a: hasattr(a, "perturbed"))
    if setting.reduction == "none" or inputs[0].dtype == jnp.float16:
        found = _run("rows", setting, inputs, target)
        marks = {n: jnp.zeros((0, 0) if n in setting.wanted else NOT_WANTED) for n in given}
        lse = {n: found[n] for n in LOSSES if n != "loss"}
        return reduced(setting, found["loss"], target), (marks, inputs, target, lse)
    share = jnp.ones((), jnp.float32)
    if setting.reduction == "mean":
        share = share / jnp.sum(target != setting.ignore_index)
    found = _run("step", setting, inputs, target, dloss=jnp.broadcast_to(share, target.shape))
    gradients = {n: found[n] if n in setting.wanted else jnp.zeros(NOT_WANTED) for n in given}
    return reduced(setting, found["loss"], target), gradients


def _backward(setting: Setting, saved: Any, dloss: Any) -> tuple[Inputs, None]:
    if isinstance(dloss, SymbolicZero):
        return (None, None, None), None
    dloss = summed(setting, dloss)
    marks, *others = (saved,) if isinstance(saved, dict) else saved
    wanted = tuple(n for n, a in marks.items() if a.shape != NOT_WANTED)
    if others:
        inputs, target, rows = others
        if setting.reduction == "mean":
            dloss = dloss / jnp.sum(target != setting.ignore_index)
        dloss = jnp.broadcast_to(dloss, target.shape)
        found = _run("rows_bwd", setting._replace(wanted=wanted), inputs, target, **rows, dloss=dloss)
    else:
        # In float32, which dloss is: rounded to 16 bits it would be off by more than what is rounded in the end.
        found = {n: (saved[n] * dloss).astype(saved[n].dtype) for n in wanted}
    dhidden, dweight, dbias = (found.get(n) for n in GRADIENTS)
    return (dhidden, dweight, dbias), None


_loss.defvjp(_forward, _backward, symbolic_zeros=True)
