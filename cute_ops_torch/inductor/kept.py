"""Measured choices, kept on disk: both forms of a part of a graph are timed once, not in each process.

A file's name is a digest of all that times depend on: the versions of torch and of this package, sources included, the
device, the code of both forms, and what they were called with.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

import torch

from cute_ops.errors import CacheError
from cute_ops.files import cache_dir, json_schema
from cute_ops_torch.inductor import cache_key

log = logging.getLogger("cute_ops")
_FOLDER = "choices"
_SHAPE = {"ours_ms": float, "theirs_ms": float}


def key_of(device: str, *parts: Any) -> str:
    """The digest of all that times depend on."""
    versions = cache_key.package(), torch.__version__, torch.version.cuda, device
    return hashlib.blake2b(repr((*versions, *parts)).encode(), digest_size=20).hexdigest()


def recall(key: str) -> tuple[float, float] | None:
    """Milliseconds of our form and of Inductor's; None if they were not measured, or cannot be read."""
    try:
        found = json_schema.parse(cache_dir.read(cache_dir.folder() / _FOLDER, f"{key}.json"), _SHAPE)
    except FileNotFoundError:
        return None
    except (OSError, CacheError, ValueError) as error:
        log.debug("choice %s cannot be read: %s", key, error)
        return None
    return found["ours_ms"], found["theirs_ms"]


def keep(key: str, times: tuple[float, float]) -> None:
    """Write what was measured, if the cache folder can be written."""
    where = cache_dir.folder() / _FOLDER
    try:
        cache_dir.make(where)
        cache_dir.check_trusted(where)
        cache_dir.write_whole(where, {f"{key}.json": json.dumps(dict(zip(_SHAPE, times, strict=True))).encode()})
    except (OSError, CacheError) as error:
        log.debug("choice %s cannot be kept: %s", key, error)
