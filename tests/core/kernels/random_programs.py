"""Random expressions, as programs that run on arrays of any framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cute_ops.expressions import trace
from cute_ops.expressions.graph import Expression
from cute_ops.expressions.words import WORDS

OPERANDS = {"x": "*m n", "y": "*m n", "bias": "n", "scale": "*m 1", "s": "", "packed": "*m 2n", "mask": "bool *m n"}
FLOATS = [name for name in OPERANDS if name != "mask"]
ROW = {"axis": -1, "keepdims": True}

# Arguments are brought to where the function is smooth.
NEAR = {
    "exp": ["tanh"], "exp2": ["tanh"], "log": ["square", "plus"], "log1p": ["square"], "sqrt": ["square", "plus"],
    "rsqrt": ["square", "plus"], "reciprocal": ["square", "plus"],
}  # fmt: skip


class Step(NamedTuple):
    """A word of earlier values; a number stands for itself."""

    word: str
    args: tuple[int | float, ...]


class Program(NamedTuple):
    """Steps whose first values are the operands' (of a packed one both halves), and the values that are returned."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def __call__(self, words: Mapping[str, Any], given: Mapping[str, Any], n: Any) -> tuple[Any, ...]:
        values = [given[name] for name in FLOATS if name != "packed"]
        values += [given["packed"][..., :n], given["packed"][..., n:], given["mask"]]
        for word, args in self.steps:
            read = [values[x] if isinstance(x, int) else x for x in args]
            values.append(OPERATORS[word](*read) if word in OPERATORS else words[word](*read))
        return tuple(values[i] for i in self.outputs)

    def traced(self) -> Expression:
        def function(xp: Any, **given: Any) -> Any:
            words: dict[str, Any] = {name: getattr(xp, name) for name in WORDS if not WORDS[name].reduces}
            words |= {name: lambda x, name=name: getattr(xp, name)(x, **ROW) for name in REDUCTIONS}
            return self(words, given, given["packed"].shape[-1] // 2)

        return trace(function, OPERANDS)


OPERATORS: Mapping[str, Any] = {
    "add": lambda x, y: x + y, "subtract": lambda x, y: x - y, "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / (y * y + 1.5), "plus": lambda x: x + 0.3, "negative": lambda x: -x,
    "cube": lambda x: x**3,
}  # fmt: skip
REDUCTIONS = [name for name, word in WORDS.items() if word.reduces]
UNARY = [
    *(n for n, word in WORDS.items() if word.takes == "f" and not (word.reduces or word.grouped or n == "astype")),
    "cube",
]  # fmt: skip


def program(seed: int) -> Program:
    rng = np.random.default_rng(seed)
    floats, bools, columns = list(range(7)), [7], {0, 1, 2, 5, 6}  # of the values; those that have columns
    steps: list[Step] = []

    def add(word: str, *args: int | float) -> int:
        steps.append(Step(word, args))
        new = 7 + len(steps)
        if word not in REDUCTIONS and any(isinstance(x, int) and x in columns for x in args):
            columns.add(new)
        return new

    def some(kind: list[int]) -> int:
        return kind[-1 - min(int(rng.exponential(2.5)), len(kind) - 1)]

    columns.add(7)
    while len(steps) < rng.integers(3, 14):
        choice = rng.random()
        if choice < 0.45:
            word, x = str(rng.choice(UNARY)), some(floats)
            for before in NEAR.get(word, []):
                x = add(before, x)
            floats.append(add(word, x))
        elif choice < 0.75:
            word = str(rng.choice(["add", "subtract", "multiply", "divide", "minimum", "maximum"]))
            constant = word not in ("minimum", "maximum") and rng.random() < 0.3
            floats.append(
                add(word, some(floats), float(rng.choice([1, -1, 2, 0.25, 0.7, -3])) if constant else some(floats))
            )
        elif choice < 0.83:
            comparison = str(rng.choice(["less", "less_equal", "equal", "logical_and", "logical_or", "logical_not"]))
            pool = bools if comparison.startswith("logical") else floats
            bools.append(add(comparison, *(some(pool) for _ in WORDS[comparison].takes)))
        elif choice < 0.9:
            floats.append(add("where", some(bools), some(floats), some(floats)))
        elif choice < 0.93:
            floats.append(add("clip", some(floats), -0.7, 0.9))
        elif floats[-1] in columns:
            floats.append(add(str(rng.choice(REDUCTIONS)), floats[-1]))
    outputs = [floats[-1]] + ([some(floats)] if rng.random() < 0.3 else [])
    return Program(tuple(steps), tuple(outputs))
