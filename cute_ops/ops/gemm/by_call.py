"""The op that a call of ``linear`` runs: it follows from the epilogue and from the shapes of the operands.

There is one op for each expression, operands' names and weight's shape. Its name follows from these alone, so it is the
same in every process. Functions that take epilogues, too, such as ``rmsnorm_linear``, say so to errors by ``caller``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, NoReturn

from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.declaration.tensor import Tensor
from cute_ops.errors import header_of, meant, shown
from cute_ops.expressions.graph import Expression
from cute_ops.expressions.text import parse, text_of
from cute_ops.expressions.tracing import trace
from cute_ops.ops.batches import each
from cute_ops.ops.checks import check_flag
from cute_ops.ops.expression import many
from cute_ops.ops.expression.broadcast import Fit, Refuse, fit
from cute_ops.ops.expression.call import (
    Arrays,
    Attrs,
    check_attributes,
    digest,
    names_of_inputs,
    readable,
    remembered,
)
from cute_ops.ops.expression.call import Shapes as ByName
from cute_ops.ops.expression.call import read_by_halves as read_by_halves_of
from cute_ops.ops.gemm.fused import fused_linear
from cute_ops.ops.gemm.halves import PACKED, STACKED, stack_halves
from cute_ops.ops.gemm.named import EPILOGUES

Epilogue = Callable[..., Any] | str
# Of each operand, as :func:`fused_linear` takes it; None where it is left out.
Shapes = tuple[str | None, ...]
# What functions that take epilogues have as keywords, besides the epilogue's attributes.
OPTIONS = ("epilogue", "fused", "packed", "transposed", "save")
# Names of operands that an op has for something else, and those that it may not have.
_TAKEN = re.compile(r"d?(x|weight|acc|out\d*)|xp|ctx|type|fused|Ellipsis|TypeError|_.*")
# What :func:`remembered` has of epilogues, with the shapes of operands and weight.
_known: dict[Hashable, Traced] = {}
DOC = """Args:
    x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
    weight: ``T[n k]``, as in PyTorch; ``T[k n]`` with ``transposed``; twice as many, gate and up, with ``packed``. With
        leading dims, ``T[*b n k]``, it is one matrix for each of x, ``T[*b m k]``.
    operands: what the epilogue reads besides the product, each float32, bfloat16 or float16. They broadcast against
        ``[*m n]`` as in NumPy: ``[n]`` is a row that all rows share, ``[*m 1]`` a number per row, ``[*m n]`` a tile,
        ``[]`` a scalar; with ``packed`` also ``[2n]`` and ``[*m 2n]``. None stands for one that is left out. One that
        has some of the leading dims alone is copied to all of them, and one whose last dim has a stride other than 1 is
        copied, too.
    epilogue: ``epilogue(xp, acc, *operands, **attrs)`` in array-API style, which returns one value or several, each
        rounded once. ``acc`` is the product in float32. A function is traced once for each combination of operands'
        shapes, attributes and numbers that it refers to: these are constants of its kernel. Or ``"gelu"``,
        ``"gelu_tanh"``, ``"silu"``, ``"bias"``, which read a bias if one is given; ``"add"``, which reads a bias or
        None and a residual; or an expression's text.
    fused: whether one kernel computes all of it: ``"always"``; ``"never"``, but the framework's product and a pass over
        its output; or ``"auto"``, a kernel where it was measured to be at least as fast. float32 is never fused, and
        neither are an x and a weight that our kernel cannot read where they lie, which ``"always"`` refuses.
    packed: the weight is ``[gate | up]``: the epilogue reads ``acc[..., :n]`` and ``acc[..., n:]`` with
        ``n = acc.shape[-1] // 2``.
    transposed: the weight is ``[k, n]``, as in JAX.
    halves: the packed weight is ``[2, n, k]``, or ``[k, 2, n]``, the same memory. Devices that share n then each have
        rows of both halves, so nothing is gathered.
    save: what a call that is differentiated keeps for its gradient where that reads the product: ``"pre"``, the product
        before the epilogue; or ``"none"``, and the backward computes it again.
    attrs: of the epilogue; numbers, each combination of which is a kernel of its own.

