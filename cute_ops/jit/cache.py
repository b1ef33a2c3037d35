"""Compiled kernels: looked for in memory, then in bundles, then on disk, else compiled.

A kernel is two files in the cache folder (:mod:`cute_ops.files.cache_dir`): ``<symbol>.json`` with the variant and the
object's checksum, and ``<symbol>.so``. Both are written to temporary files and renamed, the object last. A kernel whose
checksum or variant does not match, or that another user wrote, is deleted under its lock and built again. A failing
disk costs at most a compile.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cute_ops import env
from cute_ops.errors import CacheError, CompileError
from cute_ops.files import cache_dir, file_lock, json_schema, staging
from cute_ops.files.ownership import Folder
from cute_ops.jit import bundle, loader
from cute_ops.jit.variant import Variant

if TYPE_CHECKING:
    from concurrent.futures import Future

env.check()  # when an adapter is imported, not at the first kernel
log = logging.getLogger("cute_ops")
MAX_BYTES = int(env.CACHE_MAX_BYTES.read() or 1 << 30)
# A process that holds a lock for longer than a compile may take is hanging: compile again instead of waiting for it.
LOCK_SECONDS = env.COMPILE_TIMEOUT.read() + 30
ENTRY = {"variant": object, "sha256": str}
T = TypeVar("T")

_functions: dict[str, Callable[..., Any]] = {}
_building: dict[str, threading.Lock] = {}
os.register_at_fork(after_in_child=_building.clear)  # the threads that compile exist in the parent only
_guard = file_lock.between_threads()
_storing = file_lock.between_threads()  # two threads that check for room at once would both take it
# How many bytes a folder may hold by now: the sizes of its kernels when they were last read, which takes longer than a
# store, and PROCESSES times what this process has stored since, as if so many stored as much.
_bytes: dict[Path, int] = {}
_PROCESSES = 32


# How many kernels this process loaded from bundles, loaded from disk, and compiled.
counters = SimpleNamespace(bundled=0, disk=0, compiled=0)


class Built(NamedTuple):
    """The result for one variant of :func:`build_all`: seconds, 0.0 if it was built already; the error if it failed."""

    variant: Variant
    seconds: float
    error: CompileError | CacheError | None = None


def get(variant: Variant) -> Callable[..., Any]:
    """The compiled function of a variant; compiles it if no bundle and no cache holds it.

    When several threads and processes ask at once, one of them compiles.

    Raises:
        CompileError: the kernel does not compile, or there is no compiler.
        CacheError: the cache folder cannot be trusted, or a bundle does not fit.
    """
    function = _functions.get(variant.symbol)
    if function is not None:
        return function
    with _guard:
        lock = _building.setdefault(variant.symbol, threading.Lock())
    with lock:
        function = _functions.get(variant.symbol)
        if function is None:
            where, bundles = cache_dir.folder(), env.BUNDLE.read()
            function = bundle.load(variant, bundles) if bundles else None
            if function is not None:
                counters.bundled += 1
            else:
                function = _from_disk(where, variant) or _build(where, variant)
            _functions[variant.symbol] = function
    return function


def start(variant: Variant) -> None:
    """Compile a variant in a thread of its own, for a call that comes later, unless a cache holds it. What goes wrong
    is raised by that call.
    """

    def compiled() -> None:
        try:
            get(variant)
        except (CompileError, CacheError) as error:
            log.debug("a kernel that was compiled ahead does not compile: %s", error)

    if not holds(variant):
        threading.Thread(target=compiled, name="cute_ops-ahead", daemon=True).start()


def holds(variant: Variant) -> bool:
    """Whether a variant's function is in memory, or its object on disk."""
    return variant.symbol in _functions or os.path.lexists(cache_dir.folder() / f"{variant.symbol}.so")


def build(variant: Variant) -> float:
    """Put a variant on disk without loading it, for this GPU or another; returns the seconds that the compile took,
    0.0 if it was built already.

    Raises:
        CompileError: the kernel does not compile.
        CacheError: the cache folder cannot be trusted or written.
    """
    from cute_ops.jit.compile_pool import worker  # start-up time: most programs compile nothing

    where = cache_dir.folder()
    with cache_dir.locked(where, variant.symbol, LOCK_SECONDS) as usable:
        if not usable:
            raise CacheError(f"cute_ops: cache folder {where} cannot be written")
        if _stored(where, variant, lambda folder, data: True, locked=True):
            return 0.0
        with staging.folder(where) as place:
            built = place / f"{variant.symbol}.so"
            seconds = worker.compile(variant, built)
            if _store(where, variant, built, seconds) is None:
                raise CacheError(f"cute_ops: {variant.symbol}.so could not be kept in {where}")
        return seconds


