"""Named problem sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A named problem that tests, tuning and benchmarks share.

    Args:
        name: where the shape comes from, ``"llama3-8b"``.
        dims: sizes by dim name; leading dims as a tuple.
        dtypes: dtype variables that the case fixes; the others follow the first one.
        absent: optional inputs left out.
        attrs: attributes that differ from the default.
        leading: number of leading dims of inputs that broadcast; all of them by default.
    """

    name: str
    dims: Mapping[str, Any]
    dtypes: Mapping[str, str] = {}
    absent: tuple[str, ...] = ()
    attrs: Mapping[str, Any] = {}
    leading: Mapping[str, int] = {}
