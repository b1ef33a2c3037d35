"""Bundles: built without a GPU, the same bytes every time, served without a compiler, refused where they do not fit."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from cute_ops import CacheError, __version__
from cute_ops.aot import build
from cute_ops.autotune import dispatch, winners
from cute_ops.calls import manifest
from cute_ops.files import cache_dir, folder_swap
from cute_ops.jit import bundle, cache, loader, toolchain
from cute_ops.jit.bundle import Bundle
from cute_ops.jit.target import parse
from cute_ops.jit.variant import Variant

LINES = "silu_mul gate:bfloat16[*,64] up:bfloat16[*,64]\nsilu_mul gate:float32[*,7] up:float32[*,7]\n"
TARGETS = [parse("sm_80"), parse("sm_90a")]
CALLS = manifest.parse(LINES)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, compiled once."""
    where = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_OPS_CACHE_DIR", str(where / "cache"))
        built = build.build(CALLS, TARGETS, where / "bundle")
    assert len(built) == 4 and not any(one.error for one in built)
    return where / "bundle"


@pytest.fixture
def served(made: Path, tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it that ``CUTE_OPS_BUNDLE`` names, beside an empty cache."""
    copy = Path(shutil.copytree(made, tmp_path / "bundle"))
    monkeypatch.setenv("CUTE_OPS_BUNDLE", str(copy))
    return copy


def edit(where: Path, change: Callable[[dict], object]) -> None:
    record = json.loads((where / "bundle.json").read_text())
    change(record)
    (where / "bundle.json").write_text(json.dumps(record))
    bundle.forget()


def wanted(arch: str = "sm_90a") -> Variant:
    return build.variant_of(CALLS[0], parse(arch))


@pytest.mark.slow
def test_a_bundle_serves_and_nothing_is_compiled_or_written(served: Path, cache_folder: Path) -> None:
    before = cache.counters.bundled, cache.counters.compiled
    for target in TARGETS:
        for call in CALLS:
            assert callable(cache.get(build.variant_of(call, target)))
    assert (cache.counters.bundled, cache.counters.compiled) == (before[0] + 4, before[1])
    assert not cache_folder.exists()


@pytest.mark.slow
def test_the_same_bytes_every_time(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an empty cache, in a folder of another name, with calls and targets in another order."""
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(tmp_path / "another-cache"))
    build.build(CALLS[::-1], TARGETS[::-1], tmp_path / "elsewhere")

    def content(where: Path) -> dict[str, tuple[bytes, int, float]]:
        files = [p for p in where.rglob("*") if p.is_file()]
        return {str(p.relative_to(where)): (p.read_bytes(), p.stat().st_mode, p.stat().st_mtime) for p in files}

    assert content(made) == content(tmp_path / "elsewhere")
    assert len(content(made)) >= 4 + 2 + 3


@pytest.mark.slow
def test_a_new_bundle_can_be_read_whatever_the_umask(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_umask: None
) -> None:
    """By all, and written by its owner only, as are the folders that are made for it: another is refused."""
    monkeypatch.setenv("CUTE_OPS_CACHE_DIR", str(made.parent / "cache"))
    outer = tmp_path / "outer"
    build.build(CALLS, TARGETS, outer / "inner" / "bundle")
    assert Bundle(outer / "inner" / "bundle").verify() == 4
    assert not any(path.stat().st_mode & 0o022 for path in (outer, *outer.rglob("*")))


@pytest.mark.slow
def test_it_carries_versions_digests_and_licences(made: Path) -> None:
    record = json.loads((made / "bundle.json").read_text())
    dsl, tvm_ffi = toolchain.versions()
    assert record["versions"] == {"cute-ops": __version__, "nvidia-cutlass-dsl": dsl, "apache-tvm-ffi": tvm_ffi}
    assert record["targets"] == ["sm_80:108", "sm_90a:132"]
    assert {p.name for p in (made / "licenses").iterdir()} >= {
        "NOTICE.txt", "cute-ops-LICENSE.txt", "nvidia-cutlass-dsl-LICENSE.txt", "apache-tvm-ffi-LICENSE.txt",
    }  # fmt: skip
    assert manifest.read(made / "manifest.txt") == sorted(CALLS, key=str)
    assert Bundle(made).verify() == 4


