"""Where compiled kernels live: memory, then disk, then the compiler.

The folder holds native code, so it is private to the user: a folder that others can write is refused.
A kernel is two files, ``<symbol>.so`` and ``<symbol>.json`` with the variant and the object's checksum,
written aside and renamed into place; one that does not match is deleted and built again. Nothing on a
disk that fails costs more than a compile.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_ops import loader
from cute_ops.errors import CacheError
from cute_ops.variant import Variant
from cute_ops.worker import worker

log = logging.getLogger("cute_ops")
MAX_BYTES = int(os.environ.get("CUTE_OPS_CACHE_MAX_BYTES", str(1 << 30)))

_functions: dict[str, Callable[..., Any]] = {}
_building: dict[str, threading.Lock] = {}
_guard = threading.Lock()


@dataclass
class Counters:
    """What this process did: hits on disk, compiles."""

    disk: int = 0
    compiled: int = 0


counters = Counters()


def folder() -> Path:
    """The cache folder: ``CUTE_OPS_CACHE_DIR``, or the user's cache directory."""
    chosen = os.environ.get("CUTE_OPS_CACHE_DIR")
    if chosen:
        return Path(chosen)
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("cute_ops"))


def get(variant: Variant) -> Callable[..., Any]:
    """The compiled function of a variant; compiles it when no cache holds it.

    However many threads and processes ask, one compiles.

    Raises:
        CompileError: the kernel does not compile.
        CacheError: the cache folder cannot be trusted.
    """
    function = _functions.get(variant.symbol)
    if function is not None:
        return function
    with _guard:
        lock = _building.setdefault(variant.symbol, threading.Lock())
    with lock:
        function = _functions.get(variant.symbol) or _from_disk(variant) or _build(variant)
        _functions[variant.symbol] = function
    return function


def build(variant: Variant) -> float:
    """Put a variant on disk without loading it, for this GPU or another; returns the seconds it took to
    compile, 0.0 when it was there.

    Raises:
        CompileError: the kernel does not compile.
        CacheError: the cache folder cannot be trusted or written.
    """
    with _process_lock(variant.symbol) as usable:
        if not usable:
            raise CacheError(f"cute_ops: cache folder {folder()} cannot be written")
        if _verified(variant):
            return 0.0
        with tempfile.TemporaryDirectory(prefix="cute_ops-") as staging:
            built = Path(staging, f"{variant.symbol}.so")
            seconds = worker.compile(variant, built)
            if _store(variant, built, seconds) is None:
                raise CacheError(f"cute_ops: {variant.symbol}.so does not fit into {folder()}")
        return seconds


def forget() -> None:
    """Drop the functions held in memory (the disk keeps them)."""
    _functions.clear()


def clear() -> int:
    """Delete every cached kernel; returns how many."""
    where = folder()
    if not where.exists():
        return 0
    check_trusted(where)
    kernels = list(where.glob("cute_*.so"))
    for path in [*where.glob("cute_*"), *where.glob("*.lock")]:
        path.unlink(missing_ok=True)
    return len(kernels)