Returns:
    ``T[*m n]``, of reductions of rows ``float32[*m 1]``, or a tuple where the epilogue returns several values. One that
    ``xp.astype`` gives has that dtype.

Raises:
    TraceError: the epilogue does what an expression cannot say; what to write instead.
    TypeError: a dtype that is not listed, operands that the epilogue does not have.
    ValueError: shapes that do not fit together.
"""
GATED_DOC = """Args:
    x: ``T[*m k]``; bfloat16, float16 or float32; any leading shape.
    weight: ``T[2n k]``, ``[gate | up]``; ``T[k 2n]`` with ``transposed``. With leading dims it is one matrix for each
        of x, ``T[*b m k]``.
    activation: ``"silu"`` (SwiGLU), ``"gelu"`` (by the error function) or ``"gelu_tanh"`` (GeGLU).
    fused: as :func:`linear` has it.
    transposed: the weight is ``[k, 2n]``, as in JAX.
    halves: the weight is ``[2, n, k]``, or ``[k, 2, n]``, the same memory. Devices that share n then each have rows of
        both halves, so nothing is gathered.

Returns:
    ``T[*m n]``, compact. Summed up in float32, rounded once: neither half is stored.

Raises:
    TypeError: a dtype that is not listed.
    ValueError: shapes that do not fit together, another activation.
"""


class Traced(NamedTuple):
    """An epilogue, traced for operands of some shapes.

    Attributes:
        name: the function's; empty of a text.
        text: the expression.
        operands: names and shapes of those that are not left out.
    """

    name: str
    text: str
    operands: tuple[tuple[str, str], ...]


class Product(NamedTuple):
    """The product of a call of ``linear``, or of a declaration, as :func:`cute_ops.ops.expression.call.op_of` takes it.

    Attributes:
        layout: the weight's shape, as :func:`weight_shape` gives it.
        batched: whether there is a weight for each example.
        save: what is kept for the gradient, as :func:`fused_linear` has it.
        sizes: of a call: leading dims of x, columns of the result, leading dims of the weight.
    """

    layout: str = "n k"
    batched: bool = False
    save: str = "pre"
    sizes: tuple[Sequence[Any], Any, Sequence[Any]] | None = None

    @classmethod
    def of(cls, x: Array, weight: Array, layout: str = "n k", save: str = "pre") -> Product:
        """The product of a call.

        Raises:
            ValueError: x and the weight do not fit together.
        """

        def refuse(problem: str) -> NoReturn:
            raise ValueError(f"cute.linear: {problem}")

        return cls(layout, is_batch(layout, len(weight.shape)), save, _sizes(x.shape, weight.shape, layout, refuse))

    def fits(self, expression: Expression, operands: Arrays) -> dict[str, Fit | None]:
        """How an epilogue's operands meet the product.

        Raises:
            ValueError: one does not broadcast.
        """
        if self.sizes is None:
            raise ValueError("cute.linear: operands are arrays, which meet the product of a call: use Product.of.")
        (rows, n, batch), packed = self.sizes, "2" in self.layout
        halves = iter(PACKED if operand.packed else "n" for operand in expression.operands[1:])
        found: dict[str, Fit | None] = {}
        for key, array in operands.items():
            found[key] = how = fit(array.shape, rows, n, packed, batch) if isinstance(array, Array) else None
            if isinstance(array, Array) and how is None:
                raise ValueError(f"cute.linear: {_unfit(key, array.shape, rows, n, packed)}")
            if how and packed and n == 0:  # n columns are as many as 2n
                found[key] = how._replace(shape=how.shape.replace("n", next(halves)))
        return found

    def op(self, expression: Expression | str, operands: ByName, name: str) -> Op:
        """The op of the product with an epilogue whose operands have these shapes.

        Raises:
            NotImplementedError: weights are a batch, and the epilogue reduces rows or looks at groups of columns.
        """
        text = expression if isinstance(expression, str) else text_of(expression)
        return self.of_traced(Traced(name, text, _named([*operands], [*operands.values()])), name or text)

    def of_traced(self, traced: Traced, epilogue: Epilogue) -> Op:
        """The op of the product with an epilogue that is traced; raises as :meth:`op` does."""
        one = op_of_traced(traced, self.whole, self.save)
        op = one.batched if self.batched else one
        if op is None:
            refuse_batch(epilogue)
        return stack_halves(op, whole=one.batched is None) if STACKED in self.layout else op

    @property
    def whole(self) -> str:
        """The weight's shape with both halves in one dim."""
        return self.layout.replace(STACKED, PACKED)


