"""A linear layer's product with an epilogue: declaration, reference and config follow from the epilogue's expression.

Ops made here are not among :data:`cute_ops.ops.OPS`: each belongs to whoever wrote its epilogue.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any, Literal, NoReturn

from cute_ops.declaration.array_api import cast
from cute_ops.declaration.attributes import defaults_of
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Config, Problem, Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import FUSED, Instead, Program
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE, Array
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Accumulation, Tensor
from cute_ops.errors import suggesting
from cute_ops.expressions.graph import SHAPES, Expression, Graph, copied
from cute_ops.expressions.groups import REDUCTIONS, reads, reduced, sizes
from cute_ops.expressions.reference import evaluate
from cute_ops.expressions.stages import levels, split
from cute_ops.expressions.text import parse, text_of
from cute_ops.expressions.words import LIKE
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.gemm.config import ROW_PARTIALS, GemmConfig
from cute_ops.ops.batches import CASES as BATCHES
from cute_ops.ops.batches import each
from cute_ops.ops.expression.formula import COLUMN, ByAttrs, Formula, period, repeated, shape_of
from cute_ops.ops.expression.pointwise import pointwise
from cute_ops.ops.expression.traces import Traces
from cute_ops.ops.gemm.choice import WIDE, instead
from cute_ops.ops.gemm.config import SWIZZLED, EpilogueCost, GemmSize, space_of
from cute_ops.ops.gemm.gradient import ACC, Forward, Gradient, gradient
from cute_ops.ops.gemm.linear import (
    HALVES,
    check_rows,
    configure,
    exact,
    multiply,
    of_small_m,
    product_of,
    sums_of_small_m,
    vector,
)

WEIGHTS = {"n k": "Linear", "k n": "LinearDx", "2n k": "Linear", "k 2n": "LinearDx"}
Check = Callable[[Binding], str | None]
COLUMNS = (COLUMN, "*m 1")
LATE = "no kernel computes a product and such reductions of its rows"
# Indices that give the vectors and scalars of a batch the dims that they lack.
SHARED: dict[str, Any] = {"n": (..., None, slice(None)), "2n": (..., None, slice(None)), "": (..., None, None)}
SIZES = ("m", "n", "k")  # rows, columns and terms of the product
GROUPS = (16, 32, 64, 128)  # columns
CASES = (
    Case("one-row", {"m": (), "n": 64, "k": 64}),
    Case("odd-rows-and-columns", {"m": (3, 67), "n": 333, "k": 200}),
    Case("bert-base", {"m": (8, 128), "n": 3072, "k": 768}),
    Case("llama3-8b-mlp", {"m": (2, 4096), "n": 14336, "k": 4096}),
)


@suggesting
def fused_linear(
    epilogue: Callable[..., Any] | str,
    *,
    operands: Mapping[str, str] | None = None,
    weight: str = "n k",
    name: str = "",
    outputs: Mapping[str, str] | None = None,
    dtypes: Mapping[str, str] | None = None,
    attrs: Mapping[str, Any] | None = None,
    save: Literal["pre", "none"] = "pre",
    grad: tuple[Op, ...] = (),
    no_gradient: tuple[str, ...] = (),
    check: Check | None = None,
    cases: tuple[Case, ...] = CASES,
    called: str = "",
) -> Op:
    """The op of a product ``x @ weight.T`` and of what happens to it before it is stored, in one kernel.

        def gelu_add(xp, acc, bias, residual):
            return xp.gelu(acc + bias) + residual

        op = fused_linear(gelu_add, operands={"bias": "n", "residual": "*m n"})

    ``acc`` is the product in float32; of packed weights, ``2n k`` or ``k 2n``, it has ``2n`` columns, and is read by
    halves: ``acc[..., :n]`` and ``acc[..., n:]`` with ``n = acc.shape[-1] // 2``. Values are float32, and outputs are
    rounded once. Reductions of rows, and what follows from them and has no columns, may be returned beside a tile:

        def add_rstd(xp, acc, residual):
            y = acc + residual
            return y, xp.rsqrt(xp.mean(y * y, axis=-1, keepdims=True) + 1e-6)

    Columns may be looked at in groups: by ``xp.rotate_half``, or by ``xp.group_sum``, ``xp.group_mean`` and
    ``xp.group_max``, which give each column of a group the same. An operand ``*m 64`` is repeated every 64 columns:

        def qk_norm_rope(xp, acc, norm, cos, sin, *, heads):      # those of queries and keys, before the values
            x = acc * xp.rsqrt(xp.group_mean(acc * acc, 128) + 1e-6) * norm
            turned = x * cos + xp.rotate_half(x, 128) * sin
            return xp.where(xp.arange(acc.shape[-1]) < 128 * heads, turned, acc)

        op = fused_linear(qk_norm_rope, operands={"norm": "n", "cos": "*m 64", "sin": "*m 64"}, attrs={"heads": 40})

    The op has one more attribute, ``fused``. ``"always"`` runs that kernel; ``"never"`` the framework's product and
    then one pass, between which the product is rounded to x's dtype, or to the one that ``dtypes`` has for ``acc``.
    ``"auto"`` runs the kernel where it was measured to be at least as fast (:func:`cute_ops.ops.gemm.choice.instead`),
    and never for float32. For an epilogue that reduces rows, looks at groups of columns or repeats an operand,
    ``"auto"`` always runs the kernel, except for float32; with ``"never"`` the framework computes the epilogue. No
    kernel computes a product with reductions of rows that depend on each other, on which tiles depend, or which alone
    are returned: ``"auto"`` then runs the framework's product and one pass over rows, and ``"always"`` is refused.

    The gradient follows from the epilogue, unless ``grad`` gives one. An operand that repeats itself has none.

    Args:
        epilogue: ``epilogue(xp, acc, *operands, **attrs)`` in array-API style, which returns a value or a tuple of
            values; or an expression's text, whose first operand is the product.
        operands: their shapes: ``*m n`` a tile, ``*m 2n`` two side by side, ``n`` or ``2n`` a row vector, ``*m 1`` or
            ``*m`` a column vector, empty a scalar, ``*m 64`` what repeats itself; ``*#m 64`` where its leading dims
            broadcast, as in :class:`Op`. Each has its own dtype: float32, float16 or bfloat16.
        weight: its shape; ``n k`` as in PyTorch, ``k n`` as in JAX and in gradients.
        name: the op's name, the function's by default.
        outputs: their shapes, ``*m n`` or ``*m 2n``, which takes two values, of what follows from reductions ``*m 1``
            or ``*m``; ``out``, or ``out0``, ``out1``, ... of ``*m n`` and ``*m 1`` by default. An op with an
            output named ``d<operand>`` is a gradient, and has none itself.
        dtypes: of those outputs that do not have x's dtype, column vectors float32, nor the one that ``xp.astype``
            gives them; of ``acc`` the one in which it is saved.
        attrs: as in :class:`Op`; Python sees their values, and each combination is a kernel of its own.
        save: what happens to the product where the gradient reads it: a call that is differentiated stores it, too
            (``pre``, "pre-activations"), or the backward computes it again (``none``). Where the gradient can be
            computed from the outputs as well, it reads these instead.
        grad: the ops that compute the gradient, as in :class:`Op`, where it does not follow from the epilogue.
        no_gradient: operands for which these compute none.
        check: as in :class:`Op`; it runs once the columns are known to be whole groups.
        cases: named problems.
        called: as :class:`Op` has it.

    Raises:
        TraceError: the function does what an expression cannot say.
        ValueError: it does what is not fused yet, or the declaration is wrong.
    """
    name, attrs = name or getattr(epilogue, "__name__", "linear"), attrs or {}
    defaults = defaults_of(attrs)
    _check_options(name, weight, save)
    made = _Epilogue(name, epilogue, dict(operands or {}), "2n" in weight, outputs, defaults)
    inputs = {"x": Tensor("*m k", "T", merged=True), "weight": Tensor(weight, "T")}
    given = {key: Tensor(shape, f"T_{key}") for key, shape in made.operands.items()}
    usual = made.output_dtypes(dtypes or {}, defaults)
    results = {key: Tensor(shape, usual[key]) for key, shape in made.outputs.items()}
    # A pass that reduces rows reads the product as the kernels' epilogues do, unrounded.
    acc = Tensor(made.shapes[ACC], usual.get(ACC, "float32" if made.late else "T"), hidden=True)
    # Where the op is declared.
    module = getattr(epilogue, "__module__", __name__)
    forward = Forward(
        name, inputs["weight"], given, results, acc, made.expression, attrs, module,
        by=made.by,
    )  # fmt: skip
    itself = any(f"d{key}" in results for key in given)
    found = Gradient(grad, no_gradient=no_gradient) if grad or itself else gradient(forward, save == "pre")
    # A copy of an operand costs little beside the product.
    inputs |= {key: t._replace(otherwise="copy") for key, t in given.items()}
    common: dict[str, Any] = {
        "apart": made.apart(forward) if made.by_element or made.late else None, "inputs": inputs, "acc": acc,
        "attrs": attrs, "cases": cases, "module": module, "check": check, "called": called or name,
        "doc": (None if isinstance(epilogue, str) else inspect.getdoc(epilogue)) or f"A product and ``{name}`` of it.",
    }  # fmt: skip
    saving = (
        _declare(f"{name}_saving", made.with_acc(), outputs={**results, ACC: acc}, **common) if found.saves else None
    )
    return _declare(
        name, made, outputs=results, grad=found.steps or None, handed_on=found.handed_on, saving=saving,
        no_gradient=found.no_gradient if found.steps else (), **common,
    )  # fmt: skip


def _check_options(name: str, weight: str, save: str) -> None:
    if weight not in WEIGHTS:
        _refuse(name, f"weight has shape {weight!r}; shapes are {', '.join(map(repr, WEIGHTS))}")
    if save not in ("pre", "none"):
        _refuse(name, f"save is {save!r}, expected 'pre' or 'none'")


def _declare(
    name: str, made: _Epilogue, *, apart: Op | None, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor],
    acc: Tensor, attrs: Mapping[str, Any], module: str, check: Check | None, is_batch: bool = False, **more: Any,
) -> Op:  # fmt: skip
    """The op of a product with an epilogue. ``apart`` is the op of the epilogue alone; None where the framework
    computes that.
    """
    weight = inputs["weight"].shape.removeprefix("*b ")
    may_be_small = made.by_element and not is_batch
    across, kernel = weight.startswith("k"), f"{'Batched' * is_batch}{WEIGHTS[weight]}"
    typed = [f"T_{key}" for key in made.operands]
    multiplied = product_of(kernel, acc.dtype)

    def reference(xp: Any, x: Any, weight: Any, *arrays: Any, fused: str = "", **attrs: Any) -> tuple[Any, ...]:
        return of_acc(xp, exact(xp, multiplied, x, weight), x, arrays, attrs)

    def operand(xp: Any, array: Any, shape: str, columns: int) -> Any:
        if is_batch and shape in SHARED:
            return array[SHARED[shape]]
        if shape == COLUMN:
            return array[..., None]
        return repeated(xp, array, columns) if period(shape) else array

    def of_acc(xp: Any, acc: Any, x: Any, arrays: Iterable[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
        given = [operand(xp, a, shape, acc.shape[-1]) for a, shape in zip(arrays, made.operands.values(), strict=True)]
        values = iter(evaluate(made.expression(attrs), xp, [acc, *given]))
        outs = []
        for tensor in outputs.values():
            out = xp.concat([next(values), next(values)], axis=-1) if "2n" in tensor.shape else next(values)
            out = out[..., 0] if tensor.shape == COLUMN else out
            like = x if tensor.dtype == "T" else dict(zip(typed, arrays, strict=True)).get(tensor.dtype)
            outs.append(cast(xp, out, tensor.dtype, out) if like is None else xp.astype(out, like.dtype))
        return tuple(outs)

    def half_start(problem: Problem) -> int:
        """Bytes, at most a vector's, that divide where second halves start."""
        return math.gcd(VECTOR_BYTES, problem.size("n") * ITEMSIZE[problem.dtypes["x"]])

    def epilogue_cost(problem: Problem) -> EpilogueCost:
        return made.epilogue_cost(problem, half_start(problem), SWIZZLED if across else 8)

    def config(problem: Problem) -> GemmConfig:
        if made.late:
            raise ValueError(f"cute.{op.called}: {LATE}: {made.late}")
        check_rows(op, problem)
        n, k, start, wanted = problem.size("n"), problem.size("k"), half_start(problem), epilogue_cost(problem)
        second, by_tma = vector(problem, "weight", n if across else k)
        vectors = [vector(problem, "x", k), (second, by_tma and (weight != "k 2n" or start == VECTOR_BYTES))]
        chosen = of_small_m(problem, vectors, SIZES, 1 + made.packed) if may_be_small else None
        chosen = chosen or configure(problem, vectors, SIZES, wanted)
        halves = start if made.packs else VECTOR_BYTES
        if wanted.group > 1 and chosen.form == "mma_sync":  # each warp then has all columns of its rows
            chosen = replace(chosen, warps_n=1)
        return GemmConfig.of({**chosen.flat(), **made.texts(problem.attrs), "half_align": halves})

    def run(xp: Any, call: Any, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        given, attrs = dict(inputs), without_fused(attrs)
        given[ACC] = multiply(xp, multiplied, given["x"], given["weight"])
        if apart is None:
            import array_api_compat  # start-up time

            names, arrays = array_api_compat.array_namespace(given["x"]), [given[key] for key in made.operands]
            return dict(zip(outputs, of_acc(names, given[ACC], given["x"], arrays, attrs), strict=True))
        read = {key: given[key] for key in apart.inputs}
        found = apart.program.run(xp, call, read, attrs) if apart.program else call(apart, read, attrs)
        return {key: given[ACC] if key == ACC else found[key] for key in outputs}

    def problem(binding: Binding) -> str | None:
        n, size = binding.dims["n"], math.lcm(*sizes(made.expression(without_fused(binding.attrs))))
        if n % size:
            return f"argument `weight` has n={n}, no multiple of the {size} columns of a group."
        if made.late and binding.attrs["fused"] == "always":
            return f"attribute `fused` is 'always', but {LATE}: {made.late}. 'auto' and 'never' run it."
        return check(binding) if check else None

    if apart is None:
        other = Instead(Program(run), lambda problem: False, WIDE, ("x", "weight"))
    elif made.late:
        other = Instead(Program(run, (apart,)), lambda problem: LATE, WIDE, ("x", "weight"))
    else:
        plain = may_be_small and len(outputs) == 1 and "2n" not in weight
        biased = plain and not attrs and {t.dtype for t in (acc, *outputs.values())} == {"T"}
        begins = multiplied._replace(read_as=ACC, bias=made.bias if biased else "")
        program = Program(run, apart.program.ops) if apart.program else Program(run, (apart,), begins)
        adds = program.product is not None and bool(program.product.bias)  # cuBLAS does, too
        other = instead(
            program, config, lambda p: (GemmSize.of(p, SIZES), epilogue_cost(p)), after=not adds, small_m=plain
        )

    def batched() -> Op:
        known: dict[str, Any] = {key: value for key, value in more.items() if key != "cases"}
        if more.get("grad"):
            known["grad"] = tuple(step.batched for step in more["grad"])
        if more.get("saving"):
            known["saving"] = more["saving"].batched
        known["doc"] = f"The same for each example of a batch.\n\n    {more['doc']}"
        # A column vector has no contiguous dim.
        read = {key: t._replace(contiguous=()) if t.shape == "*b m" else t for key, t in each(inputs).items()}
        return _declare(
            f"{name}_batched", made, apart=apart and apart.batched, inputs=read, outputs=each(outputs), acc=acc,
            attrs=attrs, module=module, check=check, is_batch=True, cases=BATCHES, **known,
        )  # fmt: skip

    reference.__module__ = module
    rows = made.workspace if made.reduces and not made.late else None
    summed = Accumulation(("k",))
    op = Op(
        name, inputs=inputs, outputs={key: t._replace(accumulates=summed) for key, t in outputs.items()},
        reference=reference, static=(),
        tuning=Tuning(
            config, space_of(SIZES, epilogue_cost, is_batch),
            sums_of_small_m(SIZES, 1 + made.packed) if may_be_small else rows,
        ),
        dtypes={"T": HALVES} | {f"T_{key}": FLOATS for key in made.operands},
        kernel=f"cute_ops.kernels.gemm.linear:{kernel}", batched=batched if made.by_element and not is_batch else None,
        sharding=Sharding(
            ("m",) * is_batch + ("n",) * (made.by_element and not made.packs), inner=("k",) * (not is_batch)
        ), check=problem,
        attrs={**attrs, "fused": FUSED}, instead=other, **more,
    )  # fmt: skip
    return op


def without_fused(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The epilogue's own attributes."""
    return {key: value for key, value in attrs.items() if key != "fused"}


def _refuse(name: str, why: str) -> NoReturn:
    raise ValueError(f"cute_ops.fused_linear: {name} cannot be fused: {why}")


def _usual_outputs(expression: Expression) -> dict[str, str]:
    """Names and shapes of outputs that are not declared."""
    kinds = expression.output_kinds
    names = ("out",) if len(kinds) == 1 else tuple(f"out{i}" for i in range(len(kinds)))
    return {name: "*m n" if kind.columns else "*m 1" for name, kind in zip(names, kinds, strict=True)}


class _Epilogue:
    """An epilogue, traced once for each combination of attributes."""

    def __init__(
        self, name: str, epilogue: Callable[..., Any] | str, operands: dict[str, str], packed: bool,
        outputs: Mapping[str, str] | None, defaults: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.name, self.epilogue, self.operands, self.packed = name, epilogue, operands, packed
        self.shapes = {ACC: "*m 2n" if packed else "*m n"}
        self.shapes |= {key: shape_of(shape) for key, shape in operands.items()}
        self._check_operands(outputs or {})
        self._expressions = None if isinstance(epilogue, str) else self._of_function(epilogue, defaults)
        # Why no kernel computes it behind the product; empty where one does.
        self._traced, self.saves, self.late = ByAttrs(self._trace), False, ""
        self.outputs = dict(outputs or _usual_outputs(self._traced(defaults)))
        self.packs = any("2n" in shape for shape in (*self.shapes.values(), *self.outputs.values()))
        self.reduces = any(shape in COLUMNS for shape in self.outputs.values())
        self._check_outputs()
        # The tensors that the values are stored in; a packed one takes two.
        self.writes = [f"{key}{half}" for key, shape in self.outputs.items() for half in SHAPES[shape_of(shape)].halves]
        found = self.expression(defaults)
        # Whether each element of an output depends on elements at its own place alone.
        columns = bool(sizes(found)) or any(node.word == "column" for node in found.nodes)
        self.groups = columns or any(map(period, operands.values()))
        self.by_element = not (self.groups or self.reduces or self.late)
        self.by: Literal["elements", "rows", "groups"] = "elements" if self.by_element else "rows"
        if self.groups:
            self.by = "groups"
        # The row vector that is added to the product, if that is all.
        self.bias = next(iter(operands)) if text_of(found) == "e1(t,r) add 0 1 -> 2" else ""

    def _check_operands(self, outputs: Mapping[str, str]) -> None:
        if ACC in self.operands or ACC in outputs:
            _refuse(self.name, f"an operand or an output is called {ACC!r}, as the product is")
        if bools := [key for key, shape in self.operands.items() if "bool" in shape]:
            _refuse(self.name, f"operand `{bools[0]}` holds bools: give numbers, and compare them, `{bools[0]} != 0`")

    def _check_outputs(self) -> None:
        known = ("*m n", "*m 2n", "*m 1", COLUMN)
        if wrong := [key for key, shape in self.outputs.items() if shape not in known]:
            listed = ", ".join(map(repr, known))
            _refuse(self.name, f"{wrong[0]} has shape {self.outputs[wrong[0]]!r}; shapes of outputs are {listed}")

    def output_dtypes(self, given: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, str]:
        """The dtypes of outputs, or their variables: those given, those that the function says, or the usual ones."""
        known = {ACC, *self.outputs}
        if wrong := [key for key, dtype in given.items() if key not in known or dtype not in FLOATS]:
            listed = ", ".join(self.outputs)
            _refuse(self.name, f"dtypes has {wrong[0]!r}; outputs {listed} may have {', '.join(FLOATS)}")
        usual = {key: "float32" if shape in COLUMNS else "T" for key, shape in self.outputs.items()}
        return usual | self.said(self.expression(defaults)) | dict(given)

    def with_acc(self) -> _Epilogue:
        """The epilogue with the product as one more output."""
        made = copy(self)
        made.saves, shape = True, self.shapes[ACC]
        made.outputs = {**self.outputs, ACC: shape}
        made.writes = [*self.writes, *(f"{ACC}{half}" for half in SHAPES[shape].halves)]
        made.packs = self.packs or "2n" in shape
        made._traced = ByAttrs(lambda attrs: _with_acc(self._traced(attrs)))
        return made

    def apart(self, forward: Forward) -> Op:
        """The op of the epilogue alone, which reads the product."""
        kinds = "".join("c" if self.outputs[key.partition("[")[0]] in COLUMNS else "t" for key in self.writes)
        reads, writes = (ACC, *forward.operands), tuple(self.writes)

        def formula(attrs: Mapping[str, Any]) -> Formula:
            return Formula(self.expression(attrs), not self.by_element, reads, writes, kinds, ACC)

        inputs = {ACC: Tensor(forward.acc.shape, forward.acc.dtype), **forward.operands}
        if forward.acc.dtype != "T":  # the weight says what dtype outputs have
            inputs["weight"] = forward.weight._replace(unread=True, contiguous=())
        return pointwise(
            f"{forward.name}_epilogue", formula, inputs, forward.outputs, forward.attrs, groups=self.groups,
            module=forward.module, doc=f"The epilogue of :func:`{forward.name}`.",
        )  # fmt: skip

    def said(self, expression: Expression) -> dict[str, str]:
        """The dtypes, or their variables, that an epilogue gives to outputs; the product is float32."""
        found, names = {}, [*self.operands]
        for written, i in zip(self.writes, expression.outputs, strict=True):
            if dtype := expression.nodes[i].stored_as:
                place = int(dtype.removeprefix(LIKE)) if dtype.startswith(LIKE) else 0
                like = f"T_{names[place - 1]}" if place else "float32"
                found[written.partition("[")[0]] = like if dtype.startswith(LIKE) else dtype
        return found

    def expression(self, attrs: Mapping[str, Any]) -> Expression:
        """The expression for these attributes."""
        found = self._traced(attrs)
        if len(found.outputs) != len(self.writes):
            _refuse(self.name, f"it returns {len(found.outputs)} values for {', '.join(self.writes)}")
        for written, kind in zip(self.writes, found.output_kinds, strict=True):
            shape = self.outputs[written.partition("[")[0]]
            if kind.columns == (shape in COLUMNS):
                _refuse(self.name, f"{written} does not have the shape {shape!r}")
        return found

    def _of_function(self, epilogue: Callable[..., Any], defaults: Mapping[str, Any]) -> Traces:
        (_, acc, *_) = inspect.signature(epilogue).parameters
        shapes = {acc if name == ACC else name: shape for name, shape in self.shapes.items()}
        return Traces(self.name, epilogue, shapes, defaults)

    def _trace(self, attrs: Mapping[str, Any]) -> Expression:
        if self._expressions is not None:
            found = self._expressions(attrs)
        else:
            found, wanted = parse(str(self.epilogue)), tuple(SHAPES[shape] for shape in self.shapes.values())
            if found.operands != wanted:
                given, declared = (",".join(map(str, each)) for each in (found.operands, wanted))
                _refuse(self.name, f"its text takes ({given}), and its operands are ({declared})")
        self._check_reductions(found)
        try:
            turned = [list(self.operands)[read.operand - 1] for read in reads(found) if read.turned and read.operand]
        except ValueError as error:
            _refuse(self.name, str(error))
        for i, (node, kind) in enumerate(zip(found.outputs, found.output_kinds, strict=True)):
            if kind.dtype == "bool":
                _refuse(self.name, f"value {i} holds bools; return xp.where(value, 1.0, 0.0)")
            if not (kind.rows and (kind.columns or levels(found)[node])):
                _refuse(self.name, f"value {i} does not have the shape '*m n': compute it from acc")
        if wrong := [size for size in sizes(found) if size not in GROUPS]:
            _refuse(self.name, f"it has groups of {wrong[0]} columns; they have {', '.join(map(str, GROUPS))}")
        turns, groups = sizes(found, "rotate_half"), sizes(found, *REDUCTIONS)
        if len(groups) > 1 or any(size > groups[0] for size in turns if groups):
            _refuse(self.name, f"it has groups of {groups[0]} columns, which are reduced, and of {max(turns + groups)}")
        if others := [list(self.operands)[i - 1] for i in reduced(found) if i]:
            _refuse(self.name, f"it reduces groups of `{others[0]}`; of acc and operands '*m 1' it may")
        if tiles := [name for name in turned if self.operands[name] in ("*m n", "*m 2n")]:
            _refuse(self.name, f"xp.rotate_half of the tile `{tiles[0]}`: use the tile after the rotation")
        return found

    def _check_reductions(self, expression: Expression) -> None:
        """Find out whether a kernel computes an expression's reductions behind the product."""
        why = ""
        try:
            split(expression)
        except ValueError as error:
            why = str(error)
        if not why and not any(kind.columns for kind in expression.output_kinds):
            why = "it returns reductions alone: return a tile, '*m n', too"
        if why and not self.late and hasattr(self, "outputs"):  # with other attributes it was another one
            _refuse(self.name, why)
        self.late = self.late or why

    def texts(self, attrs: Mapping[str, Any]) -> dict[str, str]:
        """The fields of the kernel's config that say what it computes."""
        text = text_of(self.expression(attrs))
        read = [f"{name}%{period(shape)}" if period(shape) else name for name, shape in self.operands.items()]
        return {"expression": text, "reads": " ".join(read), "writes": " ".join(self.writes)}

    def epilogue_cost(self, problem: Problem, start: int, blocks: int) -> EpilogueCost:
        """What the epilogue needs of an SM, where ``start`` bytes, at most 16, divide the offset of second halves, and
        ``blocks`` columns of the weight share a row of shared memory.
        """
        expression, words, _ = split(self.expression(problem.attrs))
        # A thread reduces two rows. A reduction of groups takes eight registers, for what it adds up and for results.
        tiles, vectors = [], 2 * len(words) + 8 * sum(node.word in REDUCTIONS for node in expression.nodes)
        for read in reads(expression):
            if not read.operand:
                continue
            name, operand = list(self.operands)[read.operand - 1], expression.operands[read.operand]
            itemsize, repeats = ITEMSIZE[problem.dtypes[name]], period(self.operands[name])
            aligned = min(problem.aligns[name], start if operand.packed else VECTOR_BYTES) == VECTOR_BYTES
            if operand.kind.rows and operand.kind.columns and aligned and not repeats:
                tiles += [itemsize]
            elif operand.kind.columns:  # 16 elements in two rows, of this subtile and the next; the rows' addresses
                vectors += 2 * (16 if operand.kind.rows else 8) * itemsize // 4 + 4 * operand.kind.rows
            else:
                vectors += 2 * (1 + operand.kind.rows)
        outputs = [name.partition("[")[0] for name in self.writes]
        outputs = [name for name in outputs if self.outputs[name] not in COLUMNS]
        mufu, fma = expression.cost
        return EpilogueCost(
            tuple(ITEMSIZE[problem.dtypes[name]] for name in outputs), tuple(tiles), self.packed, blocks, vectors,
            _live(expression), mufu, fma + len(words), math.lcm(*sizes(expression)),
        )  # fmt: skip

    def workspace(self, problem: Problem, config: Config) -> dict[str, Array | None]:
        """The workspace of reductions of rows: partial results, of each tile."""
        partials = GemmConfig.of(config).row_partials(problem.size("n"), self.packed)
        words = split(self.expression(problem.attrs)).reductions
        return {ROW_PARTIALS: Array((problem.size("m"), partials, len(words)), "float32")}


def _with_acc(expression: Expression) -> Expression:
    """An expression with its first operand as one more output."""
    graph = Graph(expression.operands)
    nodes = copied(expression, graph)
    acc = [graph.operand(0, half) for half in expression.operands[0].halves]
    return graph.finish([*(nodes[i] for i in expression.outputs), *acc])


def _live(expression: Expression) -> int:
    """The most values that are needed at once while nodes are computed in order."""
    last = {arg: i for i, node in enumerate(expression.nodes) for arg in node.args}
    last |= dict.fromkeys(expression.outputs, len(expression.nodes))
    values = [i for i, node in enumerate(expression.nodes) if node.word not in ("constant", "n")]
    return max(sum(j <= i < last.get(j, j) for j in values) for i in range(len(expression.nodes)))
