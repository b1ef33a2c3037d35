"""Folders replaced as a whole: readers find the old one or the new one, whatever happens to the writer."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cute_ops import CacheError
from cute_ops.aot import build
from cute_ops.calls import manifest
from cute_ops.files import cache_dir, file_lock, folder_swap, ownership
from cute_ops.jit import cache
from cute_ops.jit.bundle import Bundle
from cute_ops.jit.target import parse

ROOT = Path(__file__).parents[2]
LINES = "silu_mul gate:bfloat16[*,64] up:bfloat16[*,64]\nsilu_mul gate:float32[*,7] up:float32[*,7]\n"

WRITING = """
import os, random, signal, sys, time
from pathlib import Path
from cute_ops.calls import manifest
from cute_ops.aot import build
from cute_ops.jit import cache
from cute_ops.jit.target import parse
calls, target, where = manifest.parse({lines!r}), parse("sm_90a"), Path(sys.argv[1])
variants = [build.variant_of(call, target) for call in calls]
def write(turn):
    build.write(variants[: 1 + turn % 2], [target], where, calls[: 1 + turn % 2])
write(0)
print("ready", flush=True)
"""
IN_A_LOOP = """
turn = 0
while True:
    turn += 1
    write(turn)
    print(turn, flush=True)
"""
KILLED = """
from cute_ops.jit.bundle import Bundle
random.seed(0)
start = time.monotonic()
write(0)
seen, usual, end = [], time.monotonic() - start, start + 300
while len(seen) < 20 or (len(set(seen)) < 2 and time.monotonic() < end):
    writer = os.fork()
    if not writer:
        for turn in range(1, 1000):
            write(turn)
    time.sleep(random.random() * usual * (3 + len(seen) // 20))  # longer where a busy machine writes nothing so soon
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    seen.append(Bundle(where).verify())
write(0)
print(sorted(set(seen)), sorted(os.listdir(where.parent)))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the kernels of the bundles."""
    where = tmp_path_factory.mktemp("compiled") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_OPS_CACHE_DIR", str(where))
        cache.build_all(build.variant_of(call, parse("sm_90a")) for call in manifest.parse(LINES))
    return where


def program(code: str, compiled: Path, where: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUTE_OPS_CACHE_DIR": str(compiled), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITING.format(lines=LINES) + code, str(where)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
def test_readers_beside_a_writer(tmp_path: Path, compiled: Path) -> None:
    """Issue 15: 4 of 1454 reads saw files of two bundles, or none."""
    where = tmp_path / "of" / "bundle"
    where.parent.mkdir()
    writer = program(IN_A_LOOP, compiled, where)
    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    calls = manifest.parse(LINES)
    found, written, end = list[int](), 0, time.monotonic() + 300
    try:
        kept = Bundle(where)
        while (len(found) < 100 or len(set(found)) < 2) and time.monotonic() < end:
            if len(found) > 30 * written:  # on a busy machine, too, there are writes between the reads
                written += bool(writer.stdout.readline())
            found += [Bundle(where).verify(), kept.verify()]
            assert manifest.parse(kept.text("manifest.txt") or "") in ([calls[0]], sorted(calls, key=str))
            assert kept.load(build.variant_of(calls[0], parse("sm_90a")))
    finally:
        writer.kill()
    writer.wait()
    assert written > 2 and set(found) == {1, 2}


@pytest.mark.slow
@pytest.mark.fault(
    "kill -9 of a process that replaces a bundle, at random moments",
    "the old or the new one is there, complete; the next writer deletes what was left", "nothing",
)  # fmt: skip
def test_a_writer_killed_at_random_moments(tmp_path: Path, compiled: Path) -> None:
    where = tmp_path / "of" / "bundle"
    where.parent.mkdir()
    killed = program(KILLED, compiled, where)
    ready, rest = killed.communicate(timeout=600)[0].splitlines()
    assert ready == "ready" and killed.returncode == 0
    assert rest == "[1, 2] ['bundle']"


def test_a_record_is_whole_or_not_there(tmp_path: Path) -> None:
    """A writer that dies in the middle of its record leaves a folder that is all ours."""
    code = """
import os, sys
from pathlib import Path
from cute_ops.files import cache_dir, folder_swap
os.fsync = lambda file: (os.ftruncate(file, 5), os.kill(os.getpid(), 9))
with folder_swap.replacing(Path(sys.argv[1]), lambda where: set(), "thing") as made:
    (made / "file").write_text("one")
    cache_dir.write_whole(made, {"record": b'["file"]'})
"""
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path / "thing")], cwd=ROOT, check=False)
    assert died.returncode == -9 and names(tmp_path) != []
    put(tmp_path / "thing", "two")
    assert names(tmp_path) == ["thing"]


def names(where: Path) -> list[str]:
    return sorted(path.name for path in where.iterdir())


def ours(where: Path) -> set[str]:
    return {"record", *json.loads((where / "record").read_text())}


def put(where: Path, text: str) -> None:
    with folder_swap.replacing(where, ours, "thing") as made:
        (made / "in").mkdir()
        (made / "in" / "file").write_text(text)
        (made / "record").write_text('["in/file"]')


def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NFS answers."""
    monkeypatch.setattr(folder_swap, "_renameat2", lambda one, other: errno.EINVAL)


@pytest.mark.parametrize("can", [True, False])
def test_a_folder_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can: bool) -> None:
    if not can:
        no_exchange(monkeypatch)
    for text in ("one", "two", "three"):
        put(tmp_path / "parents" / "thing", text)
        assert (tmp_path / "parents" / "thing" / "in" / "file").read_text() == text
        assert names(tmp_path / "parents") == ["thing"]
    (tmp_path / "link").symlink_to("parents/thing")
    put(tmp_path / "link", "four")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "parents" / "thing" / "in" / "file").read_text() == "four"
    (tmp_path / "empty").mkdir()
    put(tmp_path / "empty", "five")
    monkeypatch.chdir(tmp_path / "empty")
    put(Path(), "six")
    assert (tmp_path / "empty" / "in" / "file").read_text() == "six"


