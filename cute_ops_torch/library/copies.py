"""Copies of operands that kernels cannot load where they lie, made once for a forward and all steps of its backward.

A product copies operands off a vector into rows that begin at lines of memory. Its node saves these copies in place of
the operands, so that the backward, which multiplies by the same ones, need not make them again, and the steps of a
backward share the copies of a cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Copies = list[tuple[torch.Tensor, torch.Tensor]]


class Kept:
    """Copies that are kept while a forward or a backward runs. Where threads take turns, one may find that of another,
    which holds none of its tensors: then it makes a copy that is there already.

    Attributes:
        now: the tensors whose copies are kept, no others, of which there may be many; these tensors and their copies.
        forward: whether a node's forward runs, whose copies the backward reads, too.
    """

    __slots__ = ("forward", "now")

    def __init__(self) -> None:
        self.now: tuple[Sequence[Any], Copies] = (), []
        self.forward = False


kept = Kept()


def copied(x: torch.Tensor, copy: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """``copy(x)``, or the copy that is kept."""
    of, copies = kept.now
    for known, made in copies:
        if known is x:
            return made
    made = copy(x)
    if any(x is t for t in of):
        copies.append((x, made))
    return made


def for_a_node(plan: Callable[..., Any], *args: Any) -> Any:
    """``plan(*args)``, which chooses the kernels of a call, for one whose backward reads the forward's copies, too."""
    kept.forward = True
    try:
        return plan(*args)
    finally:
        kept.forward = False


def saving(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A node's forward that saves copies of its inputs in place of these."""

    def forward_with_copies(ctx: Any, *args: Any) -> Any:
        before = kept.now
        copies: Copies = []
        kept.now, kept.forward = (args, copies), True
        try:
            out = forward(ctx, *args)
        finally:
            kept.now, kept.forward = before, False
        if copies:
            ctx.to_save = tuple(_instead(t, copies) for t in ctx.to_save)
        return out

    return forward_with_copies


def sharing(steps: Callable[[tuple[Any, ...]], Any]) -> Callable[[tuple[Any, ...]], Any]:
    """``steps(values)``, which share copies of values and of what they :func:`add`."""

    def steps_with_copies(values: tuple[Any, ...]) -> Any:
        before, kept.now = kept.now, (values, [])
        try:
            return steps(values)
        finally:
            kept.now = before

    return steps_with_copies


def watched(steps: Callable[[tuple[Any, ...]], Any], values: tuple[Any, ...]) -> tuple[Any, bool]:
    """``steps(values)``, and whether these have made copies of values, or of what they :func:`add`."""
    before, kept.now = kept.now, (values, [])
    try:
        return steps(values), bool(kept.now[1])
    finally:
        kept.now = before


def add(values: Sequence[Any]) -> None:
    """Keep copies of these tensors from now on, besides the copies that there are."""
    kept.now = values, kept.now[1]


def _instead(x: torch.Tensor | None, copies: Copies) -> torch.Tensor | None:
    """The tensor that an autograd node saves for x: x itself, or its copy, which stays in the graph behind x so that
    second derivatives reach the tensors from which x was computed.
    """
    for known, made in copies:
        if known is x:
            with torch.enable_grad():
                return _Copy.apply(x, made) if known.requires_grad else made  # type: ignore[no-untyped-call]
    return x


class _Copy(torch.autograd.Function):
    """A copy that hangs on what it is a copy of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, d: torch.Tensor) -> tuple[torch.Tensor, None]:
        return d, None
