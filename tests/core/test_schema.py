"""One checker for all JSON that is read, and what it says."""

from __future__ import annotations

from typing import Any

import pytest

from cute_ops.files import json_schema
from cute_ops.files.json_schema import Either

SHAPE = {
    "name": str, "sizes": [Either(int, None)], "pair": (str, int), "any": object, "by_name": {str: float},
    "kind": frozenset({"a", "b"}), "inner?": {"yes": bool},
}  # fmt: skip
GOOD: dict[str, Any] = {
    "name": "n", "sizes": [1, None], "pair": ["x", 2], "any": [{}], "by_name": {"x": 1.5}, "kind": "a",
}  # fmt: skip


def test_what_has_the_shape_passes() -> None:
    json_schema.check(GOOD, SHAPE)
    json_schema.check(GOOD | {"inner": {"yes": True}, "more": 1}, SHAPE)
    assert json_schema.parse('{"a": NaN}', {"a": float})["a"] != 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": 1}, "name is 1, expected a string"),
        ({"name": None}, "name is null, expected a string"),
        ({"name": ["x" * 99]}, "name is a list, expected a string"),
        ({"sizes": [1, True]}, "sizes[1] is true, expected an integer or null"),
        ({"sizes": {}}, "sizes is an object, expected a list"),
        ({"pair": ["x"]}, "pair has 1 values, expected 2"),
        ({"pair": ["x", 1.0]}, "pair[1] is 1.0, expected an integer"),
        ({"by_name": {"x": 1}}, "by_name.x is 1, expected a number"),
        ({"kind": "c"}, "kind is \"c\", expected 'a' or 'b'"),
        ({"kind": []}, "kind is a list, expected 'a' or 'b'"),
        ({"inner": {}}, "inner has no 'yes'"),
        ({"name": "\ud800" * 99, "kind": 0}, "kind is 0"),
    ],
)
def test_what_has_not_is_told_where(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        json_schema.check(GOOD | change, SHAPE)
    assert text in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 10**6, "its JSON is nested too deeply"),
        ('{"a":' * 10**6, "its JSON is nested too deeply"),
        ("[]", "it is a list, expected an object"),
        ("{}", "it has no 'name'"),
        ("9" * 5000, "Exceeds the limit"),
        (b"\xff\xfe", "'utf-8' codec can't decode"),
        ("", "Expecting value"),
    ],
)
def test_what_is_no_json(text: str | bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        json_schema.parse(text, SHAPE)
