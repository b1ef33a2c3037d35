"""The kernel class that an op names, and the name under which another process imports it."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple


class Kernel(NamedTuple):
    """The kernel class that an op is compiled from.

    Args:
        name: ``"module:Class"``, imported by the compiler's process only. The compiled kernel is kept under the digest
            of its sources: its module, the packages that contain it, and all that these import, also in functions, from
            the same package, from this one and from modules that are not installed. Of other installed packages the
            modules that import statements name count; frameworks and the compiler do not. A script may name its own
            class, ``f"{__name__}:Class"``: the compiler's process imports the script, so what the script runs stands
            under ``if __name__ == "__main__"``. So may a notebook: the class is compiled with the functions, imports
            and constants of other cells that it uses.
        sources: sources that no import statement names: files and folders that are read while the kernel is compiled,
            relative to the folder of its module, and modules that ``importlib`` or ``exec`` imports,
            ``("data/table.bin", "mypackage.generated")``; an installed package that is named here counts as a whole.
            When one of them changes, the kernel is compiled anew.
        least_sm: the oldest SM that the kernel runs on, ``89`` for 8.9.
    """

    name: str
    sources: tuple[str, ...] = ()
    least_sm: int = 80


def importable(name: str) -> str:
    """``__main__:Class`` as another process can import it: by the name of the program's module or file, or of a module
    made from a notebook's cells. The name of a program without a known source is returned unchanged.

    Raises:
        ValueError: a notebook's class that refers to what no module can hold.
    """
    module, _, attribute = name.partition(":")
    program = sys.modules[module]
    spec, file = getattr(program, "__spec__", None), getattr(program, "__file__", None)
    if spec:
        module = spec.name
    elif file and file.endswith(".py"):
        module = os.path.basename(file).removesuffix(".py")  # noqa: PTH119 (start-up time)
    elif attribute:
        from cute_ops.declaration import notebook  # start-up time: few programs are notebooks

        module = notebook.module_of(attribute, vars(program)) or module
    return f"{module}:{attribute}"