def test_what_was_added_meanwhile_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between the look at the folder and its exchange."""
    where, put_in_place = tmp_path / "thing", folder_swap._put
    put(where, "one")

    def late(made: Path, place: Path) -> None:
        (where / "in" / "thesis.txt").write_text("years of work")
        put_in_place(made, place)

    monkeypatch.setattr(folder_swap, "_put", late)
    put(where, "two")
    monkeypatch.undo()
    assert (where / "in" / "file").read_text() == "two" and "files that are not ours are kept in" in caplog.text
    for _ in range(2):
        (kept,) = tmp_path.glob("thing.kept-*/*/in/*")
        assert kept.read_text() == "years of work"
        put(where, "three")


@pytest.mark.fault(
    "Ctrl-C while a folder is replaced, on a file system that cannot exchange folders", "the old one is put back",
    "nothing",
)  # fmt: skip
def test_an_interrupt_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "thing", "one")
    no_exchange(monkeypatch)
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == "made" and not target.exists():
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        put(tmp_path / "thing", "two")
    assert (tmp_path / "thing" / "in" / "file").read_text() == "one" and names(tmp_path) == ["thing"]


DYING = """
import errno, os, signal, sys
from pathlib import Path
from tests.core import test_exchange
from cute_ops.files import folder_swap
folder_swap._renameat2 = lambda one, other: errno.EINVAL
rename = Path.rename
def dying(self, target):
    if self.name == "made" and not target.exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = dying
