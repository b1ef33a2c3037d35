"""Which dims of a call may be split over devices; this follows from the declaration.

A *factor* is a dim that may be split: a leading dim, or one that the declaration calls ``parallel``, ``contracted`` or
``inner``. Of a tied dim such as ``g*r`` heads it is the first name: each device has whole groups. Every device has all
of any other dim. An input without a factor is replicated. An output without it is the sum of the devices' outputs if
the factor is contracted or inner or if the output is the gradient of such an input; else the dim is not split. Nor are
leading dims that the declaration's ``whole`` names: each row depends on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from types import SimpleNamespace
from typing import Any, NamedTuple

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.declaration.tensor import Tensor

Factors = Mapping[str, tuple[str | None, ...]]


def factors(binding: Binding, split: bool = False) -> Factors:
    """The factor of every dim of every present array; None for a dim that may not be split.

    Args:
        split: whether to include the dim of the declaration's ``split``.
    """
    op = binding.op
    arrays = {**binding.inputs, **binding.outputs}
    apart = {op.split.dim} if split and op.split else set()
    cut = apart.union(op.parallel, op.contracted, op.inner)
    tensors = {n: t for n, t in {**op.inputs, **op.outputs}.items() if arrays[n] is not None}
    found = {n: _names(t, a, cut) for n, t in tensors.items() if (a := arrays[n]) is not None}
    dims = {f: t.rows for n, t in tensors.items() if t.rows for f in found[n][: len(found[n]) - len(t.dims)]}
    gathered = {f for f, rows in dims.items() if rows in op.whole}
    whole = gathered | {
        f for n in op.results if n in found for f in _all(found) - apart - set(found[n])
        if not op.sums(n, dims.get(f) or f)
    }  # fmt: skip
    return {n: tuple(None if f in whole else f for f in each) for n, each in found.items()}


def sizes(binding: Binding, named: Factors) -> dict[str, Any]:
    """The size of each factor: that of ``g`` for a dim ``g*r``."""
    arrays = {**binding.inputs, **binding.outputs}
    found: dict[str, Any] = {}
    for name, names in named.items():
        if (array := arrays[name]) is not None:
            found |= {f: binding.dims.get(f, size) for f, size in zip(names, array.shape, strict=True) if f}
    return found


def tied(binding: Binding) -> set[str]:
    """The factors of tied dims: their slices fit together only if all slices have the same length."""
    tensors = {**binding.op.inputs, **binding.op.outputs}.values()
    return {d.outer for t in tensors for d in t.dims if d.outer and not d.name}


def _names(tensor: Tensor, array: Array, cut: set[str]) -> tuple[str | None, ...]:
    lead = len(array.shape) - len(tensor.dims)
    # Counted from the last one, because what broadcasts has the last few. A dim of one element is not split.
    rows = [f"{tensor.rows}{lead - i}" if array.shape[i] != 1 else None for i in range(lead)]
    return (*rows, *(d.outer if d.outer in cut else None for d in tensor.dims))


def _all(found: Factors) -> set[str]:
    return {f for dims in found.values() for f in dims if f is not None}


def with_others(framework: Any, **others: Any) -> Any:
    """A framework's functions for programs, with these in place of its own."""
    return SimpleNamespace(**{**vars(framework), **others})


class OnTerms(NamedTuple):
    """An op on one device's slices of its inner dims: a product with an epilogue, whose terms devices share.

    No kernel can stop between the product and the epilogue to add up what devices have, so the op's program runs.

    Attributes:
        framework: what it offers to programs.
        terms: the inner dims of which devices have slices.
        call: ``call(op, inputs, attrs)``: another op on this device.
        add: ``add(partial, dims)``: adds up the devices' partial sums over these dims.
    """

    framework: Any
    terms: Set[str]
    call: Callable[..., Mapping[str, Any]]
    add: Callable[[Any, Iterable[str]], Any]

    def run(self, op: Op, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The op's outputs from the device's slices of its inputs, None where absent."""
        program = op.without_kernel
        assert program is not None  # a declaration with inner dims has one
        offered = with_others(self.framework, product=self._product, shared=True)
        return program.run(offered, self._nested, inputs, attrs)

    def _product(self, a: Any, b: Any, dtype: str | None = None) -> Any:
        return self.add(self.framework.product(a, b, dtype), self.terms)

    def _nested(self, op: Op, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self.terms.isdisjoint(op.inner):
            return self.run(op, inputs, {**op.keywords, **attrs})
        outputs, over = self.call(op, inputs, attrs), [dim for dim in op.contracted if dim in self.terms]
        return {name: self.add(a, over) for name, a in outputs.items()} if over else outputs