def load(variant: Variant) -> float:
    """Load a variant's function with :func:`get`; returns the seconds that it took."""
    start = time.perf_counter()
    get(variant)
    return time.perf_counter() - start


def build_all(
    variants: Iterable[Variant],
    done: Callable[[Built], None] | None = None,
    each: Callable[[Variant], float] | None = None,
) -> list[Built]:
    """Put many variants on disk, one at a time per core; the others are built even if one fails.

    Args:
        done: called after each of them, from the caller's thread.
        each: what builds one: :func:`build` by default, :func:`load` where this process is going to run them.

    Returns:
        One entry per variant, in order, without duplicates.
    """
    from concurrent.futures import as_completed  # start-up time: few programs build

    with building(variants, each) as futures:
        for future in as_completed(futures.values()):
            if done:
                done(future.result())
        return [future.result() for future in futures.values()]


@contextmanager
def building(
    variants: Iterable[Variant], each: Callable[[Variant], float] | None = None
) -> Iterator[dict[str, Future[Built]]]:
    """Build kernels in threads; yields a future of each result by symbol. What is not built at the end of the block is
    cancelled.
    """
    from concurrent.futures import ThreadPoolExecutor, wait  # as above

    from cute_ops.jit.compile_pool import worker  # as above

    def attempt(variant: Variant) -> Built:
        try:
            return Built(variant, (each or build)(variant))
        except (CompileError, CacheError) as error:
            return Built(variant, 0.0, error)

    own: set[int] = set()
    with ThreadPoolExecutor(
        worker.size, thread_name_prefix="cute_ops-build", initializer=lambda: own.add(threading.get_ident())
    ) as threads:
        futures = {v.symbol: threads.submit(attempt, v) for v in {v.symbol: v for v in variants}.values()}
        try:
            yield futures
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            while left := [future for future in futures.values() if not future.done()]:
                worker.cancel(own)  # until none is left: a process that is just starting cannot be killed yet
                wait(left, 0.1)


def read(variant: Variant) -> bytes | None:
    """A cached variant's object, checked; None if the folder does not hold it."""
    return _stored(cache_dir.folder(), variant, lambda folder, data: data)


def forget() -> None:
    """Drop the functions and bundles held in memory (the disk keeps them)."""
    _functions.clear()
    bundle.forget()


def clear() -> int:
    """Delete everything that was compiled; returns the number of kernels. Measured winners stay.

    Raises:
        CacheError: the folder cannot be trusted, read or emptied.
    """
    where = cache_dir.folder()
    try:
        if not where.exists():
            return 0
        cache_dir.check_trusted(where)
        # We make no folders here: what is one is somebody else's.
        ours = [path for path in where.glob("cute_*") if path.is_symlink() or not path.is_dir()]
        for path in ours:
            if not path.name.startswith("cute_use-"):
                path.unlink(missing_ok=True)
    except OSError as error:
        raise CacheError(f"cute_ops: cache folder {where} cannot be emptied ({error})") from error
    return sum(path.suffix == ".so" for path in ours)


def entries() -> list[tuple[Variant, int, float]]:
    """Every cached kernel whose record can be read: variant, bytes, time of last use.

    Raises:
        CacheError: the folder cannot be trusted.
    """
    found, where = [], cache_dir.folder()
    if not where.exists():
        return []
    with cache_dir.opened(where) as folder:
        for path in where.glob("cute_*.json"):
            try:
                variant = Variant.from_raw(json_schema.parse(folder.read(path.name), ENTRY)["variant"])
                status = path.with_suffix(".so").stat()
            except (OSError, ValueError):
                continue
            found.append((variant, status.st_size, status.st_mtime))
    return sorted(found, key=lambda entry: -entry[2])


def _from_disk(where: Path, variant: Variant, locked: bool = False) -> Callable[..., Any] | None:
    path = where / f"{variant.symbol}.so"
    if not os.path.lexists(path):
        return None

    def load(folder: Folder, _: bytes) -> Callable[..., Any]:
        cache_dir.in_use.add(where, variant.symbol)
        return loader.load(path, variant.symbol, folder.path(path.name))

    function = _stored(where, variant, load, locked)
    if function is not None:
        counters.disk += 1
        try:
            os.utime(path)
        except OSError:
            pass  # a read-only cache can still be read
    return function


