"""A linear layer's product with an epilogue: declaration, reference and config follow from the epilogue's expression.

Ops made here are not among :data:`cute_ops.ops.OPS`: each belongs to whoever wrote its epilogue.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

from cute_ops.declaration.array_api import cast
from cute_ops.declaration.attributes import defaults_of
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.case import Case
from cute_ops.declaration.config import Config, Problem, Tuning
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import FUSED, Fallback, ProductPlan, Program
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE, Array
from cute_ops.declaration.split import Sharding
from cute_ops.declaration.tensor import Accumulation, Tensor
from cute_ops.errors import suggesting
from cute_ops.expressions.graph import SHAPES, Expression, Graph, copied
from cute_ops.expressions.groups import REDUCTIONS, reads, reduced, sizes
from cute_ops.expressions.primitives import LIKE
from cute_ops.expressions.reference import evaluate
from cute_ops.expressions.stages import levels, split
from cute_ops.expressions.text import parse, text_of
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.kernels.gemm.config import ROW_PARTIALS, GemmConfig
from cute_ops.ops.batches import CASES as BATCHES
from cute_ops.ops.batches import each
from cute_ops.ops.expression.formula import COLUMN, ByAttrs, Formula, period, repeated, shape_of
from cute_ops.ops.expression.pointwise import pointwise
from cute_ops.ops.expression.traces import Traces
from cute_ops.ops.gemm.choice import WIDE, fallback
from cute_ops.ops.gemm.config import SWIZZLED, EpilogueCost, GemmSize, space_of
from cute_ops.ops.gemm.gradient import ACC, Forward, Gradient, gradient
from cute_ops.ops.gemm.linear import (
    HALVES,
    check_rows,
    configure,
    exact,
    multiply,
    parts_of,
    product_of,
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
            rotated = x * cos + xp.rotate_half(x, 128) * sin
            return xp.where(xp.arange(acc.shape[-1]) < 128 * heads, rotated, acc)

        op = fused_linear(qk_norm_rope, operands={"norm": "n", "cos": "*m 64", "sin": "*m 64"}, attrs={"heads": 40})

    The op has one more attribute, ``fused``. ``"always"`` runs that kernel; ``"never"`` the framework's product and
    then one pass, between which the product is rounded to x's dtype, or to the one that ``dtypes`` has for ``acc``.
    ``"auto"`` runs the kernel where it was measured to be at least as fast (:func:`cute_ops.ops.gemm.choice.fallback`),
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
    _check_options(name, weight, save)
    traced = _Epilogue(
        name, epilogue, dict(operands or {}), packed="2n" in weight, outputs=outputs, defaults=defaults_of(attrs)
    )
    module = getattr(epilogue, "__module__", __name__)
    forward = traced.forward(weight, attrs, traced.output_dtypes(dtypes or {}, defaults_of(attrs)), module)
    how = Gradient(grad, no_gradient=no_gradient) if grad or forward.is_gradient else gradient(forward, save == "pre")
    # A copy of an operand costs little beside the product.
    read = {key: tensor._replace(otherwise="copy") for key, tensor in forward.operands.items()}
    product = _Product(
        name, traced, traced.alone(forward),
        inputs={"x": Tensor("*m k", "T", merged=True), "weight": forward.weight, **read}, outputs=forward.outputs,
        acc=forward.acc, attrs=attrs, module=module, check=check,
    )  # fmt: skip
    doc = None if isinstance(epilogue, str) else inspect.getdoc(epilogue)
    fields: dict[str, Any] = {
        "cases": cases,
        "called": called or name,
        "doc": doc or f"A product and ``{name}`` of it.",
    }
    saving = product.saving().op(**fields) if how.saves else None
    return product.op(
        grad=how.steps or None, handed_on=how.handed_on, saving=saving,
        no_gradient=how.no_gradient if how.steps else (), **fields,
    )  # fmt: skip


def _check_options(name: str, weight: str, save: str) -> None:
    if weight not in WEIGHTS:
        _refuse(name, f"weight has shape {weight!r}; shapes are {', '.join(map(repr, WEIGHTS))}")
    if save not in ("pre", "none"):
        _refuse(name, f"save is {save!r}, expected 'pre' or 'none'")


class _Reference(NamedTuple):
    """The reference of an op of a product, in array-API style.

    Attributes:
        epilogue: the epilogue.
        product: what is multiplied.
        outputs: the tensors that the values become.
        is_batch: whether each example has its own vectors and scalars.
    """

    epilogue: _Epilogue
    product: ProductPlan
    outputs: Mapping[str, Tensor]
    is_batch: bool

    def of_acc(self, xp: Any, acc: Any, x: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The outputs, computed from the product; ``arrays`` are the epilogue's other operands."""
        shapes = self.epilogue.operands
        given = [self._operand(xp, a, s, acc.shape[-1]) for a, s in zip(arrays, shapes.values(), strict=True)]
        values = iter(evaluate(self.epilogue.expression(attrs), xp, [acc, *given]))
        likes = {"T": x} | {f"T_{key}": array for key, array in zip(shapes, arrays, strict=True)}
        outs = []
        for tensor in self.outputs.values():
            out = xp.concat([next(values), next(values)], axis=-1) if "2n" in tensor.shape else next(values)
            out = out[..., 0] if tensor.shape == COLUMN else out
            like = likes.get(tensor.dtype)
            outs.append(cast(xp, out, tensor.dtype, out) if like is None else xp.astype(out, like.dtype))
        return tuple(outs)

    def _operand(self, xp: Any, array: Any, shape: str, columns: int) -> Any:
        if self.is_batch and shape in SHARED:
            return array[SHARED[shape]]
        if shape == COLUMN:
            return array[..., None]
        return repeated(xp, array, columns) if period(shape) else array


