"""Import one of our modules as soon as a program imports another module.

Our rules for DTensors need their module, which takes 0.4 s to import and which most programs never use.
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
    """Import ``ours`` right after ``theirs``; now, if that is imported already."""
    if theirs in sys.modules:
        importlib.import_module(ours)
    else:
        sys.meta_path.insert(0, _ImportAfter(theirs, ours))


class _ImportAfter(MetaPathFinder):
    """Finds ``theirs`` through the other finders, with a loader that imports ``ours`` when its code has run."""

    def __init__(self, theirs: str, ours: str) -> None:
        self.theirs, self.ours = theirs, ours
        self.searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.theirs or self.searching:
            return None
        self.searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # Not before: a program may look for a module without importing it.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            importlib.import_module(self.ours)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
