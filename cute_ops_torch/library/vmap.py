"""``torch.vmap``: all examples run as one call (see :mod:`cute_ops.declaration.batching`). Where an op cannot do that,
the ops that it calls are batched one by one if it is a composite that allows it, else its examples run one after
another.

An input that the op writes has to be batched where any is: the examples' values for one tensor would be several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cute_ops.declaration.batching import OneCall, as_one_call
from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
from cute_ops_torch.library import framework, program
from cute_ops_torch.library.nodes import tracked
from cute_ops_torch.library.schema import filler, resolver
from cute_ops_torch.library.tensors import arrays, readable


def register_vmap(library: torch.library.Library, name: str, rule: Callable[..., Any], op: Callable[[], Any]) -> None:
    """``torch.library.register_vmap`` of an op that ``library`` has just defined, whose overload is ``op()``.

    Torch's own looks all arguments up for tensors by keyword, which took 4 ms of our import. It is the fallback for
    versions that keep what it calls elsewhere than torch 2.11 to 2.13.
    """
    try:
        from torch._functorch.autograd_function import custom_function_call_vmap_helper as call
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter as interpreter
    except ImportError:
        torch.library.register_vmap(f"{library.ns}::{name}", rule, lib=library)
        return

    def kernel(keyset: Any, *args: Any, **named: Any) -> Any:
        return call(interpreter(), rule, op(), *args, **named)  # type: ignore[arg-type]

    library.impl(name, kernel, "FuncTorchBatched", with_keyset=True)


def vmap_rule(op: Op, define: Callable[[Op], Any]) -> Callable[..., Any]:
    """The rule that ``torch.library.register_vmap`` takes; ``define`` registers an op and returns its overload."""
    fill, arity = filler(op), len(op.inputs)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        args = fill(args)
        attrs, dims = args[arity:], [*in_dims, *[None] * (len(args) - len(in_dims))][:arity]
        tensors = [t if d is None else t.movedim(d, 0) for t, d in zip(args[:arity], dims, strict=True)]
        _refuse_shared(op, tensors, [d is not None for d in dims])
        named = zip(op.inputs, tensors, dims, strict=True)
        one = as_one_call(torch, op, {n: (t, d is not None) for n, t, d in named if t is not None}, info.batch_size)
        if one is None and op.program and op.program.maps and info.batch_size and not _has_the_gradient(op, tensors):
            given = [t if d is None else Examples(t) for t, d in zip(tensors, dims, strict=True)]
            return _by_program(op, given, attrs, define)
        if one is None:
            results = _one_by_one(define(op), op, tensors, dims, attrs, info.batch_size)
            return _with_places(results, [0] * len(results))
        return together(one, attrs)

    def together(one: OneCall, attrs: Sequence[Any]) -> Any:
        whole = [one.inputs.get(name) for name in op.inputs]
        raw = _outputs(define(one.op)(*_read(one.op, whole), *attrs))
        results = [one.unfolded(t, out) for t, out in zip(op.outputs.values(), raw, strict=True)]
        real = resolver(op)(whole, results) if one.op is op else results
        return _with_places(results, [0 if o is r else None for o, r in zip(results, real, strict=True)])

    return rule


def _has_the_gradient(op: Op, tensors: Sequence[Any]) -> bool:
    """Whether autograd needs a composite as a whole: it tracks the call, and a part of it has no gradient, or none of
    some inputs.
    """
    assert op.program is not None
    if not (op.differentiable and torch.is_grad_enabled() and any(tracked(t) for t in tensors if t is not None)):
        return False
    return any(part.no_gradient or not part.differentiable for part in op.program.ops)


def _with_places(results: list[Any], places: list[int | None]) -> Any:
    """Results and their batch dims as torch takes them: None without results, one result alone."""
    if not results:
        return None, None
    return (results[0], places[0]) if len(results) == 1 else (tuple(results), tuple(places))


def _one_by_one(
    run: Callable[..., Any], op: Op, tensors: Sequence[Any], dims: Sequence[Any], attrs: Sequence[Any], count: int
) -> list[Any]:
    """The results of ``count`` examples, one call each."""
    columns = [
        # Of no example one of zeros, which tells the shapes of results.
        [t] * max(count, 1) if d is None else (t if count else t.new_zeros(1, *t.shape[1:])).unbind()
        for t, d in zip(tensors, dims, strict=True)
    ]
    found = [_outputs(run(*_read(op, each), *attrs)) for each in zip(*columns, strict=True)]
    return [torch.stack(column)[:count] for column in zip(*found, strict=True)]


def _outputs(raw: Any) -> tuple[Any, ...]:
    return () if raw is None else raw if isinstance(raw, tuple) else (raw,)


def _read(op: Op, tensors: Sequence[Any]) -> list[Any]:
    """The inputs; copies of those that batching has left so that the op cannot read them."""
    given = zip(op.inputs.items(), tensors, strict=True)
    return [t if t is None or name in op.mutates else readable(declared, t) for (name, declared), t in given]


class Examples:
    """A batched tensor, of which a program sees the shape of one example."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, tensor.shape[1:], tensor.dtype

    def reshape(self, shape: Sequence[int]) -> Examples:
        return Examples(self.tensor.reshape((len(self.tensor), *shape)))

    def __getitem__(self, index: tuple[Any, ...]) -> Examples:
        """Of the last dims alone: ``x[..., None]``."""
        assert index[0] is Ellipsis
        return Examples(self.tensor[index])