def _stored(where: Path, variant: Variant, use: Callable[[Folder, bytes], T], locked: bool = False) -> T | None:
    """The result of ``use`` for the variant's object on disk, after its owner, checksum and variant were compared.

    None if there is no object, or a bad one. A bad one is deleted only with the lock: without it, another process may
    just be writing it.
    """
    path = where / f"{variant.symbol}.so"
    if not os.path.lexists(path):
        return None
    try:
        opened = cache_dir.opened(where)
    except OSError as error:
        log.warning("cache folder %s cannot be read (%s)", where, error)
        return None
    with opened as folder:
        try:
            record = json_schema.parse(folder.read(f"{variant.symbol}.json"), ENTRY)
            data = folder.read(path.name)
            if hashlib.sha256(data).hexdigest() != record["sha256"]:
                raise ValueError("checksum does not match")
            if record["variant"] != json.loads(variant.text):
                raise ValueError("it holds another variant")
            return use(folder, data)
        except (OSError, ValueError, CacheError) as error:
            if locked:
                log.warning("cache entry %s is unusable (%s): building it again", path.name, error)
                _remove(path)
            return None


def _build(where: Path, variant: Variant) -> Callable[..., Any]:
    """Compile, under a lock that other processes respect, and keep the result on disk where that works.

    The bundles of installed packages are tried here, after the disk, because finding them takes longer.
    """
    shipped = bundle.load_installed(variant)
    if shipped is not None:
        counters.bundled += 1
        return shipped
    from cute_ops.jit.compile_pool import worker  # as above

    with cache_dir.locked(where, variant.symbol, LOCK_SECONDS) as usable:
        if usable:
            cache_dir.in_use.add(where, variant.symbol)
            path = where / f"{variant.symbol}.so"
            if os.path.lexists(path) and (function := _from_disk(where, variant, locked=True)) is not None:
                return function  # another process built it while we waited
        with staging.folder(where if usable else None) as place:
            built = place / f"{variant.symbol}.so"
            seconds = worker.compile(variant, built)
            counters.compiled += 1
            if log.isEnabledFor(logging.INFO):
                log.info("compiled %s in %.2f s", variant.describe(), seconds)
            if usable and (kept := _store(where, variant, built, seconds)):
                try:
                    return loader.load(kept, variant.symbol)
                except CacheError as error:
                    log.warning("another process has just deleted %s (%s): it runs from memory", kept, error)
            # The file is deleted afterwards, but stays mapped.
            return loader.load(built, variant.symbol)


def _store(where: Path, variant: Variant, built: Path, seconds: float) -> Path | None:
    path = where / built.name
    data = built.read_bytes()
    record = {"variant": json.loads(variant.text), "sha256": hashlib.sha256(data).hexdigest(), "seconds": seconds}
    try:
        with _room(where, len(data)):
            # The object comes last: a reader that finds it also finds its record.
            cache_dir.write_whole(where, {f"{path.stem}.json": json.dumps(record, indent=1).encode(), path.name: data})
    except OSError as error:
        log.warning("cannot keep a compiled kernel in %s (%s): the next process compiles it again", where, error)
        _remove(path)
        return None
    return path


@contextmanager
def _room(where: Path, size: int) -> Iterator[None]:
    """Have room for a kernel of this size, which the block writes: at once with other threads where the folder is far
    from its limit, else alone.
    """
    with _storing:
        share = _PROCESSES * size
        if where not in _bytes or _bytes[where] + share > MAX_BYTES:
            _bytes[where] = _make_room(where, size)
            yield
            return
        _bytes[where] += share
    yield


def _make_room(where: Path, size: int) -> int:
    """If a kernel of this size exceeds the limit, delete the least recently used ones that no process uses until a
    sixteenth of the limit is free, so that few stores delete. Returns the bytes of all kernels with this one.
    """
    now = time.time()
    found = []
    with os.scandir(where) as files:
        for each in files:
            if not each.name.startswith("cute_") or not each.name.endswith(".so"):
                continue
            try:
                status = each.stat()
            except FileNotFoundError:
                continue  # another process deleted it
            # A time in the future means that the clock was set back: such a file counts as the oldest.
            found.append((status.st_mtime if status.st_mtime < now + 60 else 0.0, status.st_size, Path(each.path)))
    total = size + sum(other for _, other, _ in found)
    if total <= MAX_BYTES:
        return total
    used = cache_dir.in_use.everywhere(where)
    for _, freed, path in sorted(found):
        if total <= MAX_BYTES * 15 // 16:
            break
        if path.stem not in used:
            _remove(path)
            total -= freed
    return total


def _remove(path: Path) -> None:
    for name in (path, path.with_suffix(".json")):
        try:
            name.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot delete %s: %s", name, error)
