"""The report of a program's regions as a table and as a picture."""

import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from cute_ops.fusion.report import BAR, Entry, Report

ENTRIES = [
    Entry("", "mm", "[torch] is expected to be faster", "[8, 64]", "", 3, None, "layers.*.out"),
    Entry("rmsnorm", "", "", "[8, 64]", "", 2, 10.0, "layers.*.norm"),
    Entry("gated_mlp", "x, w", "", "[8, 64]", "scan", 4, 10.0, "layers.*.mlp"),
    Entry("linear", "x", "", "[8, 64]", "", 1, -3.0, "head"),
]


def texts(svg: str) -> list[str]:
    """The texts of a picture that is well-formed, in its order."""
    tags = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return [(tag.text or "").replace("\xa0", " ").strip() for tag in tags]


def test_the_table_begins_with_what_saves_most():
    console = Console(width=160)
    with console.capture() as captured:
        console.print(Report("step", ENTRIES))
    rows = [re.split(r" *│ *", line)[1:] for line in captured.get().splitlines() if line.startswith("│")]
    assert [row[1] for row in rows] == ["gated_mlp", "rmsnorm", "linear", "-"]
    assert [row[5] for row in rows] == ["10", "10", "-3", ""]
    assert rows[-1][6] == "[torch] is expected to be faster"


def test_bars_of_the_picture_say_what_all_places_save():
    found = texts(Report("step", ENTRIES).svg())
    assert [len(text) for text in found if re.fullmatch("█+", text)] == [BAR, BAR // 2]
    assert {"gated_mlp", "rmsnorm", "linear", "[torch] is expected to be faster"} <= {*found}


@pytest.mark.parametrize("entries", [[], ENTRIES[:1], ENTRIES[-1:]])
def test_a_picture_without_bars(entries):
    assert not [text for text in texts(Report("step", entries).svg()) if "█" in text]
