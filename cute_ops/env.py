"""The environment variables of cute_ops: their names, what they do, and how their values are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T", covariant=True)


class Variable(NamedTuple, Generic[T]):
    """One environment variable.

    Attributes:
        name: its name.
        meaning: what it does.
        parse: ``parse(name, text)``, the value; the text is empty where the variable is not set.
    """

    name: str
    meaning: str
    parse: Callable[[str, str], T]

    def read(self) -> T:
        """Its present value.

        Raises:
            ValueError: the value is not allowed.
        """
        return self.parse(self.name, os.environ.get(self.name, ""))


def _text(name: str, text: str) -> str:
    return text


def _switch(name: str, text: str) -> str:
    if text not in ("", "0", "1"):
        raise ValueError(f"the environment variable {name} is {text!r}, it must be 0 or 1")
    return text


def _seconds(name: str, text: str) -> float:
    return _number(name, text) or 300.0


def _number(name: str, text: str) -> float | None:
    """A number above zero; None for an empty text."""
    try:
        value = float(text) if text else None
    except ValueError:
        value = 0.0
    if value is not None and not 0 < value < float("inf"):
        raise ValueError(f"the environment variable {name} is {text!r}, it must be a number above 0")
    return value


def _count(name: str, text: str) -> int | None:
    """A whole number above zero; None for an empty text."""
    if text and not (text.isdecimal() and int(text)):
        raise ValueError(f"the environment variable {name} is {text!r}, it must be a whole number above 0")
    return int(text) if text else None


def _path(name: str, text: str) -> Path | None:
    """A path, ``~`` expanded as a shell would; None for an empty text."""
    try:
        return Path(text).expanduser() if text else None
    except RuntimeError as error:
        raise ValueError(
            f"the environment variable {name} holds {text!r}, but {text.partition('/')[0]} has no home folder: "
            "write the whole path"
        ) from error


def _paths(name: str, text: str) -> list[Path]:
    return [path for part in text.split(os.pathsep) if (path := _path(name, part))]


ARCH = Variable("CUTE_OPS_ARCH", "JAX lowers for this architecture, sm_90a or sm_90a:114, instead of device 0's", _text)
BUNDLE = Variable("CUTE_OPS_BUNDLE", "folders of compiled kernels to load from, separated as in PATH", _paths)
CACHE_DIR = Variable("CUTE_OPS_CACHE_DIR", "the folder that compiled kernels and winners are kept in", _path)
CACHE_MAX_BYTES = Variable("CUTE_OPS_CACHE_MAX_BYTES", "how large that folder may grow; 1 GiB by default", _number)
COMPILE_TIMEOUT = Variable("CUTE_OPS_COMPILE_TIMEOUT", "seconds that one compile may take; 300 by default", _seconds)
COMPILE_WORKERS = Variable("CUTE_OPS_COMPILE_WORKERS", "compiles at the same time; by default one per core", _count)
RECORD = Variable("CUTE_OPS_RECORD", "a manifest to which every new kind of call is added", _path)
TUNE = Variable("CUTE_OPS_TUNE", "1 measures calls without a winner; 0 uses the heuristics alone", _switch)
VARIABLES: tuple[Variable[object], ...] = (
    ARCH, BUNDLE, CACHE_DIR, CACHE_MAX_BYTES, COMPILE_TIMEOUT, COMPILE_WORKERS, RECORD, TUNE,
)  # fmt: skip


def check() -> None:
    """Refuse values that variables may not have, also where nothing reads them in this process.

    Raises:
        ValueError: says which, and what they may be.
    """
    if problems := wrong():
        raise ValueError("; ".join(problems))


def wrong() -> list[str]:
    """The faults of variables' values in this process's environment."""
    found = []
    for variable in VARIABLES:
        try:
            variable.read()
        except ValueError as error:
            found.append(str(error))
    return found
