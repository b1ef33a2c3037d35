"""What is wrong with a declaration, found where it is made: a framework would refuse it later, in other words."""

from __future__ import annotations

from cute_ops.declaration.checks import dims, gradient, lists, names, tensors
from cute_ops.declaration.fields import Declaration
from cute_ops.declaration.messages import renamed

# Basic mistakes come first. An op with lists is checked again without them, once it is unrolled.
_ALWAYS = (lists.problems,)
_UNROLLED = (names.problems, tensors.problems, dims.problems, gradient.problems)


def check(op: Declaration) -> None:
    """Raise ValueError for the first thing that is wrong with a declaration."""
    for problems in _ALWAYS if op.numbers else (*_ALWAYS, *_UNROLLED):
        for problem in problems(op):
            raise ValueError(renamed(f"op {op.name}: {problem}", op.aliases))
