"""Random expressions, as programs that run on arrays of any framework, and ops of several of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from cute_ops import Case, Op, fused, testing
from cute_ops.declaration.shapes import FLOATS as DTYPES
from cute_ops.expressions import evaluate, reference, trace
from cute_ops.expressions.graph import Expression
from cute_ops.expressions.primitives import PRIMITIVES

OPERANDS = {"x": "*m n", "y": "*m n", "bias": "n", "scale": "*m 1", "s": "", "packed": "*m 2n", "mask": "bool *m n"}
FLOATS = [name for name in OPERANDS if name != "mask"]
ROW = {"axis": -1, "keepdims": True}

# Arguments are brought to where the function is smooth.
NEAR = {
    "exp": ["tanh"], "exp2": ["tanh"], "log": ["square", "plus"], "log1p": ["square"],
    "log2": ["square", "plus", "exp2"], "sqrt": ["square", "plus"],
    "rsqrt": ["square", "plus"], "reciprocal": ["square", "plus"],
}  # fmt: skip


class Step(NamedTuple):
    """A primitive of earlier values; a number stands for itself."""

    primitive: str
    args: tuple[int | float, ...]


class Program(NamedTuple):
    """Steps whose first values are the operands' (of a packed one both halves), and the values that are returned."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def __call__(self, primitives: Mapping[str, Any], given: Mapping[str, Any], n: Any) -> tuple[Any, ...]:
        values = [given[name] for name in FLOATS if name != "packed"]
        values += [given["packed"][..., :n], given["packed"][..., n:], given["mask"]]
        for primitive, args in self.steps:
            read = [values[x] if isinstance(x, int) else x for x in args]
            values.append(OPERATORS[primitive](*read) if primitive in OPERATORS else primitives[primitive](*read))
        return tuple(values[i] for i in self.outputs)

    def written(self, xp: Any, **given: Any) -> tuple[Any, ...]:
        """As a user writes it."""
        primitives: dict[str, Any] = {name: getattr(xp, name) for name in PRIMITIVES if not PRIMITIVES[name].reduces}
        primitives |= {name: lambda x, name=name: getattr(xp, name)(x, **ROW) for name in REDUCTIONS}
        return self(primitives, given, given["packed"].shape[-1] // 2)

    def traced(self) -> Expression:
        return trace(self.written, OPERANDS)


OPERATORS: Mapping[str, Any] = {
    "add": lambda x, y: x + y, "subtract": lambda x, y: x - y, "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / (y * y + 1.5), "plus": lambda x: x + 0.3, "negative": lambda x: -x,
    "cube": lambda x: x**3,
}  # fmt: skip
REDUCTIONS = [name for name, primitive in PRIMITIVES.items() if primitive.reduces]
UNARY = [
    *(n for n, p in PRIMITIVES.items() if p.takes == "f" and not (p.reduces or p.grouped or n == "astype")),
    "cube",
]  # fmt: skip


def program(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    floats, bools, columns = list(range(7)), [7], {0, 1, 2, 5, 6}  # of the values; those that have columns
    steps: list[Step] = []

    def add(primitive: str, *args: int | float) -> int:
        steps.append(Step(primitive, args))
        new = 7 + len(steps)
        if primitive not in REDUCTIONS and any(isinstance(x, int) and x in columns for x in args):
            columns.add(new)
        return new

    def some(kind: list[int]) -> int:
        return kind[-1 - min(int(rng.exponential(2.5)), len(kind) - 1)]

    columns.add(7)
    while len(steps) < rng.integers(3, 14):
        choice = rng.random()
        if choice < 0.45:
            primitive, x = str(rng.choice(UNARY)), some(floats)
            for before in NEAR.get(primitive, []):
                x = add(before, x)
            floats.append(add(primitive, x))
        elif choice < 0.75:
            primitive = str(rng.choice(["add", "subtract", "multiply", "divide", "minimum", "maximum"]))
            constant = primitive not in ("minimum", "maximum") and rng.random() < 0.3
            floats.append(
                add(primitive, some(floats), float(rng.choice([1, -1, 2, 0.25, 0.7, -3])) if constant else some(floats))
            )
        elif choice < 0.83:
            comparison = str(rng.choice(["less", "less_equal", "equal", "logical_and", "logical_or", "logical_not"]))
            pool = bools if comparison.startswith("logical") else floats
            bools.append(add(comparison, *(some(pool) for _ in PRIMITIVES[comparison].takes)))
        elif choice < 0.9:
            floats.append(add("where", some(bools), some(floats), some(floats)))
        elif choice < 0.93:
            floats.append(add("clip", some(floats), -0.7, 0.9))
        elif floats[-1] in columns:
            floats.append(add(str(rng.choice(REDUCTIONS)), floats[-1]))
    outputs = [floats[-1]] + ([some(floats)] if rng.random() < 0.3 else [])
    return Program(tuple(steps), tuple(outputs))


class Drawn(NamedTuple):
    """An op of several programs, inputs for it, and their shapes and dtype: what its kernels are checked with."""

    op: Op
    programs: tuple[Program, ...]
    arrays: dict[str, np.ndarray]
    case: Case
    dtype: str

    def calls(self, arrays: dict[str, np.ndarray] | None = None, seed: int = 0) -> list[tuple[Op, dict[str, Any]]]:
        """The op's; its gradient's, for each output with no other cotangent than its own; that with all of them."""
        arrays = arrays or self.arrays
        rng = np.random.default_rng(seed)
        outputs = dict(zip(self.op.outputs, testing.run_reference(self.op, arrays, {}), strict=True))
        given = {
            f"d{name}": testing.as_dtype(rng.standard_normal(out.shape, np.float32), str(out.dtype))
            for name, out in outputs.items()
        }
        found = [(self.op, arrays)]
        for only in (*given, None):
            every = {name: c if only in (name, None) else np.zeros_like(c) for name, c in given.items()}
            every |= arrays | outputs
            found.append((self.op.grad, {name: every[name] for name in self.op.grad.inputs}))
        return found

    def more(self, call: int) -> Iterator[dict[str, Any]]:
        """Inputs like those of a call, by which the reference's loss is measured. Meanwhile its primitives in float32
        are off by up to :data:`UNITS`, as device functions are: this is what an expression of them may lose. Equal
        values stay equal.
        """
        table: dict[str, Any] = reference.REFERENCE  # type: ignore[assignment]
        exact = {name: table[name] for name in ROUNDED}
        draws = islice(clear_inputs(self.op, self.programs, self.case, self.dtype, range(1, 33)), 8)
        try:
            for salt, arrays in enumerate([*[self.arrays] * 8, *draws]):
                given = self.calls(arrays, salt)[call][1]
                table.update({name: _moved(primitive, 7919 * salt) for name, primitive in exact.items()})
                yield given
                table.update(exact)
        finally:
            table.update(exact)


# Programs of an op: their kernels compile together, and their gradients are told apart by which cotangents are 0.
TOGETHER = 5
# An element of a program decides clearly if what it compares differs by so many times the error in float32.
CLEAR = 64


def drawn(seed: int, count: int) -> Iterator[Drawn]:
    """Ops of at least ``count`` programs that kernels can compute, each on a random problem."""
    rng, pools, made = np.random.default_rng(seed), {False: [], True: []}, 0
    while made < count:
        one = program(int(rng.integers(2**31)))
        expression = one.traced()
        if not all(kind.rows for kind in expression.output_kinds):
            continue
        # Kernels of rows are others than those of elements.
        pool = pools[any(node.primitive in REDUCTIONS for node in expression.nodes)]
        pool.append(one)
        if len(pool) < TOGETHER:
            continue
        op, (case, dtype) = of_programs(pool, f"drawn_{seed}_{made}"), problem(rng)
        for arrays in islice(clear_inputs(op, pool, case, dtype, range(16)), 1):
            yield Drawn(op, tuple(pool), arrays, case, dtype)
            made += TOGETHER
        pool.clear()


def problem(rng: np.random.Generator) -> tuple[Case, str]:
    """A shape, and dtypes."""
    dtype = str(rng.choice(DTYPES))
    own = {f"T_{name}": str(rng.choice([dtype, "float32"])) for name in ("bias", "scale", "s")}
    n = int(rng.integers(1, 50)) * int(rng.choice([1, 8]))
    return Case("drawn", {"m": [(3,), (2, 3), (17,)][rng.integers(3)], "n": n}, dtypes=own), dtype


def of_programs(programs: Sequence[Program], name: str) -> Op:
    """An op that has the outputs of all of them; its mask is of numbers."""
    kept = tuple(programs)

    def function(xp: Any, mask: Any, **given: Any) -> tuple[Any, ...]:
        return tuple(out for one in kept for out in one.written(xp, mask=mask != 0, **given))

    return fused(function, operands={**OPERANDS, "mask": "*m n"}, name=name)


def clear_inputs(
    op: Op, programs: Sequence[Program], case: Case, dtype: str, seeds: Iterable[int]
) -> Iterator[dict[str, np.ndarray]]:
    """Of these draws those on which all programs decide clearly."""
    for seed in seeds:
        arrays = testing.inputs(op, case, dtype, seed)
        arrays["mask"] = (arrays["mask"] > 0).astype(arrays["mask"].dtype)
        if all(decides_clearly(one, arrays) for one in programs):
            yield arrays


def decides_clearly(one: Program, arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether float32 arithmetic takes the same side as exact arithmetic wherever a program, or its derivative, has
    two, and whether no value overflows.
    """
    every = one._replace(outputs=tuple(range(8 + len(one.steps)))).traced()
    with np.errstate(all="ignore"):
        low, exact = (
            evaluate(every, np, [a != 0 if name == "mask" else a.astype(kind) for name, a in arrays.items()])
            for kind in (np.float32, np.float64)
        )
        if not all(np.isfinite(value).all() for value in low):
            return False
        for primitive, args in one.steps:
            for distance in DISTANCES.get(primitive, ()):
                near, right = (
                    distance(*(values[x] if isinstance(x, int) else x for x in args)) for values in (low, exact)
                )
                noise = np.abs(right - near).max(initial=0)
                if not ((np.abs(right) > CLEAR * noise) | (right == 0) & (near == 0)).all():
                    return False
    return True


def _lead(x: np.ndarray) -> np.ndarray:
    """By how much each row's largest element exceeds the next one."""
    two = np.sort(x, axis=-1)[..., -2:]
    return two[..., -1] - two[..., 0] if two.shape[-1] == 2 else np.ones(x.shape[:-1])


# How far an element is from where its primitive, or that one's derivative, jumps.
DISTANCES: Mapping[str, Sequence[Callable[..., np.ndarray]]] = {
    **{name: [lambda x: x] for name in ("abs", "relu", "sign")},
    **{name: [np.subtract] for name in ("equal", "less", "less_equal", "maximum", "minimum")},
    "clip": [lambda x, low, high: x - low, lambda x, low, high: x - high],
    "floor": [lambda x: x - np.rint(x)],
    "round": [lambda x: x - np.floor(x) - 0.5],
    "max": [_lead],
    "min": [lambda x: _lead(-x)],
}

_EXACT = ("abs", "cube", "floor", "negative", "relu", "round", "sign", "square", "stop_gradient")
# Primitives whose device functions lose up to so many units in the last place: 2 in the hardware's, which ours combine.
ROUNDED = ["divide", *(n for n in UNARY if n not in _EXACT)]
UNITS = 4


def _moved(primitive: Callable[..., Any], salt: int) -> Callable[..., Any]:
    def run(xp: Any, *args: Any) -> Any:
        value = primitive(xp, *args)
        if value.dtype != np.float32:
            return value
        mixed = (value.view(np.uint32) + np.uint32(salt)) * np.uint32(2654435761)
        return value * (1 + (mixed * 2.0**-31 - 1) * UNITS * 2.0**-23).astype(np.float32)

    return run
