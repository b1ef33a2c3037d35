"""Inputs and outputs as a declaration gives them: shape, dtype and how they lie in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from cute_ops.declaration.dims import Dim
from cute_ops.declaration.dims import parse as parse_dim
from cute_ops.declaration.shapes import parse


class Accumulation(NamedTuple):
    """An output that is summed one term after another, which loses more than other sums: the tolerance allows for it.

    Args:
        over: the dims whose terms are added, ``("k",)`` of a product.
        dtype: what the sum is kept in: ``"float32"``, ``"float22"`` (fp8 on Hopper's tensor cores) or ``"float16"``.
    """

    over: tuple[str, ...]
    dtype: str = "float32"


class _TensorFields(NamedTuple):
    shape: str
    dtype: str
    optional: bool = False
    given: str | None = None
    same_as: str | None = None
    upper_bound: str | None = None
    at_most: float | None = None
    unread: bool = False
    hidden: bool = False
    donates: str | None = None
    accumulates: Accumulation | None = None
    skippable: bool = False
    zero_without: str | None = None
    contiguous: str | tuple[str, ...] | None = None
    align: int = 0
    otherwise: str = "refuse"
    merged: bool = False
    many: str | None = None
    own: tuple[str, ...] = ()
    strided_like: str | None = None


class Tensor(_TensorFields):
    """One input or output of an op, or with ``many`` a list of them.

    Args:
        shape: dims separated by blanks, ``"*m n"``. A name binds a dim. ``2n``, ``n/2`` (2 must divide n), ``g*r``,
            ``b+1``, ``k-1``, ``ceil(k/128)`` and ``3`` are checked against the sizes of their names; all but ``ceil``
            also bind a name that no other dim binds. One leading ``*name`` binds any number of leading dims, the rows:
            a row of an output depends on the rows at its index of tensors with the same name, and on all of any other
            tensor. The empty string is a scalar. An input with ``*#name`` has the last few of these leading dims, or
            all of them, any of size 1, and is broadcast over the others.
        dtype: a dtype variable of the op (``"T"``) or a dtype name (``"float32"``); of outputs also an attribute whose
            value is the dtype's name, ``attrs={"out_dtype": OneOf("bfloat16", "float32")}``.
        optional: the input may be ``None``.
        given: for outputs: the optional input with which the output exists. For optional inputs: another optional
            input; a call passes both or neither.
        same_as: for outputs: another output of equal values. If both have the same dtype, only that one is written.
        upper_bound: for integer inputs: the dim that bounds its values, ``[0, dim)``, or an expression such as
            ``"p*s"``. Kernels still check.
        at_most: for floating inputs: the largest valid value. Random inputs stay below it; kernels need not check.
        unread: for inputs: only its shape is used.
        hidden: for outputs: kept for the gradient. The raw op returns it, the Python function does not; it has
            no cotangent.
        donates: for outputs: the input of this shape and dtype whose memory the output may take if the caller asks for
            it. The kernel reads each element before it writes there.
        accumulates: for outputs: that one term is added after another, as tensor cores do it, ``Accumulation(("k",))``.
            By default the tolerance is that of sums in float32 by the framework, which adds up pairs or blocks.
        skippable: for outputs of a backward op: if this gradient is not wanted, the kernel gets None for it and skips
            its work. The reference always returns it.
        zero_without: for outputs of a backward op: the cotangent that this gradient is a sum of, so that it is zero
            where that is: where a loss does not depend on the output, PyTorch's parameters then have no gradient.
        contiguous: the dim whose elements are neighbours in memory, ``"k"``; or several, ``("k", "n")``, of which at
            least one must be: each has a kernel of its own, the first if several are contiguous. The name of leading
            dims means the last of them. The other dims have any strides. ``()`` leaves all strides free. By default the
            last dim is contiguous. An output is made compact; one that the caller gives may have these strides.
        align: for inputs: bytes, at most 16, that divide the address and the strides of all dims but the contiguous
            one: 16 where TMA loads it. By default each alignment has a kernel of its own.
        otherwise: what happens to an input with other strides or another alignment: ``"refuse"`` or ``"copy"``.
        merged: whether one stride steps over all rows, as those of a matrix. Strided leading dims arrive as one, and
            :func:`cute_ops.kernels.lib.matrix.folded` makes one of compact ones, too.
        many: for a list of one or more such tensors: the name of their number, ``"k"``. Lists with the same name have
            the same length, which is also the size of a dim of this name, ``"k n"``. The kernel gets the tensors one
            after another and is compiled for their number; references, ``check`` and ``arrange`` get lists.
        own: for a list: the dims, or the name of the leading dims, whose sizes differ from tensor to tensor. Lists of
            the same length share these sizes, index by index. Functions of sizes get a tuple of them, and cases give
            a tuple.
        strided_like: for outputs of programs, in PyTorch: the input whose strides it gets. By default it is compact.
    """

    # Cached: binding and planning ask for these some forty times per call.
    @cached_property
    def dims(self) -> tuple[Dim, ...]:
        """The dims after the leading ones."""
        return parse(self.shape).dims

    @cached_property
    def rows(self) -> str | None:
        """The name that binds the leading dims, or None."""
        return parse(self.shape).rows

    @cached_property
    def broadcast(self) -> bool:
        """Whether some of the leading dims may be missing."""
        return parse(self.shape).broadcast

    @cached_property
    def may_be_contiguous(self) -> tuple[str, ...]:
        """The dims of which one is contiguous in memory, the preferred one first; none where all strides are free."""
        if self.contiguous is None:
            return tuple(str(d) for d in self.dims[-1:])
        return (self.contiguous,) if isinstance(self.contiguous, str) else self.contiguous

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes of :attr:`may_be_contiguous`, counted from the end: -1 is the last."""
        if self.contiguous is None:
            return (-1,) if self.dims else ()
        names = (self.rows, *map(str, self.dims))
        return tuple(names.index(name) - len(names) for name in self.may_be_contiguous)

    def contiguous_axis(self, shape: Sequence[Any], strides: Sequence[Any]) -> int | None:
        """Which of :attr:`axes` is contiguous in memory with these strides; None if none is. A dim of one element
        always is; leading dims of one element do not count.
        """
        return next((axis for axis in self.axes if self._is_contiguous(axis, shape, strides)), None)

    def _is_contiguous(self, axis: int, shape: Sequence[Any], strides: Sequence[Any]) -> bool:
        if axis >= -len(self.dims):
            # Strides come first, so that the usual case does not compare a symbolic size.
            return bool(strides[axis] == 1 or shape[axis] <= 1)
        lead = len(shape) - len(self.dims)
        stepped = [stride for size, stride in zip(shape[:lead], strides[:lead], strict=True) if size != 1]
        return not stepped or bool(stepped[-1] == 1)

    def is_merged(self, shape: Sequence[Any], strides: Sequence[Any]) -> bool:
        """Whether one stride steps over all leading dims."""
        lead = len(shape) - len(self.dims)
        if lead < 2:
            return True
        # A dim of one element is stepped over last, so that the usual case does not compare a symbolic size.
        every = [*zip(shape[:lead], strides[:lead], strict=True)]
        return _one_stride(every) or _one_stride([each for each in every if each[0] != 1])

    def memory_order(self, rank: int, contiguous: int) -> tuple[int, ...]:
        """The axes from the outermost in memory to the contiguous one. Leading dims stay together, so that they can be
        merged.
        """
        lead = rank - len(self.dims)
        inner = range(lead) if contiguous < -len(self.dims) else range(rank + contiguous, rank + contiguous + 1)
        return (*(i for i in range(rank) if i not in inner), *inner)

    def of(self, dims: Mapping[str, Any]) -> tuple[Any, ...]:
        """The shape for these sizes, with all leading dims."""
        own = [dims[d.name] if d.name else d.of(dims) for d in self.dims]
        return (*(dims[self.rows] if self.rows else ()), *own)

    def has(self, dim: str) -> bool:
        """Whether it has leading dims of this name, or a dim with this name in it."""
        return dim == self.rows or any(dim in d.names for d in self.dims)

    def bound(self, dims: Mapping[str, Any]) -> Any:
        """The value of ``upper_bound`` for these sizes."""
        dim = parse_dim(self.upper_bound or "")
        return dim.of(dims) if dim else None

    @property
    def declared(self) -> str:
        return f"{self.dtype}[{self.shape}]"


def _one_stride(dims: Sequence[tuple[Any, Any]]) -> bool:
    """Whether one stride steps over dims with these sizes and strides."""
    return all(above == size * stride for (_, above), (size, stride) in pairwise(dims))