@pytest.mark.skipif(not (shutil.which("nm") and shutil.which("readelf")), reason="nm and readelf read objects")
@pytest.mark.slow
def test_kernels_contain_nothing_of_the_compiler(made: Path) -> None:
    """As licenses/NOTICE.txt says: they define what was generated for them and need one library of NVIDIA's."""
    for kernel in (made / "kernels").iterdir():
        dynamic = subprocess.check_output(["readelf", "-d", kernel], text=True)
        assert set(re.findall(r"NEEDED.*\[(\S+)\]", dynamic)) - {"libc.so.6"} == {"libcute_dsl_runtime.so"}
        defined = subprocess.check_output(["nm", "-D", "--defined-only", "--format=just-symbols", kernel], text=True)
        assert {name.partition(kernel.stem)[0] for name in defined.split()} == {"__cute_internal_", "__tvm_ffi_"}


def change_version(record: dict) -> None:
    record["versions"]["nvidia-cutlass-dsl"] = "4.7.0"


def change_sources(record: dict) -> None:
    for kernel in record["kernels"].values():
        kernel["variant"]["sources"] = "0" * 64
    record["kernels"] = {name + "x": kernel for name, kernel in record["kernels"].items()}


def flip_a_bit(where: Path) -> None:
    path = where / "kernels" / f"{wanted().symbol}.so"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(where: Path) -> None:
    path = where / "kernels" / f"{wanted().symbol}.so"
    path.write_bytes(path.read_bytes()[:1000])


def link(where: Path) -> None:
    path = where / "kernels" / f"{wanted().symbol}.so"
    path.rename(where / "elsewhere.so")
    path.symlink_to(where / "elsewhere.so")


def open_behind_a_link(where: Path) -> None:
    where.rename(where.with_name("open"))
    where.with_name("open").chmod(0o777)
    where.symlink_to(where.with_name("open"))


