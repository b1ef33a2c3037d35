"""What :func:`linear_cross_entropy` takes, in both frameworks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cute_ops.binding import bind
from cute_ops.ops.reduction.cross_entropy import cross_entropy
from cute_ops.shapes import Array

DOC = """Args:
    hidden: ``T[*m h]``; float32, float16 or bfloat16.
    weight: ``T[n h]``.
    target: int64 or int32 ``[*m]``, the class of each row.
    bias: ``T[n]``.
    ignore_index: rows with this target have loss 0 and gradient 0.
    label_smoothing: part of the target that is spread evenly over all classes.
    z_loss: weight of ``lse^2``.
    reduction: ``"mean"`` over the rows that are not ignored, ``"sum"`` or ``"none"``.
    chunk_rows: rows whose logits are held at a time; None chooses as described above.
    accum_dtype: dtype in which the weight's gradient is summed over chunks: float32 (None means this) or T. Sums in
        float32 are rounded once, and take four more bytes per element of the weight while the gradients are computed,
        unless T is float32 or all rows are one chunk. Sums in T are rounded with every chunk: in bfloat16 the error is
        about 0.2% of the gradient with one chunk, 0.5% with 16 and 2% with 256.

Returns:
    float32: a scalar, or ``[*m]``. Gradients are products of the logits' gradient, rounded to T. In float16 the
    backward computes the logits again, a third more products: the scale of the loss must multiply their gradient
    before that is rounded.

Raises:
    TypeError: dtypes that differ or are not listed, ``chunk_rows`` that is no integer.
    ValueError: shapes that do not fit, an attribute out of its range, an unknown reduction, ``chunk_rows`` below 1,
        another ``accum_dtype``.

Source: computing gradients chunk by chunk in the forward: Hsu et al., Liger Kernel, 2024.
"""


def check_chunk_rows(what: str, chunk_rows: Any) -> None:
    """Raise TypeError or ValueError unless ``chunk_rows`` is None or a positive int."""
    if chunk_rows is not None and not isinstance(chunk_rows, int):
        raise TypeError(f"cute.{what}: option `chunk_rows` is {chunk_rows!r}, expected an int or None.")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"cute.{what}: option `chunk_rows` is {chunk_rows}, expected at least 1.")


def check_accum_dtype(what: str, accum_dtype: Any, float32: Any, of_weight: Any) -> None:
    """Raise ValueError unless ``accum_dtype`` is None, float32 or the weight's dtype, all as one framework has them."""
    if accum_dtype is not None and accum_dtype not in (float32, of_weight):
        raise ValueError(
            f"cute.{what}: option `accum_dtype` is {accum_dtype}, expected {float32} or the dtype of `weight`, "
            f"{of_weight}."
        )


def check_tensors(what: str, hidden: Any, weight: Any, target: Any, bias: Any) -> None:
    """Raise TypeError for dtypes that differ, ValueError for shapes that do not fit."""

    def fail(kind: type[Exception], problem: str) -> Exception:
        return kind(f"cute.{what}: {problem}")

    for name, a in (("weight", weight), ("bias", bias)):
        if a is not None and a.dtype != hidden.dtype:
            raise fail(TypeError, f"argument `{name}` has dtype {a.dtype}, but `hidden` has {hidden.dtype}.")
    if hidden.ndim < 1 or weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        problem = f"argument `weight` has shape {tuple(weight.shape)}, expected (n, h) with `hidden` [*m h]"
        raise fail(ValueError, f"{problem} = {tuple(hidden.shape)}.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise fail(ValueError, f"argument `bias` has shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}.")
    if target.shape != hidden.shape[:-1]:
        problem = f"argument `target` has shape {tuple(target.shape)}, expected {tuple(hidden.shape[:-1])}"
        raise fail(ValueError, f"{problem}: the leading dims of `hidden`.")


def check_attributes(hidden: Any, weight: Any, target: Any, attrs: Mapping[str, Any]) -> None:
    """Raise what :func:`cross_entropy` raises for the logits of these tensors: without rows it is never called."""
    logits = Array((*target.shape, weight.shape[0]), _dtype_name(hidden))
    bind(cross_entropy, {"logits": logits, "target": Array(tuple(target.shape), _dtype_name(target))}, attrs)


def _dtype_name(array: Any) -> str:
    return str(array.dtype).removeprefix("torch.")