def fits(
    epilogue: Epilogue, arrays: Sequence[Any], layout: str, attrs: Attrs, spec: Callable[[Any], Array],
    caller: str = "linear",
) -> tuple[Fit | None, ...]:  # fmt: skip
    """How each operand of a call meets the product, None for one that is left out. ``arrays`` are x, the weight of a
    :func:`weight_shape` and the operands; ``attrs`` are the epilogue's; ``spec`` gives an array's shape and dtype.

    Raises:
        TypeError: the epilogue takes more operands, or fewer; x or the weight is None.
        ValueError: an operand does not broadcast.
    """
    x, weight, *operands = arrays
    if x is None or weight is None:
        raise TypeError(f"cute.{caller}: argument `{'x' if x is None else 'weight'}` is required, but None was given.")

    def refuse(problem: str) -> NoReturn:
        _refuse(problem, [x, weight], (), layout, spec, caller)

    (rows, n, batch), packed = _sizes(x.shape, weight.shape, layout, refuse), "2" in layout
    halves = _may_be_halves(epilogue, len(operands), packed, caller)
    found = tuple(
        None if a is None else fit(a.shape, rows, n, half, batch) for a, half in zip(operands, halves, strict=True)
    )
    for i, (operand, how) in enumerate(zip(operands, found, strict=True)):
        if operand is not None and how is None:
            names = operand_names(epilogue, len(operands), caller)
            problem = _unfit(names[i], operand.shape, rows, n, halves[i])
            _refuse(problem, arrays, names, layout, spec, caller)
    if packed and n == 0:  # n columns are as many as 2n
        read = read_by_halves(epilogue, tuple(fit and fit.shape for fit in found), layout, attrs, caller)
        found = tuple(f and f._replace(shape=f.shape.replace("n", each)) for f, each in zip(found, read, strict=True))
    return found


def _may_be_halves(epilogue: Epilogue, count: int, packed: bool, caller: str) -> list[bool]:
    """Which of the operands may be two halves: all beside a packed product; else those that a text reads so."""
    # Dynamo cannot trace what looks at a function that was made in what it compiles.
    function = _meant(epilogue, caller) if isinstance(epilogue, str) else epilogue
    if packed or not isinstance(function, str):
        return [packed] * count
    read = [each.packed for each in parse(function).operands[1:]]
    return [*read, *[False] * count][:count]


def _sizes(
    x: Sequence[Any], weight: Sequence[Any], layout: str, refuse: Refuse
) -> tuple[Sequence[Any], Any, Sequence[Any]]:
    """The leading dims of x, the columns of the result and the leading dims of the weight, which fit together."""
    dims, packed = layout.split(), "2" in layout
    if not x:
        refuse("argument `x` has 0 dims, expected 1 or more.")
    if len(weight) < len(dims):
        refuse(f"argument `weight` has {len(weight)} dims, expected {len(dims)} or more.")
    own = dict(zip(dims, weight[-len(dims) :], strict=True))
    if "2" in dims and own["2"] != 2:
        refuse(f"argument `weight` has {own['2']} in place of 2, its halves.")
    columns = 2 * own["n"] if "2" in dims else own["2n" if packed else "n"]
    rows, batch = x[:-1], weight[: -len(dims)]
    if batch and rows[:-1] != batch:
        refuse(f"argument `x` has the leading dims {[*rows]}, but `weight` {[*batch]}: expected one more, the rows.")
    if packed and columns % 2:
        refuse(f"argument `weight` has {columns} columns of the product, which two halves cannot share.")
    return rows, columns // 2 if packed else columns, batch


def _unfit(name: str, shape: Sequence[Any], rows: Sequence[Any], n: Any, packed: bool) -> str:
    """Says that an operand does not broadcast."""
    result = " or ".join(str([*rows, columns]) for columns in ((n, 2 * n) if packed else (n,)))
    return f"argument `{name}` has shape {list(shape)}, which does not broadcast to {result}."