test_exchange.put(Path(sys.argv[1]), "two")
"""


@pytest.mark.fault(
    "kill -9 between the two renames of a file system that cannot exchange folders",
    "the next writer puts the old folder back", "the folder, until then",
)  # fmt: skip
def test_a_death_between_two_renames(tmp_path: Path) -> None:
    put(tmp_path / "thing", "one")
    command = [sys.executable, "-c", DYING, str(tmp_path / "thing"), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=environment, check=False).returncode == -9
    assert not (tmp_path / "thing").exists()
    with pytest.raises(ZeroDivisionError), folder_swap.replacing(tmp_path / "thing", ours, "thing"):
        raise ZeroDivisionError
    assert (tmp_path / "thing" / "in" / "file").read_text() == "one" and names(tmp_path) == ["thing"]


def test_what_is_written_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files before the folder that names them, and that before the exchange; then the folder around."""
    put(tmp_path / "thing", "one")
    steps: list[str] = []
    fsync, rename = os.fsync, folder_swap._exchange

    def noted(handle: int) -> None:
        steps.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        fsync(handle)

    def exchanged(one: Path, other: Path) -> None:
        steps.append("exchange")
        rename(one, other)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(folder_swap, "_exchange", exchanged)
    put(tmp_path / "thing", "two")
    assert sorted(steps[:4]) == ["file", "in", "made", "record"] and steps.index("file") < steps.index("in")
    assert steps[4:] == ["exchange", tmp_path.name]
    steps.clear()
    cache_dir.write_whole(tmp_path, {"one": b""})
    assert len(steps) == 2 and steps[1] == tmp_path.name


@pytest.mark.parametrize("write", [put, lambda where, _: build.write([], [], where)], ids=["thing", "bundle"])
def test_two_writers_at_once(tmp_path: Path, write: Callable[[Path, str], None]) -> None:
    """One after the other: the last one's is there, and nothing of the first."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda turn: write(tmp_path / "thing", str(turn)), range(12)))
    assert names(tmp_path) == ["thing"]
    shutil.rmtree(tmp_path / "thing")


def test_what_another_writer_is_deleting_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has found the new folder, or file, before this one could lock it."""
    deleting: list[threading.Timer] = []

    def taken(path: Path, delete: Callable[[Path], None]) -> None:
        handle = os.open(path, os.O_RDONLY)
        assert file_lock.acquire(handle)
        deleting.append(threading.Timer(0.05, lambda: (delete(path), os.close(handle))))
        deleting[-1].start()

    def new_folder(**options: Any) -> str:
        path = made_folder(**options)
        if not deleting:
            taken(Path(path), Path.rmdir)
        return path

    def new_file(**options: Any) -> tuple[int, str]:
        handle, path = made_file(**options)
        if len(deleting) < 2:
            taken(Path(path), Path.unlink)
        return handle, path

    made_folder, made_file = tempfile.mkdtemp, tempfile.mkstemp
    monkeypatch.setattr(tempfile, "mkdtemp", new_folder)
    monkeypatch.setattr(tempfile, "mkstemp", new_file)
    folder, handle = folder_swap._new_folder(tmp_path, ".thing")
    file, path = file_lock.new_file(tmp_path, file_lock.WRITTEN)
    for thread in deleting:
        thread.join()
    os.close(handle)
    os.close(file)
    assert len(deleting) == 2
    assert folder.exists()
    assert path.exists()


def test_a_reader_that_is_never_fast_enough_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(folder: ownership.Folder) -> bytes:
        put(tmp_path / "thing", "again")
        return folder.read("gone")

    put(tmp_path / "thing", "one")
    monkeypatch.setattr(ownership, "_TRIES", 3)
    with pytest.raises(OSError, match="it was replaced during every read"):
        ownership.read_one_state(tmp_path / "thing", replaced)


def test_a_folder_that_cannot_be_replaced_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    with pytest.raises(CacheError, match="is not a folder: name another one"):
        put(tmp_path / "file", "one")
    with pytest.raises(CacheError, match="is not empty and no thing: name another folder"):
        put(tmp_path / "full", "one")
    with pytest.raises(CacheError, match="is not empty and no thing"):  # and not all of it is read to say so
        put(Path("/"), "one")
    with pytest.raises(FileExistsError):
        put(tmp_path / "file" / "thing", "one")
