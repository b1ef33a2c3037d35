"""File locks of the operating system, which are free as soon as their holder dies.

``flock`` works between processes and threads, and over NFS. No lock expires after a time. A forked child holds none of
its parent's locks, neither these nor the thread locks that are made here.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Prefixes for :func:`new_file`: a file that is being written, the kernels that a process uses, a staging folder's lock.
WRITTEN, USED, STAGED = "cute_tmp-", "cute_use-", "staging-cute_ops-"
# Another process may take a new file or folder for abandoned. It holds the lock while it deletes what it found, for
# at most so many seconds.
DELETING = 60.0
AGAIN = 10.0  # seconds between two sweeps of a folder by a process that writes many files: listing thousands takes long
FOLDER = ".d"  # added to such a file's name, it names the folder that belongs to the file
_swept: dict[Path, float] = {}  # when this process has swept a folder
_handles: set[int] = set()  # files of locks that this process holds or tries to acquire


def between_threads(make: Callable[[], Any] = threading.Lock) -> Any:
    """A thread lock that is free in a forked child, since the thread that held it does not exist there."""
    lock = make()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # as the standard library does for its own
    return lock


@contextmanager
def exclusive(path: Path, timeout: float) -> Iterator[bool]:
    """Hold the lock of a file, which is deleted afterwards.

    Yields:
        False if the lock could not be acquired: one process held it for longer than ``timeout`` seconds, or the file
        system has no locks. Callers then continue without it: at worst some work is done twice.

    Raises:
        OSError: the file cannot be made.
    """
    while True:
        # A new file is a new holder's. However many come first, none of them hangs.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _handles.add(handle)
        held = acquire(handle, timeout)
        if held and _is(handle, path):
            break
        # If the lock is held now, the last holder has deleted the file, so it would exclude no other process.
        _handles.discard(handle)
        os.close(handle)
        if not held:
            yield False
            return
    try:
        yield True
    finally:
        if handle in _handles:  # false in a child that was forked in between
            with suppress(OSError):
                path.unlink(missing_ok=True)
            _handles.discard(handle)
            os.close(handle)


def _let_go() -> None:
    """Run in a forked child: close its copies of the handles, which would keep the locks after the parent's death."""
    while _handles:
        os.close(_handles.pop())


os.register_at_fork(after_in_child=_let_go)


def new_file(where: Path, prefix: str) -> tuple[int, Path]:
    """A new file in a folder, open and locked: :func:`sweep` deletes it once this process is dead.

    Raises:
        OSError: the file cannot be made.
    """
    while True:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=where)
        acquire(handle, DELETING)
        if _is(handle, Path(name)):
            return handle, Path(name)
        os.close(handle)  # another process took it for abandoned and deleted it before it was locked


def acquire(handle: int, timeout: float = 0.0) -> bool:
    """Lock an open file; False if it stays locked for ``timeout`` seconds, or the file system has no locks."""
    deadline, pause = time.monotonic() + timeout, 0.001
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES) or time.monotonic() >= deadline:
                return False
        else:
            return True
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def sweep(where: Path, again: float = 0.0) -> None:
    """Delete the files that dead processes have left in a folder, each with the folder that belongs to it.

    Args:
        again: do nothing if this process has swept the folder within so many seconds.
    """
    now = time.monotonic()
    if now < _swept.get(where, -again) + again:
        return
    _swept[where] = now
    for path in listed(where, WRITTEN, USED, STAGED):
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # for instance such a folder
        try:
            # The lock is held while the file is deleted, so that a process that has just made it notices.
            if os.fstat(handle).st_uid == os.geteuid() and acquire(handle):
                shutil.rmtree(f"{path}{FOLDER}", ignore_errors=True)
                path.unlink(missing_ok=True)
        finally:
            os.close(handle)


def listed(where: Path, *prefixes: str) -> list[Path]:
    """A folder's files whose names begin so; none if it cannot be listed. Of thousands, ``glob`` takes five times as
    long.
    """
    try:
        return [where / name for name in os.listdir(where) if name.startswith(prefixes)]  # noqa: PTH208
    except OSError:
        return []


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
