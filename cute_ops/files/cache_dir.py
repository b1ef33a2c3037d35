"""The cache folder: where it is, whether it can be trusted, atomic writes, locks, and which kernels are in use.

The folder holds native code, so one that others can write is refused.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from cute_ops import env
from cute_ops.errors import CacheError
from cute_ops.files import file_lock, ownership

log = logging.getLogger("cute_ops")


def folder() -> Path:
    """The cache folder: ``CUTE_OPS_CACHE_DIR``, or the user's cache directory.

    Raises:
        ValueError: the variable begins with ``~`` or ``~user``, and there is no such home folder.
    """
    chosen = env.CACHE_DIR.read()
    if chosen:
        return chosen
    from platformdirs import user_cache_dir  # start-up time, and needed only here

    try:
        where = Path(user_cache_dir("cute_ops"))
    except RuntimeError:  # older versions of platformdirs return a path that begins with ~ instead
        return _without_home()
    return where if where.is_absolute() else _without_home()


@cache
def _without_home() -> Path:
    """The cache folder of a user without a home directory, as in many containers."""
    where = Path(tempfile.gettempdir(), f"cute_ops-{os.geteuid()}")
    log.warning(
        "HOME is not set and user %d has no home: kernels are kept in %s; CUTE_OPS_CACHE_DIR sets another folder",
        os.geteuid(), where,
    )  # fmt: skip
    return where


def make(where: Path, mode: int = 0o700) -> None:
    """Make a folder, and all that are missing above it, with this mode: by the umask alone others could replace them,
    and what is in them would be refused ever after.
    """
    if not where.is_dir():
        if where.parent != where:
            make(where.parent, mode)
        where.mkdir(mode=mode, exist_ok=True)


def opened(where: Path) -> ownership.Folder:
    """The cache folder, held open, after a check that only this user or root can write or replace it.

    Raises:
        CacheError: it belongs to someone else, others can write it or a parent of it, or it is a link.
        OSError: it does not exist or cannot be read.
    """
    try:
        return ownership.Folder(where, follow=False)
    except ownership.Untrusted as error:
        raise CacheError(
            f"cute_ops: cache folder {where} {error}; it holds native code, so it must be private: set "
            "CUTE_OPS_CACHE_DIR to a new folder of your own, or delete this one with all that is in it (what others "
            "may have put there would run)"
        ) from error


def read(where: Path, name: str) -> bytes:
    """A file of a cache folder; raises as :func:`opened`."""
    with opened(where) as folder:
        return folder.read(name)


def check_trusted(where: Path) -> None:
    """Raise what :func:`opened` raises if it refuses the folder."""
    opened(where).close()


def write_whole(where: Path, files: Mapping[str, bytes], mode: int = 0o600) -> None:
    """Write files into a folder, one after the other, each to a temporary file that is flushed and renamed. Readers see
    a complete file or none, even after a power failure.
    """
    file_lock.sweep(where, file_lock.AGAIN)
    for name, data in files.items():
        handle, temporary = file_lock.new_file(where, file_lock.WRITTEN)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
                os.fsync(file.fileno())
                temporary.replace(where / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync_folder(where)


def sync_folder(where: Path) -> None:
    """Flush a folder's entries to disk, if its file system can do that."""
    handle = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EROFS):
            raise
    finally:
        os.close(handle)


@contextmanager
def locked(where: Path, name: str, seconds: float) -> Iterator[bool]:
    """Hold a lock across processes, such as a variant's; yields False where the folder cannot be written."""
    with ExitStack() as stack:
        try:
            make(where)
            check_trusted(where)
            held = stack.enter_context(file_lock.exclusive(where / f"{name}.lock", seconds))
        except OSError as error:
            log.warning("cache folder %s cannot be used (%s): kernels stay in memory", where, error)
            held = None
        if held is False:
            log.warning("could not acquire the lock for %s in %s; continuing without it", name, where)
        yield held is not None


class Use:
    """Which kernels of a folder are in use: each process keeps a locked file there, with one symbol per line.

    Kernels in use are not deleted: a local disk would allow that for a mapped file, but over NFS the mapping breaks.
    """

    def __init__(self) -> None:
        self._file: tuple[int, Path] | None = None
        self._owner = 0

    def add(self, where: Path, symbol: str) -> None:
        """Note that this process uses a kernel of a folder that is known to be trusted."""
        if self._file is None or self._file[1].parent != where:
            self.close()
            try:
                self._file = file_lock.new_file(where, file_lock.USED)
            except OSError:
                return  # the folder does not exist yet or is read-only: nothing is evicted there
            self._owner = os.getpid()
        try:
            os.write(self._file[0], f"{symbol}\n".encode())
        except OSError:
            pass  # a full disk: at worst a kernel is compiled again

    def everywhere(self, where: Path) -> set[str]:
        """The symbols that living processes use."""
        file_lock.sweep(where)
        symbols: set[str] = set()
        with opened(where) as folder:
            for path in file_lock.listed(where, file_lock.USED):
                with suppress(OSError, ownership.Untrusted):  # its process has just ended, or somebody else wrote it
                    symbols.update(folder.read(path.name).decode(errors="replace").split())
        return symbols

    def close(self) -> None:
        # A forked child shares the file with its parent.
        if self._file is not None and self._owner == os.getpid():
            self._file[1].unlink(missing_ok=True)
            os.close(self._file[0])
        self._file = None


in_use = Use()
atexit.register(in_use.close)