@pytest.mark.fault(
    "a bundle that is damaged, open to others, or of other versions, sources or another machine",
    "an error that says what does not match", "nothing",
)  # fmt: skip
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda where: (where / "bundle.json").unlink(), "has no bundle.json"),
        (lambda where: (where / "bundle.json").write_text("{"), "has a bundle.json that cannot be read"),
        (lambda where: shutil.rmtree(where), "has no bundle.json"),
        (lambda where: edit(where, lambda r: r.update(format=9)), "has format 9, this version of cute_ops reads 1"),
        (lambda where: edit(where, lambda r: r.update(platform="linux-sparc")), "was built for linux-sparc, this is "),
        (lambda where: edit(where, change_version), "was built with nvidia-cutlass-dsl 4.7.0, here is 4.8"),
        (
            lambda where: edit(where, lambda r: r["versions"].update({"cute-ops": "0.0.1"})),
            f"was built with cute-ops 0.0.1, here is {__version__}: build it again",
        ),
        (
            lambda where: edit(where, change_sources),
            "was built from other sources of cute_ops.kernels.rows.select:fused",
        ),
        (flip_a_bit, "is damaged: the checksum of cute_silu_mul_"),
        (truncate, "is damaged: the checksum of cute_silu_mul_"),
        (link, "is not a file"),
        (lambda where: (where / "kernels" / f"{wanted().symbol}.so").unlink(), ".so: No such file or directory"),
        (lambda where: where.chmod(0o777), " can be written by others (mode 777); it holds native code"),
        (lambda where: (where / "bundle.json").chmod(0o666), "holds bundle.json, which can be written by others"),
        (lambda where: (where / "kernels").chmod(0o775), " holds kernels, which can be written by others (mode 775)"),
        (open_behind_a_link, " can be written by others (mode 777)"),
        (lambda where: (shutil.rmtree(where), where.write_text("")), "is not a folder"),
    ],
    ids=[
        "no record", "broken record", "no folder", "format", "platform", "version", "our version", "sources",
        "flipped bit", "truncated", "link", "missing", "open folder", "open record", "open kernels",
        "link to an open folder", "file",
    ],
)  # fmt: skip
def test_a_bundle_that_does_not_fit_is_refused(
    served: Path, cache_folder: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    damage(served)
    with pytest.raises(CacheError) as caught:
        cache.get(wanted())
    text = str(caught.value)
    assert text.startswith(f"cute_ops: bundle {served} ") and sentence in text and "\n" not in text


@pytest.mark.fault("a bundle without this GPU", "an error that says how to build it", "nothing")
def test_another_gpu_is_told_which_one_it_was_built_for(served: Path, cache_folder: Path) -> None:
    sentence = "was built for sm_80:108, sm_90a:132, this GPU is sm_100a: build it again with --arch sm_100a"
    with pytest.raises(CacheError, match=sentence):
        cache.get(wanted("sm_100a"))


@pytest.mark.fault("a kernel that the bundle does not hold", "it is compiled; a warning", "a compile")
def test_what_a_bundle_does_not_hold_is_compiled_and_said(
    served: Path, cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (call,) = manifest.parse("silu_mul gate:bfloat16[*,96] up:bfloat16[*,96]")
    before = cache.counters.compiled
    with caplog.at_level(logging.WARNING, "cute_ops"):
        cache.get(build.variant_of(call, parse("sm_90a")))
    assert cache.counters.compiled == before + 1
    assert f"{served} does not hold silu_mul sm_90a gate:bfloat16[?,96]" in caplog.text


def test_several_bundles(served: Path, tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each target; the first one does not fit."""
    (call,) = manifest.parse("silu_mul gate:bfloat16[*,64] up:bfloat16[*,64]")
    build.build([call], [parse("sm_120a")], tmp_path / "other")
    monkeypatch.setenv("CUTE_OPS_BUNDLE", f"{served}{os.pathsep}{tmp_path / 'other'}")
    before = cache.counters.compiled
    for arch in ("sm_120a", "sm_80"):
        assert callable(cache.get(build.variant_of(call, parse(arch))))
    assert cache.counters.compiled == before


BARE = """
import sys
sys.path[:0] = {path!r}
import importlib.util
assert importlib.util.find_spec("cutlass") is None and importlib.util.find_spec("torch") is None
from cute_ops import CompileError
from cute_ops.jit import cache, toolchain
from cute_ops.calls import manifest
from cute_ops.aot import build
from cute_ops.jit.target import parse
calls = manifest.parse({lines!r})
print(all(callable(cache.get(build.variant_of(call, parse("sm_90a")))) for call in calls))
other, = manifest.parse("silu_mul gate:bfloat16[*,96] up:bfloat16[*,96]")
try:
    cache.get(build.variant_of(other, parse("sm_90a")))
except CompileError as error:
    print(error)
"""


@pytest.mark.fault(
    "no compiler installed", "bundles run; a kernel that no bundle has raises an error that says so", "nothing",
)  # fmt: skip
def test_a_bundle_runs_where_the_compiler_is_not_installed(served: Path, tmp_path: Path) -> None:
    """Python without its packages, given the DSL's runtime and TVM-FFI only."""
    site, packages = tmp_path / "site", Path(toolchain.runtime_library()).parents[3]  # type: ignore[arg-type]
    library = site / "nvidia_cutlass_dsl" / "cu13" / "lib"
    library.mkdir(parents=True)
    (library / "libcute_dsl_runtime.so").symlink_to(packages / "nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so")
    for pattern in ("nvidia_cutlass_dsl_libs_cu13-*", "apache_tvm_ffi-*", "tvm_ffi", "typing_extensions.py"):
        (found,) = packages.glob(pattern)
        (site / found.name).symlink_to(found)
    code = BARE.format(path=[str(site), str(ROOT)], lines=LINES)
    command = [sys.executable, "-S", "-c", code]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    assert first == "True"
    assert second.startswith("cute.silu_mul: no bundle and no cache holds silu_mul sm_90a gate:bfloat16[?,96]")
    assert "the compiler is not installed: add the call to the manifest" in second


def test_an_installed_package_serves_its_bundle(
    made: Path, tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An entry point names the folder; nothing of the package is imported. One that does not fit is passed over."""
    site = tmp_path / "site"
    for name in ("shipped", "stale"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
        shutil.copytree(made, site / name / "kernels_of_it")
        information = site / f"{name}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(f"[cute_ops.bundles]\nany = {name}.kernels_of_it\n")
    edit(site / "stale" / "kernels_of_it", change_version)
    for path in [site / "shipped", *(site / "shipped").rglob("*")]:
        path.chmod(0o775 if path.is_dir() else 0o664)  # as pip leaves it where the umask is 002
    monkeypatch.syspath_prepend(str(site))
    before = cache.counters.bundled, cache.counters.compiled
    with caplog.at_level(logging.WARNING, "cute_ops"):
        assert callable(cache.get(wanted()))
        assert (cache.counters.bundled, cache.counters.compiled) == (before[0] + 1, before[1])
        cache.get(build.variant_of(manifest.parse("silu_mul gate:float16[*,32] up:float16[*,32]")[0], parse("sm_90a")))
    assert caplog.text.count("was built with nvidia-cutlass-dsl 4.7.0") == 1
    assert cache.counters.compiled == before[1] + 1
    (site / "shipped" / "kernels_of_it").chmod(0o777)
    bundle.forget()
    assert bundle.load_installed(wanted()) is None
    assert "kernels_of_it can be written by others (mode 777)" in caplog.text


AS_NOBODY = """
import os
from cute_ops.jit import cache
from cute_ops.calls import manifest
from cute_ops.aot import build
from cute_ops.jit.target import parse
from tests.programs import rights
os.environ["CUTE_OPS_TUNE"] = "0"
variant = build.variant_of(manifest.parse({lines!r})[0], parse("sm_90a"))
rights.become(65534)
print(callable(cache.get(variant)), cache.counters.bundled)
"""


@pytest.mark.slow
@pytest.mark.as_root
def test_a_bundle_of_root_serves_everybody(made: Path, cache_folder: Path) -> None:
    """What several users share: it serves, and is left as it is."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are for root only
        Path(folder).chmod(0o755)
        shared = Path(shutil.copytree(made, Path(folder, "bundle")))
        content = {path: path.stat().st_mtime for path in shared.rglob("*")}
        path = os.pathsep.join(sys.path)
        variables = {"CUTE_OPS_BUNDLE": str(shared), "CUTE_OPS_CACHE_DIR": f"{folder}/none", "PYTHONPATH": path}
        environment = {**os.environ, **variables}
        command = [sys.executable, "-c", AS_NOBODY.format(lines=LINES)]
        served = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
        assert served.stdout == "True 1\n" and not served.stderr, served.stderr
        assert {path: path.stat().st_mtime for path in shared.rglob("*")} == content


@pytest.mark.fault("a bundle, or a file in one, that belongs to another user", "an error", "nothing")
@pytest.mark.as_root
@pytest.mark.parametrize("name", [".", "bundle.json", "kernels", "kernels/*.so", ".."])
def test_a_bundle_of_another_user_is_refused(served: Path, cache_folder: Path, name: str) -> None:
    """Whoever owns it can write it when he likes; who owns a folder around it can put another in its place."""
    (given, *_) = [served / name] if "*" not in name else served.glob(f"kernels/{wanted().symbol}.so")
    os.chown(given, 65534, 65534)
    who = "can be replaced by user 65534" if name == ".." else "belongs to user 65534, not to you"
    with pytest.raises(CacheError, match=f"{who}.*; it holds native code: put it into a new folder"):
        cache.get(wanted())
    os.chown(given, 0, 0)


@pytest.mark.fault("others can write a folder above a bundle", "an error", "nothing")
def test_a_bundle_that_others_can_replace_is_refused(served: Path, cache_folder: Path) -> None:
    served.parent.chmod(0o777)
    with pytest.raises(CacheError, match=r"can be replaced by others, who can write .* \(mode 777\)"):
        cache.get(wanted())
    served.parent.chmod(0o1777)  # where each keeps what is his
    bundle.forget()
    assert callable(cache.get(wanted()))


@pytest.mark.fault(
    "an object is tampered with in one of two bundles", "an error, even though the other bundle has the kernel",
    "nothing",
)  # fmt: skip
def test_a_tampered_object_is_no_reason_to_ask_the_next_bundle(
    made: Path, served: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTE_OPS_BUNDLE", f"{served}{os.pathsep}{made}")
    flip_a_bit(served)
    with pytest.raises(CacheError, match="is damaged: the checksum of cute_silu_mul_"):
        cache.get(wanted())


@pytest.mark.fault(
    "a bundle is replaced, object by object or as a whole, between the check of an object and its loading",
    "the object that was checked is loaded", "nothing",
)  # fmt: skip
def test_what_was_checked_is_loaded(
    made: Path, served: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt of issue 15: swap the folder in that moment."""
    load, moved = loader.load, served.with_name("moved")

    def swapped(path: Path, symbol: str, through: str = "") -> Any:
        if not moved.exists():
            served.rename(moved)
            shutil.copytree(moved, served)
            (served / "kernels" / f"{symbol}.so").write_bytes(b"of somebody else")
        return load(path, symbol, through)

    monkeypatch.setattr(loader, "load", swapped)
    before = cache.counters.bundled
    assert callable(cache.get(wanted())) and cache.counters.bundled == before + 1


@pytest.mark.fault("a bundle that a program has open is replaced by another", "the program continues", "nothing")
def test_a_program_goes_on_with_a_new_bundle(made: Path, served: Path, cache_folder: Path) -> None:
    assert callable(cache.get(wanted()))
    with folder_swap.replacing(served, build.files, "bundle") as new:
        shutil.copytree(made, new, dirs_exist_ok=True)
        # The same kernels, in files of other bytes, as another compiler's would be.
        for path in (new / "kernels").iterdir():
            path.write_bytes(path.read_bytes() + b"\0")
        edit(new, lambda r: [k.update(sha256=sha256(new, s)) for s, k in r["kernels"].items()])
    before = cache.counters.bundled
    assert callable(cache.get(build.variant_of(CALLS[1], parse("sm_80")))) and cache.counters.bundled == before + 1


def test_a_program_may_change_its_working_directory(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(served.parent)
    named = [Path(served.name)]
    opened = Bundle(*named)
    assert callable(bundle.load(wanted(), named))
    monkeypatch.chdir("/")
    assert opened.verify() == 4 and callable(bundle.load(build.variant_of(CALLS[1], parse("sm_90a")), named))


@pytest.mark.slow
def test_names_are_shown_as_they_are(served: Path, tmp_path: Path) -> None:
    """What looks like a style, which ended the command, or like a terminal's escape sequence."""
    odd = Path(served.rename(tmp_path / "[bold]bundle[red]"))

    def rename(record: dict) -> None:
        kernel = record["kernels"].pop(wanted().symbol)
        kernel["variant"]["op"] = "[/red]"
        record["kernels"]["[red]"] = kernel

    (odd / "kernels" / f"{wanted().symbol}.so").rename(odd / "kernels" / "[red].so")
    edit(odd, rename)
    shown = run("bundle", "check", str(odd))
    assert shown.returncode == 0 and not shown.stderr, shown.stderr
    assert "[/red] sm_90a" in shown.stdout and "[bold]bundle[red]: 4 kernels" in shown.stdout
    (odd / "bundle.json").unlink()
    assert "[bold]bundle[red] has no bundle.json" in run("bundle", "check", str(odd)).stdout


def sha256(where: Path, symbol: str) -> str:
    return hashlib.sha256((where / "kernels" / f"{symbol}.so").read_bytes()).hexdigest()


def test_a_bundle_replaces_a_bundle_and_nothing_else(made: Path, tmp_path: Path, cache_folder: Path) -> None:
    where = tmp_path / "precious"
    where.mkdir()
    (where / "thesis.txt").write_text("years of work")
    with pytest.raises(CacheError, match="is not empty and no bundle: name another folder"):
        build.build(CALLS[:1], TARGETS[:1], where)
    assert (where / "thesis.txt").exists()
    with pytest.raises(CacheError, match="is not a folder: name another one"):
        build.build(CALLS[:1], TARGETS[:1], where / "thesis.txt")
    again = Path(shutil.copytree(made, tmp_path / "again"))
    build.build(CALLS[:1], TARGETS[:1], again)
    assert Bundle(again).verify() == 1 and not list(tmp_path.glob(".again*"))


@pytest.mark.fault(
    "a bundle is to replace one with files of a user in it, or with a broken record", "an error", "nothing",
)  # fmt: skip
@pytest.mark.parametrize("name", ["thesis.txt", "kernels/thesis.txt", "licenses/mine/", "kernels/.hidden", "-> .."])
def test_what_somebody_put_into_a_bundle_is_kept(made: Path, tmp_path: Path, cache_folder: Path, name: str) -> None:
    again = Path(shutil.copytree(made, tmp_path / "again"))
    if name == "-> ..":
        (again / "linked").symlink_to(tmp_path)
        name = "linked"
    elif name.endswith("/"):
        (again / name).mkdir()
    else:
        (again / name).write_text("years of work")
    with pytest.raises(CacheError, match=f"holds {name.rstrip('/')}, which we did not write: move that elsewhere"):
        build.build(CALLS[:1], TARGETS[:1], again)
    assert (again / name).exists() and Bundle(again).verify() == 4
    (again / "bundle.json").write_text("{}")
    with pytest.raises(CacheError, match=r"whose record cannot be read .*: name another folder, or delete it yourself"):
        build.build(CALLS[:1], TARGETS[:1], again)


@pytest.mark.slow
def test_a_cache_that_holds_no_whole_bundle(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MAX_BYTES", 1)
    both, write = threading.Barrier(2), cache_dir.write_whole

    def written_at_once(*args: Any) -> None:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # the other thread has looked for room, too, if it may
        write(*args)

    monkeypatch.setattr(cache_dir, "write_whole", written_at_once)
    with pytest.raises(
        CacheError, match=r"was deleted from the cache folder while .* CUTE_OPS_CACHE_MAX_BYTES, 1, may be too small"
    ):
        build.build(CALLS, TARGETS[:1], tmp_path / "bundle")
    assert not list(tmp_path.glob("*bundle*"))


@pytest.mark.fault(
    "while a bundle replaces another, the disk fills up or a kernel disappears from the cache",
    "an error; the old one stays", "nothing",
)  # fmt: skip
@pytest.mark.parametrize("step", ["_licenses", "_exchange"])
def test_a_bundle_that_cannot_be_written_leaves_the_one_before(
    made: Path, tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    again = Path(shutil.copytree(made, tmp_path / "again"))

    def full(*_: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder_swap if step == "_exchange" else build, step, full)
    with pytest.raises(OSError, match="No space left"):
        build.build(CALLS[:1], TARGETS[:1], again)
    monkeypatch.undo()
    assert Bundle(again).verify() == 4 and not list(tmp_path.glob(".again*"))


@pytest.mark.slow
@pytest.mark.fault(
    "one kernel of a bundle crashes the compiler", "the others compile; all errors are reported; no bundle is written",
    "nothing",
)  # fmt: skip
def test_where_one_kernel_fails_nothing_is_written(
    tmp_path: Path, cache_folder: Path, variant: Callable[..., Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "variants_of", lambda *_: [variant("Aborting"), variant("Copy"), variant("Broken")])
    built = build.build(CALLS, TARGETS, tmp_path / "bundle")
    texts = [str(one.error) for one in built]
    assert "died with signal 6" in texts[0] and texts[1] == "None" and "broken on purpose" in texts[2]
    assert not (tmp_path / "bundle").exists()


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cute_ops", *arguments]
    env = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)


@pytest.mark.slow
def test_from_a_program_to_a_bundle_by_the_command_line(tmp_path: Path, cache_folder: Path) -> None:
    program = (
        "from cute_ops import Array; from cute_ops.calls import lookup; from cute_ops.jit import cache\n"
        "from cute_ops.declaration.binding import bind\n"
        "from cute_ops.autotune.dispatch import choose; from cute_ops.jit.target import parse\n"
        "arrays = dict.fromkeys(('gate', 'up'), Array((4, 64), 'bfloat16'))\n"
        "cache.get(choose(bind(lookup.find('silu_mul'), arrays), {}, parse('sm_90a')).variant)\n"
        "print(vars(cache.counters)); raise SystemExit(3)\n"
    )
    (tmp_path / "train.py").write_text(program)
    train, text, where = str(tmp_path / "train.py"), str(tmp_path / "m.txt"), str(tmp_path / "bundle")
    recorded = run("record", "-o", text, "--", sys.executable, train, PYTHONPATH=str(ROOT))
    assert recorded.returncode == 3, "the program's own exit code"
    assert f"{text}: 1 kinds of calls" in recorded.stdout, recorded.stderr
    warmed = run("warm-up", text, "--arch", "sm_90a")
    assert warmed.returncode == 0 and "1 were there" in warmed.stdout, warmed.stdout
    built = run("build", text, "-o", where, "--arch", "sm_80,sm_90a")
    assert "2 kernels for sm_80:108, sm_90a:132" in built.stdout, built.stdout + built.stderr
    checked = run("bundle", "check", where)
    assert checked.returncode == 0 and "sound" in checked.stdout
    cache.clear()
    environment = {**os.environ, "CUTE_OPS_BUNDLE": where, "PYTHONPATH": str(ROOT)}
    served = subprocess.run([sys.executable, train], capture_output=True, text=True, env=environment, check=False)
    assert served.stdout.strip() == "{'bundled': 1, 'disk': 0, 'compiled': 0}"
    (Path(where) / "kernels" / f"{wanted().symbol}.so").write_bytes(b"")
    checked = run("bundle", "check", where)
    assert checked.returncode == 1 and "is damaged: the checksum of" in checked.stdout
    closed = run("build", text, "-o", "/proc/bundle", "--arch", "sm_90a")
    assert closed.returncode == 1 and "'/proc/" in closed.stdout and not closed.stderr, closed.stderr
    wrong = run("build", str(tmp_path / "train.py"), "-o", where)
    assert wrong.returncode == 1 and "train.py, line 1: no op 'from'" in wrong.stdout


def tile_of(call: manifest.Call) -> dict[str, int]:
    return dict(build.variant_of(call, parse("sm_90a")).config)


@pytest.mark.slow
def test_it_carries_what_calls_were_tuned_to(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who loads it chooses the tiles that it was built with, whatever else was measured there; nothing is compiled."""
    monkeypatch.setattr(winners, "SHIPPED", tmp_path / "none")
    calls = CALLS[:1]
    heuristic = tile_of(calls[0])
    ((name, _),) = [key for keys in dispatch._planned.values() for key in keys]
    winners.remember([winners.Winner(name, heuristic, {**heuristic, "threads": 64})])
    dispatch.forget()
    built = build.build(calls, [parse("sm_90a")], tmp_path / "bundle")
    # Both: a program that finds it by an entry point has not read its tuning.
    assert sorted(one.variant.config["threads"] for one in built) == [64, heuristic["threads"]]

    winners.remember([winners.Winner(name, heuristic, {**heuristic, "threads": 512})])
    dispatch.forget()
    assert tile_of(calls[0])["threads"] == 512
    monkeypatch.setenv("CUTE_OPS_BUNDLE", str(tmp_path / "bundle"))
    dispatch.forget()
    before = cache.counters.compiled
    assert tile_of(calls[0])["threads"] == 64
    assert callable(cache.get(build.variant_of(calls[0], parse("sm_90a")))) and cache.counters.compiled == before

    (tmp_path / "bundle" / "tuning.json").write_text("{}")
    dispatch.forget()
    assert tile_of(calls[0])["threads"] == 512
    assert "tuning of bundle" in caplog.text and "the checksum of tuning.json does not match" in caplog.text


@pytest.mark.parametrize("value", ["__main__", "", "nowhere.at_all", "not a name", ".x", "json.a:b"])
def test_an_entry_point_of_another_distribution_stops_no_program(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "other-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[cute_ops.bundles]\nany = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    bundle.installed()
    (information / "entry_points.txt").write_bytes(b"[cute_ops.bundles]\nany = caf\xe9\n")
    bundle.installed()
