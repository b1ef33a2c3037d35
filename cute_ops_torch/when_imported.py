"""Import a module of ours as soon as somebody imports another one.

What we add to DTensor needs its module, which takes 0.4 s to import and which most programs never use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(theirs: str, ours: str) -> None:
    """Import ``ours`` right after ``theirs``, now if that is there already."""
    if theirs in sys.modules:
        importlib.import_module(ours)
    else:
        sys.meta_path.insert(0, _Follow(theirs, ours))


class _Follow(MetaPathFinder):
    """Finds ``theirs`` as others do, once, and has ``ours`` imported when its code has run."""

    def __init__(self, theirs: str, ours: str) -> None:
        self.theirs, self.ours = theirs, ours

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.theirs or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(self.ours)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
