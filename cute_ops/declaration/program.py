"""Programs: what a composite runs in place of a kernel, and what an op may run in place of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from cute_ops.declaration.attributes import OneOf

HOW_FUSED = ("auto", "always", "never")
FUSED = OneOf(*HOW_FUSED)


class Program(NamedTuple):
    """What a composite runs in place of a kernel: a Python function that calls other ops and the framework's own
    functions. A composite is declared like any op; the ops of its gradient may be composites, too.

    Args:
        run: ``run(xp, call, inputs, attrs) -> outputs``: arrays by name, None where absent; outputs are new arrays.
            ``call(op, inputs, attrs, inplace=False)`` runs another op, all by name; in place, outputs take the memory
            of inputs that they donate. Arrays have the methods that both frameworks share, such as ``reshape``. ``xp``
            has

            - ``where(condition, x, y)``
            - ``rows_of(table, index)``: ``table[index]``; the framework decides what an index out of range gives
            - ``classes_of(index, count)``: indices as int32, ``count`` in place of those out of range
            - ``sort(keys) -> (keys, order)``: stable
            - ``ends(keys, count)``: int32, for each of ``range(count)`` how many of the sorted keys do not exceed it
            - ``product(a, b, dtype=None)``: ``a @ b`` of a matrix ``b``, or of batches of matrices, with sums in
              float32, rounded once to this or their own dtype
            - ``add_product(total, a, b)``: ``total + a @ b`` of matrices, or of batches of matrices, rounded to the
              dtype of ``total``
            - ``leads(op, inputs, attrs)``: whether our kernel of a product with an epilogue was measured to be at least
              as fast on this GPU as ``product`` and a pass; False without a GPU
            - ``broadcast_to(x, shape)``
            - ``sums(x, axes, like)``: sums in float32 over these axes, counted from the end, in the dtype of ``like``
            - ``ones(shape, like)``: in float32, where ``like`` is
            - ``chunks(inputs, attrs, wanted, share=False)``: the rows of a linear layer a few at a time
              (:class:`cute_ops.composite.chunks.Chunks`)
            - ``shared``: whether devices share the dim that the op splits
        ops: the ops that it calls. If there are none, XLA sees the framework's functions and may shard and fuse them.
        product: the product that it begins with, and that is all but the first of ``ops``: an adapter may run both
            without ``run``.
        maps: whether vmap maps the program where the op has no op of batches: each op that it calls is batched by
            itself. Such a program calls none in place.
    """

    run: Callable[..., Mapping[str, Any]]
    ops: tuple[Any, ...] = ()  # of Op, whose declaration refers to this class
    product: Product | None = None
    maps: bool = False


class Product(NamedTuple):
    """A product of the first two inputs of an op: ``a @ b``, of matrices or of batches of them.

    Args:
        turned: which of both is transposed, 0 or 1; None for neither.
        flat: whether the leading dims of both are rows of one matrix.
        dtype: of the product; None for that of ``a``.
        read_as: the input of the op that comes next, in which that reads the product.
        bias: the input whose addition to each row of the product is all that comes next; empty where it is not.
    """

    turned: int | None
    flat: bool = False
    dtype: str | None = None
    read_as: str = ""
    bias: str = ""


class Instead(NamedTuple):
    """A program that runs in place of a kernel if it is faster, or if the kernel does not take the dtypes. Its results
    differ from the kernel's by rounding only.

    Args:
        program: the program; it returns the new values of inputs that the op mutates, too.
        when: ``when(problem)``: whether it runs if the attribute ``fused`` is ``"auto"``; a text means yes and says why
            in the log. With ``"always"`` the kernel runs, with ``"never"`` the program, also on a CPU. No kernel
            depends on this attribute, which must be declared as ``FUSED``.
        dtypes: dtypes that variables of the op may have beside those that the kernel takes.
        anywhere: inputs that the program takes with any strides: it runs where the kernel cannot read one of them.
    """

    program: Program
    when: Callable[[Any], bool | str]
    dtypes: Mapping[str, tuple[str, ...]] = {}
    anywhere: tuple[str, ...] = ()
