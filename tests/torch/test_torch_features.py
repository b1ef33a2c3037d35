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
        values = dict(zip((op.name for op in OPS), map(str.strip, others), strict=True))
        # What a GPU is needed for is not run where none is; the page also says what failed on one.
        allowed = {"yes", "not run", "**no**"} if feature.startswith("GPU: ") else {"yes"}
        assert {values[op.name] for op in OPS if op.grad} <= allowed, feature
        # A feature of gradients applies to no op that has none, any other one to all.
        # A step of an optimizer is no layer.
        layers = [op for op in OPS if not op.grad and (op.inference_only or feature != "nn module")]
        # Inductor has no form of its own of what writes its inputs.
        layers = [op for op in layers if not op.mutates or values[op.name] != "-"]
        others = {values[op.name] for op in layers}
        assert others == {"-"} or others <= allowed, feature
