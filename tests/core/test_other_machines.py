"""``tests/other_machines.py``: a machine is what it says, and how its tests ended is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import other_machines

TESTS = Path(__file__).parents[1]
SCRIPT = Path(other_machines.__file__)


def test_what_tests_forget_of_a_user_is_set_by_a_machine(request: pytest.FixtureRequest) -> None:
    """So that a test which minds it fails there, if it is not forgotten."""
    (conftest,) = (
        plugin
        for plugin in request.config.pluginmanager.get_plugins()
        if getattr(plugin, "__file__", None) == str(TESTS / "conftest.py")
    )
    machines = other_machines.MACHINES.values()
    known = {name for machine in machines for name in machine.variables} | {"PYTHONUNBUFFERED"}
    assert known >= conftest.FOR_PROGRAMS


def test_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_OPS_TUNE", "1")
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    monkeypatch.setenv("HOME", "/home/me")
    environment, machines = other_machines.environment, other_machines.MACHINES
    plain = environment(machines["as it is"], tmp_path, "7")
    assert plain["HOME"] == "/home/me" and plain["OMP_NUM_THREADS"] == "1"
    assert not plain.keys() & {"CUTE_OPS_TUNE", "PYTHONPATH"}
    assert environment(machines["nothing"], tmp_path, "7").keys() == {"PATH", "PYTHONUNBUFFERED"}
    assert "HOME" not in environment(machines["no home"], tmp_path, "7")
    assert environment(machines["other python"], tmp_path, "7")["PYTHONHASHSEED"] == "7"
    assert environment(machines["our variables"], tmp_path, "7")["CUTE_OPS_CACHE_DIR"] == f"{tmp_path}/kernels"
    assert environment(machines["threads"], tmp_path, "7")["OMP_NUM_THREADS"] == "16"


def test_how_tests_ended(tmp_path: Path) -> None:
    report, log = tmp_path / "report.xml", tmp_path / "log.txt"
    log.write_text("collecting ... INTERNALERROR> no space\n")
    assert other_machines.read(report, 2, log).problem == "exit code 2: collecting ... INTERNALERROR> no space"
    case = '<testcase classname="tests.core.test_a" name="test_{}">{}</testcase>'
    cases = [("one", ""), ("two", "<skipped/>"), ("three", '<failure message="1 == 2&#10;more">long</failure>')]
    report.write_text(f"<testsuites>{''.join(case.format(*each) for each in cases)}</testsuites>")
    failed = other_machines.Outcome(1, 1, [("tests.core.test_a::test_three", "1 == 2")])
    assert other_machines.read(report, 2, log) == failed
    # A process that died after its tests, or a report of an earlier one.
    assert "exit code 0" in other_machines.read(report, 0, log).problem


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("make") and shutil.which("git")), reason="neither make nor git")
def test_a_machine_runs_tests_and_names_what_fails(tmp_path: Path) -> None:
    if subprocess.run(["git", "ls-files"], cwd=TESTS, capture_output=True, check=False).returncode:
        pytest.skip("not a clone that git reads")
    machines = [word for name in ("umask 077", "umask 002") for word in ("--only", name)]
    chosen = [
        "--tests",
        "tests/programs/private_clone.py",
        "--fraction",
        "1",
        "--jobs",
        "2",
        "--logs",
        str(tmp_path),
    ]
    command = [sys.executable, str(SCRIPT), *machines, *chosen]
    # As CI and `make test-newest` have it: what is handed on to make inside of make.
    handed_on = {"MAKEFLAGS": " -- COVERAGE=1", "MAKELEVEL": "1", "COVERAGE": "1", "READY": ".venv-newest/.installed"}
    done = subprocess.run(command, env={**os.environ, **handed_on}, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "umask 077: 1 passed, 0 failed" in done.stdout and "umask 002: 0 passed, 1 failed" in done.stdout
    assert "umask 002: tests.programs.private_clone::test_nobody_else_reads_the_clone" in done.stdout
    assert "1 failed" in (tmp_path / "umask_002.txt").read_text()