class _Product:
    """The declaration of a product with an epilogue, for one example or for each of a batch.

    Attributes:
        alone: the op of the epilogue alone; None where the framework computes that.
    """

    def __init__(
        self, name: str, epilogue: _Epilogue, alone: Op | None, *, inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor], acc: Tensor, attrs: Mapping[str, Any], module: str, check: Check | None,
        is_batch: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.epilogue, self.alone, self.acc = name, epilogue, alone, acc
        self.inputs, self.outputs, self.attrs = inputs, outputs, attrs
        self.module, self.check, self.is_batch = module, check, is_batch
        self.weight = inputs["weight"].shape.removeprefix("*b ")
        self.across = self.weight.startswith("k")
        self.kernel = f"{'Batched' * is_batch}{WEIGHTS[self.weight]}"
        self.multiplied = product_of(self.kernel, acc.dtype)
        self.reference = _Reference(epilogue, self.multiplied, outputs, is_batch)

    def saving(self) -> _Product:
        """The declaration with the product as one more output."""
        return self._with(f"{self.name}_saving", self.epilogue.with_acc(), outputs={**self.outputs, ACC: self.acc})

    def batched(self) -> _Product:
        """The declaration for each example of a batch."""
        # A column vector has no contiguous dim.
        inputs = {key: t._replace(contiguous=()) if t.shape == "*b m" else t for key, t in each(self.inputs).items()}
        return self._with(
            f"{self.name}_batched", self.epilogue, alone=self.alone and self.alone.batched, inputs=inputs,
            outputs=each(self.outputs), is_batch=True,
        )  # fmt: skip

    def _with(self, name: str, epilogue: _Epilogue, **changed: Any) -> _Product:
        fields = {key: getattr(self, key) for key in ("alone", "inputs", "outputs", "acc")}
        fields |= {key: getattr(self, key) for key in ("attrs", "module", "check", "is_batch")}
        return _Product(name, epilogue, **{**fields, **changed})

    def op(self, **more: Any) -> Op:
        """The op; ``more``: other arguments of :class:`Op`."""
        computed, epilogue, called = self.reference, self.epilogue, more["called"]

        def reference(xp: Any, x: Any, weight: Any, *arrays: Any, fused: str = "", **attrs: Any) -> tuple[Any, ...]:
            return computed.of_acc(xp, exact(xp, computed.product, x, weight), x, arrays, attrs)

        def config(problem: Problem) -> GemmConfig:
            if epilogue.late:
                raise ValueError(f"cute.{called}: {LATE}: {epilogue.late}")
            check_rows(op, problem)
            return self.config(problem)

        reference.__module__ = self.module
        summed = Accumulation(("k",))
        op = Op(
            self.name, inputs=self.inputs, reference=reference, static=(), check=self.problem,
            outputs={key: t._replace(accumulates=summed) for key, t in self.outputs.items()},
            tuning=Tuning(config, space_of(SIZES, self.cost, self.is_batch), self._workspace()),
            dtypes={"T": HALVES} | {f"T_{key}": FLOATS for key in epilogue.operands},
            kernel=f"cute_ops.kernels.gemm.linear:{self.kernel}",
            batched=partial(self._batched_op, more) if epilogue.by_element and not self.is_batch else None,
            sharding=Sharding(
                ("m",) * self.is_batch + ("n",) * (epilogue.by_element and not epilogue.packs),
                inner=("k",) * (not self.is_batch),
            ), attrs={**self.attrs, "fused": FUSED}, fallback=self._fallback(config), **more,
        )  # fmt: skip
        return op

    def _batched_op(self, more: Mapping[str, Any]) -> Op:
        known = {**more, "cases": BATCHES, "doc": f"The same for each example of a batch.\n\n    {more['doc']}"}
        if more.get("grad"):
            known["grad"] = tuple(step.batched for step in more["grad"])
        if more.get("saving"):
            known["saving"] = more["saving"].batched
        return self.batched().op(**known)

    def config(self, problem: Problem) -> GemmConfig:
        """The heuristic."""
        epilogue, n, k, start = self.epilogue, problem.size("n"), problem.size("k"), self._half_start(problem)
        second, by_tma = vector(problem, "weight", n if self.across else k)
        vectors = [vector(problem, "x", k), (second, by_tma and (self.weight != "k 2n" or start == VECTOR_BYTES))]
        wanted = self.cost(problem)
        by_rows = problem.contiguous.get("x", "k") == "k"
        lie = by_rows and not (self.across or self.is_batch or epilogue.groups or epilogue.reduces)
        chosen = configure(problem, vectors, self.size(problem), wanted, by_rows, lie)
        if wanted.group > 1 and chosen.form == "mma_sync":  # each warp then has all columns of its rows
            chosen = replace(chosen, warps_n=1)
        halves = start if epilogue.packs else VECTOR_BYTES
        return GemmConfig.of({**chosen.flat(), **epilogue.texts(problem.attrs), "half_align": halves})

    def size(self, problem: Problem) -> GemmSize:
        row = problem.size("n") * (1 + self.epilogue.packed) if self.across else problem.size("k")
        return GemmSize.of(problem, SIZES, (problem.size(problem.contiguous.get("x", "k")), row))

    def cost(self, problem: Problem) -> EpilogueCost:
        cost = self.epilogue.cost(problem, self._half_start(problem), SWIZZLED if self.across else 8)
        single = not self.is_batch
        return cost._replace(transposes=cost.transposes and single, parts=self.epilogue.by_element and single)

    def _half_start(self, problem: Problem) -> int:
        """Bytes, at most a vector's, that divide where second halves start."""
        return math.gcd(VECTOR_BYTES, problem.size("n") * ITEMSIZE[problem.dtypes["x"]])

    def _workspace(self) -> Callable[[Problem, Config], dict[str, Array | None]] | None:
        if self.epilogue.by_element and not self.is_batch:
            return partial(parts_of, sizes=SIZES, halves=1 + self.epilogue.packed)
        return self.epilogue.workspace if self.epilogue.reduces and not self.epilogue.late else None

    def problem(self, binding: Binding) -> str | None:
        """The error text for a call; empty if it is right."""
        late, attrs = self.epilogue.late, without_fused(binding.attrs)
        n, size = binding.dims["n"], math.lcm(*sizes(self.epilogue.expression(attrs)))
        if n % size:
            return f"argument `weight` has n={n}, no multiple of the {size} columns of a group."
        if late and binding.attrs["fused"] == "always":
            return f"attribute `fused` is 'always', but {LATE}: {late}. 'auto' and 'never' run it."
        return self.check(binding) if self.check else None

    def _fallback(self, config: Callable[[Problem], GemmConfig]) -> Fallback:
        """The framework's product, and a pass over it."""
        alone, epilogue = self.alone, self.epilogue
        if alone is None:
            return Fallback(Program(self._run), lambda problem: False, WIDE, ("x", "weight"))
        if epilogue.late:
            return Fallback(Program(self._run, (alone,)), lambda problem: LATE, WIDE, ("x", "weight"))
        plain = epilogue.by_element and not self.is_batch and len(self.outputs) == 1 and "2n" not in self.weight
        biased = plain and not self.attrs and {t.dtype for t in (self.acc, *self.outputs.values())} == {"T"}
        first = self.multiplied._replace(read_as=ACC, bias=epilogue.bias if biased else "")
        program = Program(self._run, alone.program.ops) if alone.program else Program(self._run, (alone,), first)
        adds = program.product is not None and bool(program.product.bias)  # cuBLAS does, too
        return fallback(program, config, lambda p: (self.size(p), self.cost(p)), after=not adds)

    def _run(self, xp: Any, call: Any, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, Any]:
        given, attrs, alone = dict(inputs), without_fused(attrs), self.alone
        given[ACC] = multiply(xp, self.multiplied, given["x"], given["weight"])
        if alone is None:
            import array_api_compat  # start-up time

            names, arrays = array_api_compat.array_namespace(given["x"]), [given[key] for key in self.epilogue.operands]
            return dict(
                zip(self.outputs, self.reference.of_acc(names, given[ACC], given["x"], arrays, attrs), strict=True)
            )
        read = {key: given[key] for key in alone.inputs}
        found = alone.program.run(xp, call, read, attrs) if alone.program else call(alone, read, attrs)
        return {key: given[ACC] if key == ACC else found[key] for key in self.outputs}


