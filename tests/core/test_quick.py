"""``make quick``: one case of each fast test, and with a room all cases of the files that are about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--quick", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_one_case_of_each_fast_test_or_all_of_a_room() -> None:
    files = ("tests/core/test_fuzz.py", "tests/core/test_cache.py")
    some = collected(*files)
    names = [each.partition("[")[0] for each in some]
    assert len(names) == len(set(names)) and len(names) > 20
    assert sum("test_damaged_files_are_explained" in name for name in names) == 1
    assert not any(name.endswith("test_sixteen_processes_one_compile") for name in names)
    every = collected("tests/core", "--room", "fuzz")
    assert len(every) == 6 and all("test_damaged_files_are_explained[" in each for each in every)
    files_of_a_module = {each.partition("::")[0] for each in collected("tests/core", "--room", "file_lock")}
    assert {"tests/core/test_cache.py", "tests/core/test_processes.py"} <= files_of_a_module
    assert "tests/core/test_fuzz.py" not in files_of_a_module
