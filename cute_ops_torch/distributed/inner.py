"""An op on this rank's slices of its inner dims: a product with an epilogue, whose terms ranks share.

No kernel can stop between the product and the epilogue to add up what ranks have, so the op's program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from cute_ops.binding import Binding
from cute_ops.op import Op
from cute_ops_torch.library import framework, program

Tensor = torch.Tensor
Add = Callable[[Tensor], Tensor]


def run_on_terms(binding: Binding, tensors: Sequence[Tensor | None], terms: set[str], add: Add) -> list[Any]:
    """Raw outputs, for this rank's rows.

    Args:
        binding: the call with its whole arrays.
        tensors: this rank's slices of the inputs.
        terms: the dims that are summed over, and of which each rank has a slice.
        add: adds up the ranks' parts of such a sum.
    """
    op = binding.op
    with torch._C._DisableAutocast():  # the declaration sets the dtypes
        found = _run(op, dict(zip(op.inputs, tensors, strict=True)), binding.attrs, terms, add)
    return [found[name] for name in op.results]


def _run(op: Op, inputs: Mapping[str, Any], attrs: Mapping[str, Any], terms: set[str], add: Add) -> Mapping[str, Any]:
    def call(called: Op, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> Mapping[str, Any]:
        if not terms.isdisjoint(called.inner):
            return _run(called, inputs, {**called.keywords, **attrs}, terms, add)
        found = program.call(called, inputs, attrs)
        return found if terms.isdisjoint(called.contracted) else {name: add(t) for name, t in found.items()}

    instead = op.without_kernel
    assert instead is not None  # a declaration with inner dims has one
    return instead.run(_Adding(add), call, inputs, attrs)


class _Adding:
    """What torch offers to programs, with products that ranks add up."""

    def __init__(self, add: Add) -> None:
        self._add = add

    def __getattr__(self, name: str) -> Any:
        return getattr(framework, name)

    def product(self, a: Tensor, b: Tensor, dtype: str | None = None) -> Tensor:
        return self._add(framework.product(a, b, dtype))
