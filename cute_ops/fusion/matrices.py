"""Products with weights of more than two dims, such as heads and their columns, as products with a matrix."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from cute_ops.fusion.node import Node, Shape


class Factors(NamedTuple):
    """The factors of a product without a batch, and the dims of each that are summed over."""

    left: Node
    right: Node
    dims: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def exchanged(self) -> Factors:
        return Factors(self.right, self.left, (self.dims[1], self.dims[0]))

    @property
    def of_left(self) -> int:
        """How many dims the product has of its left factor, which are its first ones."""
        return len(self.left.shape) - len(self.dims[0])

    def turned(self, shape: Shape) -> Shape:
        """The shape of the product of the exchanged factors, of that of the product."""
        return (*shape[self.of_left :], *shape[: self.of_left])


class AsMatrix(NamedTuple):
    """A product of rows and one matrix.

    Attributes:
        left: the order of the left factor's dims: rows, then those summed over.
        rows: the left factor's shape with the latter joined.
        right: the order of the right factor's dims in which it is a matrix.
        matrix: the shape of this.
        columns: which of its dims has the product's columns.
    """

    left: tuple[int, ...]
    rows: Shape
    right: tuple[int, ...]
    matrix: Shape
    columns: int


def as_matrix(factors: Factors) -> AsMatrix | None:
    """How a product with a right factor of more than two dims is one with a matrix.

    The last dim of the left factor is summed over. A weight that is no matrix as it lies, ``[n, d, h]``, is transposed
    for the rows of more than one dim, as a compiler does it for a library's product.
    """
    x, weight, pairs = factors.left.shape, factors.right.shape, sorted(zip(*factors.dims, strict=True))
    over, summed = [a for a, _ in pairs], [b for _, b in pairs]
    kept, free = _others(x, over), _others(weight, summed)
    if len(weight) < 3 or not kept or not free or over[-1:] != [len(x) - 1] or not _are_known(weight):
        return None
    k, n = (prod(int(weight[i]) for i in dims) for dims in (summed, free))
    rows = (*(x[i] for i in kept), k)
    if _lies(transposed := (*free, *summed)):
        return AsMatrix((*kept, *over), rows, transposed, (n, k), 0)
    order = (*summed, *free)
    return AsMatrix((*kept, *over), rows, order, (k, n), 1) if _lies(order) or len(x) > 2 else None


def _lies(order: tuple[int, ...]) -> bool:
    return order == (*range(len(order)),)


def _others(shape: Shape, dims: list[int]) -> list[int]:
    return [i for i in range(len(shape)) if i not in dims]


def _are_known(sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)
