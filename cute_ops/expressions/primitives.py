"""The primitives of an expression: what each takes and gives, and what its device function costs.

A primitive's other columns stand where they are used, in tables with the same keys: its reference in
:mod:`cute_ops.expressions.reference`, its derivative in :mod:`cute_ops.expressions.derivative`, its device function in
:mod:`cute_ops.kernels.emit.primitives`. Names are those of the array API where it has the function. A test holds that
no table lacks a primitive.
"""

from __future__ import annotations

from typing import NamedTuple


class Primitive(NamedTuple):
    """One function of the elements.

    Attributes:
        takes: one letter per argument, ``f`` for a float32 and ``b`` for a bool.
        gives: the letter of the result.
        mufu: instructions of the device function that an SM does 16 of per cycle: exponentials, reciprocals, roots,
            rounding to integers and to bfloat16.
        fma: its other float32 instructions, of which an SM does 128 per cycle.
        commutes: the order of the arguments does not matter; the graph sorts them.
        reduces: it combines a row's elements to one.
        grouped: it looks at whole groups of columns, whose size it is given: heads of a projection, blocks of scales.
    """

    takes: str
    gives: str = "f"
    mufu: int = 0
    fma: int = 1
    commutes: bool = False
    reduces: bool = False
    grouped: bool = False


PRIMITIVES = {
    "add": Primitive("ff", commutes=True),
    "subtract": Primitive("ff"),
    "multiply": Primitive("ff", commutes=True),
    "divide": Primitive("ff", mufu=1),
    "negative": Primitive("f"),
    "reciprocal": Primitive("f", mufu=1, fma=0),
    "square": Primitive("f"),
    "sqrt": Primitive("f", mufu=1, fma=0),
    "rsqrt": Primitive("f", mufu=1, fma=0),
    "abs": Primitive("f"),
    "sign": Primitive("f", fma=4),
    "floor": Primitive("f", mufu=1, fma=0),
    "round": Primitive("f", mufu=1, fma=0),
    "sin": Primitive("f", mufu=1, fma=20),
    "cos": Primitive("f", mufu=1, fma=20),
    "exp": Primitive("f", mufu=1, fma=6),
    "exp2": Primitive("f", mufu=1, fma=0),
    "log": Primitive("f", fma=19),
    "log1p": Primitive("f", fma=18),
    "log2": Primitive("f", mufu=1, fma=0),
    "tanh": Primitive("f", mufu=2, fma=12),
    "sigmoid": Primitive("f", mufu=2, fma=2),
    "softplus": Primitive("f", mufu=1, fma=17),
    "erf": Primitive("f", mufu=1, fma=18),
    "ndtr": Primitive("f", mufu=2, fma=15),
    "relu": Primitive("f"),
    "silu": Primitive("f", mufu=2, fma=3),
    "gelu": Primitive("f", mufu=2, fma=16),
    "gelu_tanh": Primitive("f", mufu=2, fma=6),
    "minimum": Primitive("ff", commutes=True),
    "maximum": Primitive("ff", commutes=True),
    "clip": Primitive("fff", fma=2),
    "where": Primitive("bff"),
    "astype": Primitive("f", mufu=1, fma=0),
    "equal": Primitive("ff", "b", commutes=True),
    "less": Primitive("ff", "b"),
    "less_equal": Primitive("ff", "b"),
    "logical_and": Primitive("bb", "b", fma=0, commutes=True),
    "logical_or": Primitive("bb", "b", fma=0, commutes=True),
    "logical_not": Primitive("b", "b", fma=0),
    "stop_gradient": Primitive("f", fma=0),
    "rotate_half": Primitive("f", grouped=True),
    "group_sum": Primitive("f", fma=2, grouped=True),
    "group_max": Primitive("f", fma=2, grouped=True),
    "sum": Primitive("f", reduces=True),
    "mean": Primitive("f", reduces=True),
    "max": Primitive("f", reduces=True),
    "min": Primitive("f", reduces=True),
}
# What `astype` rounds to. Values are float32 otherwise.
ROUNDS_TO = ("float16", "bfloat16", "float8_e4m3fn")
# What `astype` of an output says of its dtype: one of these, or the dtype of the operand of this number, ``dtype0``.
STORED_AS = ("float32", "float16", "bfloat16")
LIKE = "dtype"
# Primitives that the array API lacks; the package offers them as functions.
FUNCTIONS = ("erf", "exp2", "gelu", "gelu_tanh", "ndtr", "relu", "rsqrt", "sigmoid", "silu", "softplus")
# The names that a namespace offers: primitives, and functions that are written with them.
OF_ROWS = (*(name for name, each in PRIMITIVES.items() if each.reduces), "logsumexp", "softmax", "std", "var")
OFFERED = frozenset((*PRIMITIVES, *OF_ROWS, "arange", "greater", "greater_equal", "group_mean", "not_equal", "pow"))
