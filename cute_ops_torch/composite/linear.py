"""A linear layer with an epilogue: :mod:`cute_ops.ops.gemm.by_call`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from cute_ops.composite import rmsnorm_linear as norm_before
from cute_ops.composite.docstrings import continued
from cute_ops.constants import make_room
from cute_ops.declaration.op import Op
from cute_ops.ops.expression.broadcast import Fit
from cute_ops.ops.gemm import by_call
from cute_ops.ops.gemm.by_call import Attrs, Epilogue
from cute_ops.ops.gemm.gated_dgrad import gated_linear_of
from cute_ops.ops.gemm.halves import APART, PACKED
from cute_ops.ops.gemm.linear import linear as product
from cute_ops_torch.composite.autocast import autocast, enabled
from cute_ops_torch.composite.constant import PARTS, constant, functions, guard, number, parts, traced, whole
from cute_ops_torch.library.tensors import array, checked
from cute_ops_torch.registry import define

Tensor = torch.Tensor
_product = define(product).function
constant(by_call.read_by_halves)  # torch.compile calls it, and does not trace it
_PLAIN = by_call.weight_shape(False, False)


@checked
@continued(by_call.DOC)
def linear(
    x: Tensor, weight: Tensor, *operands: Tensor | None, epilogue: Epilogue | None = None, fused: str = "auto",
    packed: bool = False, transposed: bool = False, halves: bool = False, save: str = "pre", **attrs: Any,
) -> Any:  # fmt: skip
    """A product and what happens to it before it is stored: ``out = epilogue(x @ weight.T, *operands)``.

    The op is ``torch.ops.cute.linear_<function>_<digest>``, the same in every process that has made this call.
    """
    if enabled():
        x, weight = autocast(x, weight)
    if epilogue is None:
        if operands or attrs or halves or packed or save != "pre":
            by_call.without_epilogue(operands, attrs, halves, packed, save)
        dims = weight.ndim
        run = _product if dims <= 2 else _batches()
        return run(x, weight.mT if transposed and dims > 1 else weight, fused)
    layout = by_call.weight_shape(packed, transposed, halves) if packed or transposed or halves else _PLAIN
    function, given = call_with_epilogue("linear", epilogue, (x, weight, *operands), layout, save, attrs)
    return function(x, weight, *given, fused)


def call_with_epilogue(
    caller: str, epilogue: Epilogue, arrays: Sequence[Tensor | None], layout: str, save: str, attrs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The function of the op of a call of ``caller`` on x, a weight and operands, and the latter as it takes them."""
    if torch.compiler.is_dynamo_compiling():
        constants = tuple((name, number(value)) for name, value in attrs.items())
        guard(epilogue)
        function, fits = _choose(caller, epilogue, arrays, layout, save, constants)
    else:
        constants = tuple(attrs.items()) if attrs else ()
        what = caller, layout, save, *[t if t is None else t.shape for t in arrays]
        try:
            function, fits, as_given = _known[by_call.key_of(epilogue, constants, *what)]
        except (KeyError, TypeError):  # a symbolic shape has no hash
            function, fits, as_given = _remembered(what, epilogue, arrays, constants)
        if as_given:
            return function, arrays[2:]
    fitted = zip(arrays[2:], fits, strict=True)
    halves = APART in layout
    return function, [_fitted(t, fit, halves) for t, fit in fitted if t is not None and fit is not None]


def _choose(
    caller: str, epilogue: Epilogue, arrays: Sequence[Tensor | None], layout: str, save: str, attrs: Attrs
) -> tuple[Callable[..., Any], tuple[Fit | None, ...]]:
    """The function of a call's op, and how operands meet the product."""
    fits = by_call.fits(epilogue, arrays, layout, attrs, array, caller)
    shapes = tuple(fit and fit.shape for fit in fits)
    batched = arrays[1] is not None and by_call.is_batch(layout, arrays[1].ndim)
    if torch.compiler.is_dynamo_compiling():
        return _traced(caller, *parts(epilogue), shapes, batched, layout, save, attrs), fits
    return define(_OPS[caller](epilogue, shapes, batched, layout, save, attrs)).function, fits


# By calls; at last, whether all operands are there and passed as they are.
_known: dict[Hashable, tuple[Callable[..., Any], tuple[Fit | None, ...], bool]] = {}


def _remembered(
    what: tuple[Any, ...], epilogue: Epilogue, arrays: Sequence[Tensor | None], attrs: Attrs
) -> tuple[Callable[..., Any], tuple[Fit | None, ...], bool]:
    """What ``_known`` has of a call, which is put there if that is possible."""
    key, (caller, layout, save, *shapes) = by_call.key_of(epilogue, attrs, *what), what
    function, fits = _choose(caller, epilogue, arrays, layout, save, attrs)
    as_given = all(fit and fit.sizes == shape for shape, fit in zip(shapes[2:], fits, strict=True))
    found = function, fits, as_given and APART not in layout
    if key and key == by_call.key_of(epilogue, attrs, *what):  # nothing has changed meanwhile
        try:
            make_room(_known)
            _known[key] = found
        except TypeError:  # a symbolic shape has no hash
            pass
    return found


@checked
@continued(by_call.GATED_DOC)
def gated_linear(
    x: Tensor, weight: Tensor, activation: str = "silu", fused: str = "auto", *, transposed: bool = False,
    halves: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``out = activation(x @ gate.T) * (x @ up.T)`` with ``gate, up = weight[:n], weight[n:]``."""
    if enabled():
        x, weight = autocast(x, weight)
    options = transposed, weight.ndim > 2 + halves, halves
    if out is not None:
        return define(gated_linear_of(*options)).function(x, weight, activation, fused, out=out)  # type: ignore[no-any-return]
    return _gated(*options)(x, weight, activation, fused)  # type: ignore[no-any-return]


# By the function that is called, what makes its op.
_OPS: dict[str, Callable[..., Op]] = {"linear": by_call.op_of_call, "rmsnorm_linear": norm_before.op_of_call}


def _op(caller: str, *options: Any) -> Op:
    return _OPS[caller](whole(*options[:PARTS]), *options[PARTS:])


def _batch() -> Op:
    assert product.batched is not None
    return product.batched


_traced, _gated, _batches = traced(_op), functions(gated_linear_of), functions(_batch)


def _fitted(tensor: Tensor, fit: Fit, halves: bool) -> Tensor:
    if tensor.shape != fit.sizes:
        # Tiles that some rows share are copied: kernels step from row to row by one stride.
        tensor = tensor.reshape(fit.own).expand(fit.sizes).contiguous()
    return tensor.unflatten(-1, (2, tensor.shape[-1] // 2)) if halves and PACKED in fit.shape else tensor
