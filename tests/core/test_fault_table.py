"""docs/faults.md is made from the tests' ``fault`` marks: ``python tests/core/test_fault_table.py`` writes it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "faults.md"
HEAD = """# Faults

Each line is a test that causes a fault and fails if anything other than the stated outcome happens. Processes are
really killed and stopped, disks really full or read-only, bits really flipped. Only two faults are simulated: a clock
that jumps (file times are set) and a file system without locks (the call's answer is replaced). Made by
`python tests/core/test_fault_table.py`.

| injected | what happens | lost | test |
|---|---|---|---|
"""


def lines() -> list[str]:
    found = []
    for path in sorted(HERE.parent.glob("*/test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    injected, happens, lost = map(ast.literal_eval, mark.args)
                    found.append(f"| {injected} | {happens} | {lost} | `{path.name}::{node.name}` |\n")  # type: ignore[attr-defined]
    return found


@pytest.mark.slow
def test_the_table_is_of_these_tests() -> None:
    assert len(lines()) > 20
    assert DOCUMENT.read_text(encoding="utf-8") == HEAD + "".join(lines()), f"run: python {Path(__file__).name}"


if __name__ == "__main__":
    DOCUMENT.write_text(HEAD + "".join(lines()))
