"""Numbers of an op's call that torch.compile traces as constants.

An attribute is a compile-time constant of a kernel. Under ``dynamic=True`` Dynamo makes a symbol of each float that it
reads, defaults too, and two layers that are checkpointed cannot share one: each is a graph of its own, and Dynamo ends
with an AssertionError where the second reads what the first has read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch


def keep_constant(names: Collection[str]) -> Callable[[Any], None]:
    """A function for ``torch._dynamo.comptime``: floats among these variables of the code that calls it are constants,
    which a graph guards, unless that code has used them already.
    """

    def keep(context: Any) -> None:
        from torch._dynamo.guards import GuardBuilder, install_guard
        from torch._dynamo.variables import ConstantVariable, LazyVariableTracker

        held = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().symbolic_locals
        for name in names:
            variable = held.get(name)
            if isinstance(variable, LazyVariableTracker) and not variable.is_realized():
                value, source = variable.original_value(), variable.original_source()
                if type(value) is float:
                    install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
                    held[name] = ConstantVariable.create(value, source=source)

    return keep


_keep_value = keep_constant(("value",))


def static(value: Any) -> Any:
    """A number, which is a constant to torch.compile if it has not been used: see :func:`keep_constant`."""
    if torch.compiler.is_dynamo_compiling():
        from torch._dynamo.comptime import comptime  # start-up time; torch.compile has imported it

        comptime(_keep_value)
    return value
