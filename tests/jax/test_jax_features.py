"""The tables of features have a column for every op and product, and a row for every feature that a test proves."""

from __future__ import annotations

import re
from pathlib import Path

from cute_ops.ops import OPS
from tests.ops.offered_products import PRODUCTS

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "features_jax.md"


def test_the_tables_are_up_to_date() -> None:
    columns, rows = [], []
    for text in re.findall(r"(?m)^(?:\|.*\n)+", PAGE.read_text()):
        head, _, *lines = text.splitlines()
        columns.append(re.findall(r"`(\w+)`", head))
        rows.append([[cell.strip() for cell in line.strip("|").split("|")] for line in lines])
    wanted = [[op.name for op in OPS], [product.name for product in PRODUCTS]]
    assert columns[:2] == wanted, "run what the page says at its top"
    marks = {m for path in HERE.glob("test_*.py") for m in re.findall(r'mark\.feature\("([^"]+)"\)', path.read_text())}
    of_ops, of_products, _ = rows  # those of models: tests/contract/test_model_ops.py
    assert {first for first, *_ in (*of_ops, *of_products)} == marks
    # A dash where an op has no gradient, which the test is about.
    allowed = [{"yes"} if op.grad else {"yes", "-"} for op in OPS]
    assert all(cell in fits for _, *others in of_ops for cell, fits in zip(others, allowed, strict=True))
    assert all(set(others) == {"yes"} for _, *others in of_products)
