"""The error types, and what messages say of names and values that came.

Misuse raises ``ValueError`` or ``TypeError``; a dtype, SM or rank that no kernel covers raises ``NotImplementedError``.
:mod:`cute_ops.declaration.messages` has the format of messages on a call of an op.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from inspect import Signature


P = ParamSpec("P")
R = TypeVar("R")
# What other libraries call our dtypes and arguments.
_ELSEWHERE = {
    "half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32", "epsilon": "eps",
}  # fmt: skip


class CompileError(RuntimeError):
    """A kernel did not compile. The message contains the compiler's output."""


class CacheError(RuntimeError):
    """The cache folder cannot be trusted or used. Says which folder and what to do."""


class Fields(dict[str, Any]):
    """Values by name that a kernel looks up: a name that is not there is an error that lists those that are."""

    def __init__(self, op: str, what: str, values: Iterable[tuple[str, Any]]) -> None:
        super().__init__(values)
        self._op, self._what = op, what

    def __missing__(self, name: str) -> Any:
        known = ", ".join(self) or "nothing"
        raise KeyError(f"op {self._op}: its {self._what} no {name!r}{meant(name, self)}, but {known}")


def meant(name: str, known: Iterable[str]) -> str:
    """A suggestion for an unknown name, `` (did you mean eps?)``; empty if no known name is close."""
    from difflib import get_close_matches  # start-up time: programs without mistakes need none

    lower = {each.lower(): each for each in known}
    close = get_close_matches(_ELSEWHERE.get(name.lower(), name.lower()), lower, n=1)
    return f" (did you mean {lower[close[0]]}?)" if close else ""


def no_attribute(module: str, name: str, known: Iterable[str], more: str = "") -> AttributeError:
    """The error for a name that a module lacks, with the name that was meant, and ``more``.

    The suggestion is in the text, since notebooks, logs and ``str(error)`` do not show Python's own, which would repeat
    it: Python makes none where ``obj`` is None.
    """
    # Programs that inspect modules ask for many names with underscores, of which none is a mistake.
    public = [each for each in known if not each.startswith("_")]
    hint = "" if name.startswith("_") else meant(name, public) + more
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name, obj=None)


def shown(value: Any) -> str:
    """A value that came, for a message: an array without its elements, and of others no more than a line holds."""
    if is_array(value):
        return f"an array {str(value.dtype).rpartition('.')[2]}{[*value.shape]}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an int of {value.bit_length()} bits"
    every = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(each, bool | int | float | complex | str | bytes | None) for each in every):
        return f"a {type(value).__name__}"
    return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."


def is_array(value: Any) -> bool:
    try:
        return hasattr(value, "dtype") and isinstance(getattr(value, "shape", None), tuple)
    except RuntimeError:  # a nested tensor has no shape
        return False


def unknown_argument(name: str, known: Sequence[str]) -> str:
    """The error text for a name that is not an argument of a function."""
    return f"unknown argument `{name}`{meant(name, known)}; it takes {', '.join(f'`{each}`' for each in known)}."