def read_by_halves(epilogue: Epilogue, shapes: Shapes, layout: str, attrs: Attrs, caller: str) -> tuple[str, ...]:
    """``2n`` for each operand that the epilogue of a packed product reads by halves, ``n`` for each other one."""
    function = _meant(epilogue, caller)
    if isinstance(function, str):
        operands = iter(parse(function).operands[1:])
        return tuple(PACKED if shape is not None and next(operands).packed else "n" for shape in shapes)
    names = operand_names(function, len(shapes), caller)
    _, acc, *_ = inspect.signature(function).parameters
    packed = read_by_halves_of(function, {acc: "*m 2n", **dict(zip(names, shapes, strict=True))}, attrs)
    return tuple(PACKED if name in packed else "n" for name in names)


def weight_shape(packed: bool, transposed: bool, halves: bool = False, caller: str = "linear") -> str:
    """The weight's shape as :func:`fused_linear` takes it; ``2 n`` for ``2n`` where halves are a dim.

    Raises:
        TypeError: one of them is no bool.
        ValueError: ``halves`` of a weight that is not packed.
    """
    if not type(packed) is type(transposed) is type(halves) is bool:
        for name, flag in (("packed", packed), ("transposed", transposed), ("halves", halves)):  # type: ignore[unreachable]
            check_flag(caller, name, flag)
    if halves and not packed:
        raise ValueError(f"cute.{caller}: option `halves` is for packed weights, expected `packed` too.")
    n = STACKED if halves else PACKED if packed else "n"
    return f"k {n}" if transposed else f"{n} k"


def is_batch(layout: str, ndim: int) -> bool:
    """Whether a weight of this layout and of so many dims is several matrices."""
    return ndim > len(layout.split())


def _refuse(
    problem: str, arrays: Sequence[Any], names: Sequence[str], weight: str, spec: Callable[[Any], Array], caller: str
) -> NoReturn:
    declared = {"x": Tensor("*m k", "T"), "weight": Tensor(weight, "T")}
    declared |= {name: Tensor("*m n", f"T_{name}") for name in names}
    declared = each(declared) if is_batch(weight, len(arrays[1].shape)) else declared
    given = {name: None if a is None else spec(a) for name, a in zip(declared, arrays, strict=True)}
    raise ValueError(message(_Product(caller, declared), problem, given))  # type: ignore[arg-type]


class _Product(NamedTuple):
    """The description of a call in messages."""

    name: str
    inputs: Mapping[str, Tensor]
    aliases: Mapping[str, str] = {}


def without_epilogue(
    operands: Sequence[Any], attrs: Mapping[str, Any], halves: bool, packed: bool = False, save: str = "pre"
) -> None:
    """Raise TypeError for what an epilogue would read, and ValueError for another value of ``save``."""
    check_save(save)
    for name, has_halves in (("halves", halves), ("packed", packed)):
        check_flag("linear", name, has_halves)
        if has_halves:
            raise TypeError(f"cute.linear: `{name}` was given, but no epilogue that reads halves.")
    if operands or attrs:
        given = ", ".join(f"`{name}`{meant(name, OPTIONS)}" for name in attrs) or f"operand {len(operands)}"
        adds = "" if attrs else ' epilogue="bias" adds one number for each column, "add" a residual, too.'
        raise TypeError(f"cute.linear: {given} was given, but no epilogue that reads it.{adds}")


def check_options(epilogue: Epilogue | None, options: Mapping[str, Any], layer: type) -> None:
    """Raise TypeError for what a layer passes on, but is neither an option of the function nor an attribute of its
    epilogue.
    """
    attrs, caller = {name: value for name, value in options.items() if name not in OPTIONS}, layer.__name__
    if epilogue is None or not attrs:
        without_epilogue((), attrs, False)
        return
    function = _meant(epilogue, caller)
    own: list[str] = []
    if not isinstance(function, str):
        every = [*inspect.signature(function).parameters.values()][2:]
        if any(p.kind is p.VAR_KEYWORD for p in every):
            return
        own = [p.name for p in every if p.kind is p.KEYWORD_ONLY]
    makers = [vars(base)["__init__"] for base in layer.__mro__[:-1] if "__init__" in vars(base)]
    more = [name for maker in makers for name in inspect.signature(maker).parameters]
    _refuse_attributes([name for name in attrs if name not in own], own, function, caller, more)


