"""Which tests run: one case of each fast test under ``make quick``, all of a room, a part where the mark says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drawing import part_of

ROOT = Path(__file__).parents[2]


def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}  # no worker's
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
def test_one_case_of_each_fast_test_or_all_of_a_room() -> None:
    files = ("tests/core/test_fuzz.py", "tests/core/test_cache.py")
    names = [each.partition("[")[0] for each in collected("--quick", *files)]
    fast = {each.partition("[")[0] for each in collected("-m", "not slow and not gpu", *files)}
    assert len(names) == len(set(names)) and set(names) == fast
    assert "tests/core/test_fuzz.py::test_damaged_files_are_explained" in fast
    assert not any(name.endswith("test_sixteen_processes_one_compile") for name in names)
    every = collected("--quick", "tests/core", "--room", "fuzz")
    assert len(every) == 6 and all("test_damaged_files_are_explained[" in each for each in every)
    files_of_a_module = {each.partition("::")[0] for each in collected("--quick", "tests/core", "--room", "file_lock")}
    assert {"tests/core/test_cache.py", "tests/core/test_processes.py"} <= files_of_a_module
    assert "tests/core/test_fuzz.py" not in files_of_a_module


def test_one_of_so_many_neighbours_is_drawn() -> None:
    drawn = [part_of(range(10), 0.3, str(seed)) for seed in range(50)]
    assert drawn[0] == part_of(range(10), 0.3, "0")
    assert {case for some in drawn for case in some} == set(range(10))
    assert all(first < 3 <= second < 6 <= third for first, second, third in drawn)
    assert part_of(range(10), 1.0, "") == [*range(10)]
    assert len(part_of(["alone"], 0.1, "")) == 1


@pytest.mark.slow
def test_a_drawn_part_of_a_test() -> None:
    test = "tests/core/test_model_kernels.py::test_every_case_compiles_without_spills"
    draws = ["--all"], ["--draw", "a", "--drawn", "1"], ["--draw", "b", "--drawn", "1"], ["--draw", "a"]
    every, some, others, fewer = (collected(*how, test) for how in draws)
    assert set(some) | set(others) < set(every) and len(some) == len(others) == round(0.12 * len(every))
    assert some != others
    assert len(fewer) == round(0.6 * 0.12 * len(every))
