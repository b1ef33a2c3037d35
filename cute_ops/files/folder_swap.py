"""Folders replaced as a whole: a reader finds the old one or the new one, whatever happens to the writer.

Linux exchanges two folders in one step (``renameat2``). Some file systems, such as NFS, cannot. There the old folder is
first moved aside, to ``.<name>.cute_tmp-*/before``. If a writer is killed before the new one gets its name, there is no
folder of that name until the next writer puts the old one back.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cute_ops.errors import CacheError
from cute_ops.files import cache_dir, file_lock

log = logging.getLogger("cute_ops")
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE, AT_FDCWD


def check_replaceable(where: Path, ours: Callable[[Path], set[str]], what: str) -> None:
    """Raise unless a folder is missing, empty, or holds only files that we wrote.

    Args:
        ours: returns the files and empty folders that the folder's record lists; raises ValueError or OSError if the
            record cannot be read.
        what: the kind of folder, for messages: ``bundle``.

    Raises:
        CacheError: it holds other files, which replacing the folder would delete.
    """
    while True:
        if not os.path.lexists(where):
            return
        if not where.is_dir():
            raise CacheError(f"cute_ops: {where} is not a folder: name another one")
        before = where.stat()
        try:
            _check_holds_ours(where, ours, what)
            return
        except (CacheError, OSError):
            if not _is_another(where, before):
                raise


def _is_another(where: Path, before: os.stat_result) -> bool:
    """Whether another process has replaced the folder since it had the status ``before``."""
    try:
        return not os.path.samestat(where.stat(), before)
    except FileNotFoundError:
        return True


def _check_holds_ours(where: Path, ours: Callable[[Path], set[str]], what: str) -> None:
    if not any(where.iterdir()):
        return
    try:
        listed = ours(where)
    except FileNotFoundError:
        raise CacheError(f"cute_ops: {where} is not empty and no {what}: name another folder") from None
    except (OSError, ValueError) as error:
        raise CacheError(
            f"cute_ops: {where} holds a {what} whose record cannot be read ({error}), so it may hold files that "
            "are not ours: name another folder, or delete it yourself"
        ) from error
    if other := sorted(_leaves(where) - listed):
        names = ", ".join(other[:3]) + (" and more" if len(other) > 3 else "")
        raise CacheError(
            f"cute_ops: {where} holds {names}, which we did not write: move that elsewhere, or name another folder"
        )


@contextmanager
def replacing(where: Path, ours: Callable[[Path], set[str]], what: str) -> Iterator[Path]:
    """Yield a new folder to fill; at the end of the block it is flushed to disk and takes the place of ``where``. The
    record that lists its files is written last, by :func:`cute_ops.files.cache_dir.write_whole`: without one it holds
    our files only.

    Of the old folder only our files are deleted. If the block raises, nothing has changed. Arguments as those of
    :func:`check_replaceable`.

    Raises:
        CacheError: the old folder holds something else.
        OSError: the new one cannot be written.
    """
    where = where.resolve()
    check_replaceable(where, ours, what)
    cache_dir.make(where.parent, 0o755)
    prefix = f".{where.name}.cute_tmp-"
    for left in [path for path in where.parent.iterdir() if path.name.startswith(prefix)]:
        _clear_abandoned(left, where, ours)
    staging, handle = _new_folder(where.parent, prefix)
    try:
        made = staging / "made"
        made.mkdir()
        yield made
        _sync(made)
        check_replaceable(where, ours, what)
        _put(made, where)
        cache_dir.sync_folder(where.parent)
    finally:
        _clear(staging, ours)
        os.close(handle)


def _new_folder(where: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and its open handle, which holds a lock as long as this process lives."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process took it for abandoned and deleted it before it was locked
        file_lock.acquire(handle, file_lock.DELETING)
        if path.exists():
            return path, handle
        os.close(handle)


def _put(made: Path, where: Path) -> None:
    """Give the new folder its name; the old folder gets the new one's previous name."""
    while True:
        try:
            made.rename(where)  # replaces an empty folder only
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
        with suppress(FileNotFoundError):  # another process has just moved it away
            _exchange(made, where)
            return


def _exchange(one: Path, other: Path) -> None:
    """Exchange the names of two folders, in one step if the file system can."""
    code = _renameat2(one, other)
    if not code:
        return
    if code not in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        raise OSError(code, os.strerror(code), str(other))
    aside = one.with_name("before")
    try:
        other.rename(aside)
        one.rename(other)
    except BaseException:
        if aside.exists() and not os.path.lexists(other):
            aside.rename(other)
        raise


def _renameat2(one: Path, other: Path) -> int:
    """Exchange two names in one step; returns 0 or the error number."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return errno.ENOSYS
    failed = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    return ctypes.get_errno() if failed else 0


def _clear_abandoned(staging: Path, where: Path, ours: Callable[[Path], set[str]]) -> None:
    """Delete what a killed process left behind. A folder that it had moved aside but not replaced is put back."""
    try:
        handle = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # another process was faster
    try:
        if file_lock.acquire(handle):
            if (staging / "before").exists() and not os.path.lexists(where):
                (staging / "before").rename(where)
            _clear(staging, ours)
    finally:
        os.close(handle)


def _clear(staging: Path, ours: Callable[[Path], set[str]]) -> None:
    """Delete a new folder that was not used, or our files of an old one."""
    for folder in (staging / "made", staging / "before"):
        try:
            listed = ours(folder)
        except FileNotFoundError:  # it has no record yet, or does not exist
            shutil.rmtree(folder, ignore_errors=True)
            continue
        except (OSError, ValueError):
            continue
        for name in listed:
            with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                (folder / name).unlink()
        for name in sorted(listed, reverse=True):
            _remove_empty(folder / name, folder.parent)
    if staging.exists() and not _remove_empty(staging, staging.parent):
        kept = staging.with_name(staging.name.removeprefix(".").replace("cute_tmp", "kept"))
        staging.rename(kept)
        log.warning("files that are not ours are kept in %s", kept)


def _remove_empty(folder: Path, end: Path) -> bool:
    """Remove a folder and those above it, up to but not ``end``, while they are empty; False if one is not."""
    while folder != end:
        try:
            folder.rmdir()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            return False
        folder = folder.parent
    return True


def _leaves(where: Path, within: str = "") -> set[str]:
    """The names of all files, links and empty folders in a folder."""
    found = set()
    with os.scandir(where) as entries:
        for entry in entries:
            name = f"{within}{entry.name}"
            inner = _leaves(Path(entry.path), f"{name}/") if entry.is_dir(follow_symlinks=False) else None
            found |= inner or {name}
    return found


def _sync(where: Path) -> None:
    """Flush all files of a folder, and their names, to disk."""
    for folder, _, names in os.walk(where):
        for name in names:
            with Path(folder, name).open("rb") as file:
                os.fsync(file.fileno())
        cache_dir.sync_folder(Path(folder))