def _refuse_attributes(
    unknown: Iterable[str], own: Sequence[str], epilogue: Epilogue, caller: str, more: Sequence[str] = ()
) -> None:
    """Raise TypeError for attributes that an epilogue does not have; ``own`` are those that it has, and ``more`` what
    else may have been meant.
    """
    for name in unknown:
        has = f"has {', '.join(f'`{each}`' for each in own)}" if own else "has none"
        of = repr(epilogue) if isinstance(epilogue, str) else _name(epilogue)
        near = meant(name, (*own, *OPTIONS, *more))
        raise TypeError(f"cute.{caller}: unknown attribute `{name}`{near}; the epilogue {of} {has}.")


def operand_names(epilogue: Epilogue, count: int, caller: str = "linear") -> tuple[str, ...]:
    """The names of so many operands: the function's positional parameters after ``xp`` and the product.

    Raises:
        TypeError: it takes more, or fewer.
    """
    epilogue = _meant(epilogue, caller)
    if isinstance(epilogue, str):
        return tuple(f"operand{i}" for i in range(count))
    every = inspect.signature(epilogue).parameters.values()
    first = [p for p in every if p.kind is not p.KEYWORD_ONLY]
    if len(first) < 2:
        problem = f"the epilogue {_name(epilogue)} must take xp and the product first: (xp, acc, *operands)."
        raise TypeError(f"cute.{caller}: {problem}")
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in first):
        problem = f"the epilogue {_name(epilogue)} does not name its operands: write them after the product, and "
        raise TypeError(f"cute.{caller}: {problem}attributes after a `*`: (xp, acc, bias, *, limit=1.0).")
    parameters = first[2:]
    least = sum(p.default is p.empty for p in parameters)
    if not least <= count <= len(parameters):
        names = ", ".join(f"`{p.name}`" for p in parameters) or "nothing"
        were = "1 was" if count == 1 else f"{count} were"
        problem = f"the epilogue {_name(epilogue)} reads {names} besides the product; {were} given."
        raise TypeError(f"cute.{caller}: {problem}")
    return tuple(p.name for p in parameters[:count])


def op_of_call(
    epilogue: Epilogue, shapes: Shapes, batched: bool = False, layout: str = "n k", save: str = "pre",
    attrs: Attrs = (),
) -> Op:  # fmt: skip
    """The op of a call, whose weight, of a layout that :func:`weight_shape` gives, may be a batch of them.

    Raises:
        TypeError: the epilogue takes more operands, or fewer, or other attributes.
        TraceError: it does what an expression cannot say.
        NotImplementedError: weights are a batch, and it reduces rows or looks at groups of columns.
    """
    check_save(save)
    product = Product(layout, batched, save)
    return product.of_traced(traced(epilogue, shapes, product.whole, attrs), epilogue)


def refuse_batch(epilogue: Epilogue, caller: str = "linear") -> NoReturn:
    """Raise NotImplementedError for an epilogue that is not fused with a batch of weights."""
    name = epilogue if isinstance(epilogue, str) else _name(epilogue)
    raise NotImplementedError(
        f"cute.{caller}: {name} reduces rows, looks at groups of columns or repeats an operand, which is not fused "
        "with a batch of weights: call it for each of them."
    )


def check_save(save: str, caller: str = "linear") -> None:
    """Raise ValueError for what this option cannot be."""
    if save not in ("pre", "none"):
        raise ValueError(f"cute.{caller}: option `save` is {shown(save)}, expected 'pre' or 'none'.")


