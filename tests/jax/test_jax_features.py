"""The table of features has a column for every op and a row for every feature that a test proves."""

from __future__ import annotations

import re
from pathlib import Path

from cute_ops.ops import OPS

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "docs" / "features_jax.md"


def test_the_table_is_up_to_date() -> None:
    head, _, *rows = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    assert re.findall(r"`(\w+)`", head) == [op.name for op in OPS], "run what the page says at its top"
    marks = {m for path in HERE.glob("test_*.py") for m in re.findall(r'mark\.feature\("([^"]+)"\)', path.read_text())}
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert {first for first, *_ in cells} == marks
    # A dash where an op has no gradient, which the test is about.
    allowed = [{"yes"} if op.grad else {"yes", "-"} for op in OPS]
    assert all(cell in fits for _, *others in cells for cell, fits in zip(others, allowed, strict=True))
