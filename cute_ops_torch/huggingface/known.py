"""What modules compute, kept on disk: a trace takes up to a second, and the next process needs it again.

A file's name is a digest of all that a trace depends on: the sources of the module's classes and functions, its
attributes, and the versions. What a file says is no more than a guess, which the caller compares with the original.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cute_ops.errors import CacheError
from cute_ops.files import cache_dir, json_schema
from cute_ops.version import __version__

log = logging.getLogger("cute_ops")
_FOLDER = "meanings"
_PAIRS = [(str, object)]
# A meaning: the op, its tensors, its attributes and the last layer; None of what is no op of ours.
_SHAPE = {"op": json_schema.Either(str, None), "tensors": _PAIRS, "attrs": _PAIRS, "last": str}


def key_of(module: nn.Module, n: int, state: Iterable[tuple[str, Any]]) -> str:
    """The digest of all that a module's meaning depends on."""
    parts: list[object] = [__version__, torch.__version__, n]
    for name, child in module.named_modules():
        parts += [name, *(_source(cls) for cls in type(child).__mro__ if not _is_torchs(cls))]
    parts += [(name, _source(value) if callable(value) else repr(value)) for name, value in state]
    return hashlib.blake2b(repr(parts).encode(), digest_size=20).hexdigest()


def recall(key: str) -> dict[str, Any] | None:
    """What is known of a module; None if nothing is, or it cannot be read."""
    try:
        found = json_schema.parse(cache_dir.read(cache_dir.folder() / _FOLDER, f"{key}.json"), _SHAPE)
    except FileNotFoundError:
        return None
    except (OSError, CacheError, ValueError) as error:
        log.debug("meaning %s cannot be read: %s", key, error)
        return None
    return dict(found)


def keep(key: str, meaning: dict[str, Any]) -> None:
    """Write what is known of a module, if the cache folder can be written."""
    where = cache_dir.folder() / _FOLDER
    try:
        cache_dir.make(where)
        cache_dir.check_trusted(where)
        cache_dir.write_whole(where, {f"{key}.json": json.dumps(meaning).encode()})
    except (OSError, CacheError) as error:
        log.debug("meaning %s cannot be kept: %s", key, error)


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
