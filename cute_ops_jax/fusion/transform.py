"""``fuse``: a transformation of JAX functions, as ``jit`` or ``checkpoint`` are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from cute_ops.declaration.op import Op
from cute_ops.errors import suggesting
from cute_ops.fusion.own import Meanings, Own
from cute_ops.fusion.report import Report
from cute_ops.garbage import without_collections
from cute_ops_jax.fusion.program import Program
from cute_ops_jax.fusion.report import report_of

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ARRAY = object()  # the place of an array among a function's outputs
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


class _Fuse:
    """Run a function, such as a model, on our ops, without a change to it.

    The function is traced, as by ``jax.jit``, at each call; parts whose meaning one of our ops or kernels computes are
    replaced, with our gradients, and everything else runs as it stands. It works inside and around ``jit``, ``grad``,
    ``vmap``, ``scan``, ``cond``, ``checkpoint`` and ``shard_map``, and on functions that contain these. Call it under
    ``jit``, which traces once per shape.

        step = jax.jit(jax.value_and_grad(cute_ops_jax.fuse(loss)))
        print(cute_ops_jax.fuse.report(loss, params, batch))

    Args:
        function: any function of arrays and of trees of arrays; what else is in its arguments is static.
        exact: round every value as the function does, where otherwise values inside of a replaced part stay in float32
            and its outputs are rounded once.
        own: ops of your own, which replace what their references compute, before any of ours: ``[op]``. Of a product
            say what follows it: ``[Own(op, meaning, product=("x", "weight"))]`` with ``meaning(xp, acc, bias)`` and
            ``Own`` of ``cute_ops_jax.fusion``.

    Returns:
        The function with the same arguments and results. Differences are those of rounding.

    Raises:
        TypeError: what is no function; one of your own that is no op.
        ValueError: an op of your own of which no expression says what it computes.
    """

    @suggesting
    def __call__(
        self, function: Callable[_P, _R], *, exact: bool = False, own: Sequence[Op | Own] = ()
    ) -> Callable[_P, _R]:
        if not callable(function):
            raise TypeError(
                f"cute_ops_jax.fuse: argument `function` must be a function, got {type(function).__name__}."
            )
        meanings = _meanings(own)

        @wraps(function)
        def fused(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            arrays, program, rebuild = _traced(function, args, kwargs, exact, meanings)
            made: _R = rebuild(program(*arrays))
            return made

        return fused

    def report(
        self, function: Callable[..., Any], *args: Any, exact: bool = False, own: Sequence[Op | Own] = (), **kwargs: Any
    ) -> Report:
        """The parts that ``fuse`` finds in a function for these arguments, what each becomes, and what stays and why.

        Arguments may be ``jax.ShapeDtypeStruct`` in place of arrays; nothing is computed. ``print`` shows a table.
        """
        _, program, _ = _traced(function, args, kwargs, exact, _meanings(own))
        return report_of(program, getattr(function, "__name__", type(function).__name__))


def _meanings(own: Sequence[Op | Own]) -> Meanings:
    try:
        return Meanings(own)
    except (TypeError, ValueError) as error:
        raise type(error)(f"cute_ops_jax.fuse: {error}") from error


def _traced(function: Callable[..., Any], args: Any, kwargs: Any, exact: bool, own: Meanings) -> Any:
    """The arrays of a call, the program of the function, and what makes the function's result of its outputs."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]
    results: list[Any] = []

    @wraps(function)  # JAX's errors name the function and its arguments
    def of_arrays(*args: Any, **kwargs: Any) -> list[Any]:
        given = list(leaves)
        for place, array in zip(places, jax.tree.leaves((args, kwargs)), strict=True):
            given[place] = array
        args, kwargs = jax.tree.unflatten(tree, given)
        outputs, out_tree = jax.tree.flatten(function(*args, **kwargs))
        # Arrays are traced here: kept until the call returns they would be leaked tracers.
        results[:] = [[_ARRAY if isinstance(each, _ARRAYS) else each for each in outputs], out_tree]
        return [each for each in outputs if isinstance(each, _ARRAYS)]

    arrays = [leaves[place] for place in places]
    try:
        args, kwargs = jax.tree.unflatten(tree, [a if isinstance(a, _ARRAYS) else None for a in leaves])
    except Exception:  # a class of the caller's refuses None: its arrays go by number
        args, kwargs = arrays, {}
    closed = jax.make_jaxpr(of_arrays)(*args, **kwargs)

    def rebuild(made: list[Any]) -> Any:
        outputs, out_tree = results
        remaining = iter(made)
        return jax.tree.unflatten(
            out_tree, [jax.numpy.asarray(next(remaining)) if each is _ARRAY else each for each in outputs]
        )

    with without_collections():
        return arrays, Program(closed, exact, own=own), rebuild


fuse = _Fuse()