def wrong_arguments(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The error text for the names or the number of a call's arguments; empty if they are right."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return _misfit(signature, args, kwargs) or f"{error}."
    return ""


def _misfit(signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Why the arguments of a call do not fit; empty where that is something else than names and numbers."""
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    for name in kwargs:
        if name not in names:
            return unknown_argument(name, names)
        if name in by_position[: len(args)]:
            return f"argument `{name}` was given twice, by position and by name."
    if len(args) > len(by_position) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        how = "" if len(by_position) == len(names) else " by position"
        return f"{len(args)} arguments were given{how}; it takes {', '.join(f'`{n}`' for n in by_position) or 'none'}."
    required = [p.name for p in parameters if p.name in names and p.default is p.empty]
    missing = next((name for name in required if name not in {*by_position[: len(args)], *kwargs}), None)
    return f"argument `{missing}` is required, but was not given." if missing else ""


def header_of(function: Any, argument: str) -> Signature:
    """The signature of a function that a caller gave as this argument.

    Raises:
        TypeError: it is no function, or none that Python knows the parameters of.
    """
    from inspect import signature  # as in meant()

    if not callable(function):
        raise TypeError(f"{argument} must be a function, got {type(function).__name__}.")
    try:
        return signature(function)
    except ValueError:
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{argument} must be a function written in Python, got the built-in {name}.") from None


def suggesting(function: Callable[P, R], wrong: Callable[[Any], str] | None = None) -> Callable[P, R]:
    """A decorator: names of arguments that a function, or a constructor, does not have are refused as an op refuses
    them, with the one that was meant. Other errors are looked into when they are raised; a call that is right costs a
    frame, 0.1 us.

    Args:
        wrong: what an array was expected to be and what came, ``one array, got BCOO``; empty for a right one. It is
            asked about arguments that are annotated as arrays.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError, LookupError) as error:
            refused = _refused(error, function, args, kwargs, wrong)
            if refused is None:
                raise
        raise refused

    # torch.compile keeps what it compiled, and how often, by code object: each function has its own.
    call.__code__ = call.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    return call


_MISUSE = TypeError, ValueError, NotImplementedError
_ARRAYS = r"\b(Array|ArrayLike|Tensor)\b"
_SCALARS: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


def _wrong_option(header: Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Which option is no number, text or bool where its annotation says so, or is an array; empty where none is."""
    for name, value in header.bind(*args, **kwargs).arguments.items():
        kind, _, more = str(header.parameters[name].annotation).partition(" | ")
        if is_array(value) and not re.search(_ARRAYS, kind):
            return f"option `{name}` is {shown(value)}, expected none."
        expected = _SCALARS.get(kind)
        if expected is None or more not in ("", "None") or (more and value is None):
            continue
        if isinstance(value, int) and value.bit_length() > 63:
            return f"option `{name}` is {shown(value)}, expected a number of 64 bits."
        if not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool"):
            return f"option `{name}` must be {kind}{' or None' if more else ''}, got {shown(value)}."
    return ""


def _refused(
    error: Exception, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
    wrong: Callable[[Any], str] | None,
) -> Exception | None:  # fmt: skip
    """The error of a wrong call of a function or of a constructor, under the name that callers know, in place of an
    error in it; None for that error itself.
    """
    from inspect import signature  # start-up time: calls that are right need none

    package, _, rest = function.__module__.partition(".")
    called = f"{'cute' if rest.startswith('composite.') else package}.{function.__name__}"
    if function.__name__ in ("__init__", "__call__"):
        name = type(args[0]).__name__
        # An object that is called as a function has the name of its class: `fuse` of `_Fuse`.
        called = f"cute.{name}" if function.__name__ == "__init__" else f"{package}.{name.strip('_').lower()}"
        function, args = function.__get__(args[0]), args[1:]
    header, text = signature(function), str(error)
    problem = wrong_arguments(header, args, kwargs)
    if not problem and wrong is not None:
        problem = _wrong_array(header, args, kwargs, wrong)
    if not problem and not text.startswith("cute"):
        problem = _wrong_option(header, args, kwargs)
    if problem:
        return TypeError(f"{called}: {problem}")
    inner = re.match(r"cute\.(\w+): ", text)
    if inner is None or f"cute.{inner[1]}" == called or type(error) not in _MISUSE:
        return None
    return type(error)(f"{called}: in {inner[1]}: {text[inner.end() :]}")  # an op that the function calls


def _wrong_array(
    signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any], wrong: Callable[[Any], str]
) -> str:
    """Which argument is no array, of those whose annotation says so; empty where none is."""
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        parameter = signature.parameters[name]
        kind = str(parameter.annotation)
        if not re.search(_ARRAYS, kind):
            continue
        if value is None and "None" not in kind:
            return f"argument `{name}` is required, but None was given."
        several = parameter.kind is parameter.VAR_POSITIONAL
        for label, each in ((f"{name}[{i}]", v) for i, v in enumerate(value)) if several else [(name, value)]:
            if problem := wrong(each):
                return f"argument `{label}` must be {problem}."
    return ""


def first_line(error: Exception) -> str:
    """An error in one line: ``ValueError: ...``."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
