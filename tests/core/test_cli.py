"""The command line, run as people run it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

import cute_ops
from cute_ops import CacheError, __version__
from cute_ops.__main__ import app
from cute_ops.aot import build
from cute_ops.calls import manifest
from cute_ops.cli import table_of
from cute_ops.jit import bundle, cache, source_digest, target, toolchain
from cute_ops.tools import doctor

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cute_ops", *arguments]
    env = {**os.environ, "COLUMNS": "200", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)


def invoke(*arguments: str) -> Result:
    """The same in this process: to start one takes half a second."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, prog_name="python -m cute_ops")


def test_help_teaches() -> None:
    assert "Usage: python -m cute_ops" in run("--help").stdout
    for name in ("cache", "bundle", "doctor"):
        assert f"Usage: python -m cute_ops {name}" in invoke(name, "--help").stdout
    assert "Example: python -m cute_ops compile rmsnorm" in invoke("compile", "--help").stdout


@pytest.mark.slow
def test_compile_fills_the_cache(cache_folder: Path) -> None:
    result = run(
        "compile", "silu_mul", "--dtype", "float16", "--n", "64", "--n", "128", "--arch", "sm_80", "--arch", "sm_90a"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    found = {(v.op, v.arch, v.dims["n"]) for v, _, _ in cache.entries()}
    assert found == {("silu_mul", arch, n) for arch in ("sm_80", "sm_90a") for n in (64, 128)}
    info = run("cache", "info").stdout
    assert f"{cache_folder}: 4 kernels" in info.replace("\n", "") and "silu_mul sm_80 gate:float16[?,64]" in info
    assert "deleted 4 kernels" in run("cache", "clear").stdout
    assert not cache.entries()


@pytest.mark.slow
def test_dump_keeps_what_the_compiler_made(cache_folder: Path, tmp_path: Path) -> None:
    result = run("compile", "silu_mul", "--n", "64", "--arch", "sm_90a", "--dump", str(tmp_path / "dump"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert {p.suffix for p in (tmp_path / "dump").iterdir()} == {".so", ".ptx", ".cubin", ".json"}


def test_compile_takes_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(cache, "build", lambda variant: made.append(variant.op) or 0.0)
    for place in ("softcap.py", "softcap.py:softcap"):
        assert invoke("compile", str(ROOT / "examples/custom_op" / place), "--n", "64").exit_code == 0
    assert made == ["softcap_bwd", "softcap", "softcap"]


def test_a_pipe_gets_no_progress_bar(cache_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "manifest.txt").write_text("silu_mul gate:bfloat16[*,64] up:bfloat16[*,64]")
    result = invoke("warm-up", str(tmp_path / "manifest.txt"), "--arch", "sm_90a")
    (line,) = result.stdout.splitlines()
    assert line.startswith("1 compiled in ") and line.endswith(" 0 were there")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("compile", "nothing"), "Invalid value for OP: no op 'nothing'; there are"),
        (("compile", "silu_mul", "--arch", "sm_1"), "unknown architecture 'sm_1'; known: sm_80"),
        (("compile", "silu_mul", "--without", "gate"), "silu_mul has no optional input gate"),
    ],
)
def test_mistakes_are_explained(arguments: tuple[str, ...], text: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2 and text in result.stderr


def test_cache_commands_refuse_an_open_folder(cache_folder: Path) -> None:
    cache_folder.mkdir()
    cache_folder.chmod(0o777)
    result = run("cache", "clear")
    assert result.returncode == 1 and "can be written by others" in result.stdout


@pytest.mark.slow
def test_doctor_passes_here(cache_folder: Path) -> None:
    result = run("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    for text in ("nvidia-cutlass-dsl 4.8", "cache folder", "compiles: rmsnorm", "torch.ops.cute.rmsnorm runs on"):
        assert text in result.stdout


def test_doctor_says_what_to_do(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder.mkdir()
    cache_folder.chmod(0o777)
    for part in ("_compiler", "_framework"):  # which take seconds, and the test above has them
        monkeypatch.setattr(doctor, part, lambda *_: iter(()))
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "BAD  cute_ops: cache folder" in result.stdout and "do: set CUTE_OPS_CACHE_DIR" in result.stdout


def test_doctor_looks_at_bundles(tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = manifest.parse("silu_mul gate:bfloat16[*,64] up:bfloat16[*,64]")
    build.build(calls, [target.parse("sm_90a")], tmp_path / "bundle")
    monkeypatch.setenv("CUTE_OPS_BUNDLE", str(tmp_path / "bundle"))
    (good,) = doctor._bundles()
    assert good == ("ok", f"bundle {tmp_path / 'bundle'}: 1 kernels for sm_90a:132, sound", "")
    for here, text in {
        "sm_90a:114": "kernels that depend on this GPU's 114 SMs are compiled",
        "sm_80:108": "none for this GPU, sm_80:108: its kernels are compiled",
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(target, "device_count", lambda: 1)
            patch.setattr(target, "of_device", lambda here=here: target.parse(here))
            (note,) = doctor._bundles()
            assert note.level == "note" and note.text.endswith(text)
    with monkeypatch.context() as patch:
        patch.setattr(source_digest, "key", lambda kernel, declared: "another")
        (bad,) = doctor._bundles()
        assert bad.level == "bad" and "built from other sources of cute_ops.kernels.rows.select" in bad.text
    (tmp_path / "bundle" / "manifest.txt").write_text("changed")
    (bad,) = doctor._bundles()
    assert bad.level == "bad" and "the checksum of manifest.txt does not match" in bad.text and bad.remedy


def test_doctor_believes_what_programs_believe(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed package's bundle whose group can write it serves programs; doctor called it bad."""
    calls = manifest.parse("silu_mul gate:bfloat16[*,64] up:bfloat16[*,64]")
    for name in ("named", "installed"):
        build.build(calls, [target.parse("sm_90a")], tmp_path / name)
        for path in [tmp_path / name, *(tmp_path / name).rglob("*")]:
            path.chmod(0o775 if path.is_dir() else 0o664)
    monkeypatch.setenv("CUTE_OPS_BUNDLE", str(tmp_path / "named"))
    entry = EntryPoint("any", "kernels.installed", bundle.GROUP)
    monkeypatch.setattr(bundle, "installed", lambda: [bundle.Installed(tmp_path / "installed", entry)])
    wanted = build.variant_of(calls[0], target.parse("sm_90a"))
    named, installed = doctor._bundles()
    assert named.level == "bad" and "can be written by others" in named.text
    with pytest.raises(CacheError, match="can be written by others"):
        bundle.load(wanted, [tmp_path / "named"])
    assert installed == ("ok", "package kernels.installed: 1 kernels for sm_90a:132, sound", "")
    assert bundle.load_installed(wanted)


def test_doctor_where_only_the_runtime_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    (finding,) = doctor._compiler()
    assert finding.level == "note" and "only what bundles and the cache hold runs" in finding.text


def test_doctor_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "versions", lambda: ("", ""))
    bad = [f for f in doctor._versions() if f.level == "bad"]
    assert len(bad) == 2 and all(f.remedy for f in bad)


def test_doctor_looks_at_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_OPS_CACHEDIR", "/tmp")
    monkeypatch.setenv("CUTE_OPS_TUNE", "yes")
    monkeypatch.setenv("CUTE_OPS_ARCH", "sm_90")
    *texts, arch = [finding.text for finding in doctor._variables()]
    assert arch.startswith("CUTE_OPS_ARCH: unknown architecture 'sm_90' (did you mean sm_90a?); known: sm_80")
    assert "CUTE_OPS_CACHEDIR is no variable of cute_ops (did you mean CUTE_OPS_CACHE_DIR?)" in texts
    assert texts[-1] == "the environment variable CUTE_OPS_TUNE is 'yes', it must be 0 or 1"


def test_doctor_reports_a_broken_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = doctor._framework("json", "cute_ops.no_such_adapter")
    assert finding.level == "bad" and "No module named" in finding.text and finding.remedy.startswith("run: ")


def test_unknown_arch_of_target() -> None:
    with pytest.raises(ValueError, match="unknown architecture 'sm_70'; known: sm_80"):
        target.parse("sm_70")
    with pytest.raises(ValueError, match=r"unknown architecture 'sm_90' \(did you mean sm_90a\?\); known: sm_80"):
        target.parse("sm_90")


def test_help_wraps_at_the_terminals_width() -> None:
    """The docstrings' own line breaks would leave short lines between full ones."""
    text = "fastest for calls of an op and its gradient, and remember it"
    result = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    lines = [line.strip() for line in result.output.split("Arguments")[0].splitlines()]
    start = next(k for k, line in enumerate(lines) if line.startswith("Without this"))
    paragraph = lines[start : lines.index("", start)]
    assert text in " ".join(lines) and all(len(line) > 60 for line in paragraph[:-1])


def test_the_version() -> None:
    assert invoke("--version").stdout == f"cute_ops {__version__}\n"


def test_the_core_says_where_functions_are_and_what_was_meant() -> None:
    for name, hint in {
        "rmsnorm": ": functions are in cute_ops_torch and cute_ops_jax",
        "fusd": " (did you mean fused?): functions are in cute_ops_torch and cute_ops_jax",
        "Tensr": " (did you mean Tensor?)",
        "_fused": "",
    }.items():
        with pytest.raises(AttributeError) as error:
            getattr(cute_ops, name)
        assert str(error.value) == f"module 'cute_ops' has no attribute {name!r}{hint}"


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "bad.json").write_text("{bad")
    (tmp_path / "small.json").write_text('{"hidden_size": 64}')
    for words, text in {
        ("warm-up", "no.txt"): "No such file or directory: 'no.txt'",
        ("manifest", "no.json"): "No such file or directory: 'no.json'",
        ("manifest", str(tmp_path / "list.json")): "list.json: it is no configuration, but a list",
        ("manifest", str(tmp_path / "bad.json")): "bad.json: not JSON: Expecting property name",
        ("manifest", str(tmp_path / "small.json")): "small.json: no layer that is known; it needs rms_norm_eps",
        ("record", "-o", str(tmp_path), "--", "false"): f"cannot write {tmp_path}: Is a directory",
        ("record", "-o", str(tmp_path / "no" / "m.txt"), "--", "false"): "m.txt: No such file or directory",
    }.items():
        result = invoke(*words)
        assert result.exit_code == 1 and text in result.stdout, result.output


def test_names_of_files_are_whole_in_any_terminal() -> None:
    table, out = table_of("kernel", "file"), io.StringIO()
    table.add_row("silu", "/" + "x" * 100)
    Console(file=out, width=40).print(table)
    assert sum(line.count("x") for line in out.getvalue().splitlines()) == 100 and "…" not in out.getvalue()


@pytest.mark.parametrize("command", ["doctor", "cache"])
def test_a_bad_value_of_a_variable_is_one_line(command: str) -> None:
    """Some are read while modules are imported, others in the midst of a command."""
    bad = {"CUTE_OPS_TUNE": "2", "CUTE_OPS_CACHE_MAX_BYTES": "1GiB"}
    run = [sys.executable, "-m", "cute_ops", command]
    done = subprocess.run(run, capture_output=True, text=True, check=False, env={**os.environ, **bad})
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines() == [
        "cute_ops: the environment variable CUTE_OPS_CACHE_MAX_BYTES is '1GiB', it must be a number above 0",
        "cute_ops: the environment variable CUTE_OPS_TUNE is '2', it must be 0 or 1",
    ]
