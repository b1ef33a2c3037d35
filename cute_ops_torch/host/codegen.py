"""Python source that is generated at run time: the functions of the hot path.

A loop over a call's arguments costs more host time than the rest of a warm call (2 us), so four functions are written
out with the arguments of their op: the public function, a guarded call, the call of a compiled kernel and the calls of
a program. All other host code is plain Python. Tracebacks and debuggers show the generated lines, because each source
is in ``linecache`` under a file name of its own, ``<cute_ops rmsnorm.guarded>``, for as long as a function of it
exists.

Names that do not come from the op start with an underscore, which no argument does.
"""

from __future__ import annotations

import linecache
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import lru_cache
from inspect import Signature, signature
from itertools import count
from types import CodeType
from typing import Any

Call = Callable[..., Any]

# The public function of an op: looks a warm call up by the shape of its first input. What it uses is in its closure:
# torch.compile would look globals up in the module that the function claims to be from.
FUNCTION = """
def make({values}):
    def {name}({parameters}):
        {before}if _compiling() or _function_modes() or _profiled():
            {constants}_out = _overload({arguments})
        else:
            try:
                _known = _get({first}.shape) if type({first}) in _exact else None
            except (TypeError, RuntimeError):  # a symbolic shape has no hash, a nested tensor no shape
                _known = None
            _out = None if _known is None else _known({arguments})
            if _out is None:
                _out = _specialize({arguments})
        return {returned}
    return {name}
"""

# A call like an earlier one takes the short way, others go on to the next function for their shape.
GUARDED = """
def make(_otherwise, {values}):
    def {name}({parameters}):
        try:
            _fits = {condition}
        except (RuntimeError, ValueError, OverflowError):  # an attribute that is an array is neither equal nor not
            _fits = False
        if _fits:
            return {result}
        return _otherwise({arguments})
    return {name}
"""

# Allocates what a compiled kernel writes and calls it.
KERNEL_CALL = """
def make({values}):
    def {name}({parameters}):
{allocations}        _kernel({arguments})
{finish}        return {outputs}
    return {name}
"""

# Repeats what a program ran, one call a line.
RECORDED = """
def make({values}):
    def {name}({parameters}):
{body}        return {returned}
    return {name}
"""

_lock = threading.Lock()


def maker(template: str, label: str, values: Iterable[str], **texts: str) -> Call:
    """``make(**values)`` of a filled template: returns a new function with these values in its closure. ``label``, for
    the file name, is op and kind, ``rmsnorm.guarded``; ``texts`` are what else the template asks for.
    """
    source = template.format(values=", ".join(values), **texts)
    # torch.compile limits recompiles per code object, so public functions do not share theirs.
    return _compiled(source, label) if template is FUNCTION else _shared(source, label)


def public_signature(function: Call, missing: object) -> Signature:
    """The parameters of a function that users give; a default that is ``missing`` stands for none."""
    own = [p for p in signature(function).parameters.values() if p.name not in ("_more", "_others")]
    return Signature([p.replace(default=p.empty) if p.default is missing else p for p in own])


@lru_cache(1024)
def _shared(source: str, label: str) -> Call:
    """Compiling takes 0.2 ms, and calls of other shapes have the same source."""
    return _compiled(source, label)


def _compiled(source: str, label: str) -> Call:
    with _lock:
        names = (f"<cute_ops {label}{f' {k}' if k else ''}>" for k in count())
        file = next(name for name in names if name not in linecache.cache)
        # No time of change: `linecache.checkcache` leaves such entries alone.
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    space: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, file, "exec"), space)
    make: Call = space["make"]
    (inner,) = (c for c in make.__code__.co_consts if isinstance(c, CodeType))
    weakref.finalize(inner, linecache.cache.pop, file, None).atexit = False
    return make
