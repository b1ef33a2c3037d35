"""What each step of docs/own_kernel.md reaches on this GPU, and the kernels of the other pages on writing ops.

    python benchmarks/tutorial.py --out out/benchmarks

Bytes that an op must move, divided by its time, in GB/s and as a part of what a large copy reaches.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, Table
from rich.console import Console
from rich.table import Table as View

sys.path += [str(ROOT / "docs"), str(ROOT / "examples" / "custom_op")]
import make_pictures

from cute_ops import Array, Op, fused
from cute_ops_torch.tools import measure

ROWS, N = 16384, 4096
COLUMNS = ("kernel", "rows", "n", "us", "us_min", "us_max", "gb_s", "of_copy")


def capped(xp: Any, x: Any) -> Any:
    """``cap * tanh(x / cap)``"""
    return 30.0 * xp.tanh(x / 30.0)


def unit(xp: Any, x: Any) -> Any:
    """``x * rsqrt(sum(x^2) + eps)``"""
    return x * xp.rsqrt(xp.sum(x * x, axis=-1, keepdims=True) + 1e-12)


def kernels(folder: Path) -> Iterator[tuple[str, Op]]:
    """Every kernel by its name; files of the steps' are put into a folder of Python's path."""
    for number in make_pictures.steps():
        if number < 5:
            yield f"step {number}", make_pictures.op_of_step(number, folder)
    yield "step 5, forward", make_pictures.softcap.softcap
    yield "step 5, gradient", make_pictures.softcap.softcap_bwd
    yield "an expression", fused(capped, operands={"x": "*m n"})
    yield "a row kernel, `unit_norm`", make_pictures.unit_norm.unit_norm
    yield "its gradient, `unit_norm_bwd`", make_pictures.unit_norm.unit_norm_bwd
    yield "`unit_norm` as an expression", fused(unit, operands={"x": "*m n"})


def arrays(op: Op) -> dict[str, Array]:
    """Inputs of a kernel: rows, and a number for each."""
    return {n: Array((ROWS, N), "bfloat16") if t.dims else Array((ROWS,), t.dtype) for n, t in op.inputs.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for tutorial.csv")
    options = parser.parse_args(arguments)
    if not measure.available():
        parser.error("no GPU here")
    table, ceiling = Table(options.out / "tutorial.csv", COLUMNS), measure.copy_rate()
    view = View("kernel", "us", "GB/s", "of a copy", title=f"{ROWS} x {N}, bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        sys.path.append(folder)
        for name, op in kernels(Path(folder)):
            inputs = arrays(op)
            found = measure.measure(op, inputs)
            spread = {"us": found.us, "us_min": found.low, "us_max": found.high}
            rates = {"gb_s": found.rate, "of_copy": found.rate / ceiling}
            table.add({"kernel": name, "rows": ROWS, "n": N, **spread, **rates})
            view.add_row(name, f"{found.us:.1f}", f"{found.rate:.0f}", f"{found.rate / ceiling:.0%}")
    Console(width=100).print(view)


if __name__ == "__main__":
    main()
