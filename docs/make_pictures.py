"""Which thread stores which element, as pictures: ``python docs/make_pictures.py`` runs kernels on the CPU to see it.

Kernels run by :mod:`cute_ops.testing.interpreter`. Those of the steps are the code of ``docs/own_kernel.md``.
"""

from __future__ import annotations

import csv
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "examples" / "custom_op"))
sys.path.append(str(Path(__file__).parents[1] / "examples" / "row_kernel"))
import softcap
import unit_norm

from cute_ops import Op
from cute_ops.testing import interpreter, kernel_calls

DOCS = Path(__file__).parent
PAGE, PICTURES = DOCS / "own_kernel.md", DOCS / "pictures"
SECTOR, WARP = 32, 32  # bytes that memory moves at least; threads
TINTS = ("#e57373", "#ffb74d", "#81c784", "#64b5f6")
_STYLE = (
    "<style>text{font:11px sans-serif;text-anchor:middle;fill:#888}.on{fill:#111}"
    "rect{fill:none;stroke:#888;stroke-width:.7}</style>"
)


def steps() -> dict[int, str]:
    """The kernels of the page by the number of their step."""
    blocks = re.findall(
        r'^```python\n("""HOW, step (\d).*?)^```', PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return {int(number): text for text, number in blocks}


def op_of_step(number: int, folder: Path) -> Op:
    """The op of the page with the kernel of a step, whose file is put into a folder of Python's path."""
    module = f"softcap_step_{number}"
    (folder / f"{module}.py").write_text(steps()[number], encoding="utf-8")
    op = softcap.softcap
    return Op(
        "softcap", inputs=op.inputs, outputs=op.outputs, dtypes=op.dtypes, attrs=op.attrs, reference=op.reference,
        kernel=f"{module}:SoftCap",
    )  # fmt: skip


class _Watched(interpreter.Memory):
    """Memory that remembers which thread of the launch stored what."""

    stored: list[tuple[np.ndarray, np.ndarray]]

    def write(self, address: Any, offsets: Any, kind: Any, values: Any) -> None:
        super().write(address, offsets, kind, values)
        active = np.flatnonzero(np.broadcast_to(interpreter.now.mask, interpreter.now.count))
        index, threads = np.broadcast_arrays(self._index(address, offsets, kind), active)
        self.stored = [*getattr(self, "stored", []), (index.ravel() * kind.size, threads.ravel())]


def writers(op: Op, rows: int, n: int) -> np.ndarray:
    """``[rows, n]``: the thread that stores each element of the first output, in bfloat16."""
    call = kernel_calls.made(op, rows, n, "bfloat16", "compact", np.random.default_rng(0))
    before, interpreter.Memory = interpreter.Memory, _Watched
    try:
        kernel_calls.run(call)
        places, threads = (np.concatenate(part) for part in zip(*interpreter.now.memory.stored, strict=True))
    finally:
        interpreter.Memory = before
    return threads[np.argsort(places)][: rows * n].reshape(rows, n)


def row(number: int, op: Op) -> str:
    """A line of the page's table: what the first warp stores at a time in a tensor of 256 rows and 256 columns."""
    threads = writers(op, 256, 256)
    places = 2 * np.flatnonzero(threads.ravel() < WARP)
    touched = SECTOR * len(np.unique(places // SECTOR))
    return f"| {number} | {2 * len(places)} | {touched // SECTOR} | {2 * len(places) / touched:.0%} |"


def rates(word: str = "") -> str:
    """A page's table of kernels whose name has a word, from the results of ``benchmarks/tutorial.py``."""
    with (DOCS.parent / "benchmarks" / "results" / "tutorial.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    lines = [
        f"| {r['kernel']} | {float(r['us']):.0f} | {float(r['gb_s']):.0f} | {float(r['of_copy']):.0%} |"
        for r in found
        if word in r["kernel"]
    ]
    return "\n".join(["| kernel | us | GB/s | of a copy |", "|---|---|---|---|", *lines])


def picture(threads: np.ndarray, columns: int = 16, width: int = 34) -> str:
    """An SVG with a cell for each element, or for each vector of them."""
    cells = threads.reshape(-1, columns)
    height = 22
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {columns * width + 2} {len(cells) * height + 2}">']
    parts.append(_STYLE)
    for i, line in enumerate(cells):
        for j, thread in enumerate(line):
            tint = f' style="fill:{TINTS[thread]}"' if thread < len(TINTS) else ""
            x, y = 1 + j * width, 1 + i * height
            parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}"{tint}/>')
            on = ' class="on"' if tint else ""
            parts.append(f'<text x="{x + width // 2}" y="{y + 15}"{on}>{thread}</text>')
    return "\n".join([*parts, "</svg>\n"])


def pictures(folder: Path) -> dict[str, str]:
    """Every picture by its name; steps' kernels are put into a folder of Python's path."""
    made = {f"softcap_{k}.svg": picture(writers(op_of_step(k, folder), 4, 16)) for k in steps()}
    # One row of 512: a cell is a vector of eight elements.
    return made | {"unit_norm.svg": picture(writers(unit_norm.unit_norm, 1, 512)[:, ::8])}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        sys.path.append(folder)
        PICTURES.mkdir(exist_ok=True)
        for name, text in pictures(Path(folder)).items():
            (PICTURES / name).write_text(text, encoding="utf-8")
        print(*(row(number, op_of_step(number, Path(folder))) for number in steps()), "", rates(), sep="\n")
