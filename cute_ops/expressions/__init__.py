"""One Python function in array-API style: the reference, what a kernel computes, and its derivative.

    from cute_ops.expressions import gelu, trace

    def gelu_add(xp, x, bias, residual):
        return gelu(x + bias) + residual

    expression = trace(gelu_add, {"x": "*m n", "bias": "n", "residual": "*m n"})
    text_of(expression)                                  # e1(t,r,t) add 0 1; gelu 3; add 2 4 -> 5
    evaluate(expression, numpy, [x, bias, residual])     # the reference
    differentiate(expression).expression                 # an expression, too

Primitives are functions of ``xp``, ``xp.gelu``. Those that the array API lacks are functions here, too, of symbols and
of arrays. Modules: ``primitives`` (which there are), ``graph`` (expressions), ``tracing`` and ``symbols`` (from a
function), ``simplify`` and ``recognize`` (while it is traced), ``text`` (as text, and back), ``reference`` (on arrays),
``derivative``, ``stages`` (of reductions). Kernels import ``text`` and what it needs, so that this package imports
nothing by itself.
"""

from functools import partial
from importlib import import_module
from typing import Any

_HOMES = {
    "Expression": "graph", "TraceError": "symbols", "differentiate": "derivative", "digest": "text",
    "evaluate": "reference", "parse": "text", "text_of": "text", "trace": "tracing",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in import_module(f"{__name__}.primitives").FUNCTIONS:
        return partial(import_module(f"{__name__}.tracing").call, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
