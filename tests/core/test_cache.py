"""The cache under faults, each caused: nothing is lost but the time of a compile."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cute_ops import CacheError, CompileError, cache
from cute_ops.variant import Variant

Make = Callable[..., Variant]
HERE = Path(__file__).parent
GET = """
import sys; sys.path.insert(0, {kernels!r}); sys.path.insert(0, {here!r})
from conftest import copying_variant
from cute_ops import cache
cache.get(copying_variant({kernel!r}))
print(cache.counters.compiled, cache.counters.disk, "cutlass" in sys.modules, flush=True)
"""


def process_getting(where: Path, kernel: str = "Copy") -> subprocess.Popen[str]:
    code = GET.format(kernels=str(HERE / "kernels"), here=str(HERE), kernel=kernel)
    environment = {**os.environ, "CUTE_OPS_CACHE_DIR": str(where), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


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
    cache.forget()
    before = cache.counters.disk
    assert compiles(lambda: cache.get(wanted)) == 0 and cache.counters.disk == before + 1
    assert stat.S_IMODE(cache_folder.stat().st_mode) == 0o700
    assert not list(cache_folder.glob("cute_tmp-*"))


def test_two_processes_one_compile(cache_folder: Path) -> None:
    processes = [process_getting(cache_folder) for _ in range(2)]
    counts = [p.communicate(timeout=120)[0].split() for p in processes]
    assert sorted(c[0] for c in counts) == ["0", "1"]
    assert all(c[2] == "False" for c in counts), "the compiler was imported into the caller's process"


def test_threads_compile_once(cache_folder: Path, variant: Make) -> None:
    from concurrent.futures import ThreadPoolExecutor

    wanted = variant()
    with ThreadPoolExecutor(8) as pool:
        assert compiles(lambda: list(pool.map(cache.get, [wanted] * 8))) == 1


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


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        truncate,
        of_another_variant,
        lambda path: path.with_suffix(".json").unlink(),
        lambda path: path.with_suffix(".json").write_text("{"),
        lambda path: path.with_suffix(".json").write_text("[1, 2]"),
        lambda path: replace(path, b""),
    ],
    ids=["flipped bit", "truncated", "other variant", "no record", "broken record", "foreign record", "empty"],
)
def test_a_damaged_entry_is_built_again(
    cache_folder: Path, variant: Make, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = variant()
    cache.get(wanted)
    cache.forget()
    damage(object_file(cache_folder))
    with caplog.at_level(logging.WARNING, "cute_ops"):
        assert compiles(lambda: cache.get(wanted)) == 1
    assert "is unusable" in caplog.text
    cache.forget()
    assert compiles(lambda: cache.get(wanted)) == 0


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_refused(cache_folder: Path, variant: Make, mode: int) -> None:
    cache_folder.mkdir()
    cache_folder.chmod(mode)
    with pytest.raises(CacheError, match=rf"can be written by others \(mode {mode:o}\); it holds native code"):
        cache.get(variant())
    assert not list(cache_folder.iterdir())


def test_a_folder_opened_later_is_refused(cache_folder: Path, variant: Make) -> None:
    wanted = variant()
    cache.get(wanted)
    cache.forget()
    cache_folder.chmod(0o777)
    with pytest.raises(CacheError, match="can be written by others"):
        cache.get(wanted)


def test_a_link_is_refused(cache_folder: Path, variant: Make, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache_folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="is not a folder"):
        cache.get(variant())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_is_refused(cache_folder: Path, variant: Make) -> None:
    cache_folder.mkdir(mode=0o700)
    os.chown(cache_folder, 65534, 65534)
    with pytest.raises(CacheError, match="belongs to user 65534"):
        cache.get(variant())


def test_a_folder_that_cannot_be_made_costs_only_the_cache(
    tmp_path: Path, variant: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    cache.forget()
    with caplog.at_level(logging.WARNING, "cute_ops"):
        assert callable(cache.get(variant()))
    assert "kernels stay in memory" in caplog.text
    cache.forget()


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


def test_a_really_full_disk(tmp_path: Path) -> None:
    """On a file system of one page, in a mount namespace of the test's own."""
    where = tmp_path / "small"
    where.mkdir(mode=0o700)
    mount = f"mount -t tmpfs -o size=8k,mode=700 tmpfs {where}"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    code = GET.format(kernels=str(HERE / "kernels"), here=str(HERE), kernel="Copy")
    script = (
        f"{mount} && CUTE_OPS_CACHE_DIR={where} {sys.executable} -c '{code.replace(chr(39), chr(34))}' && ls {where}"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["unshare", "-m", "sh", "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    assert "No space left on device" in result.stderr
    assert result.stdout.startswith("1 0 False") and ".so" not in result.stdout


def test_a_process_killed_while_it_compiles(cache_folder: Path, variant: Make) -> None:
    victim = process_getting(cache_folder, "Slow")
    deadline = time.monotonic() + 60
    while not list(cache_folder.glob("*.lock")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    assert not list(cache_folder.glob("cute_*.so"))
    # The lock died with its holder.
    follower = process_getting(cache_folder, "Slow")
    assert follower.communicate(timeout=60)[0].split()[:2] == ["1", "0"]


def test_a_kernel_that_does_not_compile_leaves_nothing(cache_folder: Path, variant: Make) -> None:
    for _ in range(2):
        with pytest.raises(CompileError, match="broken on purpose"):
            cache.get(variant("Broken"))
    assert not list(cache_folder.glob("cute_*.so")) and not list(cache_folder.glob("cute_*.json"))


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


def test_clear(cache_folder: Path, variant: Make) -> None:
    cache.build(variant())
    assert cache.build(variant()) == 0.0
    assert cache.clear() == 1 and not list(cache_folder.iterdir()) and cache.clear() == 0