def without_fused(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The epilogue's own attributes."""
    return {key: value for key, value in attrs.items() if key != "fused"}


def _refuse(name: str, why: str) -> NoReturn:
    raise ValueError(f"cute_ops.fused_linear: {name} cannot be fused: {why}")


class _Epilogue:
    """An epilogue, traced once for each combination of attributes."""

    def __init__(
        self, name: str, epilogue: Callable[..., Any] | str, operands: dict[str, str], *, packed: bool,
        outputs: Mapping[str, str] | None, defaults: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.name, self.epilogue, self.operands, self.packed = name, epilogue, operands, packed
        self.shapes = {ACC: "*m 2n" if packed else "*m n"}
        self.shapes |= {key: shape_of(shape) for key, shape in operands.items()}
        self._check_operands(outputs or {})
        self._expressions = None if isinstance(epilogue, str) else self._of_function(epilogue, defaults)
        # Why no kernel computes it behind the product; empty where one does.
        self._traced, self.saves, self.late = ByAttrs(self._trace), False, ""
        self.outputs = self._output_shapes(outputs, self._traced(defaults))
        self.packs = any("2n" in shape for shape in (*self.shapes.values(), *self.outputs.values()))
        self.reduces = any(shape in COLUMNS for shape in self.outputs.values())
        # The tensors that the values are stored in; a packed one takes two.
        self.writes = [f"{key}{half}" for key, shape in self.outputs.items() for half in SHAPES[shape_of(shape)].halves]
        found = self.expression(defaults)
        self.groups = _looks_at_columns(found) or any(map(period, operands.values()))
        # Whether each element of an output depends on elements at its own place alone.
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

    def _output_shapes(self, outputs: Mapping[str, str] | None, expression: Expression) -> dict[str, str]:
        kinds = expression.output_kinds
        names = ("out",) if len(kinds) == 1 else tuple(f"out{i}" for i in range(len(kinds)))
        shapes = ["*m n" if kind.columns else "*m 1" for kind in kinds]
        found, known = dict(outputs or zip(names, shapes, strict=True)), ("*m n", "*m 2n", "*m 1", COLUMN)
        if wrong := [key for key, shape in found.items() if shape not in known]:
            listed = ", ".join(map(repr, known))
            _refuse(self.name, f"{wrong[0]} has shape {found[wrong[0]]!r}; shapes of outputs are {listed}")
        return found

    def output_dtypes(self, given: Mapping[str, str], defaults: Mapping[str, Any]) -> dict[str, str]:
        """The dtypes of outputs, or their variables; and of the product, if it has another one than x."""
        known = {ACC, *self.outputs}
        if wrong := [key for key, dtype in given.items() if key not in known or dtype not in FLOATS]:
            outputs = ", ".join(self.outputs)
            _refuse(self.name, f"dtypes has {wrong[0]!r}; outputs {outputs} may have {', '.join(FLOATS)}")
        usual = {key: "float32" if shape in COLUMNS else "T" for key, shape in self.outputs.items()}
        return usual | self.said(self.expression(defaults)) | dict(given)

    def forward(self, weight: str, attrs: Mapping[str, Any], dtypes: Mapping[str, str], module: str) -> Forward:
        """The product with this epilogue, as its gradient sees it."""
        # A pass that reduces rows reads the product as the kernels' epilogues do, unrounded.
        acc = Tensor(self.shapes[ACC], dtypes.get(ACC, "float32" if self.late else "T"), hidden=True)
        operands = {key: Tensor(shape, f"T_{key}") for key, shape in self.operands.items()}
        outputs = {key: Tensor(shape, dtypes[key]) for key, shape in self.outputs.items()}
        return Forward(
            self.name, Tensor(weight, "T"), operands, outputs, acc, self.expression, attrs, module, by=self.by
        )

    def with_acc(self) -> _Epilogue:
        """The epilogue with the product as one more output."""
        made = copy(self)
        made.saves, shape = True, self.shapes[ACC]
        made.outputs = {**self.outputs, ACC: shape}
        made.writes = [*self.writes, *(f"{ACC}{half}" for half in SHAPES[shape].halves)]
        made.packs = self.packs or "2n" in shape
        made._traced = ByAttrs(lambda attrs: _with_acc(self._traced(attrs)))
        return made

    def alone(self, forward: Forward) -> Op | None:
        """The op of the epilogue alone, which reads the product; None where the framework computes that."""
        if not (self.by_element or self.late):
            return None
        kinds = "".join("c" if self.outputs[key.partition("[")[0]] in COLUMNS else "t" for key in self.writes)
        reads, writes = (ACC, *forward.operands), tuple(self.writes)

        def formula(attrs: Mapping[str, Any]) -> Formula:
            return Formula(self.expression(attrs), not self.by_element, reads, writes, kinds, ACC)

        operands = {key: tensor._replace(otherwise="copy") for key, tensor in forward.operands.items()}
        inputs = {ACC: Tensor(forward.acc.shape, forward.acc.dtype), **operands}
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
        rotated = self._rotated(found)
        for i, (node, kind) in enumerate(zip(found.outputs, found.output_kinds, strict=True)):
            if kind.dtype == "bool":
                _refuse(self.name, f"value {i} holds bools; return xp.where(value, 1.0, 0.0)")
            if not (kind.rows and (kind.columns or levels(found)[node])):
                _refuse(self.name, f"value {i} does not have the shape '*m n': compute it from acc")
        self._check_groups(found)
        if tiles := [name for name in rotated if self.operands[name] in ("*m n", "*m 2n")]:
            _refuse(self.name, f"xp.rotate_half of the tile `{tiles[0]}`: use the tile after the rotation")
        return found

    def _rotated(self, expression: Expression) -> list[str]:
        """The operands that ``rotate_half`` reads."""
        try:
            every = [read for read in reads(expression) if read.operand]
        except ValueError as error:
            _refuse(self.name, str(error))
        return [list(self.operands)[read.operand - 1] for read in every if read.rotate]

    def _check_groups(self, expression: Expression) -> None:
        """Refuse groups of columns that no kernel computes."""
        if wrong := [size for size in sizes(expression) if size not in GROUPS]:
            _refuse(self.name, f"it has groups of {wrong[0]} columns; they have {', '.join(map(str, GROUPS))}")
        turns, groups = sizes(expression, "rotate_half"), sizes(expression, *REDUCTIONS)
        if len(groups) > 1 or any(size > groups[0] for size in turns if groups):
            _refuse(self.name, f"it has groups of {groups[0]} columns, which are reduced, and of {max(turns + groups)}")
        if others := [list(self.operands)[i - 1] for i in reduced(expression) if i]:
            _refuse(self.name, f"it reduces groups of `{others[0]}`; of acc and operands '*m 1' it may")

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

    def cost(self, problem: Problem, start: int, blocks: int) -> EpilogueCost:
        """The resources of an SM that the epilogue needs, if ``start`` bytes, at most 16, divide the offset of second
        halves, and ``blocks`` columns of the weight share a row of shared memory.
        """
        expression, primitives, _ = split(self.expression(problem.attrs))
        # A thread reduces two rows. A reduction of groups takes eight registers, for what it adds up and for results.
        tiles, vectors = [], 2 * len(primitives) + 8 * sum(node.primitive in REDUCTIONS for node in expression.nodes)
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
            _live(expression), mufu, fma + len(primitives), math.lcm(*sizes(expression)),
            self._transposes(problem, expression, outputs, len(tiles)),
        )  # fmt: skip

    def _transposes(self, problem: Problem, expression: Expression, outputs: Sequence[str], by_tma: int) -> bool:
        """Whether tiles may be of the output's transpose: where TMA takes all that has rows and columns, and no value
        depends on its column.
        """
        kinds = [expression.operands[read.operand].kind for read in reads(expression) if read.operand]
        whole = sum(kind.rows and kind.columns for kind in kinds)
        stored = all(problem.aligns.get(name) == VECTOR_BYTES for name in outputs)
        length = any(node.primitive == "n" for node in expression.nodes)
        return self.by_element and stored and whole == by_tma and not length

    def workspace(self, problem: Problem, config: Config) -> dict[str, Array | None]:
        """The workspace of reductions of rows: partial results, of each tile."""
        partials = GemmConfig.of(config).row_partials(problem.size("n"), self.packed)
        primitives = split(self.expression(problem.attrs)).reductions
        return {ROW_PARTIALS: Array((problem.size("m"), partials, len(primitives)), "float32")}


def _looks_at_columns(expression: Expression) -> bool:
    """Whether it computes with groups of columns, or with their numbers."""
    return bool(sizes(expression)) or any(node.primitive == "column" for node in expression.nodes)


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
    values = [i for i, node in enumerate(expression.nodes) if node.primitive not in ("constant", "n")]
    return max(sum(j <= i < last.get(j, j) for j in values) for i in range(len(expression.nodes)))
