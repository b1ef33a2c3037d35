"""The expressions of a function with attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cute_ops.constants import exact, state, values
from cute_ops.declaration.attributes import defaults_of
from cute_ops.expressions.graph import Expression
from cute_ops.expressions.text import text_of
from cute_ops.expressions.tracing import trace
from cute_ops.ops.expression.formula import Attrs, ByAttrs


class Traces(ByAttrs[Expression]):
    """The expressions of a function, which is traced once for each combination of attributes.

    The op has the numbers that the function refers to when it is declared. A combination that is traced later must not
    have others.
    """

    def __init__(self, name: str, function: Callable[..., Any], operands: Mapping[str, str], attrs: Attrs) -> None:
        super().__init__(self._trace)
        self._name, self._function, self._operands = name, function, dict(operands)
        self._defaults = defaults_of(attrs)
        self._first, self._state = trace(function, operands, self._defaults), state(function, "")

    def _trace(self, attrs: Attrs) -> Expression:
        if exact(dict(attrs)) == exact(self._defaults):
            return self._first
        same = self._state is not None and state(self._function, "") is self._state
        if not same and trace(self._function, self._operands, self._defaults) != self._first:
            raise ValueError(
                f"cute.{self._name}: what the function refers to has changed since the op was declared: declare it "
                "again, or make what changes an attribute or an operand"
            )
        return trace(self._function, self._operands, attrs)

    def __getstate__(self) -> Any:
        """The key of a function: its trace with the defaults, and all else that it may read.

        Raises:
            Unknown: it cannot be known what that is.
        """
        if not self._defaults:
            return text_of(self._first)
        return text_of(self._first), self._operands, values(self._function)
