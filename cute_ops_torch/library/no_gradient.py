"""The error when an op without a gradient is differentiated, or a gradient a second time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch

from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
from cute_ops_torch.library.modes import transforms_active
from cute_ops_torch.library.reference import register_fake

Call = Callable[..., Any]
LINKS = "links"  # the attribute of a node with empty copies of its inputs, which hold their places in the graph


def no_gradients(
    op: Op, given: Mapping[str, Any], cotangents: Sequence[torch.Tensor | None], wanted: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradients of an op that has none, in a backward: an error.

    Compilers trace the backward of everything that may be differentiated, needed or not. They trace an op that raises
    when the compiled program runs it, for each input whose gradient is ``wanted``.
    """
    text = message(op, without_gradient_text(op), given)
    if not torch.compiler.is_compiling():
        raise NotImplementedError(text)
    there = [d for d in cotangents if d is not None]
    return [
        torch.ops.cute._no_gradient(there, a.shape, getattr(torch, a.dtype), text) if want and a and there else None
        for a, want in zip(given.values(), wanted, strict=True)
    ]


def without_gradient_text(op: Op) -> str:
    """Why an op cannot be differentiated."""
    if op.inference_only:
        return f"is for inference only, it has no gradient; {op.inference_only}."
    backward = all(name.startswith("d") for name in op.outputs) and any(name.startswith("d") for name in op.inputs)
    also = ", so there is no double backward" if backward else ""
    return f"has no gradient of its own{also}."


def _refuse(cotangents: Sequence[torch.Tensor], size: Sequence[int], dtype: torch.dtype, text: str) -> torch.Tensor:
    """Zeros where all cotangents are zero: compiled backwards pass these for outputs that a loss does not depend on."""
    if any(d.float().any() for d in cotangents):
        raise NotImplementedError(text)
    return cotangents[0].new_zeros(size, dtype=dtype)


_library = torch.library.Library("cute", "FRAGMENT")
_library.define(
    "_no_gradient(Tensor[] cotangents, SymInt[] size, ScalarType dtype, str text) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),  # it waits for the device
)
_library.impl("_no_gradient", _refuse, "CompositeExplicitAutograd")
register_fake(
    _library, "_no_gradient", lambda cotangents, size, dtype, text: cotangents[0].new_empty(size, dtype=dtype)
)


def once(name: str) -> Callable[[Call], Call]:
    """Decorate the backward of a Function: gradients that raise when they are differentiated.

    Torch's ``once_differentiable`` does not raise where the cotangents are constants, as those of a sum are.
    """

    def wrap(backward: Call) -> Call:
        @wraps(backward)
        def run(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
            if cotangents[0] is None and all(each is None for each in cotangents):
                return (None,) * len(ctx.needs_input_grad)  # a program's own function gave no gradient
            # Functorch prepares for a double backward in every gradient; compilers refuse one themselves.
            if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
                return backward(ctx, *cotangents)  # type: ignore[no-any-return]
            if torch.compiler.is_compiling():
                with torch.no_grad():
                    return backward(ctx, *cotangents)  # type: ignore[no-any-return]
            node = _Unpacked(ctx)
            with torch.no_grad():
                found = backward(node, *cotangents)
            # Through its saved inputs and outputs the node depends on its inputs: a saved output on all of them.
            given = [t for t in (*cotangents, *node.saved_tensors) if t is not None and t.requires_grad]
            given += getattr(ctx, LINKS, None) or ()
            gradients = [g.detach().requires_grad_() for g in found if g is not None]
            made = iter(_Last.apply(name, len(gradients), *gradients, *given, *_leaves(ctx)))  # type: ignore[no-untyped-call]
            return tuple(None if g is None else next(made) for g in found)

        return run

    return wrap


def linking_inputs(forward: Call, places: Sequence[int]) -> Call:
    """Decorate the forward of a Function with ``once``: second derivatives to the inputs at these places of its
    arguments raise, too, where they are no leaves.
    """

    @wraps(forward)
    def run(ctx: Any, *args: Any) -> Any:
        for k in places:  # most are weights: a comprehension, and another call, take 2 us
            if not args[k].is_leaf:
                link_inputs(ctx, *[args[place] for place in places])
                break
        return forward(ctx, *args)

    return run


def link_inputs(ctx: Any, *given: Any) -> None:
    """In the forward of a Function with ``once``: second derivatives to these inputs raise, though it saves neither
    them nor an output.
    """
    # First what most biases and weights are.
    inner = [t for t in given if type(t) is torch.Tensor and not t.is_leaf and t.requires_grad and t.ndim]
    if inner and not transforms_active():
        # Without elements they do not hold the inputs' memory.
        with torch.enable_grad():
            setattr(ctx, LINKS, [torch.narrow_copy(t, 0, 0, 0) for t in inner])


class _Unpacked:
    """A node whose saved tensors are unpacked once, which is as often as a checkpoint does it."""

    def __init__(self, node: Any) -> None:
        self._node, self.saved_tensors = node, node.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


def _leaves(node: Any) -> list[torch.Tensor]:
    """The leaves that a node's inputs were computed from."""
    found, waiting, seen = list[torch.Tensor](), [node], {node}
    while waiting:
        each = waiting.pop()
        if (leaf := getattr(each, "variable", None)) is not None:
            found.append(leaf)
        before = {of for of, _ in each.next_functions if of is not None} - seen
        seen |= before
        waiting += before
    return found


class _Last(torch.autograd.Function):
    """Passes gradients on and raises when they are differentiated. It takes cotangents, leaves and links to
    inputs, too: second derivatives to them lead here, and are not taken for zero.
    """

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.name = name
        return tuple(g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise double_backward(ctx.name)


def double_backward(name: str) -> NotImplementedError:
    return NotImplementedError(f"cute.{name}: its gradient has none of its own, so there is no double backward.")
