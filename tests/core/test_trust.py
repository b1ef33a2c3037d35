"""Files are trusted only if this user or root owns them, and nobody else can write them or a folder above them."""

from __future__ import annotations

import ctypes
import grp
import json
import os
import resource
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cute_ops import CacheError
from cute_ops.autotune import dispatch, winners
from cute_ops.files import cache_dir, ownership
from cute_ops.jit import cache, loader
from cute_ops.jit.variant import Variant

Make = Callable[..., Variant]
NOBODY = 65534
as_root = pytest.mark.as_root


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fail rather than wait for ever."""

    def over(*_: object) -> None:
        raise AssertionError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def compiled(wanted: Variant) -> int:
    """How many compiles it takes to get a kernel that is on disk."""
    dispatch.forget()
    before = cache.counters.compiled
    assert callable(cache.get(wanted))
    return cache.counters.compiled - before


@pytest.mark.slow
@pytest.mark.fault(
    "another user plants a kernel or its record while the cache folder is writable for all",
    "the kernel is refused, deleted and built again; a warning", "a compile",
)  # fmt: skip
@as_root
@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_a_planted_kernel_is_not_run(
    cache_folder: Path, variant: Make, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = variant()
    cache.build(wanted)
    planted = cache_folder / f"{wanted.symbol}{suffix}"
    os.chown(planted, NOBODY, NOBODY)
    assert compiled(wanted) == 1 and planted.stat().st_uid == 0
    assert f"holds {planted.name}, which belongs to user {NOBODY}, not to you (0)" in caplog.text


@pytest.mark.fault("others can write a kernel in the cache, or its record", "the kernel is built again", "a compile")
@pytest.mark.parametrize("mode", [0o660, 0o602])
@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_a_kernel_that_others_can_write_is_not_run(
    cache_folder: Path, variant: Make, suffix: str, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = variant()
    cache.build(wanted)
    (cache_folder / f"{wanted.symbol}{suffix}").chmod(mode)
    assert compiled(wanted) == 1
    assert f"{suffix}, which can be written by others (mode {mode:o})" in caplog.text


def test_the_advice_on_an_open_folder_is_safe(cache_folder: Path) -> None:
    """To close it again is none: what was put there while it was open would stay."""
    cache_folder.mkdir()
    cache_folder.chmod(0o777)
    with pytest.raises(CacheError) as caught:
        cache_dir.check_trusted(cache_folder)
    text = str(caught.value)
    assert "chmod" not in text and "set CUTE_OPS_CACHE_DIR to a new folder of your own, or delete this one" in text


@pytest.mark.fault("others can write a folder above the cache, or it belongs to another user", "an error", "nothing")
@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o772, 0), pytest.param(0o755, NOBODY, marks=as_root)])
def test_who_can_replace_the_folder_can_write_it(
    tmp_path: Path, variant: Make, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int
) -> None:
    outer = tmp_path / "outer"
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(outer / "inner" / "cache"))
    dispatch.forget()
    wanted = variant()
    cache.build(wanted)
    outer.chmod(mode)
    if owner:
        os.chown(outer, owner, owner)
    with pytest.raises(CacheError, match=f"can be replaced by {'user 65534' if owner else 'others'}.* {outer} "):
        compiled(wanted)
    outer.chmod(0o1777)  # where each keeps what is his
    if owner:
        os.chown(outer, 0, 0)
    assert compiled(wanted) == 0


@as_root
def test_a_group_that_is_a_users_own_is_nobody_else(tmp_path: Path) -> None:
    """Many systems make one for each user, with the umask 002."""
    (tmp_path / "inner").mkdir()
    tmp_path.chmod(0o775)
    ownership.Folder(tmp_path / "inner").close()
    group = next(g for g in grp.getgrall() if g.gr_gid)
    os.chown(tmp_path, 0, group.gr_gid)
    with pytest.raises(ownership.Untrusted, match=r"can be replaced by others, who can write .* \(mode 775\)"):
        ownership.Folder(tmp_path / "inner")


@as_root
def test_links_on_the_way_count_too(tmp_path: Path) -> None:
    """A link of another user leads where he likes, also from a folder where each keeps what is his."""
    (tmp_path / "real" / "inner").mkdir(parents=True)
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "link").symlink_to("../real")
    for path in (shared / "link" / "inner", shared / "link" / "." / ".." / "real" / "inner"):
        folder = ownership.Folder(path)
        assert not folder.replaced and folder.identity == ownership.Folder(tmp_path / "real" / "inner").identity
    os.chown(shared / "link", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ownership.Untrusted, match=r"can be replaced by user 65534, to whom .*/shared/link belongs"):
        ownership.Folder(shared / "link" / "inner")
    (tmp_path / "ring").symlink_to("ring")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        ownership.Folder(tmp_path / "ring" / "inner")


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "b/../../a", "", ".", "..", "b//c", "a\0", "link", "into/c"])
def test_a_name_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    where = tmp_path / "where"
    (where / "b").mkdir(parents=True)
    for path in (tmp_path / "a", where / "a", where / "b" / "c"):
        path.write_text("text")
    (where / "link").symlink_to("a")
    (where / "into").symlink_to("b")
    with ownership.Folder(where) as folder:
        assert folder.read("a") == folder.read("b/c") == b"text"
        with pytest.raises(ownership.Untrusted, match=r"no file inside of it|not a file but a link|not a folder"):
            folder.read(name)


@pytest.mark.fault(
    "a pipe in place of a kernel's record", "the kernel is built again; no process waits for the pipe", "a compile",
)  # fmt: skip
@pytest.mark.parametrize("suffix", [".so", ".json"])
def test_a_pipe_in_the_cache(cache_folder: Path, variant: Make, suffix: str) -> None:
    wanted = variant()
    cache.build(wanted)
    path = cache_folder / f"{wanted.symbol}{suffix}"
    path.unlink()
    os.mkfifo(path, 0o600)
    with within(200):
        assert compiled(wanted) == 1
    assert stat.S_ISREG(path.stat().st_mode)


@pytest.mark.fault("a record in the cache has many gigabytes", "the kernel is built again", "a compile")
def test_a_file_that_fills_the_memory(cache_folder: Path, variant: Make, caplog: pytest.LogCaptureFixture) -> None:
    wanted = variant()
    cache.build(wanted)
    os.truncate(cache_folder / f"{wanted.symbol}.json", 1 << 40)  # of holes
    assert compiled(wanted) == 1 and "which is too large (1099511627776 bytes)" in caplog.text


@pytest.mark.fault("a program has no file descriptor left", "a warning; nothing is read from the cache", "nothing")
def test_no_file_descriptor_is_left(cache_folder: Path, variant: Make, caplog: pytest.LogCaptureFixture) -> None:
    wanted = variant()
    cache.build(wanted)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        found = cache.read(wanted)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found is None and "Too many open files" in caplog.text and cache.read(wanted)


def test_a_folder_that_can_be_searched_but_not_listed(tmp_path: Path) -> None:
    """As some shared ones are."""
    (tmp_path / "file").write_text("text")
    tmp_path.chmod(0o300)
    handle = os.fork()
    if not handle:
        status = 1
        with suppress(BaseException):
            if os.geteuid() == 0:
                # Root may list everything, unless it gives that up: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
                ctypes.CDLL(None).syscall(126, struct.pack("II", 0x20080522, 0), struct.pack("6I", 1, 1, 0, 0, 0, 0))
            with suppress(PermissionError):
                status = 2 if list(tmp_path.iterdir()) else 1
            with ownership.Folder(tmp_path) as folder:
                status = 0 if folder.read("file") == b"text" and status == 1 else 3
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(handle, 0)[1]) == 0
    tmp_path.chmod(0o700)


@pytest.mark.fault(
    "a kernel is replaced between its check and its loading", "the object that was checked is loaded", "nothing",
)  # fmt: skip
def test_the_folder_is_swapped_while_a_kernel_loads(
    cache_folder: Path, variant: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, load = variant(), loader.load
    cache.build(wanted)
    moved = cache_folder.with_name("moved")

    def swapped(path: Path, symbol: str, through: str = "") -> object:
        cache_folder.rename(moved)
        cache_folder.mkdir(mode=0o700)
        (cache_folder / path.name).write_bytes(b"of somebody else")
        return load(path, symbol, through)

    monkeypatch.setattr(loader, "load", swapped)
    assert compiled(wanted) == 0


@pytest.mark.fault("a tuning file in the cache folder belongs to another user", "it is ignored; a warning", "nothing")
@as_root
def test_a_planted_tuning_file_is_ignored(cache_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = winners.remember([winners.Winner("call", {"threads": 128}, {"threads": 64})])
    assert len(winners._read_folder(cache_folder)) == 1
    os.chown(path, NOBODY, NOBODY)
    assert not winners._read_folder(cache_folder)
    assert f"tuning.json is ignored: holds tuning.json, which belongs to user {NOBODY}" in caplog.text


@pytest.mark.fault("files in the cache folder are not text", "they are ignored", "nothing")
def test_what_is_in_use_is_read_from_text_only(cache_folder: Path) -> None:
    cache_folder.mkdir(mode=0o700)
    cache_dir.in_use.add(cache_folder, "cute_a_0")
    (own,) = cache_folder.glob("cute_use-*")
    handle = os.open(cache_folder / "cute_use-x", os.O_CREAT | os.O_WRONLY, 0o600)
    os.write(handle, b"\xff\xfe cute_b_0\n")
    cache_dir.file_lock.acquire(handle)
    assert {"cute_a_0", "cute_b_0"} <= cache_dir.in_use.everywhere(cache_folder)
    os.close(handle)
    assert cache_dir.in_use.everywhere(cache_folder) == {"cute_a_0"} and list(cache_folder.glob("cute_use-*")) == [own]


IN_A_NAMESPACE = """
import ctypes, os, pathlib, sys, tempfile
from cute_ops.files import ownership
# Where every user may go: a temporary folder of one's own is none.
places = (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm")
public = [p for p in map(pathlib.Path, places) if p.is_dir() and all(q.stat().st_mode & 1 for q in (p, *p.parents))]
if not public:
    sys.exit(77)
with tempfile.TemporaryDirectory(dir=public[0]) as folder:
    mine, roots = pathlib.Path(folder, "mine"), pathlib.Path(folder, "roots")
    mine.mkdir(), roots.mkdir()
    pathlib.Path(folder).chmod(0o755)
    os.chown(mine, 1000, 1000)
    if not os.fork():
        os.setgroups([]), os.setgid(1000), os.setuid(1000)
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE, so that /proc/self is its own
        if ctypes.CDLL(None).unshare(0x10000000):  # CLONE_NEWUSER
            os._exit(77)
        pathlib.Path("/proc/self/uid_map").write_text("1000 1000 1")
        print(pathlib.Path(folder).stat().st_uid, os.geteuid())
        for where in (mine, roots):
            try:
                ownership.Folder(where)
                print("trusted")
            except ownership.Untrusted as error:
                print(error)
        sys.stdout.flush()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
sys.exit(code)
"""


@as_root
def test_in_a_user_namespace_folders_around_may_be_of_an_unknown_user() -> None:
    """In a container without root, the host's root is one of the users that are not known there."""
    command = [sys.executable, "-c", IN_A_NAMESPACE]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode == 77:
        pytest.skip("this machine makes no user namespaces, or has no folder that all users may enter")
    assert found.stdout.splitlines() == ["65534 1000", "trusted", "belongs to user 65534, not to you (1000)"], found


@pytest.mark.fault(
    "JSON in the cache is nested a million deep, or has other types", "the kernel is built again", "a compile",
)  # fmt: skip
@pytest.mark.parametrize(
    "change",
    [
        lambda record: "[" * 1_000_000,
        lambda record: json.dumps(record | {"variant": 7}),
        lambda record: json.dumps(record | {"sha256": [record["sha256"]]}),
        lambda record: json.dumps(record | {"variant": record["variant"] | {"args": [{"name": "x"}]}}),
        lambda record: json.dumps(record | {"variant": record["variant"] | {"static": {"n": 1}}}),
        lambda record: json.dumps(record | {"variant": record["variant"] | {"settings": [["threads", 1e400]]}}),
        lambda record: '{"variant": {}, "sha256": "\\ud800"}',
        lambda record: '{"variant": ' + "9" * 5000 + "}",
    ],
)
def test_a_record_of_something_else(cache_folder: Path, variant: Make, change: Callable[[dict], str]) -> None:
    wanted = variant()
    cache.build(wanted)
    record = cache_folder / f"{wanted.symbol}.json"
    record.write_text(change(json.loads(record.read_text())))
    assert not cache.entries()
    assert compiled(wanted) == 1 and len(cache.entries()) == 1
