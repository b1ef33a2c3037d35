"""Files that can be trusted: only this user and root can write or replace them.

A compiled kernel runs with the rights of whoever loads it. So the owner and the mode of a file are checked, and those
of its folder and of every folder above, as ssh does. The folder is kept open and files are opened relative to it. So
the file that was checked is the one that is read, even if the folder's name leads elsewhere by then.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

OTHERS = stat.S_IWGRP | stat.S_IWOTH  # the mode bits that let other users write
_LINKS = 40  # links on one path, as many as Linux follows
_TRIES = 100  # attempts to read a folder that is replaced during every one
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC  # needs search permission only
_LARGEST = 1 << 30  # bytes of a file that is read whole; a kernel has about 50 thousand
T = TypeVar("T")


class Untrusted(ValueError):
    """Another user can write a file or a folder, or it is not the kind that was expected; says which one and why."""


class Folder:
    """A folder that only this user or root can change, kept open; ``identity`` is its device and inode.

    Args:
        installed: whether it belongs to an installed package. Then its group may write it, as some umasks leave it, and
            it may belong to the owner of this package, whose code runs anyway.
        follow: whether ``where`` itself may be a link.

    Raises:
        Untrusted: others can write it or a folder above it, or it is no folder.
        OSError: it does not exist or cannot be read.
    """

    def __init__(self, where: Path, installed: bool = False, follow: bool = True) -> None:
        self.where = where
        self._others = stat.S_IWOTH if installed else OTHERS
        self._owners = {0, os.geteuid()} | ({os.stat(__file__).st_uid} if installed else set())  # noqa: PTH116
        if not follow and where.is_symlink():
            raise Untrusted("is not a folder but a link")
        real = self._walked()
        try:
            self._handle = os.open(real, _FOLDER)
        except NotADirectoryError:
            raise Untrusted("is not a folder") from None
        try:
            self.identity = _identity(self._checked(os.fstat(self._handle), ""))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._handle)

    def read(self, name: str) -> bytes:
        """The content of a file in it or in one of its subfolders.

        Raises:
            Untrusted: others can write it, it is no file, or its name leads out of the folder.
            OSError: it does not exist or cannot be read.
        """
        *folders, last = components(name)
        inner, opened = self._handle, list[int]()
        try:
            for depth, part in enumerate(folders, 1):
                inner = _open(part, _FOLDER, inner, "/".join(folders[:depth]))
                opened.append(inner)
                self._checked(os.fstat(inner), "/".join(folders[:depth]))
            # O_NONBLOCK: opening a pipe must not wait for its writer.
            handle = _open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, inner, name)
            opened.append(handle)
            status = self._checked(os.fstat(handle), name)
            if not stat.S_ISREG(status.st_mode):
                raise Untrusted(f"holds {name}, which is not a file")
            if status.st_size > _LARGEST:
                raise Untrusted(f"holds {name}, which is too large ({status.st_size} bytes)")
            with os.fdopen(handle, "rb", closefd=False) as file:
                return file.read()
        finally:
            for handle in opened:
                os.close(handle)

    def path(self, name: str) -> str:
        """A path to one of its files that leads through the open folder; valid until it is closed."""
        through = f"/proc/self/fd/{self._handle}"
        return f"{through if os.path.exists(through) else self.where}/{name}"  # noqa: PTH110

    @property
    def replaced(self) -> bool:
        """Whether its name now leads to another folder, or to none."""
        try:
            return _identity(self.where.stat()) != self.identity
        except OSError:
            return True

    def _checked(self, status: os.stat_result, name: str) -> os.stat_result:
        holds = f"holds {name}, which " if name else ""
        if status.st_uid not in self._owners:
            raise Untrusted(f"{holds}belongs to user {status.st_uid}, not to you ({os.geteuid()})")
        if status.st_mode & self._others:
            raise Untrusted(f"{holds}can be written by others (mode {stat.S_IMODE(status.st_mode):o})")
        return status

    def _walked(self) -> str:
        """The path with all links resolved. Every folder and link on the way is checked, the last folder is not."""
        start = "/" if self.where.is_absolute() else os.getcwd()  # noqa: PTH109
        todo = f"{start}/{self.where}".split("/")[::-1]
        here, links = "/", 0
        while todo:
            name = todo.pop()
            if name == "..":
                here = os.path.dirname(here)  # noqa: PTH120  (`here` contains no link)
            if name in ("", ".", ".."):
                continue
            self._check_parent(here)
            inner = f"{here.rstrip('/')}/{name}"
            status = os.lstat(inner)
            if not stat.S_ISLNK(status.st_mode):
                here = inner
                continue
            links += 1
            if links > _LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(self.where))
            self._check_owner(inner, status)
            target = os.readlink(inner)  # noqa: PTH115
            here = "/" if target.startswith("/") else here
            todo += target.split("/")[::-1]
        return here

    def _check_parent(self, path: str) -> None:
        status = os.lstat(path)
        self._check_owner(path, status)
        mode = status.st_mode
        if not mode & self._others or mode & stat.S_ISVTX or (not mode & stat.S_IWOTH and _is_private_group(status)):
            return
        raise Untrusted(f"can be replaced by others, who can write {path} (mode {stat.S_IMODE(mode):o})")

    def _check_owner(self, path: str, status: os.stat_result) -> None:
        if status.st_uid not in self._owners and status.st_uid != _unmapped():
            raise Untrusted(f"can be replaced by user {status.st_uid}, to whom {path} belongs")


def components(name: str) -> list[str]:
    """The components of a file's path inside of a folder.

    Raises:
        Untrusted: the name leads out of the folder.
    """
    parts = name.split("/")
    with suppress(UnicodeEncodeError):
        os.fsencode(name)
        if not any(part in ("", ".", "..") or "\0" in part for part in parts):
            return parts
    raise Untrusted(f"names {name[:200]!r}, which is no file inside of it")


def read_one_state(where: Path, read: Callable[[Folder], T], installed: bool = False) -> T:
    """``read(folder)`` on one state of the folder: if it fails because the folder was replaced, it is tried again.

    Raises:
        Untrusted, OSError: as :class:`Folder`, and what ``read`` raises of a folder that was not replaced.
    """
    for _ in range(_TRIES):
        with Folder(where, installed) as folder:
            try:
                return read(folder)
            except (OSError, ValueError, RuntimeError):
                if not folder.replaced:
                    raise
    raise OSError(errno.EBUSY, "it was replaced during every read", str(where))


def _is_private_group(status: os.stat_result) -> bool:
    """Whether the file's group is its owner's private group: of the same name, with no other member."""
    import grp  # imported here: only files that their group can write need it
    import pwd

    try:
        user, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    own = user.pw_gid == group.gr_gid and user.pw_name == group.gr_name
    return own and not set(group.gr_mem) - {user.pw_name}


def _unmapped() -> int:
    """The uid of users that a user namespace does not map (root outside a container); -1 if it maps all."""
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/uid_map").read_text().split("\n")
        if sum(int(line.split()[2]) for line in lines if line) < 2**32 - 1:
            return int(Path("/proc/sys/kernel/overflowuid").read_text())
    return -1


def _open(name: str, flags: int, folder: int, shown: str) -> int:
    try:
        return os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Untrusted(f"holds {shown}, which is not a file but a link") from None
        if error.errno == errno.ENOTDIR:
            raise Untrusted(f"holds {shown}, which is not a folder") from None
        raise OSError(error.errno, error.strerror, shown) from None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
