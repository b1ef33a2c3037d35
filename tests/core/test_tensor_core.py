"""Expressions over the accumulators of any MMA without a GPU: scores of attention, products of 8 bits, an own part."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from cute_ops import Case, Op, testing
from cute_ops.declaration.binding import bind
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.plan import plan
from cute_ops.jit.target import parse
from cute_ops.jit.variant import Variant
from cute_ops.kernels.gemm.config import REGISTERS, GemmConfig
from cute_ops.kernels.tensor_core.shared_struct import Buffer, SharedStruct, mbarriers
from cute_ops.kernels.tensor_core.sizes import RegisterBudget
from cute_ops.tools import sass
from tests.emulator import products, ptx_sm90
from tests.ops.tensor_cores import fp8_product, scores, with_part

ROOT = Path(__file__).parents[2]


def check_code(folder: Path, instructions: Mapping[str, int], loads: int) -> None:
    """The kernel compiled into a folder has these matrix instructions and TMA loads, and spills nothing."""
    (kernel,) = sass.resources(folder / "kernel.cubin")
    code = sass.sass(folder / "kernel.cubin")
    assert (kernel.stack, kernel.local) == (0, 0) and not re.search(r"\b(STL|LDL)\b", code)
    found = re.findall(r"\b[HQ]GMMA\.\S+", code)
    assert {name: found.count(name) for name in found} == instructions
    assert len(re.findall(r"\bUTMALDG\b", code)) == loads


def check_shared(folder: Path, buffers: tuple[Buffer, ...]) -> None:
    """The kernel takes the shared memory that its config has counted."""
    assert json.loads((folder / "shared.json").read_text()) == [SharedStruct(buffers).bytes]


def variant_of(op: Op, case: Case) -> Variant:
    return plan(bind(op, testing.specs(op, case, op.dtypes["T"][0])), {}, parse("sm_90a")).variant


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("case", fp8_product.cases, ids=lambda case: case.name)
def test_products_of_8_bits(case: Case, tmp_path: Path) -> None:
    """An instruction takes 32 numbers of k. A stage's stand there twice, as the first ones overwrite."""
    given = testing.inputs(fp8_product, case, "float8_e4m3fn")
    out = products.run(fp8_product, given, tmp_path, "sm_90a")
    testing.check(fp8_product, given, {}, tuple(out.values()))
    blocks, kind = (2, "E5M2") if case.name == "pingpong" else (1, "E4M3")  # blocks of 64 rows of a warpgroup
    check_code(tmp_path, {f"QGMMA.64x128x32.F32.E4M3.{kind}": 2 * blocks * 128 // 32}, 2)
    check_shared(tmp_path, GemmConfig.of(variant_of(fp8_product, case).config).buffers((2,), operands=(1, 1)))


@pytest.mark.slow
@products.emulated
def test_scores(tmp_path: Path) -> None:
    """Two CTAs and two tiles of keys, the last of both with rows that are not there. Scores go to the second product
    as they lie in registers.
    """
    (case,) = scores.cases
    given = testing.inputs(scores, case, "bfloat16")
    worker.compile(variant_of(scores, case), tmp_path / "kernel.cubin", tmp_path)
    (ptx,) = tmp_path.glob("*.ptx")
    arrays = {**given, "out": np.full(given["q"].shape, np.nan, given["q"].dtype)}
    address = {name: i << 32 for i, name in enumerate(arrays, start=1)}
    arguments, maps = [b"0", b"0"], {}  # of the MMAs
    for name, rows in (("q", 64), ("k", 128), ("v", 128)):
        maps[len(arguments)] = ptx_sm90.Map(arrays[name], rows, 64, set())
        arguments += [bytes(128), struct.pack("<i", len(arrays[name]))]
    (m, _), (n, _) = given["q"].shape, given["k"].shape
    arguments += [struct.pack("<2q", address["bias"], n), struct.pack("<q", address["factor"])]
    arguments += [struct.pack("<2q", address["out"], m), struct.pack("<i", m), struct.pack("<i", n)]
    memory = [a.reshape(-1).view(np.uint8) for a in arrays.values()]
    kernel, grid = ptx_sm90.Kernel(ptx.read_text()), -(-m // 64)
    for index in range(grid):
        ptx_sm90.Cluster(kernel, index, grid, (1, 1), arguments, maps, memory).run(seed=index)
    testing.check(scores, given, {}, (arrays["out"],))
    check_code(tmp_path, {"HGMMA.64x128x16.F32.BF16": 64 // 16, "HGMMA.64x64x16.F32.BF16": 128 // 16}, 3)


@pytest.mark.slow
@products.emulated
@pytest.mark.parametrize("case", with_part.cases, ids=lambda case: case.name)
def test_a_part_with_memory_and_tma_of_its_own(case: Case, tmp_path: Path) -> None:
    given = testing.inputs(with_part, case, "bfloat16")
    out = products.run(with_part, given, tmp_path, "sm_90a")
    testing.check(with_part, given, {}, tuple(out.values()))
    config = GemmConfig.of(variant_of(with_part, case).config)
    check_shared(tmp_path, (*config.buffers((2,)), Buffer("twice", 128 * 32 * 2)))  # of two groups, or of 128 rows


@pytest.mark.slow
def test_attention_knows_where_accumulators_lie() -> None:
    """By arithmetic on thread numbers, of WGMMA and of ``mma.sync``."""
    command = [sys.executable, "-m", "tests.programs.accumulator_places"]
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.stdout == "equal\n", done.stderr


def test_a_struct_has_the_bytes_of_its_buffers() -> None:
    struct = SharedStruct((Buffer("a", 1000), mbarriers("a_full", 3), Buffer("b", 8, 1024), Buffer("none", 0)))
    assert struct.bytes == 2048 + 8  # b begins at 2048


def test_registers_of_an_sm_suffice() -> None:
    REGISTERS.check(2)
    with pytest.raises(ValueError, match="for 3 multiplying warpgroups takes 94208 of 65536"):
        REGISTERS.check(3)
    with pytest.raises(ValueError, match=r"RegisterBudget\(load=40, multiply=230\)"):
        RegisterBudget(40, 230).check(1)
