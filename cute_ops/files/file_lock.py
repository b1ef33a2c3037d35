"""Locks on files, kept by the operating system: a holder that dies, by whatever, has let go.

``flock`` works across processes and threads, and over NFS. Nothing here looks at a clock. A forked child holds nothing
that its parent held, neither these nor the locks between threads that are made here.
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

_handles: set[int] = set()  # files of locks that this process holds or tries


def between_threads(make: Callable[[], Any] = threading.Lock) -> Any:
    """A lock between threads, free in a forked child, where the thread that held it is not."""
    lock = make()
    os.register_at_fork(after_in_child=lock._at_fork_reinit)  # as the standard library's own locks
    return lock


@contextmanager
def exclusive(path: Path, timeout: float) -> Iterator[bool]:
    """Hold the lock named by a file, which is gone afterwards.

    Yields:
        False where there is no such lock: another holds it for longer than ``timeout`` seconds, or the file
        system has none. Work goes on without it; what a lock saves is doing it twice.

    Raises:
        OSError: the file cannot be made.
    """
    handle = None
    deadline, pause = time.monotonic() + timeout, 0.01
    while handle is None:
        trial = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _handles.add(trial)
        free = acquire(trial)
        if not free:
            _close(trial)
            if free is None or time.monotonic() > deadline:
                break
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
        elif _is(trial, path):
            handle = trial
        else:
            _close(trial)  # its last holder has deleted it: this lock excludes nobody
    if handle is None:
        yield False
        return
    try:
        yield True
    finally:
        if handle in _handles:  # else this is a child that was forked meanwhile
            with suppress(OSError):
                path.unlink(missing_ok=True)
            _close(handle)


def _close(handle: int) -> None:
    _handles.discard(handle)
    os.close(handle)


def _let_go() -> None:
    """In a forked child: its copies of the handles would hold the locks when the parent has died."""
    while _handles:
        os.close(_handles.pop())


os.register_at_fork(after_in_child=_let_go)


def new_file(where: Path, prefix: str) -> tuple[int, Path]:
    """A new file in a folder, open and locked: :func:`remove_abandoned` takes it away once this process is dead.

    Raises:
        OSError: the file cannot be made.
    """
    while True:
        handle, name = tempfile.mkstemp(prefix=prefix, dir=where)
        acquire(handle)
        if _is(handle, Path(name)):
            return handle, Path(name)
        os.close(handle)  # someone took it for abandoned before it was locked


def acquire(handle: int) -> bool | None:
    """Lock an open file for this process, without waiting; False where another holds it, None without locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def remove_abandoned(path: Path, folder: Path | None = None) -> None:
    """Delete a file of this user's whose lock nobody holds, and first the folder that it stands for: whoever made them
    has died.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        # Deleted while the lock is held: one that is just being made sees that it is gone.
        if os.fstat(handle).st_uid == os.geteuid() and acquire(handle):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _is(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