class Mapped:
    """The framework's functions for programs, of which some take :class:`Examples`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(framework, name)

    def ones(self, shape: Any, like: Any) -> torch.Tensor:
        return framework.ones(shape, _tensor(like))

    def number(self, value: float, like: Any) -> torch.Tensor:
        return framework.number(value, _tensor(like))

    def sums(self, x: Any, axes: tuple[int, ...], like: Any) -> Any:
        found = framework.sums(_tensor(x), axes, _tensor(like))  # axes are counted from the end
        return Examples(found) if isinstance(x, Examples) else found

    def broadcast_to(self, x: Any, shape: Sequence[int]) -> Any:
        if not isinstance(x, Examples):
            return framework.broadcast_to(x, shape)
        count, more = len(x.tensor), len(shape) - len(x.shape)
        return Examples(x.tensor.reshape((count, *[1] * more, *x.shape)).broadcast_to((count, *shape)))


def _tensor(x: Any) -> torch.Tensor:
    found: torch.Tensor = x.tensor if isinstance(x, Examples) else x
    return found


class _Info(NamedTuple):
    """The part of torch's information on a vmap that a rule reads."""

    batch_size: int


def _by_program(op: Op, given: Sequence[Any], attrs: Sequence[Any], define: Callable[[Op], Any]) -> Any:
    """The results of a composite's rule: its program runs with the rules of the ops that it calls."""
    assert op.program is not None
    first = next(t.tensor for t in given if isinstance(t, Examples))

    def call(called: Op, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        values, options = [inputs.get(name) for name in called.inputs], {**called.keywords, **attrs}.values()
        if not any(isinstance(t, Examples) for t in values):
            return program.call(called, inputs, attrs)
        rule, dims = vmap_rule(called, define), [0 if isinstance(t, Examples) else None for t in values]
        tensors = [t.tensor if isinstance(t, Examples) else t for t in values]
        raw, places = rule(_Info(len(first)), (*dims, *[None] * len(options)), *tensors, *options)
        outputs = zip(raw, places, strict=True) if isinstance(raw, tuple) else [(raw, places)]
        made = [out if place is None else Examples(out) for out, place in outputs]
        return dict(zip(called.outputs, made, strict=True))

    inputs = dict(zip(op.inputs, given, strict=True))
    xp: Any = Mapped()
    named = op.program.run(xp, call, inputs, dict(zip(op.keywords, attrs, strict=True)))
    found = [first.new_empty(0) if (out := named.get(name)) is None else out for name in op.outputs]
    places = tuple(0 if isinstance(out, Examples) else None for out in found)
    outputs = tuple(out.tensor if isinstance(out, Examples) else out for out in found)
    return (outputs, places) if len(outputs) > 1 else (outputs[0], places[0])


def _refuse_shared(op: Op, tensors: Sequence[Any], batched: Sequence[bool]) -> None:
    given = zip(op.inputs, tensors, batched, strict=True)
    shared = [name for name, t, b in given if t is not None and not b and name in op.mutates]
    if shared and any(batched):
        other = next(name for name, b in zip(op.inputs, batched, strict=True) if b)
        problem = (
            f"vmap: `{shared[0]}` is written but not batched, while `{other}` is: every example would write its own "
            f"values into one tensor; batch `{shared[0]}` too."
        )
        raise ValueError(message(op, problem, arrays(op, tensors)))
