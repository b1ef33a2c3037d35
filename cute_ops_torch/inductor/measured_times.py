"""Measured choices, kept on disk: both forms of a part of a graph are timed once, not in each process.

A file's name is a digest of all that times depend on: the versions of torch and of this package, sources included, the
device, the code of both forms, and what they were called with.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from cute_ops.files.records import Records
from cute_ops_torch.inductor import cache_key

_choices = Records("choices", "choice", {"ours_ms": float, "theirs_ms": float})


def key_of(device: str, *parts: Any) -> str:
    """The digest of all that times depend on."""
    versions = cache_key.package(), torch.__version__, torch.version.cuda, device
    return hashlib.blake2b(repr((*versions, *parts)).encode(), digest_size=20).hexdigest()


def recall(key: str) -> tuple[float, float] | None:
    """Milliseconds of our form and of Inductor's; None if they were not measured, or cannot be read."""
    found = _choices.recall(key)
    return None if found is None else (found["ours_ms"], found["theirs_ms"])


def keep(key: str, times: tuple[float, float]) -> None:
    """Write what was measured, if the cache folder can be written."""
    _choices.keep(key, dict(zip(_choices.shape, times, strict=True)))
