"""The words of an expression: what each takes and gives, and what its device function costs.

A word's other columns stand where they are used, in tables with the same keys: its reference in
:mod:`cute_ops.expressions.reference`, its derivative in :mod:`cute_ops.expressions.derivative`, its device function in
:mod:`cute_ops.kernels.emit.words`. Names are those of the array API where it has the function. A test holds that no
table lacks a word.
"""

from __future__ import annotations

from typing import NamedTuple


class Word(NamedTuple):
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


WORDS = {
    "add": Word("ff", commutes=True),
    "subtract": Word("ff"),
    "multiply": Word("ff", commutes=True),
    "divide": Word("ff", mufu=1),
    "negative": Word("f"),
    "reciprocal": Word("f", mufu=1, fma=0),
    "square": Word("f"),
    "sqrt": Word("f", mufu=1, fma=0),
    "rsqrt": Word("f", mufu=1, fma=0),
    "abs": Word("f"),
    "sign": Word("f", fma=4),
    "floor": Word("f", mufu=1, fma=0),
    "exp": Word("f", mufu=1, fma=6),
    "exp2": Word("f", mufu=1, fma=0),
    "log": Word("f", fma=19),
    "log1p": Word("f", fma=18),
    "tanh": Word("f", mufu=2, fma=12),
    "sigmoid": Word("f", mufu=2, fma=2),
    "softplus": Word("f", mufu=1, fma=17),
    "erf": Word("f", mufu=1, fma=18),
    "ndtr": Word("f", mufu=2, fma=15),
    "relu": Word("f"),
    "silu": Word("f", mufu=2, fma=3),
    "gelu": Word("f", mufu=2, fma=16),
    "gelu_tanh": Word("f", mufu=2, fma=6),
    "minimum": Word("ff", commutes=True),
    "maximum": Word("ff", commutes=True),
    "clip": Word("fff", fma=2),
    "where": Word("bff"),
    "astype": Word("f", mufu=1, fma=0),
    "equal": Word("ff", "b", commutes=True),
    "less": Word("ff", "b"),
    "less_equal": Word("ff", "b"),
    "logical_and": Word("bb", "b", fma=0, commutes=True),
    "logical_or": Word("bb", "b", fma=0, commutes=True),
    "logical_not": Word("b", "b", fma=0),
    "rotate_half": Word("f", grouped=True),
    "group_sum": Word("f", fma=2, grouped=True),
    "group_max": Word("f", fma=2, grouped=True),
    "sum": Word("f", reduces=True),
    "mean": Word("f", reduces=True),
    "max": Word("f", reduces=True),
    "min": Word("f", reduces=True),
}
# What `astype` rounds to. Values are float32 otherwise.
ROUNDS_TO = ("float16", "bfloat16", "float8_e4m3fn")
# What `astype` of an output says of its dtype: one of these, or the dtype of the operand of this number, ``dtype0``.
STORED_AS = ("float32", "float16", "bfloat16")
LIKE = "dtype"
# Those that the array API lacks, which the package offers as functions of their own.
FUNCTIONS = ("erf", "exp2", "gelu", "gelu_tanh", "ndtr", "relu", "rsqrt", "sigmoid", "silu", "softplus")
# What a namespace offers: words, and what is written with other words.
OFFERED = frozenset(WORDS) | {"arange", "greater", "greater_equal", "group_mean", "not_equal", "pow"}
