"""Whether a function reads what it read when it was traced: :func:`state` is one object for as long as it does.

What it reads is compared by identity at each call, which takes 0.1 to 0.3 us. What is another object is compared by its
key, and only a value that was never seen is traced. Nothing keeps the function, or its object, alive.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from operator import is_
from types import CodeType, FunctionType, MethodType
from typing import Any

from cute_ops.constants.exact import Unknown, exact
from cute_ops.constants.reads import code_of, reads

Values = tuple[Any, ...]
# Entries of a table of functions, of values that they read, or of an op's calls.
REMEMBERED = 4096
# Readers of one code: functions with the same code may read other things of their objects.
_FEW = 8
_log = logging.getLogger("cute_ops")
ANEW = "is traced at each call"


class State:
    """Stands for one set of values that a function reads; compared by identity."""

    __slots__ = ()


class Reader:
    """Reads what functions of one code read, if they are like the one that it was made for.

    Attributes:
        read: ``read(function)``: the values.
        is_same: ``is_same(function, values)``: whether they are these.
        last: values, and their state.
    """

    def __init__(self, code: CodeType, texts: Sequence[str], function: Any) -> None:
        self.code, self.texts, self.text = code, texts, "".join(f"{text}, " for text in texts)
        self.read: Callable[[Any], Values] = _lambda(f"_of: ({self.text})")
        self.is_same: Callable[[Any, Values], bool] = self._identical
        if not any(text.startswith("*") for text in texts):  # a fifth of the time
            same = " and ".join(f"({text}) is _then[{i}]" for i, text in enumerate(texts))
            self.is_same = _lambda(f"_of, _then: {same or True}")
        # One object: threads may call at once.
        self.last = self._state(function, anew=True)

    def _identical(self, function: Any, then: Values) -> bool:
        now = self.read(function)
        return len(now) == len(then) and all(map(is_, now, then))

    def find(self, function: Any) -> State | None:
        """The state of a function, which is not the last one; None if it is not known yet."""
        values, found = self._state(function)
        if found is not None:
            self.last = values, found
        return found

    def _state(self, function: Any, anew: bool = False) -> tuple[Values, State | None]:
        now = self.read(function)
        key = id(self.code), self.text, *map(exact, now)
        found = _states.get(key)
        if found is None and anew:
            make_room(_states)
            found = _states.setdefault(key, State())
        return now, found


def _lambda(text: str) -> Any:
    return eval(f"lambda {text}", {"__name__": __name__})


_readers: dict[tuple[int, type], list[Reader]] = {}
_states: dict[Hashable, State] = {}
_told: dict[tuple[CodeType, str], None] = {}


def state(function: Any, otherwise: str = ANEW) -> State | None:
    """An object that stands for all that a function reads; None if that cannot be known, and what happens
    ``otherwise`` is logged once, unless it is empty.
    """
    kind = type(function)
    code = function.__code__ if kind is FunctionType or kind is MethodType else code_of(function)
    readers = _readers.get((id(code), kind))
    if readers is None:
        made = reader_of(function, otherwise)
        return None if made is None else made.last[1]
    try:
        values, known = readers[0].last
        if readers[0].is_same(function, values):
            return known
    except Exception:  # the function is not like the one that the first reader was made for
        pass
    return _another(function, readers, otherwise)


def _another(function: Any, readers: Sequence[Reader], otherwise: str) -> State | None:
    """The state of a function that reads something else than the last time."""
    for reader in readers:
        try:
            if (known := reader.find(function)) is not None:
                return known
        except Exception:  # as above
            continue
    made = reader_of(function, otherwise)
    return None if made is None else made.last[1]


def reader_of(function: Any, otherwise: str) -> Reader | None:
    """A function that returns all that a function reads; None if that cannot be known: see :func:`state`."""
    code = code_of(function)
    if code is None:
        return None
    try:
        made = Reader(code, reads(function), function)
    except Exception as error:
        if otherwise and (code, otherwise) not in _told:
            make_room(_told)
            _told[code, otherwise] = None
            _log.info("%s %s: %s", code.co_qualname, otherwise, error)
        return None
    make_room(_readers)
    readers = _readers.setdefault((id(code), type(function)), [])
    same = [each for each in readers if each.text == made.text]
    for each in same:
        each.last = made.last
    if not same:
        readers[:] = [made, *readers[: _FEW - 1]]
    return same[0] if same else made


def values(function: Any) -> Values:
    """The values that a function reads: numbers, texts, and the code of other functions.

    Raises:
        Unknown: it reads what may change unseen.
    """
    made = reader_of(function, "")
    if made is None:
        raise Unknown("it cannot be known what the function reads")
    return made.code, *made.read(function)


def constant(value: Any) -> Hashable:
    """The key of a value that a call holds constant: :func:`exact`, of functions with what they read.

    Raises:
        Unknown: there is none: what depends on the value is made anew.
    """
    return exact(value, _of_function)


def _of_function(value: Any) -> Hashable:
    found = state(value) if callable(value) else None
    if found is None:
        raise Unknown(f"a {type(value).__name__} may change")
    return found


def make_room(*tables: dict[Any, Any]) -> None:
    """Make room for one more entry in each table of what is remembered; the oldest leaves first. Other threads may
    remove entries, too.
    """
    for table in tables:
        while len(table) >= REMEMBERED:
            table.pop(next(iter(table)), None)