def traced(epilogue: Epilogue, shapes: Shapes, weight: str, attrs: Attrs = (), caller: str = "linear") -> Traced:
    """An epilogue's expression: the same one every time for the same arguments, which are those of :func:`op_of`."""
    epilogue = _meant(epilogue, caller)
    check_attributes(attrs, "given by position", partial(_refuse_type, caller))
    if isinstance(epilogue, str):
        _refuse_attributes(dict(attrs), (), epilogue, caller)
        return Traced("", epilogue, _named(operand_names(epilogue, len(shapes), caller), shapes))
    function = epilogue

    def make() -> Traced:
        names = operand_names(function, len(shapes), caller)
        _check_attributes(function, len(names), dict(attrs), caller)
        _, acc, *_ = inspect.signature(function).parameters
        operands = {acc: "*m 2n" if "2n" in weight else "*m n", **dict(zip(names, shapes, strict=True))}
        found = Traced(_name(function), text_of(trace(function, operands, dict(attrs))), _named(names, shapes))
        many.note(function, f"the epilogue {found.name} of {caller}", found.text)
        return found

    return remembered(_known, function, attrs, (shapes, weight), make)


def _refuse_type(caller: str, problem: str) -> NoReturn:
    raise TypeError(f"cute.{caller}: {problem}")


def _meant(epilogue: Any, caller: str) -> Epilogue:
    """The function that a name such as ``"gelu"`` stands for; a function or an expression's text as it is."""
    if not isinstance(epilogue, str):
        if not callable(epilogue):
            came = type(epilogue).__name__
            raise TypeError(f"cute.{caller}: argument `epilogue` must be a function, or a text, got {came}.")
        if (library := str(getattr(epilogue, "__module__", "")).partition(".")[0]) in ("torch", "jax"):
            problem = f"argument `epilogue` is {library}'s {_name(epilogue)}, expected a function of xp and the product"
            raise TypeError(f"cute.{caller}: {problem}, such as lambda xp, acc: xp.silu(acc).")
        header_of(epilogue, f"cute.{caller}: argument `epilogue`")
        if hasattr(epilogue, "by_call"):
            problem = f"argument `epilogue` is {_name(epilogue)} as `fused` decorates it, whose callers leave out `xp`"
            raise TypeError(f"cute.{caller}: {problem}: give the function that `fused` was given.")
        function: Epilogue = epilogue
        return function
    if epilogue.isidentifier() and epilogue not in EPILOGUES:
        known = ", ".join(map(repr, EPILOGUES))
        problem = f"argument `epilogue` is {epilogue!r}{meant(epilogue, EPILOGUES)}, expected one of {known}"
        raise ValueError(f"cute.{caller}: {problem}, an expression's text, or a function.")
    return EPILOGUES.get(epilogue, epilogue)


def _check_attributes(epilogue: Callable[..., Any], operands: int, attrs: Mapping[str, Any], caller: str) -> None:
    """Raise TypeError for attributes that an epilogue does not have, and for those that it lacks."""
    every = list(inspect.signature(epilogue).parameters.values())[2 + operands :]
    own = {p.name: p for p in every if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    unknown = [name for name in attrs if name not in own and not any(p.kind is p.VAR_KEYWORD for p in every)]
    _refuse_attributes(unknown, list(own), epilogue, caller)
    lacking = [p.name for p in own.values() if p.default is p.empty and p.name not in attrs]
    if lacking:
        raise TypeError(f"cute.{caller}: the epilogue {_name(epilogue)} needs `{lacking[0]}`, which was not given.")


def _name(epilogue: Callable[..., Any]) -> str:
    """An epilogue's own name, without those of the scopes around it that torch.compile puts before it."""
    return str(getattr(epilogue, "__name__", type(epilogue).__name__)).rpartition(".")[2]


def _named(names: Sequence[str], shapes: Sequence[str | None]) -> tuple[tuple[str, str], ...]:
    """Operands that are not left out, by names that they may have."""
    allowed = zip(names_of_inputs(names, _TAKEN, "operand"), shapes, strict=True)
    return tuple((name, shape) for name, shape in allowed if shape is not None)


@cache
def op_of_traced(traced: Traced, weight: str, save: Any) -> Op:
    """The op of a product with an epilogue that is traced."""
    ending = digest(traced.text, *(name for name, _ in traced.operands), weight, save)
    full = "_".join(filter(None, ["linear", readable(traced.name), ending]))
    return fused_linear(
        traced.text, operands=dict(traced.operands), weight=weight, name=full, save=save, called="linear"
    )
