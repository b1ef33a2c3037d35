"""Ops made from one Python function: declaration, reference, kernel and gradient follow from the traced expression."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NoReturn

from cute_ops.declaration.attributes import defaults_of
from cute_ops.declaration.case import Case
from cute_ops.declaration.finish import Finish
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.static import WhileFew
from cute_ops.declaration.tensor import Tensor
from cute_ops.errors import header_of, meant, suggesting
from cute_ops.expressions.derivative import differentiate, worth_saving
from cute_ops.expressions.graph import SHAPES, Expression, operands_of
from cute_ops.expressions.groups import sizes
from cute_ops.expressions.primitives import LIKE
from cute_ops.expressions.stages import stages
from cute_ops.ops.expression.formula import COLUMN, WHOLE_OF, Attrs, ByAttrs, Formula, declare
from cute_ops.ops.expression.traces import Traces

CASES = (Case("odd", {"m": (3, 5), "n": 999}), Case("aligned", {"m": (64,), "n": 4096}))


@suggesting
def fused(
    function: Callable[..., Any],
    *,
    operands: Mapping[str, str],
    name: str = "",
    outputs: Sequence[str] = (),
    attrs: Mapping[str, Any] | None = None,
    no_gradient: tuple[str, ...] = (),
    cases: tuple[Case, ...] = CASES,
    doc: str = "",
    grad_doc: str = "",
    finish: Finish | None = None,
    squeezed: bool = False,
    check: Callable[[Any], str | None] | None = None,
) -> Op:
    """The op of a function, with its gradient. Its kernel computes the whole function in one pass.

        def gelu_add(xp, x, bias, residual):
            return xp.gelu(x + bias) + residual

        gelu_add_op = cute_ops.fused(gelu_add, operands={"x": "*m n", "bias": "n", "residual": "*m n"})

    Values are float32. Outputs are rounded once. They have the shape ``*m n`` and the dtype of the tiles that they are
    computed from, float32 if these differ; or, if they follow from reductions of rows alone, the shape ``*m 1`` and
    float32. An output that ``xp.astype`` gives has that dtype. :mod:`cute_ops.expressions` says what a function may do.

    Args:
        function: ``function(xp, *operands, **attrs)`` in array-API style; returns a value or a tuple of values.
        operands: their shapes: ``*m n`` a tile, ``*m 2n`` two side by side, ``n`` or ``2n`` a row vector, ``*m 1`` a
            column vector, empty a scalar. Tiles share a dtype, vectors and scalars have their own. A dtype may stand
            before the shape, ``float32 *m n``; ``any *m n`` is a tile of any dtype, on which no output's depends.
            ``bool *m n``, or of another shape, is a condition, and ``int *m n`` holds int32, int64 or uint8, which are
            read as float32 (exact below 2^24): neither has a gradient, and no output's dtype depends on them.
            ``h n`` is what the same head of all tokens shares: tiles are then declared ``*m n`` and have heads,
            ``*m h n``; ``h d`` likewise, of which each element serves n/d neighbouring columns, without a gradient.
            ``*b n`` is what the rows of each example share, ``*b m n``.
        name: the op's name, the function's by default.
        outputs: their names, by default ``out``, or ``out0``, ``out1``, ...
        attrs: as in :class:`Op`; Python sees their values, and each combination has a kernel of its own.
        no_gradient: operands whose gradient is not computed.
        cases: named problems.
        doc: the op's docstring, the function's by default.
        grad_doc: the gradient's docstring.
        finish: what Python functions do after the op.
        squeezed: whether outputs that follow from reductions alone have the shape ``*m``, without a last dim of 1.
        check: as in :class:`Op`.

    A gradient that is an output's cotangent itself, as that of ``residual`` above, is not written. A gradient that two
    operands share is written once. Where that reads fewer tiles, gradients read an output in place of the operands that
    it is the sum of, as it was rounded: ``x + residual`` of a function that returns it beside its norm.

    Raises:
        TraceError: the function does what an expression cannot say.
        ValueError: it does something that cannot be fused yet, or the declaration is wrong.
    """
    header = header_of(function, "cute_ops.fused: argument `function`")
    if not isinstance(operands, Mapping):
        came = type(operands).__name__  # type: ignore[unreachable]
        raise TypeError(f"cute_ops.fused: argument `operands` must be shapes by name, {{'x': '*m n'}}, got {came}.")
    attrs, name, module = attrs or {}, name or function.__name__, function.__module__ or ""  # none in an own `exec`
    _check_names(header, operands, attrs, name)
    shapes = {key: shape_of(operand) for key, operand in operands.items()}
    found = _Fused(
        name, Traces(name, function, shapes, attrs), operands, outputs=outputs, attrs=attrs, cases=cases,
        no_gradient=no_gradient, squeezed=squeezed, check=check, later=module.startswith("cute_ops."),
    )  # fmt: skip
    return found.op(module, doc or inspect.getdoc(function) or f"``{name}`` in one pass.", grad_doc, finish)


def _check_names(header: inspect.Signature, operands: Mapping[str, str], attrs: Mapping[str, Any], name: str) -> None:
    """Refuse operands and attributes that are not those of a function ``(xp, *operands, *, **attrs)``."""
    own = [p for p in header.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)][1:]
    known, declared = [p.name for p in own], {**operands, **attrs}
    if len(known) < len(header.parameters) - 1:  # it takes any
        return
    for each in declared:
        if each not in known:
            where, named = ("operands", "operand") if each in operands else ("attrs", "attribute")
            listed = ", ".join(f"`{p}`" for p in known) or "none besides its first, the namespace"
            raise TypeError(
                f"cute_ops.fused: argument `{where}` has `{each}`{meant(each, known)}, but {name} has no such {named}; "
                f"its parameters are {listed}."
            )
    for p in own:
        if p.name not in declared and p.default is p.empty:
            where = "attrs" if p.kind is p.KEYWORD_ONLY else "operands"
            raise TypeError(f"cute_ops.fused: argument `{where}` lacks `{p.name}`, which {name} takes.")


def fused_traced(
    expression: Expression, operands: Mapping[str, str], name: str, *, no_gradient: tuple[str, ...],
    function: Callable[..., Any] | None, called: str,
) -> Op:  # fmt: skip
    """The op of an expression, of a ``function`` that it was traced from. Other arguments as in :func:`fused`."""
    found = _Fused(name, ByAttrs(lambda _: expression), operands, no_gradient=no_gradient)
    doc = function and inspect.getdoc(function)
    return found.op(function.__module__ if function else __name__, doc or f"``{called}`` in one pass.")


def fused_again(
    function: Callable[..., Any], *, operands: Mapping[str, str], name: str, cases: tuple[Case, ...], doc: str
) -> Op:
    """The op of a function's gradients together with its outputs, for a backward that needs both; it has no gradient.
    Arguments as in :func:`fused`.
    """
    alone = _Fused(name, Traces(name, function, operands, {}), operands, cases=cases)
    inputs, outputs = alone.inputs | alone.cotangents, alone.gradients | alone.results
    both = ByAttrs(partial(alone.differentiated, recompute=True))
    return declare(name, both, inputs, outputs, module=function.__module__, doc=doc, **alone.fields)


ANY = "any"
# What may stand before the shape of an operand without a gradient: bools, or whole numbers, which are read as float32.
BOOL, INT = "bool", "int"
# Shapes of what all rows of an example share, with the shapes that the expression sees.
SHARED = {"*b n": f"{ANY} *m n", "*b 2n": f"{ANY} *m 2n", "*b 1": "*m 1"}
EXAMPLES = (Case("odd", {"b": (3,), "m": 5, "n": 999}), Case("aligned", {"b": (4,), "m": 16, "n": 4096}))
# Of what the same head of all tokens shares; tiles are then ``*m h n``. Each element of the second serves n/d columns.
STRETCHED = "h d"
OF_HEADS = {"h n": f"{ANY} *m n", STRETCHED: f"{ANY} *m n"}
HEADS = (Case("odd", {"m": (3, 5), "h": 3, "n": 77}), Case("aligned", {"m": (64,), "h": 8, "n": 128}))


def _check_rows(binding: Any) -> str | None:
    """The error text for too many rows of all examples, which kernels count in 32 bits."""
    dims = binding.dims
    if isinstance(dims.get("d", 1), int) and isinstance(dims["n"], int) and dims["n"] % max(dims.get("d", 1), 1):
        return f"heads have n={dims['n']} elements, expected a multiple of d={dims['d']}."
    if "h" in dims:
        what, rows = "tokens have {} heads", math.prod(dims["m"]) * dims["h"]
    else:
        what, rows = "examples have {} rows", math.prod(dims["b"]) * dims["m"]
    if isinstance(rows, int) and rows >= 2**31:
        return f"the {what.format(rows)} together, expected fewer than 2^31."
    return None


def _is_tile(shape: str) -> bool:
    return shape in ("*m n", "*m 2n")


def shape_of(operand: str) -> str:
    """The shape of a declared operand, as expressions know it: without a dtype, except that of bools."""
    dtype, shape = _declared(operand)
    return f"{BOOL} {shape}".strip() if dtype == BOOL else shape


def _declared(operand: str) -> tuple[str, str]:
    """The dtype that stands before a shape, a name, :data:`ANY` or :data:`INT`, else empty; and the shape."""
    operand = (SHARED | OF_HEADS).get(operand, operand)
    first, _, shape = operand.partition(" ")
    return (first, shape) if first in (*FLOATS, ANY, BOOL, INT) else ("", operand)


def _dtype(name: str, operand: str) -> str:
    """A dtype variable, or the dtype itself."""
    dtype, shape = _declared(operand)
    if dtype in (*FLOATS, BOOL):
        return dtype
    if dtype == INT:
        return f"{WHOLE_OF}{name}"
    return "T" if _is_tile(shape) and not dtype else f"T_{name}"


def _output_shapes(names: Sequence[str], expression: Expression) -> dict[str, str]:
    """The shapes of outputs: tiles, and column vectors for values without columns."""
    kinds = expression.output_kinds
    names = names or (("out",) if len(kinds) == 1 else [f"out{i}" for i in range(len(kinds))])
    columns = {name: "*m 1" for name, kind in zip(names, kinds, strict=False) if not kind.columns}
    return dict.fromkeys(names, "*m n") | columns


class _Fused:
    """The op of an expression, which attributes may change, and its gradient.

    Attributes:
        operands: their shapes; ``wanted``: of those that have a gradient.
        shared: shapes of operands of which the rows of an example share a row or, if rows take ``turns``, heads.
        dtypes: those of operands, or their variables.
        number: the shape of an output of one number per row.
        outputs: their shapes.
        tile: the first tile among the operands; ``deciding``: those on whose dtypes outputs' dtypes depend.
        forward: gives the formula of the op by its attributes, ``backward`` that of its gradient.
        handed_on: operands whose gradient is an output's cotangent; ``same_as``: whose gradient is another operand's.
        saved: outputs that the gradient reads, by index.
        later: whether the gradient is derived when it is first used, where its declaration does not depend on it: of
            our own functions, whose gradients tests derive, and of which all would take 8 ms of an import.
    """

    def __init__(
        self, name: str, expression: ByAttrs[Expression], operands: Mapping[str, str], *, outputs: Sequence[str] = (),
        attrs: Attrs | None = None, cases: tuple[Case, ...] = CASES, no_gradient: Sequence[str] = (),
        squeezed: bool = False, later: bool = False, check: Callable[[Any], str | None] | None = None,
    ) -> None:  # fmt: skip
        self.check = check
        self.name, self.expression, self.attrs, self.cases = name, expression, attrs or {}, cases
        self.later = later and bool(attrs)
        self.whole = tuple(key for key, operand in operands.items() if _declared(operand)[0] in (BOOL, INT))
        self.no_gradient = tuple(no_gradient)
        self._share(operands)
        self.number = COLUMN if squeezed else "*m 1"
        self.operands = {key: shape_of(operand) for key, operand in operands.items()}
        self.dtypes = {key: _dtype(key, operand) for key, operand in operands.items()}
        self.wanted = {key: shape for key, shape in self.operands.items() if key not in (*no_gradient, *self.whole)}
        self.forward, self.backward = ByAttrs(self._traced), ByAttrs(self.differentiated)
        defaults = defaults_of(self.attrs)
        self.outputs = _output_shapes(outputs, expression(defaults))
        tiles = self._tiles()
        self.tile = tiles[0]
        self.deciding = [key for key in tiles if _declared(operands[key])[0] != ANY] or tiles
        self.output_dtypes: tuple[str, ...] = ()
        forward = self.forward(defaults)
        self.handed_on: dict[str, str] = {}
        self.same_as: dict[str, str] = {}
        self.saved: tuple[int, ...] = ()
        if not attrs:  # other values of attributes may give other gradients
            self.handed_on, self.same_as = self._passed_on(forward.expression)
            by_rows = self._backward_by_rows(forward)
            self.saved = worth_saving(forward.expression, self._computed(), sum_columns=by_rows)

    def _share(self, operands: Mapping[str, str]) -> None:
        """Note what the rows of an example share, or the same head of all tokens."""
        self.shared = {key: operand for key, operand in operands.items() if operand in SHARED | OF_HEADS}
        self.turns = any(operand in OF_HEADS for operand in self.shared.values())
        if self.turns and any(operand in SHARED for operand in self.shared.values()):
            self._refuse("operands of examples, '*b n', and of heads, 'h n', do not go together")
        self.stretched = tuple(key for key, operand in self.shared.items() if operand == STRETCHED)
        if wrong := [key for key in self.stretched if key not in self.no_gradient]:
            self._refuse(f"operand `{wrong[0]}` of shape {STRETCHED!r} has no gradient: name it in `no_gradient`")
        if self.shared and self.cases is CASES:
            self.cases = HEADS if self.turns else EXAMPLES

    def _tiles(self) -> list[str]:
        tiles = [key for key, shape in self.operands.items() if _is_tile(shape) and key not in self.whole]
        if not tiles:
            self._refuse("it has no tile of floats, '*m n' or '*m 2n', whose dtype outputs have")
        return [key for key in tiles if key not in self.shared]

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        shapes = {key: shape.removeprefix(BOOL).strip() for key, shape in self.operands.items()}
        made = {key: Tensor(self._shape(key, shape), self.dtypes[key]) for key, shape in shapes.items()}
        # Whole numbers have no bound; random ones of tests are this small.
        small = [key for key in self.whole if self.dtypes[key] != BOOL]
        return made | {key: made[key]._replace(upper_bound="64") for key in small}

    def _shape(self, key: str, shape: str) -> str:
        """The declared shape of an operand or output, which the expression sees as ``shape``."""
        rows = "*m h" if self.turns else "*b m"
        return self.shared.get(key, shape.replace("*m", rows) if self.shared else shape)

    @cached_property
    def results(self) -> dict[str, Tensor]:
        shapes = {out: self.number if shape == "*m 1" else shape for out, shape in self.outputs.items()}
        dtypes = zip(shapes.items(), self.output_dtypes, strict=True)
        return {out: Tensor(self._shape(out, shape), dtype) for (out, shape), dtype in dtypes}

    @property
    def cotangents(self) -> dict[str, Tensor]:
        return {f"d{out}": tensor for out, tensor in self.results.items()}

    @property
    def gradients(self) -> dict[str, Tensor]:
        return {f"d{key}": self.inputs[key] for key in self.wanted}

    @property
    def _devices(self) -> tuple[str, ...]:
        """The dim besides leading ones of which several devices may each have some rows."""
        return () if not self.shared else ("h",) if self.turns else ("m",)

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields that the declarations of the op and of its gradient share."""
        defaults = defaults_of(self.attrs)
        forward = self.forward(defaults)
        # Of values of single elements no gradient reads the length of a row if they do not.
        read = (forward,) if self.later else (forward, self.backward(defaults))
        counts = any(node.primitive == "n" for each in read for node in each.expression.nodes)
        whole = forward.by_rows or any("2n" in shape for shape in self.operands.values())
        return {
            "attrs": self.attrs, "cases": self.cases, "config": Formula.config_alone,
            "check": self._problem if self.check or self.shared else None,
            "static": ("n",) if counts and not forward.by_rows else WhileFew(*("nd" if self.stretched else "n")),
            "sharding": Sharding(parallel=(*self._devices, *(() if whole else ("n",)))),
        }  # fmt: skip

    def _problem(self, binding: Any) -> str | None:
        return (self.check and self.check(binding)) or (_check_rows(binding) if self.shared else None)

    def op(self, module: str, doc: str, grad_doc: str = "", finish: Finish | None = None) -> Op:
        """The op, of a function of this module, with its gradient."""
        read = self.operands.keys() if self.attrs else {*self.backward(defaults_of(self.attrs)).reads}
        same_as = {f"d{key}": f"d{other}" for key, other in self.same_as.items()}
        written = {
            key: tensor._replace(same_as=same_as.get(key))
            for key, tensor in self.gradients.items() if key[1:] not in self.handed_on
        }  # fmt: skip
        gradient = declare(
            f"{self.name}_bwd", self.backward, self._kept(read) | self.cotangents, written, module=module,
            doc=grad_doc or f"Gradient of :func:`{self.name}`.", **self.fields,
        )  # fmt: skip
        return declare(
            self.name, self.forward, self.inputs, self.results, module=module, grad=gradient, doc=doc,
            handed_on=self.handed_on, no_gradient=self.no_gradient, finish=finish, **self.fields,
        )  # fmt: skip

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"cute_ops.fused: {self.name} cannot be fused: {why}")

    def _kept(self, needed: Collection[str]) -> dict[str, Tensor]:
        """The inputs of the gradient besides cotangents. A tile that it does not read is left out, so that nothing
        keeps it, if a cotangent says the shape of tiles, and this or something else that is read its dtype.
        """
        told = {*FLOATS, *(t.dtype for t in self.results.values())}
        told |= {tensor.dtype for key, tensor in self.inputs.items() if key in needed}
        tiles = {key: self.inputs[key].dtype for key in self._tiles() if key not in needed}
        idle = {key for key, dtype in tiles.items() if dtype in told or key not in self.wanted}
        idle = idle if "*m n" in self.outputs.values() else set()
        kept = {k: t._replace(unread=k not in needed) for k, t in self.inputs.items() if k not in idle}
        return kept | {name: self.results[name] for i, name in enumerate(self.outputs) if i in self.saved}

    def _passed_on(self, expression: Expression) -> tuple[dict[str, str], dict[str, str]]:
        """Tiles whose gradient needs no memory of its own: with the output whose cotangent it is, and with the operand
        whose gradient it is, too. At least one gradient is left to compute.
        """
        names, outputs = [*self.operands], [*self.outputs]
        found = differentiate(expression, [i for i, key in enumerate(names) if key in self.wanted])
        nodes, whole = found.expression.nodes, {key for key in self._tiles() if self.operands[key] == "*m n"}
        cotangents: dict[str, str] = {}
        same_as: dict[str, str] = {}
        firsts: dict[int, str] = {}
        for addend, i in zip(found.addends, found.expression.outputs, strict=True):
            name, node = names[addend.operand], nodes[i]
            last = len(cotangents) + len(same_as) + 1 == len(self.wanted)
            if name not in whole or addend.rows or addend.columns or last:
                continue
            source = found.sources[node.operand] if node.primitive == "operand" else None
            if source and source.role == "cotangent" and self.outputs[outputs[source.position]] == "*m n":
                cotangents[name] = outputs[source.position]
            elif (first := firsts.setdefault(i, name)) != name:
                # Of dtypes that surely differ, or may, and a call does not tell, both are written.
                dtypes = {self.dtypes[name], self.dtypes[first]}
                if len(dtypes) == 1 or dtypes.isdisjoint(FLOATS):
                    same_as[name] = first
        return cotangents, same_as

    def _traced(self, attrs: Attrs) -> Formula:
        expression = self.expression(attrs)
        if sizes(expression) or any(node.primitive == "column" for node in expression.nodes):
            self._refuse("columns by their number or in groups are for epilogues of products, cute_ops.fused_linear")
        if len(expression.outputs) != len(self.outputs):
            self._refuse(f"it returns {len(expression.outputs)} values for the outputs {', '.join(self.outputs)}")
        for (out, shape), kind in zip(self.outputs.items(), expression.output_kinds, strict=True):
            if kind.dtype == "bool":
                self._refuse(f"{out} holds bools; return xp.where({out}, 1.0, 0.0)")
            if not kind.rows or kind.columns != SHAPES[shape].kind.columns:
                self._refuse(f"{out} does not have the shape {shape!r}: compute it from a tile")
        dtypes = tuple(self._output_dtype(expression, place) for place in range(len(self.outputs)))
        self.output_dtypes = self.output_dtypes or dtypes
        if dtypes != self.output_dtypes:
            usual = ", ".join(self.output_dtypes)
            self._refuse(f"its outputs are {', '.join(dtypes)} with {dict(attrs)}, else {usual}")
        by_rows = bool(stages(expression)) or "*m 1" in self.outputs.values()
        kinds = "".join(str(SHAPES[shape]) for shape in self.outputs.values())
        return Formula(
            expression, by_rows, tuple(self.operands), tuple(self.outputs), kinds, self.tile, tuple(self.shared),
            self.turns, self.stretched,
        )  # fmt: skip

    def _output_dtype(self, expression: Expression, place: int) -> str:
        """The dtype of an output, or its variable: what the function says; of a number per row float32; else that of
        the tiles that it is computed from.
        """
        names, i = [*self.operands], expression.outputs[place]
        if said := expression.nodes[i].stored_as:
            return said if said in FLOATS else self.dtypes[names[int(said.removeprefix(LIKE))]]
        if not expression.kinds[i].columns:
            return "float32"
        read = {names[k] for k in operands_of(expression, i)}
        found = {self.dtypes[key] for key in ([key for key in self.deciding if key in read] or self.deciding)}
        if len(found) > 1 and not (found <= {*FLOATS} or "float32" in found):
            out, dtypes = [*self.outputs][place], ", ".join(sorted(found))
            self._refuse(f"{out} is computed from tiles of {dtypes}: say its dtype, xp.astype({out}, 'float32')")
        return found.pop() if len(found) == 1 else "float32"

    def differentiated(self, attrs: Attrs, recompute: bool = False) -> Formula:
        """The gradients that have to be computed; with ``recompute`` all of them, and the outputs."""
        forward = self.forward(attrs)
        by_rows = self._backward_by_rows(forward)
        saved, wanted = () if recompute else self.saved, self._computed(recompute)
        found = differentiate(forward.expression, wanted, saved, sum_columns=by_rows, again=recompute)
        tensors, outputs = [*self.operands], [*self.outputs]
        names = {"operand": tensors, "output": outputs, "cotangent": [f"d{out}" for out in outputs]}
        reads = tuple(names[source.role][source.position] for source in found.sources)
        writes = tuple(f"d{tensors[addend.operand]}{addend.half}" for addend in found.addends)
        kinds = "".join(self._kind(tensors[addend.operand]) for addend in found.addends)
        if recompute:
            writes, kinds = writes + forward.writes, kinds + forward.kinds
        tile = next((f"d{out}" for out, shape in self.outputs.items() if shape == "*m n"), self.tile)
        shared = (*self.shared, *(f"d{key}" for key in self.shared))
        return Formula(
            found.expression, by_rows, reads, writes, kinds, tile, shared, self.turns, self.stretched
        )  # fmt: skip

    def _kind(self, key: str) -> str:
        """The kind of an operand's gradient: what rows share has a sum over them."""
        kind = SHAPES[self.operands[key]].kind
        return str(kind._replace(rows=False) if key in self.shared else kind)

    def _computed(self, recompute: bool = False) -> list[int]:
        """The operands, by index, whose gradient the backward op computes; with ``recompute`` all that have one."""
        idle = set() if recompute else {*self.handed_on}
        return [i for i, key in enumerate(self.operands) if key in self.wanted.keys() - idle]

    def _backward_by_rows(self, forward: Formula) -> bool:
        """Whether a kernel of rows computes the gradient: for sums over rows it reads each tile only once."""
        shared = self.shared.keys() & self.wanted.keys()
        return forward.by_rows or bool(shared) or not all(map(_is_tile, self.wanted.values()))
