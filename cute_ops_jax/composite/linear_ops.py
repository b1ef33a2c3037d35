"""The loops of :func:`linear_cross_entropy` as ops, so that each device runs the whole loop on its own rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax

from cute_ops.op import Op, Sharding, Tensor
from cute_ops.ops.reduction.cross_entropy import cross_entropy
from cute_ops_jax.composite.linear_loops import Layer, rows, rows_bwd, step
from cute_ops_jax.composite.losses import Setting, spread
from cute_ops_jax.distributed.varying import Axes, varying_like
from cute_ops_jax.primitive.arrays import Arrays
from cute_ops_jax.primitive.primitive import Call, Composite, by_stage

ROW = Tensor("*m", "float32")
LAYER = {"hidden": Tensor("*m h", "T"), "weight": Tensor("n h", "T"), "bias": Tensor("n", "T", optional=True)}
GRADIENTS = {"dhidden": Tensor("*m h", "T"), "dweight": Tensor("n h", "T"), "dbias": Tensor("n", "T", given="bias")}
LOSSES = dict.fromkeys(cross_entropy.outputs, ROW)


def run(name: str, setting: Setting, layer: Layer, target: jax.Array, **of_rows: jax.Array) -> Arrays:
    """The outputs of a loop by name; ``of_rows``: its inputs of one number per row."""
    given = {**layer._asdict(), "target": target, **of_rows}
    if setting.axis is not None:  # inside of a shard_map, where the exchange is written out
        return _on_flat_rows(name, setting, given, by_stage)
    wanted = tuple(n for n in setting.wanted if n in PROGRAMS[name][2])
    composite = _composite(name, wanted, setting.chunk_rows, setting.accum_dtype)
    return composite(given, {n: setting.attrs[n] for n in composite.op.attrs})


@cache
def _composite(name: str, wanted: tuple[str, ...], chunk_rows: int | None, accum_dtype: str) -> Composite:
    _, inputs, outputs = PROGRAMS[name]

    def body(call: Call, given: Arrays, attrs: Arrays, axes: Axes = ()) -> Arrays:
        setting = Setting(
            **attrs, reduction="none", axis=axes or None, chunk_rows=chunk_rows, accum_dtype=accum_dtype, wanted=wanted
        )
        if not axes:
            return _on_flat_rows(name, setting, given, call)
        layer, target = spread(tuple(given[n] for n in LAYER), given["target"], axes)
        of_rows = {n: varying_like(given[n], layer[0], axes) for n in inputs}
        given = {**dict(zip(LAYER, layer, strict=True)), "target": target, **of_rows}
        found = _on_flat_rows(name, setting, given, call)
        # dhidden alone is a sum over classes.
        return {n: jax.lax.psum(a, axes) if n == "dhidden" and a is not None else a for n, a in found.items()}

    # XLA's cache sees nothing of the program but this name.
    names = [name, *wanted, accum_dtype, *([f"rows{chunk_rows}"] if chunk_rows else [])]
    hidden, weight, bias = LAYER.items()
    declared = Op(
        "_".join(["linear_cross_entropy", *names]),
        inputs=dict([hidden, weight, ("target", Tensor("*m", "I")), *inputs.items(), bias]),
        outputs={n: t for n, t in outputs.items() if n not in GRADIENTS or n in wanted},
        dtypes=cross_entropy.dtypes,
        attrs={n: cross_entropy.attrs[n] for n in ("ignore_index", "label_smoothing", "z_loss")},
        static=("n", "h"),
        reference=body,
        kernel=cross_entropy.kernel,  # every Op names one; a composite does not use it
        sharding=Sharding(split=cross_entropy.split),  # only its dim is used
    )
    return Composite(declared, body)


def _on_flat_rows(name: str, setting: Setting, given: Arrays, call: Call) -> Arrays:
    """A loop on rows with one leading dim; its outputs have the leading dims that were there."""
    loop, inputs, _ = PROGRAMS[name]
    hidden, lead = given["hidden"], given["target"].shape
    layer = Layer(hidden.reshape(-1, hidden.shape[-1]), given["weight"], given["bias"])
    found = loop(setting, layer, *(given[n].reshape(-1) for n in ("target", *inputs)), call=call)
    shapes = {"dhidden": hidden.shape, **dict.fromkeys(LOSSES, lead)}
    return {n: a.reshape(shapes[n]) if n in shapes and a is not None else a for n, a in found.items()}


def _rows(*given: Any, call: Call) -> Arrays:
    return dict(zip(LOSSES, rows(*given, call=call), strict=True))


def _step(*given: Any, call: Call) -> Arrays:
    loss, gradients = step(*given, call=call)
    return {"loss": loss, **dict(zip(GRADIENTS, gradients, strict=True))}


def _rows_bwd(*given: Any, call: Call) -> Arrays:
    return dict(zip(GRADIENTS, rows_bwd(*given, call=call), strict=True))


# Of each loop: the function, its inputs beside the layer and the target, and its outputs.
PROGRAMS: dict[str, tuple[Callable[..., Arrays], dict[str, Tensor], dict[str, Tensor]]] = {
    "rows": (_rows, {}, LOSSES),
    "step": (_step, {"dloss": ROW}, {"loss": ROW, **GRADIENTS}),
    "rows_bwd": (_rows_bwd, {"row_max": ROW, "log_sum": ROW, "dloss": ROW}, GRADIENTS),
}
