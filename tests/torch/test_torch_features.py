"""The table of features has a column for every op and a row for every feature that a test proves."""

from __future__ import annotations

import re
from pathlib import Path

from cute_ops.ops import OPS

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "docs" / "features_torch.md"


def test_the_table_is_up_to_date() -> None:
    head, _, *rows = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    assert re.findall(r"`(\w+)`", head) == [op.name for op in OPS], "run what the page says at its top"
    marks = {m for path in HERE.glob("test_*.py") for m in re.findall(r'mark\.feature\("([^"]+)"\)', path.read_text())}
    cells = {first.strip(): others for first, *others in (row.strip("|").split("|") for row in rows)}
    assert cells.keys() == marks
    for feature, others in cells.items():
        for op, cell in zip(OPS, others, strict=True):
            # What a GPU is needed for is not run where none is; what is about gradients does not apply to every op.
            allowed = (
                {"yes"} | ({"not run"} if feature.startswith("GPU: ") else set()) | ({"-"} if not op.grad else set())
            )
            assert cell.strip() in allowed, (feature, op.name)
