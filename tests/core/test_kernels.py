"""Every op and dtype compiles for every architecture without a GPU, and the machine code holds the gate:
no stack, no spills, 16-byte loads and stores where rows are aligned, registers within reach of 1024 threads
per CTA where the tile asks for them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cute_ops import FLOATS, Array, Op
from cute_ops.binding import bind
from cute_ops.ops import OPS
from cute_ops.plan import Memory, plan
from cute_ops.target import parse
from cute_ops.variant import Variant
from cute_ops.worker import worker

ARCHES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
ALL = [o for op in OPS for o in (op, op.grad) if o is not None]
REGISTERS = 65536


def variant_of(
    op: Op, dtype: str, n: int, arch: str, memory: dict[str, Memory] | None = None, absent: tuple[str, ...] = ()
) -> Variant:
    given = {name: t for name, t in op.inputs.items() if name not in absent}
    arrays: dict[str, Array | None] = {name: Array((4096, n) if t.rows else (n,), dtype) for name, t in given.items()}
    return plan(bind(op, arrays), memory or {}, parse(arch)).variant


def cuobjdump() -> str:
    """The disassembler: of the toolkit, or of the nvidia-cuda-cuobjdump package."""
    beside = [str(p) for folder in sys.path for p in Path(folder or ".").glob("nvidia/cu*/bin")]
    found = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=":".join(beside))
    assert found, "cuobjdump is missing: it comes with the dev extra"
    return found


def dump(variant: Variant, folder: Path, option: str) -> str:
    worker.compile(variant, folder / "kernel.so", folder)
    (cubin,) = folder.glob("*.cubin")
    command = [cuobjdump(), option, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_no_stack_and_no_spills(op: Op, dtype: str, arch: str, tmp_path: Path) -> None:
    variant = variant_of(op, dtype, 4096, arch)
    usage = dump(variant, tmp_path, "-res-usage")
    kernels = re.findall(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", usage)
    assert kernels, usage
    for registers, stack, local in kernels:
        assert (stack, local) == ("0", "0"), usage
        assert int(registers) * variant.tile["threads"] <= REGISTERS, usage


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_aligned_rows_move_16_bytes_at_a_time(op: Op, dtype: str, tmp_path: Path) -> None:
    code = dump(variant_of(op, dtype, 4096, "sm_90a"), tmp_path, "-sass")
    assert re.search(r"LDG\.E\S*\.128|LDGSTS\S*\.128|UBLKCP", code), "no 16-byte load"
    assert re.search(r"STG\.E\S*\.128|UBLKCP", code), "no 16-byte store"
    assert not re.search(r"\b(LDL|STL)\b", code), "local memory"


# Lengths that take every path: scalars, odd, several rows a warp, one CTA, clusters, beyond registers.
@pytest.mark.parametrize("n", [1, 2, 7, 96, 128, 1000, 4097, 8192, 50257, 131072, 262144])
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_every_length_compiles(op: Op, n: int, tmp_path: Path) -> None:
    """With at most four registers on the stack; a bias' column sums of the longest rows take more."""
    usage = dump(variant_of(op, "bfloat16", n, "sm_90a", absent=("bias",)), tmp_path, "-res-usage")
    assert max(map(int, re.findall(r"STACK:(\d+)", usage))) <= 16, usage
    worker.compile(variant_of(op, "bfloat16", n, "sm_90a"), tmp_path / "bias.so")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_other_layouts_compile(op: Op, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_ops import plan as planning

    rows = [name for name, t in op.inputs.items() if t.rows]
    strided = {name: Memory((2 * 1000 + 1, 1), address=2) for name in rows}
    worker.compile(variant_of(op, "float16", 1000, arch, strided), tmp_path / "strided.so")
    monkeypatch.setattr(planning, "STATIC_LIMIT", 0)
    monkeypatch.setattr(planning, "_static_seen", {})
    dynamic = variant_of(op, "bfloat16", 1000, arch)
    assert dynamic.dims == {"n": None}
    worker.compile(dynamic, tmp_path / "dynamic.so")
