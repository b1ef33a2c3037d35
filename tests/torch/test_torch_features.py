"""The tables of features have a column for every op and product, and a row for every feature that a test proves."""

from __future__ import annotations

import re
from pathlib import Path

from cute_ops.ops import OPS
from tests.ops.offered_products import PRODUCTS

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "features_torch.md"


def tables() -> list[tuple[list[str], dict[str, list[str]]]]:
    """Columns, and the cells of each row."""
    found = []
    for text in re.findall(r"(?m)^(?:\|.*\n)+", PAGE.read_text()):
        head, _, *rows = text.splitlines()
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        found.append((re.findall(r"`(\w+)`", head), {first: others for first, *others in cells}))
    return found


def test_the_tables_are_up_to_date() -> None:
    (ops, features), (products, of_products), _ = tables()
    assert ops == [op.name for op in OPS], "run what the page says at its top"
    assert products == [product.name for product in PRODUCTS], "run what the page says at its top"
    marks = {m for path in HERE.glob("test_*.py") for m in re.findall(r'mark\.feature\("([^"]+)"\)', path.read_text())}
    assert features.keys() | of_products.keys() == marks
    for feature, others in features.items():
        values = dict(zip(ops, others, strict=True))
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


def test_every_product_has_every_feature() -> None:
    """But for those that are shown on a GPU alone."""
    _, (_, features), _ = tables()
    for feature, cells in features.items():
        assert set(cells) <= ({"yes", "not run", "**no**"} if feature.startswith("GPU: ") else {"yes"}), feature