def entries() -> list[tuple[Variant, int, float]]:
    """Every cached kernel that reads well: variant, bytes, time of last use."""
    found = []
    for path in folder().glob("cute_*.json"):
        try:
            variant = Variant.from_json(json.dumps(json.loads(path.read_text())["variant"]))
            status = path.with_suffix(".so").stat()
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.append((variant, status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: -entry[2])


def check_trusted(where: Path) -> None:
    """Raise unless only this user can write the folder.

    Raises:
        CacheError: it belongs to someone else, others can write it, or it is a link.
    """
    status = os.lstat(where)
    if not stat.S_ISDIR(status.st_mode):
        problem = "is not a folder"
    elif status.st_uid != os.geteuid():
        problem = f"belongs to user {status.st_uid}, not to you ({os.geteuid()})"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    else:
        return
    raise CacheError(
        f"cute_ops: cache folder {where} {problem}; it holds native code, so it must be private: "
        "chmod 700 it, or set CUTE_OPS_CACHE_DIR to a folder of your own"
    )


def _from_disk(variant: Variant) -> Callable[..., Any] | None:
    path = _verified(variant)
    if path is None:
        return None
    try:
        function = loader.load(path, variant.symbol)
    except CacheError as error:
        _reject(path, error)
        return None
    counters.disk += 1
    _touch(path)
    return function


def _verified(variant: Variant) -> Path | None:
    """The variant's object on disk, its checksum and variant compared; a bad one is deleted."""
    where = folder()
    path = where / f"{variant.symbol}.so"
    if not path.exists():
        return None
    check_trusted(where)
    try:
        record = json.loads(path.with_suffix(".json").read_text())
        if hashlib.sha256(path.read_bytes()).hexdigest() != record["sha256"]:
            raise ValueError("checksum does not match")
        if Variant.from_json(json.dumps(record["variant"])).digest != variant.digest:
            raise ValueError("it holds another variant")
    except (OSError, ValueError, KeyError, TypeError) as error:
        _reject(path, error)
        return None
    return path


def _reject(path: Path, why: Exception) -> None:
    log.warning("cache entry %s is unusable (%s): building it again", path.name, why)
    _remove(path)


def _build(variant: Variant) -> Callable[..., Any]:
    """Compile, under a lock that other processes respect, and keep the result on disk where that works."""
    with _process_lock(variant.symbol) as usable:
        if usable:
            function = _from_disk(variant)
            if function is not None:
                return function  # another process built it while we waited
        staging = Path(tempfile.mkdtemp(prefix="cute_ops-"))
        built = staging / f"{variant.symbol}.so"
        try:
            seconds = worker.compile(variant, built)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        counters.compiled += 1
        log.info("compiled %s in %.2f s", variant.describe(), seconds)
        kept = _store(variant, built, seconds) if usable else None
        if kept:
            shutil.rmtree(staging, ignore_errors=True)
        else:
            # The only copy of a loaded object must stay while the process lives.
            atexit.register(shutil.rmtree, staging, ignore_errors=True)
        return loader.load(kept or built, variant.symbol)


def _store(variant: Variant, built: Path, seconds: float) -> Path | None:
    where = folder()
    path = where / built.name
    data = built.read_bytes()
    record = {"variant": json.loads(variant.to_json()), "sha256": hashlib.sha256(data).hexdigest(), "seconds": seconds}
    try:
        _write(path, data)
        _write(path.with_suffix(".json"), json.dumps(record, indent=1).encode())
        _evict(keep=path)
    except OSError as error:
        log.warning("cannot keep a compiled kernel in %s (%s): the next process compiles it again", where, error)
        _remove(path)
        return None
    return path


def _write(path: Path, data: bytes) -> None:
    """Write aside, flush and rename: a reader sees all of it or nothing."""
    handle, temporary = tempfile.mkstemp(prefix="cute_tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _evict(keep: Path) -> None:
    """Delete the least recently used kernels until the folder is within its bound."""
    sized = sorted(
        ((p.stat().st_mtime, p.stat().st_size, p) for p in keep.parent.glob("cute_*.so")), key=lambda e: e[0]
    )
    total = sum(size for _, size, _ in sized)
    for _, size, path in sized:
        if total <= MAX_BYTES:
            return
        if path != keep:
            _remove(path)
            total -= size


def _remove(path: Path) -> None:
    for name in (path.with_suffix(".json"), path):
        try:
            name.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot delete %s: %s", name, error)


def _touch(path: Path) -> None:
    try:
        os.utime(path)
    except OSError:
        pass  # a read-only cache still serves


@contextmanager
def _process_lock(symbol: str) -> Iterator[bool]:
    """Hold the variant's lock across processes; yields False where the folder cannot be written."""
    from filelock import FileLock

    where = folder()
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_trusted(where)
        lock = FileLock(where / f"{symbol}.lock")
        lock.acquire()
    except OSError as error:
        log.warning("cache folder %s cannot be used (%s): kernels stay in memory", where, error)
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
