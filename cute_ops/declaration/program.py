"""Programs: what a composite runs in place of a kernel, and what an op may run in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from cute_ops.declaration.attributes import OneOf

HOW_FUSED = ("auto", "always", "never")
FUSED = OneOf(*HOW_FUSED)


Arrays = Mapping[str, Any]  # by name, None where absent


class Framework(Protocol):
    """The functions of ``xp`` that programs of composites call, besides array methods that both frameworks have, such
    as ``reshape``. Each adapter implements them in a module, which mypy compares with this class.
    """

    @property
    def shared(self) -> bool:
        """Whether devices share the dim that the op splits, or an inner one."""

    def where(self, condition: Any, x: Any, y: Any, /) -> Any: ...

    def broadcast_to(self, x: Any, shape: Any, /) -> Any: ...

    def ones(self, shape: Any, like: Any, /) -> Any:
        """Ones in float32, on the device of ``like``."""

    def number(self, value: float, like: Any, /) -> Any:
        """A number as a float32 array without dims, on the device of ``like``."""

    def sums(self, x: Any, axes: tuple[int, ...], like: Any, /) -> Any:
        """Sums in float32 over these axes, counted from the end, in the dtype of ``like``."""

    def sort(self, keys: Any, /) -> tuple[Any, Any]:
        """The sorted keys and their order; stable."""

    def whole(self, x: Any, /) -> Any:
        """Whole numbers as int32."""

    def scattered(self, values: Any, index: Any, like: Any, /) -> Any:
        """Zeros of the shape of ``like`` with the values at these places of the last dim, which differ."""

    def picked(self, x: Any, index: Any, /) -> Any:
        """The elements of the last dim at these places."""

    def cast(self, x: Any, like: Any, /) -> Any:
        """``x`` in the dtype of ``like``."""

    def offsets(self, starts: Any, count: int, /) -> Any:
        """``starts[..., None] + range(count)``."""

    def with_rows(self, x: Any, index: Any, rows: Any, /) -> Any:
        """``x`` with these of its rows replaced; rows that are named twice are equal."""

    def plus_rows(self, x: Any, index: Any, rows: Any, /) -> Any:
        """``x`` with these added to its rows."""

    def ends(self, keys: Any, count: int, /) -> Any:
        """For each of ``range(count)`` how many of the sorted keys do not exceed it, in int32."""

    def rows_of(self, table: Any, index: Any, /) -> Any:
        """``table[index]``; the framework decides what an index out of range gives."""

    def named_rows(self, index: Any, count: int, /) -> tuple[Any, bool]:
        """(index, whether one that is no row is an error) for kernels that copy rows as :meth:`rows_of` does."""

    def classes_of(self, index: Any, count: int, /) -> Any:
        """Indices as int32, ``count`` in place of those out of range."""

    def joined(self, arrays: tuple[Any, ...], axis: int, /) -> Any:
        """Matrices one after the other along an axis, for reading only: a view where they lie so in memory."""

    def product(self, a: Any, b: Any, dtype: str | None = None, /) -> Any:
        """``a @ b`` of a matrix ``b``, or of batches of matrices, with sums in float32, rounded once to this or their
        own dtype.
        """

    def add_product(self, total: Any, a: Any, b: Any, /) -> Any:
        """``total + a @ b`` of matrices, or of batches of matrices, rounded to the dtype of ``total``."""

    def added(self, total: Any, index: tuple[Any, ...], value: Any, /) -> Any:
        """``total`` with ``value`` added to what the index names; the memory of ``total`` may be taken."""

    def repeat(self, count: int, step: Callable[[Any, Any], Any], state: Any, /) -> Any:
        """``state = step(i, state)`` for ``i`` from 0 to ``count - 1``."""

    def kernel_is_faster(self, op: Any, inputs: Arrays, attrs: Mapping[str, Any], /) -> bool:
        """Whether our kernel of a product with an epilogue was measured to be at least as fast on this GPU as
        ``product`` and a pass; False without a GPU.
        """

    def chunks(self, inputs: Arrays, attrs: Mapping[str, Any], wanted: Any, share: bool = False, /) -> Any:
        """The rows of a linear layer a few at a time (:class:`cute_ops.composite.chunks.Chunks`)."""


class Program(NamedTuple):
    """A Python function that a composite runs in place of a kernel; it calls other ops and the framework's own
    functions. A composite is declared like any op; the ops of its gradient may be composites, too.

    Args:
        run: ``run(xp, call, inputs, attrs) -> outputs``: arrays by name, None where absent; outputs are new arrays.
            ``xp`` is a :class:`cute_ops.declaration.program.Framework`. ``call(op, inputs, attrs, inplace=False)`` runs
            another op, all by name; in place, outputs take the memory of inputs that they donate.
        ops: the ops that it calls. If there are none, XLA sees the framework's functions and may shard and fuse them.
        product: the product that it begins with, and that is all but the first of ``ops``: an adapter may run both
            without ``run``.
        maps: whether vmap maps the program where the op has no op of batches: each op that it calls is batched by
            itself. Such a program calls none in place.
    """

    run: Callable[[Framework, Callable[..., Arrays], Arrays, Mapping[str, Any]], Arrays]
    ops: tuple[Any, ...] = ()  # of Op, whose declaration refers to this class
    product: ProductPlan | None = None
    maps: bool = False


class ProductPlan(NamedTuple):
    """A product of the first two inputs of an op: ``a @ b``, of matrices or of batches of them.

    Args:
        transposed: which of both is transposed, 0 or 1; None for neither.
        flat: whether the leading dims of both are rows of one matrix.
        dtype: of the product; None for that of ``a``.
        read_as: the input of the op that comes next, in which that reads the product.
        bias: the input whose addition to each row of the product is all that comes next; empty where it is not.
    """

    transposed: int | None
    flat: bool = False
    dtype: str | None = None
    read_as: str = ""
    bias: str = ""


class Fallback(NamedTuple):
    """A program that runs in place of a kernel if it is faster, or if the kernel does not take the dtypes. Its results
    differ from the kernel's by rounding only.

    Args:
        program: the program; it returns the new values of inputs that the op mutates, too.
        when: ``when(problem)``: whether it runs if the attribute ``fused`` is ``"auto"``; a text means yes and says why
            in the log. With ``"always"`` the kernel runs, with ``"never"`` the program, also on a CPU. No kernel
            depends on this attribute, which must be declared as ``FUSED``.
        dtypes: dtypes that variables of the op may have beside those that the kernel takes.
        anywhere: inputs that the program takes with any strides: it runs where the kernel cannot read one of them.
        expected: ``expected(problem)``: microseconds of the kernel and of the program, as a model has them; None where
            it says nothing.
    """

    program: Program
    when: Callable[[Any], bool | str]
    dtypes: Mapping[str, tuple[str, ...]] = {}
    anywhere: tuple[str, ...] = ()
    expected: Callable[[Any], tuple[float, float] | None] | None = None
