"""The cache under faults, each caused: nothing is lost but the time of a compile."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_ops import CacheError, CompileError
from cute_ops.autotune import dispatch
from cute_ops.files import cache_dir, file_lock
from cute_ops.jit import cache
from cute_ops.jit.variant import Variant

Make = Callable[..., Variant]
GET = """
{before}
import sys
from tests.core.conftest import copying_variant
from cute_ops.jit import cache
cache.get(copying_variant({kernel!r}))
# In one write: several processes share the pipe.
print(f"{{cache.counters.compiled}} {{cache.counters.disk}} {{'cutlass' in sys.modules}}\\n", end="", flush=True)
"""


def process_getting(where: Path, kernel: str = "Copy", before: str = "", after: str = "") -> subprocess.Popen[str]:
    code = GET.format(kernel=kernel, before=before) + after
    environment = {**os.environ, "CUTE_OPS_CACHE_DIR": str(where), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def compiles(action: Callable[[], object]) -> int:
    before = cache.counters.compiled
    action()
    return cache.counters.compiled - before


def object_file(where: Path) -> Path:
    (path,) = where.glob("cute_*.so")
    return path


def test_memory_then_disk_then_compiler(cache_folder: Path, variant: Make) -> None:
    wanted = variant()
    assert compiles(lambda: cache.get(wanted)) == 1
    assert cache.get(wanted) is cache.get(wanted)
    dispatch.forget()
    before = cache.counters.disk
    assert compiles(lambda: cache.get(wanted)) == 0 and cache.counters.disk == before + 1
    assert stat.S_IMODE(cache_folder.stat().st_mode) == 0o700
    assert not list(cache_folder.glob("cute_tmp-*"))


# Imports take longer than all else that these processes do.
BECOME_FOUR = """
import os, pytest
from cute_ops.jit import cache, loader
loader.tvm_ffi()
os.fork(), os.fork()
"""


@pytest.mark.slow
@pytest.mark.fault(
    "16 processes ask for one kernel that is not compiled yet", "one compiles, 15 wait and load it", "nothing",
)  # fmt: skip
def test_sixteen_processes_one_compile(cache_folder: Path) -> None:
    processes = [process_getting(cache_folder, before=BECOME_FOUR) for _ in range(4)]
    counts = [line.split() for p in processes for line in p.communicate(timeout=600)[0].splitlines()]
    assert sorted(c[0] for c in counts) == ["0"] * 15 + ["1"]
    assert not list(cache_folder.glob("*.lock")), "locks are left"
    assert all(c[2] == "False" for c in counts), "the compiler was imported into the caller's process"


def test_threads_compile_once_and_say_so_once(
    cache_folder: Path, variant: Make, caplog: pytest.LogCaptureFixture
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    wanted = variant()
    with ThreadPoolExecutor(8) as pool, caplog.at_level(logging.INFO, "cute_ops"):
        assert compiles(lambda: list(pool.map(cache.get, [wanted] * 8))) == 1
    (said,) = caplog.messages
    assert re.fullmatch(r"compiled copying sm_90a x:bfloat16\[\?,64\] out:bfloat16\[\?,64\] in \d+\.\d\d s", said)


def replace(path: Path, data: bytes) -> None:
    """Put other bytes there as a new file: this process has the old one mapped."""
    path.unlink()
    path.write_bytes(data)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    replace(path, bytes(data))


def truncate(path: Path) -> None:
    replace(path, path.read_bytes()[: path.stat().st_size // 2])


def of_another_variant(path: Path) -> None:
    record = json.loads(path.with_suffix(".json").read_text())
    record["variant"]["op"] = "something_else"
    path.with_suffix(".json").write_text(json.dumps(record))


@pytest.mark.fault(
    "a kernel has a flipped bit or is truncated or empty; its record is missing, broken or another kernel's",
    "it is refused, deleted and built again; a warning", "a compile",
)  # fmt: skip
@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        lambda path: (path.rename(path.with_suffix(".moved")), path.symlink_to(path.with_suffix(".moved"))),
        truncate,
        of_another_variant,
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: path.with_suffix(".json").write_text("{"),
        lambda path: path.with_suffix(".json").write_text("[1, 2]"),
        lambda path: replace(path, b""),
    ],
    ids=["flipped bit", "link", "truncated", "other variant", "no record", "broken record", "foreign record", "empty"],
)
def test_a_damaged_entry_is_built_again(
    cache_folder: Path, variant: Make, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = variant()
    cache.get(wanted)
    dispatch.forget()
    damage(object_file(cache_folder))
    with caplog.at_level(logging.WARNING, "cute_ops"):
        assert compiles(lambda: cache.get(wanted)) == 1
    assert "is unusable" in caplog.text
    dispatch.forget()
    assert compiles(lambda: cache.get(wanted)) == 0


@pytest.mark.fault(
    "others can write the cache folder", "an error that says what to do; nothing is read or written", "nothing",
)  # fmt: skip
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_refused(cache_folder: Path, variant: Make, mode: int) -> None:
    cache_folder.mkdir()
    cache_folder.chmod(mode)
    with pytest.raises(CacheError, match=rf"can be written by others \(mode {mode:o}\); it holds native code"):
        cache.get(variant())
    assert not list(cache_folder.iterdir())


@pytest.mark.fault(
    "others are given write access to the cache folder while a program runs", "an error at the next kernel", "nothing",
)  # fmt: skip
def test_a_folder_opened_later_is_refused(cache_folder: Path, variant: Make) -> None:
    wanted = variant()
    cache.get(wanted)
    dispatch.forget()
    cache_folder.chmod(0o777)
    with pytest.raises(CacheError, match="can be written by others"):
        cache.get(wanted)


@pytest.mark.fault(
    "a umask lets others write new files, as in many containers", "the cache folder and those above it are private",
    "nothing",
)  # fmt: skip
def test_the_cache_is_private_whatever_the_umask(
    cache_folder: Path, variant: Make, monkeypatch: pytest.MonkeyPatch, any_umask: None
) -> None:
    """Also the folders above it that do not exist yet, such as ~/.cache: who can write one can replace the cache."""
    outer = cache_folder / "home" / ".cache"
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(outer / "cute_ops"))
    wanted = variant()
    assert compiles(lambda: cache.get(wanted)) == 1
    made = (cache_folder, outer.parent, outer, outer / "cute_ops")
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in made[-1].iterdir()} == {0}
    dispatch.forget()
    assert compiles(lambda: cache.get(wanted)) == 0


@pytest.mark.fault("the cache folder is a link", "an error", "nothing")
def test_a_link_is_refused(cache_folder: Path, variant: Make, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache_folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="is not a folder"):
        cache.get(variant())


@pytest.mark.fault("the cache folder belongs to another user", "an error", "nothing")
@pytest.mark.as_root
def test_a_folder_of_another_user_is_refused(cache_folder: Path, variant: Make) -> None:
    cache_folder.mkdir(mode=0o700)
    os.chown(cache_folder, 65534, 65534)
    with pytest.raises(CacheError, match="belongs to user 65534"):
        cache.get(variant())


@pytest.mark.fault("the cache folder cannot be made", "a warning; the program runs", "a compile per process")
def test_a_folder_that_cannot_be_made_costs_only_the_cache(
    tmp_path: Path, variant: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    dispatch.forget()
    with caplog.at_level(logging.WARNING, "cute_ops"):
        assert callable(cache.get(variant()))
    assert "kernels stay in memory" in caplog.text
    dispatch.forget()


def test_a_full_disk_costs_only_the_cache(
    cache_folder: Path, variant: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING, "cute_ops"):
        assert callable(cache.get(variant()))
    assert "No space left on device" in caplog.text
    assert not list(cache_folder.glob("cute_*"))[1:], "only the lock remains"


@pytest.mark.slow
@pytest.mark.fault("a full disk", "a warning; the program runs; no partial file is left", "a compile per process")
def test_a_really_full_disk(tmp_path: Path) -> None:
    """On a file system of two pages."""
    where = tmp_path / "small"
    result = in_namespace(where, "mount -t tmpfs -o size=8k,mode=700 tmpfs {where}", f"ls {where}")
    assert result.returncode == 0, result.stderr
    assert "No space left on device" in result.stderr
    assert result.stdout.startswith("1 0 False") and ".so" not in result.stdout


@pytest.mark.slow
@pytest.mark.fault(
    "kill -9 of a process that holds the lock and compiles", "the lock is free at once, the next process compiles",
    "a compile",
)  # fmt: skip
def test_a_process_killed_while_it_compiles(cache_folder: Path, begun: Callable[[], int]) -> None:
    victim = process_getting(cache_folder, "Hanging")
    begun()
    assert list(cache_folder.glob("*.lock"))
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not list(cache_folder.glob("cute_*.so"))
    # The lock died with its holder.
    follower = process_getting(cache_folder, "Hanging")
    assert follower.communicate(timeout=600)[0].split()[:2] == ["1", "0"]


WRITING = """
import os, time
def stuck(_):
    print("writing", flush=True)
    time.sleep(600)
