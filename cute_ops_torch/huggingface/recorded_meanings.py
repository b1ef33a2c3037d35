"""Meanings of modules, kept on disk: a trace takes up to a second, and the next process needs it again.

A file's name is a digest of all that a trace depends on: the sources of the module's classes and functions, its
attributes, and the versions. What a file says is no more than a guess, which the caller compares with the original.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cute_ops.files import json_schema
from cute_ops.files.records import Records
from cute_ops.version import __version__
from cute_ops_torch.huggingface.trial import names_of

_PAIRS = [(str, object)]
# A meaning: the op, its tensors, its attributes and the last layer; None of what is no op of ours.
_SHAPE = {"op": json_schema.Either(str, None), "tensors": _PAIRS, "attrs": _PAIRS, "last": str}
meanings = Records("meanings", "meaning", _SHAPE)


def key_of(module: nn.Module, n: int, state: Iterable[tuple[str, Any]]) -> str:
    """The digest of all that a module's meaning depends on."""
    parts: list[object] = [__version__, torch.__version__, n, names_of(module)]
    for name, child in module.named_modules():
        parts += [name, *(_source(cls) for cls in type(child).__mro__ if not _is_torchs(cls))]
    parts += [(name, _source(value) if callable(value) else repr(value)) for name, value in state]
    return hashlib.blake2b(repr(parts).encode(), digest_size=20).hexdigest()


def _is_torchs(cls: type) -> bool:
    return cls is object or cls.__module__.partition(".")[0] == "torch"


def _source(value: Any) -> str:
    """The name of a class or function and the digest of the file that defines it."""
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
    try:
        return f"{name} {_digest(inspect.getsourcefile(value))}"
    except TypeError:  # built in
        return name


@cache
def _digest(path: str | None) -> str:
    try:
        return hashlib.blake2b(Path(path or "").read_bytes(), digest_size=20).hexdigest()
    except OSError:
        return ""
