"""The function that a user calls, made from a declaration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from cute_ops.constants import Exact
from cute_ops.declaration import lists
from cute_ops.declaration.headers import check_declaration, header
from cute_ops.declaration.messages import message, without_bias
from cute_ops.declaration.op import Op
from cute_ops.errors import is_array, shown, wrong_arguments
from cute_ops.ops.checks import inplace_backward_of
from cute_ops_jax import _compat
from cute_ops_jax.distributed.slices import spread
from cute_ops_jax.distributed.varying import Axes, alike, as_axes, manual
from cute_ops_jax.primitive.arrays import in_order, wrong_array
from cute_ops_jax.primitive.primitive import one_for_each, primitive_of
from cute_ops_jax.primitive.vjp import StaticCall, differentiable, label

# ``(x, weight=None, bias=None, eps=1e-06, weight_offset=0.0)`` of an op, with annotations as text.
signature = partial(header, takes="ArrayLike", returns="Array")


@one_for_each
def register(op: Op) -> Callable[..., Any]:
    """Turn a declaration into a JAX function.

    The function takes the op's inputs, then its attributes; optional inputs default to None. It works under ``jit``,
    ``grad``, ``vmap``, ``lax.scan``, ``jax.shard_map`` and ``jax.checkpoint``. Policies of ``jax.checkpoint`` know the
    outputs as ``cute_<op>`` (``jax.checkpoint_policies.save_only_these_names``). On CUDA the function runs the kernel,
    which is compiled when a program that calls it is lowered; on every other platform it runs the reference.

    Args:
        op: one of ours or your own.

    Returns:
        The function, the same one for the same declaration. It returns the output, or a tuple where several are
        declared, with None for an absent one.
    """
    check_declaration(op, "cute_ops_jax.register")
    header = signature(op)
    if op.numbers:
        return _of_lists(op, header)
    call = _caller(op, header)
    arity, kinds = len(op.inputs), {name: type(value) for name, value in op.keywords.items()}

    def keyed(*args: Any, _told: str = "", **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    told = inspect.Parameter("_told", inspect.Parameter.KEYWORD_ONLY, default="")
    keyed.__signature__ = header.replace(parameters=[*header.parameters.values(), told])  # type: ignore[attr-defined]
    # jit traces once per shape, so that a call outside of jit does not pay for custom_vjp every time.
    traced = jax.jit(keyed, static_argnames=(*op.keywords, *op.options, "_told"), inline=_compat.INLINE)

    def tell(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Signs of zeros and types of attributes: jit compares attributes by equality, which tells neither apart."""
        given = [*zip(kinds, args, strict=False), *((n, kwargs[n]) for n in kinds if n in kwargs)]
        return " ".join([f"{n}={v!r}" for n, v in given if type(v) is not kinds[n] or (kinds[n] is float and not v)])

    @wraps(call)
    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            told = label.get()
            if len(args) > arity or kwargs:
                told += tell(args[arity:], kwargs)
            if told:
                return traced(*args, **kwargs, _told=told)
            return traced(*args, **kwargs)
        except (TypeError, ValueError, NotImplementedError, OverflowError):
            _check_arguments(op, header, args, kwargs)  # what jit refuses, it refuses without the op's name
            raise

    return function


def of_slices(op: Op, axis: str | Axes, what: str) -> Callable[..., Any]:
    """The function of an op inside of a ``shard_map``, whose devices along ``axis`` have slices of the dim that it
    splits. It raises NameError, as the function that is called ``what``, where there is no such axis.
    """
    return _caller(op, signature(op), as_axes(axis), what)


def _check_axes(axes: Axes, what: str) -> None:
    # Gradients follow the conventions of a shard_map: the axis of a vmap is none.
    if missing := [a for a in axes if a not in manual()]:
        there = ", ".join(map(repr, sorted(manual()))) or "none"
        problem = f"axis {missing[0]!r} is no axis of a jax.shard_map that this is called in"
        raise NameError(f"cute.{what}: {problem}; there: {there}.")


def _caller(op: Op, header: inspect.Signature, axes: Axes = (), what: str = "") -> Callable[..., Any]:
    run = differentiable(op)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = header.bind(*args, **kwargs)
        bound.apply_defaults()
        given = in_order(op, bound.arguments)
        attrs = Exact((name, bound.arguments[name]) for name in op.keywords)
        options = {name: bound.arguments[name] for name in op.options}
        inplace = options.pop("inplace_backward", False)
        inplace = inplace is not False and inplace_backward_of(op, inplace)
        if op.finish:
            op.finish.check(op.name, options)
        if axes:
            primitive_of(op).bound(given, dict(attrs))
            _check_axes(axes, what)
        # Before custom_vjp, so that a replicated weight gets the sum of the devices' gradients.
        given = spread(given, axes) if axes else dict(zip(given, alike(list(given.values())), strict=True))
        found = run(StaticCall(tuple(given), attrs, inplace, axes, label.get()), given)
        results = [
            found.get(n, found.get(t.same_as) if t.same_as else None) for n, t in op.results.items() if not t.hidden
        ]
        if op.finish is not None:
            public = dict(zip(op.shown, results, strict=True))
            whole = {name: given.get(name) for name in op.inputs}
            results = list(op.finish.apply(jnp, whole, public, dict(attrs), **options).values())
        return results[0] if len(results) == 1 else tuple(results)

    return _describe(call, op, header)


def _of_lists(op: Op, header: inspect.Signature) -> Callable[..., Any]:
    """The function of an op with lists: that of the op unrolled for so many arrays, with lists in and out."""
    shown = {name: tensor for name, tensor in op.results.items() if not tensor.hidden}

    def function(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = header.bind(*args, **kwargs)
        except TypeError:
            _check_arguments(op, header, args, kwargs)
            raise
        bound.apply_defaults()
        counts = lists.counts(op, bound.arguments)
        found = register(op.unrolled(counts))(*lists.spread(op.inputs, list(bound.arguments.values())))
        results = lists.gathered(shown, counts, found if isinstance(found, tuple) else (found,))
        return results[0] if len(results) == 1 else tuple(results)

    return _describe(function, op, header)


def _describe(function: Callable[..., Any], op: Op, header: inspect.Signature) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = op.name
    function.__module__ = "cute_ops_jax"
    function.__doc__ = op.doc
    function.__signature__ = header  # type: ignore[attr-defined]
    return function


def _check_arguments(op: Op, header: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments of other names or number than declared, and for what jit cannot take."""

    def fail(problem: str) -> NoReturn:
        raise TypeError(message(op, problem)) from None

    if problem := wrong_arguments(header, args, kwargs):
        fail(problem)
    given = header.bind(*args, **kwargs).arguments
    for name in op.inputs:
        if problem := wrong_array(given.get(name)):
            fail(f"argument `{name}` must be {problem}.")
    for name, default in {**op.keywords, **op.options}.items():
        value, kind = given.get(name, default), type(default).__name__
        if isinstance(value, jax.Array):  # or a tracer
            came, what = f"{value.dtype}{list(value.shape)}", "attribute"
            why = "it is part of the compiled kernel, so it is given to jax.jit by static_argnames or not at all"
            if name in op.scalars:
                what, why = "scalar", "it is a number of the host; declare it as an input of shape () to take an array"
            fail(f"{what} `{name}` must be {kind}, got a JAX array {came}: {why}{without_bias(op)}.")
        try:
            hash(value)
            plain = not is_array(value)  # jit compares what is static, of which an array gives an array
        except TypeError:
            plain = False
        if not plain:
            fail(f"attribute `{name}` must be {kind}, got {shown(value)}.")
