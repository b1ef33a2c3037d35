"""Temporary folders for compiles. If a process is killed, its folder is deleted when the next one is made."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cute_ops.errors import CacheError
from cute_ops.files import file_lock

log = logging.getLogger("cute_ops")
_BYTES = 1 << 20  # more than the files of a kernel need


@contextmanager
def folder(preferred: Path | None = None) -> Iterator[Path]:
    """A private folder with room for a kernel, deleted afterwards: in the preferred folder, the temporary one, memory.

    Raises:
        CacheError: none of these has room.
    """
    handle, lock = _new(preferred)
    where = Path(f"{lock}{file_lock.FOLDER}")
    try:
        where.mkdir(mode=0o700)
        yield where
    finally:
        shutil.rmtree(where, ignore_errors=True)
        lock.unlink(missing_ok=True)
        os.close(handle)


def _new(preferred: Path | None) -> tuple[int, Path]:
    """A new locked file; the staging folder is made beside it."""
    places, problems = [Path("/dev/shm")], []
    with suppress(FileNotFoundError):  # no temporary folder can be written
        places.insert(0, Path(tempfile.gettempdir()))
    for place in [*([preferred] if preferred else []), *dict.fromkeys(places)]:
        try:
            file_lock.sweep(place, file_lock.AGAIN)
            handle, lock = file_lock.new_file(place, file_lock.STAGED)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
            continue
        try:
            # Detects a full disk here, which a linker's message would not name.
            os.posix_fallocate(handle, 0, _BYTES)
            os.ftruncate(handle, 0)
        except OSError as error:
            problems.append(f"{place}: {error.strerror}")
            lock.unlink(missing_ok=True)
            os.close(handle)
            continue
        return handle, lock
    raise CacheError(f"cute_ops: no folder has room for a compile ({'; '.join(problems)}): set TMPDIR to one that has")
