"""Linear layers as functions, written once for the arrays of any framework.

An adapter derives a class from :class:`Products`, which says what its framework does with arrays, and publishes the
methods of an object: ``cute_ops_torch.linear`` and ``cute_ops_jax.linear`` are :meth:`Products.linear`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from cute_ops.composite.public import MAKING, continued
from cute_ops.constants import make_room
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array as Spec
from cute_ops.ops.checks import check_flag
from cute_ops.ops.expression.broadcast import Fit
from cute_ops.ops.expression.call import Attrs, key_of
from cute_ops.ops.gemm import by_call
from cute_ops.ops.gemm.by_call import Epilogue
from cute_ops.ops.gemm.gated_dgrad import gated_linear_of
from cute_ops.ops.gemm.halves import PACKED, STACKED
from cute_ops.ops.gemm.linear import linear as product

Array = TypeVar("Array")
Function = Callable[..., Any]
Fits = tuple[Fit | None, ...]


class Caller(NamedTuple):
    """A function whose epilogue is the caller's.

    Attributes:
        name: what errors call it.
        op: makes the op of a call: of its epilogue, its operands' shapes, whether weights are a batch, the weight's
            layout, what is saved, and the epilogue's attributes.
    """

    name: str
    op: Callable[[Epilogue, by_call.Shapes, bool, str, str, Attrs], Op]


_PLAIN, _LINEAR = by_call.weight_shape(False, False), Caller("linear", by_call.op_of_call)


class Products(ABC, Generic[Array]):
    """The linear layers of a framework. Its own part are the attributes and the abstract methods.

    Attributes:
        converts: whether :meth:`operands` returns other arrays than it gets.
        tracing: whether a compiler traces the call, so that its op follows from :meth:`traced`.
        spec: an array's shape and dtype.
        shape: of what may not be an array yet.
    """

    converts: Callable[[], bool]
    tracing: Callable[[], bool]
    spec: Callable[[Any], Spec]
    shape: Callable[[Any], tuple[int, ...]]

    def __init__(self) -> None:
        # By calls; at last, whether all operands are there and passed as they are.
        self.known: dict[Hashable, tuple[Function, Fits, bool]] = {}
        self.plain, self._batches = self.function(product), self.functions(_batch)
        self._gated = self.functions(gated_linear_of)

    @abstractmethod
    def operands(self, *arrays: Array) -> tuple[Array, ...]:
        """X and weights as the ops take them."""

    @abstractmethod
    def function(self, op: Op) -> Function:
        """The function of an op."""

    @abstractmethod
    def functions(self, make: Callable[..., Op]) -> Callable[..., Function]:
        """``function(*options)``: that of the op ``make(*options)``."""

    @abstractmethod
    def expanded(self, array: Any, fit: Fit) -> Any:
        """An operand, broadcast as it meets the product."""

    def number(self, value: Any) -> Any:
        """While a compiler traces: a number as a constant."""
        return value

    def columns_to_vectors(self, x: Any, first: Any, w_down: Any, transposed: bool, fused: str) -> int:
        """Columns that an MLP's hidden layer lacks of whole vectors, if its rows are to begin at such."""
        return 0

    def apart(self, op: Op, columns: int, arrays: Sequence[Any], attrs: Sequence[Any]) -> Any:
        """The output of a product with so many columns, in rows that begin at lines of memory; None where a gradient
        is wanted.
        """
        return None

    def widened(self, array: Any, axis: int, columns: int) -> Any:
        """An array with so many zeros behind an axis, -1 or -2."""
        raise NotImplementedError

    def traced(self, caller: Caller, epilogue: Epilogue, *call: Any) -> tuple[Function, Fits]:
        """While a compiler traces: :meth:`choose` of a call, whose op is a constant to the compiler."""
        raise NotImplementedError

    @continued(by_call.DOC)
    def linear(
        self, x: Array, weight: Array, *operands: Array | None, epilogue: Epilogue | None = None, fused: str = "auto",
        packed: bool = False, transposed: bool = False, halves: bool = False, save: str = "pre", **attrs: Any,
    ) -> Any:  # fmt: skip
        """A product and what happens to it before it is stored: ``out = epilogue(x @ weight.T, *operands)``.

        Its op's name, ``linear_<function>_<digest>``, is the same in every process that has made this call.
        """
        if self.converts():
            x, weight = self.operands(x, weight)
        if epilogue is None:
            if operands or attrs or halves is not False or packed is not False or save != "pre":
                by_call.without_epilogue(operands, attrs, halves, packed, save)
            if transposed is not False:
                check_flag("linear", "transposed", transposed)
            matrix: Any = weight
            dims = matrix.ndim
            run = self.plain if dims <= 2 else self._batches()
            return run(x, matrix.mT if transposed and dims > 1 else matrix, fused)
        plain = packed is transposed is halves is False
        layout = _PLAIN if plain else by_call.weight_shape(packed, transposed, halves)
        given = x, weight, *operands
        function, fitted = self.with_epilogue(_LINEAR, epilogue, given, layout, save, attrs)
        return function(x, weight, *fitted, fused)

    @continued(by_call.GATED_DOC)
    def gated_linear(
        self, x: Array, weight: Array, activation: str = "silu", fused: str = "auto", *, transposed: bool = False,
        halves: bool = False,
    ) -> Array:  # fmt: skip
        """``out = activation(x @ gate.T) * (x @ up.T)`` with ``gate, up = weight[:n], weight[n:]``."""
        if self.converts():
            x, weight = self.operands(x, weight)
        return self.gated(weight, transposed, halves)(x, weight, activation, fused)  # type: ignore[no-any-return]

    def gated(self, weight: Any, transposed: bool, halves: bool) -> Function:
        """The function of the op of a gated layer with this weight."""
        return self._gated(transposed, weight.ndim > 2 + halves, halves)

    def with_epilogue(
        self, caller: Caller, epilogue: Epilogue, arrays: Sequence[Any], layout: str, save: str,
        attrs: Mapping[str, Any],
    ) -> tuple[Function, Sequence[Any]]:  # fmt: skip
        """The function of the op of a call on x, a weight and operands, and the latter as it takes them. A call like an
        earlier one is found by its shapes.
        """
        fits: Fits
        if self.tracing():
            function, fits = self.traced(caller, epilogue, arrays, layout, save, attrs)
        else:
            constants = tuple(attrs.items()) if attrs else ()
            what = caller.name, layout, save, *[a if a is None else a.shape for a in arrays]
            # A name refers to nothing that may change.
            key = (epilogue, what) if type(epilogue) is str and not attrs else key_of(epilogue, constants, *what)
            try:
                function, fits, as_given = self.known[key]
            except (KeyError, TypeError):  # a symbolic shape has no hash
                function, fits, as_given = self._remembered(caller, what, epilogue, arrays, constants)
            if as_given:
                return function, arrays[2:]
        fitted = zip(arrays[2:], fits, strict=True)
        halves = STACKED in layout
        return function, [self._fitted(a, fit, halves) for a, fit in fitted if a is not None and fit is not None]

    def _remembered(
        self, caller: Caller, what: tuple[Any, ...], epilogue: Epilogue, arrays: Sequence[Any], attrs: Attrs
    ) -> tuple[Function, Fits, bool]:
        """The entry of ``known`` for a call that it does not have; stored if the call's key has a hash."""
        key, (_, layout, save, *shapes) = key_of(epilogue, attrs, *what), what
        options, fits = self.choose(epilogue, arrays, layout, attrs, caller.name)
        with MAKING:
            op = caller.op(epilogue, *options, layout, save, attrs)
        function = self.function(op)
        as_given = all(fit and fit.sizes == shape for shape, fit in zip(shapes[2:], fits, strict=True))
        found = function, fits, as_given and STACKED not in layout
        if key and key == key_of(epilogue, attrs, *what):  # nothing has changed meanwhile
            try:
                make_room(self.known)
                self.known[key] = found
            except TypeError:  # a symbolic shape has no hash
                pass
        return found

    def choose(
        self, epilogue: Epilogue, arrays: Sequence[Any], layout: str, attrs: Attrs, caller: str
    ) -> tuple[tuple[by_call.Shapes, bool], Fits]:
        """The shapes of a call's operands and whether its weights are a batch; and how operands meet the product."""
        fits = by_call.fits(epilogue, arrays, layout, attrs, self.spec, caller)
        batched = arrays[1] is not None and by_call.is_batch(layout, arrays[1].ndim)
        return (tuple(fit and fit.shape for fit in fits), batched), fits

    def _fitted(self, array: Any, fit: Fit, halves: bool) -> Any:
        if array.shape != fit.sizes:
            array = self.expanded(array, fit)
        return array.reshape((*fit.sizes[:-1], 2, fit.sizes[-1] // 2)) if halves and PACKED in fit.shape else array


def _batch() -> Op:
    assert product.batched is not None
    return product.batched