os.fsync = stuck
"""


@pytest.mark.slow
@pytest.mark.fault(
    "kill -9 in the middle of a write", "readers never see the file; the next process deletes it and compiles",
    "a compile",
)  # fmt: skip
def test_a_process_killed_while_it_writes(cache_folder: Path) -> None:
    victim = process_getting(cache_folder, before=WRITING)
    assert victim.stdout is not None and victim.stdout.readline() == "writing\n"
    (half,) = cache_folder.glob("cute_tmp-*")
    # While it lives, nobody takes its file away.
    file_lock.sweep(cache_folder)
    assert half.exists() and not list(cache_folder.glob("cute_*.so"))
    victim.kill()
    victim.wait()
    follower = process_getting(cache_folder)
    assert follower.communicate(timeout=600)[0].split()[:2] == ["1", "0"]
    assert not half.exists() and not list(cache_folder.glob("cute_use-*"))


PAUSING = """
import sys
from pathlib import Path
replace = Path.replace
def paused(*paths):
    replace(*paths)
    print("written", flush=True)
    sys.stdin.readline()
Path.replace = paused
"""
ASKING = """
from cute_ops.files import cache_dir
locked = cache_dir.locked
def asking(*arguments):
    print("asks", flush=True)
    return locked(*arguments)
cache_dir.locked = asking
"""


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.slow
@pytest.mark.fault(
    "a process looks for a kernel of which another has written one of two files", "it waits until both are written",
    "nothing",
)  # fmt: skip
@pytest.mark.parametrize("files", [1, 2])
def test_a_look_at_what_is_being_written(cache_folder: Path, files: int) -> None:
    writer = process_getting(cache_folder, before=PAUSING)
    assert writer.stdin is not None and line(writer) == "written\n"
    if files == 2:
        print(file=writer.stdin, flush=True)
        assert line(writer) == "written\n"
    reader = process_getting(cache_folder, before=ASKING)
    first = line(reader)
    assert first == ("asks\n" if files == 1 else "0 1 False\n"), "what is whole is there"
    assert writer.communicate("\n\n", timeout=600)[0].split()[-3:] == ["1", "0", "False"]
    rest = reader.communicate(timeout=600)[0]
    assert (first + rest).split()[-3:] == ["0", "1", "False"]


@pytest.mark.fault(
    "a kernel that was just compiled is deleted before it is loaded", "a warning; the compiler's copy is loaded",
    "a compile",
)  # fmt: skip
def test_what_is_deleted_before_it_is_loaded(
    cache_folder: Path, variant: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_whole = cache_dir.write_whole

    def written_and_deleted(where: Path, files: Mapping[str, bytes]) -> None:
        write_whole(where, files)
        (where / list(files)[-1]).unlink()

    monkeypatch.setattr(cache_dir, "write_whole", written_and_deleted)
    with caplog.at_level(logging.WARNING, "cute_ops"):
        assert compiles(lambda: cache.get(variant())) == 1
    assert "has just deleted" in caplog.text


def test_many_short_holders_are_no_hanging_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine they take longer together; a writer that went on without the lock lost what others wrote."""
    seconds, waited = itertools.count(step=4.0), list[float]()

    def acquire(handle: int, timeout: float = 0.0) -> bool:
        waited.append(timeout)
        return timeout > 0

    monkeypatch.setattr(file_lock, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(file_lock, "acquire", acquire)
    monkeypatch.setattr(file_lock, "_is", lambda handle, path: len(waited) == 5)  # the fifth file is there still
    with file_lock.exclusive(tmp_path / "lock", 10.0) as held:
        assert held and waited == [10.0] * 5


def test_a_file_that_is_just_made_is_not_taken_for_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and its lock: who makes it sees that it is gone, and makes another."""
    acquire, taken = file_lock.acquire, []

    def late(handle: int, timeout: float = 0.0) -> bool:
        if not taken:
            taken.extend(tmp_path.iterdir())
            file_lock.sweep(tmp_path)
        return acquire(handle, timeout)

    monkeypatch.setattr(file_lock, "acquire", late)
    handle, path = file_lock.new_file(tmp_path, "cute_tmp-")
    monkeypatch.undo()
    assert taken[0] != path and [path] == list(tmp_path.iterdir())
    file_lock.sweep(tmp_path)
    assert path.exists(), "its maker lives"
    os.close(handle)
    file_lock.sweep(tmp_path)
    assert not path.exists()


@pytest.mark.fault(
    "a process stops (SIGSTOP) while it holds the lock",
    "after the longest time that a compile may take, others continue without the lock", "a compile",
)  # fmt: skip
@pytest.mark.slow
def test_a_lock_holder_that_has_stopped(
    cache_folder: Path, variant: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.3)
    stopped = process_getting(cache_folder, before=WRITING)
    assert stopped.stdout is not None and stopped.stdout.readline() == "writing\n"
    stopped.send_signal(signal.SIGSTOP)
    with caplog.at_level(logging.WARNING, "cute_ops"):
        assert compiles(lambda: cache.get(variant())) == 1
    assert "could not acquire the lock" in caplog.text and "continuing without it" in caplog.text
    assert object_file(cache_folder)
    stopped.kill()
    stopped.communicate()


@pytest.mark.fault("a file system without locks", "processes do not wait for each other", "a compile per process")
def test_a_file_system_without_locks(
    cache_folder: Path, variant: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(file_lock.fcntl, "flock", none)
    with caplog.at_level(logging.WARNING, "cute_ops"):
        assert compiles(lambda: cache.get(variant())) == 1
    assert "continuing without it" in caplog.text and object_file(cache_folder)
    dispatch.forget()
    assert compiles(lambda: cache.get(variant())) == 0


IN_NAMESPACE = "mkdir -p {where} && chmod 700 {where} && {mount}"


def in_namespace(
    where: Path, mount: str, after: str = "true", cache: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Get a kernel in a mount namespace of the test's own, and then run a command in which ``$CODE`` gets it again."""
    prepare = IN_NAMESPACE.format(where=where, mount=mount.format(where=where))
    if subprocess.run(["unshare", "-m", "sh", "-c", prepare], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    code = GET.format(kernel="Copy", before="")
    script = f'{prepare} && {sys.executable} -c "$CODE" && {after}'
    variables = {"CODE": code, "CUTE_OPS_CACHE_DIR": str(cache or where), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment = {**os.environ, **variables}
    command = ["unshare", "-m", "sh", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
@pytest.mark.fault(
    "a read-only home", "a warning; kernels in the cache are used", "a compile per process of each other kernel",
)  # fmt: skip
def test_a_read_only_home(tmp_path: Path, variant: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    where, mount = tmp_path / "home", "mount --bind {where} {where} && mount -o remount,bind,ro {where}"
    cold = in_namespace(where, mount)
    assert cold.returncode == 0, cold.stderr
    assert cold.stdout.startswith("1 0 False") and "kernels stay in memory" in cold.stderr
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(where))
    cache.build(variant())
    warm = in_namespace(where, mount)
    assert warm.stdout.startswith("0 1 False") and not warm.stderr, warm.stderr


@pytest.mark.slow
@pytest.mark.fault("the temporary folder is full, the cache folder is not", "everything compiles", "nothing")
def test_a_full_temporary_folder(cache_folder: Path, tmp_path: Path) -> None:
    # With room enough to be taken for a temporary folder.
    small = "mount -t tmpfs -o size=8k tmpfs {where} && export TMPDIR={where}"
    result = in_namespace(tmp_path / "tmp", small, cache=cache_folder)
    assert result.stdout.startswith("1 0 False"), result.stderr
    assert object_file(cache_folder) and not result.stderr, result.stderr


@pytest.mark.slow
@pytest.mark.fault(
    "a cache folder on a file system that is mounted noexec", "a warning; kernels are loaded from memory", "nothing",
)  # fmt: skip
def test_a_file_system_without_execution(tmp_path: Path) -> None:
    where = tmp_path / "noexec"
    again = f'{sys.executable} -c "$CODE" && ls {where}'
    result = in_namespace(where, "mount -t tmpfs -o noexec,size=16m,mode=700 tmpfs {where}", again)
    assert result.stdout.startswith("1 0 False\n0 1 False\n"), result.stdout + result.stderr
    assert result.stderr.count("noexec: kernels from there are copied into memory at every start") == 2
    assert "staging" not in result.stdout and ".so" in result.stdout


@pytest.mark.fault("a kernel that does not compile", "an error with the compiler's output; no file is left", "nothing")
def test_a_kernel_that_does_not_compile_leaves_nothing(cache_folder: Path, variant: Make) -> None:
    for _ in range(2):
        with pytest.raises(CompileError, match="broken on purpose"):
            cache.get(variant("Broken"))
    assert not list(cache_folder.glob("cute_*.so")) and not list(cache_folder.glob("cute_*.json"))


@pytest.mark.fault("the cache folder outgrows its limit", "the least recently used kernels are deleted", "a compile")
def test_least_recently_used_kernels_go_first(
    cache_folder: Path, variant: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (32, 64, 96)
    for age, n in enumerate(sizes[:2]):
        cache.build(variant(n=n))
        path = cache_folder / f"{variant(n=n).symbol}.so"
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(cache, "MAX_BYTES", path.stat().st_size * 5 // 2)
    cache.build(variant(n=sizes[2]))
    kept = {v.dims["n"] for v, _, _ in cache.entries()}
    assert kept == {32, 96}


def test_few_stores_read_the_sizes_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a folder is kept although most stores list nothing."""
    monkeypatch.setattr(cache, "MAX_BYTES", 20_000)
    monkeypatch.setattr(cache, "_PROCESSES", 4)
    looked, make_room = list[int](), cache._make_room
    monkeypatch.setattr(cache, "_make_room", lambda *args: looked.append(make_room(*args)) or looked[-1])
    for number in range(300):
        with cache._room(tmp_path, 100):
            path = tmp_path / f"cute_{number}.so"
            path.write_bytes(b"x" * 100)
            os.utime(path, (1e9 + number, 1e9 + number))
    kept = sorted(int(file.stem.removeprefix("cute_")) for file in tmp_path.iterdir())
    assert kept == list(range(300 - len(kept), 300)) and 187 <= len(kept) <= 200
    assert len(looked) < 100 and max(looked) <= 20_000


@pytest.mark.slow
@pytest.mark.fault(
    "the cache folder outgrows its limit while programs run", "kernels that a running process has loaded stay",
    "nothing",
)  # fmt: skip
def test_what_is_in_use_is_not_evicted(cache_folder: Path, variant: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    user = process_getting(cache_folder, after="\nimport time; time.sleep(600)")
    assert user.stdout is not None and user.stdout.readline().startswith("1 0")
    used = object_file(cache_folder)
    os.utime(used, (1e9, 1e9))
    monkeypatch.setattr(cache, "MAX_BYTES", 1)
    for n in (32, 96):
        cache.build(variant(n=n))
    assert {v.dims["n"] for v, _, _ in cache.entries()} == {64, 96}
    user.kill()  # it has no time to say goodbye
    user.communicate()
    cache.build(variant(n=128))
    assert {v.dims["n"] for v, _, _ in cache.entries()} == {128}


@pytest.mark.slow
@pytest.mark.fault(
    "the clock jumps, forwards or backwards",
    "everything loads; a file time in the future does not keep a kernel for ever", "at most a compile",
)  # fmt: skip
def test_a_clock_that_jumps(cache_folder: Path, variant: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for n, when in ((32, 0.0), (64, 4e9), (96, time.time())):
        cache.build(variant(n=n))
        os.utime(cache_folder / f"{variant(n=n).symbol}.so", (when, when))
    assert compiles(lambda: [cache.get(variant(n=n)) for n in (32, 64, 96)]) == 0
    dispatch.forget()
    cache_dir.in_use.close()
    path = cache_folder / f"{variant(n=64).symbol}.so"
    os.utime(path, (4e9, 4e9))
    monkeypatch.setattr(cache, "MAX_BYTES", path.stat().st_size * 7 // 2)
    cache.build(variant(n=128))
    assert {v.dims["n"] for v, _, _ in cache.entries()} == {32, 96, 128}


def test_clear(cache_folder: Path, variant: Make) -> None:
    cache.build(variant())
    assert cache.build(variant()) == 0.0
    somebodys = cache_folder / "cute_notes.so"
    somebodys.mkdir()
    assert cache.clear() == 1 and [*cache_folder.iterdir()] == [somebodys] and cache.clear() == 0


@pytest.mark.parametrize(("where", "why"), [("a" * 5000, "File name too long"), ("file", "is not a folder")])
def test_clearing_what_is_no_folder_says_so(
    where: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(tmp_path / where))
    with pytest.raises(CacheError, match=rf"^cute_ops: cache folder .*{why}"):
        cache.clear()


def test_a_folder_whose_name_is_no_utf8(tmp_path: Path, variant: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, kept and loaded again."""
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    before = cache.counters.compiled, cache.counters.disk
    for _ in range(2):
        cache.forget()
        assert callable(cache.get(variant()))
    assert (cache.counters.compiled, cache.counters.disk) == (before[0] + 1, before[1] + 1)
