"""The Python of kernels that decides which thread holds what: sums, vectors, rows, rings, windows, at all small counts.

A sample of lengths; ``CUTE_OPS_SWEEP=1`` takes all from 1 to 2048 and those where a heuristic changes, up to 262144, in
every dtype and layout.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from itertools import pairwise, product
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cute_ops.autotune.space import objection
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.hardware import ARCHES
from cute_ops.jit.plan import signature
from cute_ops.jit.target import parse
from cute_ops.ops.norm.add_layernorm import add_layernorm
from cute_ops.ops.norm.layernorm import layernorm
from cute_ops.testing import interpreter, kernel_calls
from cute_ops.testing.kernel_calls import ALL, LAYOUTS

# Marks tests of more numbers for lines that another test runs: measured by pytest-cov, they take twice as long.
more_numbers = pytest.mark.no_cover
SWEEP = "CUTE_OPS_SWEEP" in os.environ
ROWS = (1, 2, 5, 201, 4099)
LONGEST = 262144
SHARED = ARCHES["sm_90a"].shared_per_cta


def module(name: str) -> ModuleType:
    return importlib.import_module(f"cute_ops.kernels.{name}")


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with kernel_calls.interpreted():
        yield


class Bits(list):
    """A vector whose elements are powers of two: of their sum, every bit is one element."""

    shape = property(lambda self: (len(self),))


@pytest.mark.parametrize("vec", range(1, 17))
def test_a_thread_adds_each_element_once(vec: int) -> None:
    for per_thread in range(1, 10):
        for count in range(1, per_thread + 1):
            bits = [Bits(1 << (k * vec + j) for j in range(vec)) for k in range(count)]
            for others in ((), (Bits([3] * vec),)):
                total = module("norm.statistics").Total(per_thread)
                for x in bits:
                    total.add(x, *others)
                assert total.value() == 3 ** len(others) * ((1 << count * vec) - 1), (per_thread, count)


def lengths(op: Op, turn: int) -> list[int]:
    """All small ones, and of the others every so many; about where the tile of a row becomes another one."""
    if SWEEP:
        return [*range(1, 2049), *changes(op)]
    return [*range(1, 33), *range(33 + turn % 61, 2049, 61), 2048 * (3 + turn % 29) + turn, LONGEST - turn]


def changes(op: Op) -> list[int]:
    """Lengths from which on another tile serves, and their neighbours: between two that differ by a bisection."""
    tile = lambda n: tile_of(op, n, "bfloat16", "compact", 4099).variant.config  # noqa: E731
    found, steps = [], range(2048, LONGEST + 1, 1024)
    for low, high in pairwise(steps):
        if tile(low) != tile(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if tile(middle) == tile(low) else (low, middle)
            found += [high - 1, high, high + 1]
    return found


def tile_of(op: Op, n: int, dtype: str, layout: str, rows: int) -> Any:
    """The plan of a call whose inputs have no memory."""
    return kernel_calls.shaped(op, rows, n, dtype, layout).planned()[1]


ROW_OPS = [
    op
    for op in ALL
    if "n" in op.static and "threads_per_row" in tile_of(op, 4096, "bfloat16", "compact", 64).variant.config
]


@pytest.mark.parametrize("op", ROW_OPS, ids=lambda op: op.name)
def test_threads_share_out_a_row(op: Op) -> None:
    """Every element is that of one vector of one thread, in every form that the heuristics choose."""
    kinds = [*product(FLOATS, LAYOUTS)]
    cases = [(i, n, kinds if SWEEP else [kinds[i % 12]]) for i, n in enumerate(lengths(op, ALL.index(op)))]
    for i, n, dtype, layout in ((i, n, *kind) for i, n, some in cases for kind in some):
        variant = tile_of(op, n, dtype, layout, ROWS[i % 5]).variant
        source, _, name = variant.kernel.partition(":")
        form = form_of(getattr(importlib.import_module(source), name)(variant))
        tile = getattr(form, "tile", None)
        if isinstance(tile, module("lib.row_layout").RowTile):
            places = {row * n % tile.v.unit for row in range(tile.v.unit)} if tile.v.shifted else {0}
            for shift in sorted(places)[:: 1 if SWEEP else max(len(places) // 3, 1)]:
                check_row(tile, shift)
            if ring := getattr(form, "ring", None):
                check_ring(ring, variant)


@more_numbers
@pytest.mark.parametrize("op", [op for op in ROW_OPS if "norm_bwd" in op.name], ids=lambda op: op.name)
def test_rows_and_sums_fit_shared_memory(op: Op) -> None:
    """Also where one row is of 16 bits and another of 32, and a thread's last vector lies past the row. Beyond that
    memory a kernel compiles and is not launched.
    """
    rng = np.random.default_rng(56519)
    some = np.exp(rng.uniform(np.log(4096), np.log(LONGEST), 2000 if SWEEP else 12)).astype(int).tolist()
    calls = [(ROWS[i % 5], n, LAYOUTS[i % 4]) for i, n in enumerate((56519, 112611, *some))]
    for rows, n, layout in (*calls, *((4099, n, "spaced") for n in range(1, 9))):
        narrow = {"T": "bfloat16"} if "R" in op.dtypes else {}
        call = kernel_calls.shaped(op, rows, n, "float32", layout, **narrow)
        variant = call.planned()[1].variant
        source, _, name = variant.kernel.partition(":")
        form = getattr(importlib.import_module(source), name)(variant).form
        if hasattr(form, "ring"):
            sums = form.sum.values * form.sum.partials * form.sum.stages * form.tile.rows
            assert form.ring.bytes + 4 * sums + 8 * form.sum.stages <= SHARED, (n, variant.config)


@more_numbers
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", [layernorm, add_layernorm], ids=lambda op: op.name)
def test_rows_of_two_tensors_fit_shared_memory(op: Op, dtype: str) -> None:
    for n in (19343, 50323, *np.random.default_rng(19343).integers(2048, 2**16, 20).tolist()):
        variant = tile_of(op, n, dtype, "compact", 4099).variant
        source, _, name = variant.kernel.partition(":")
        form = getattr(importlib.import_module(source), name)(variant).form
        if hasattr(form, "ring"):
            assert form.ring.bytes + 1024 <= SHARED, (n, variant.config)


@more_numbers
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", [op for op in ALL if "block" in op.choices], ids=lambda op: op.name)
def test_threads_of_a_row_share_out_its_blocks(op: Op, layout: str) -> None:
    """Kernels of every length are made: each block is that of as many neighbouring lanes as it has vectors."""
    for n in range(1, 2049) if SWEEP else (*range(121, 330, 4), *range(330, 2049, 100)):
        call = kernel_calls.shaped(op, 5, n, FLOATS[n % 3], layout)
        for block in op.choices["block"]:
            variant = call._replace(attrs={**call.attrs, "block": block}).planned()[1].variant
            source, _, name = variant.kernel.partition(":")
            getattr(importlib.import_module(source), name)(variant)


@more_numbers
@pytest.mark.parametrize("op", [op for op in ROW_OPS if op.space], ids=lambda op: op.name)
def test_candidates_share_out_a_row(op: Op) -> None:
    """As much as the heuristic's, so do the tiles that tuning may choose."""
    turn = ALL.index(op)
    for i, n in enumerate(range(1, 2049, 16) if SWEEP else (17 + turn, 200 + turn, 512, 2049 + turn, 50257)):
        call = kernel_calls.shaped(op, ROWS[i % 5], n, FLOATS[(i + turn) % 3], LAYOUTS[i % 4])
        chosen = {name: values[i % len(values)] for name, values in op.choices.items()}
        call = call._replace(attrs={**call.attrs, **chosen})
        problem = signature(call.planned()[0], call.where, parse("sm_90a")).problem
        assert op.space is not None
        for tile in op.space.others(problem, op.config(problem)):
            if not objection(op.space, problem, tile):
                variant = call._replace(tile=tile).planned()[1].variant
                source, _, name = variant.kernel.partition(":")
                made = getattr(form_of(getattr(importlib.import_module(source), name)(variant)), "tile", None)
                if isinstance(made, module("lib.row_layout").RowTile):
                    check_row(made, 0)


def form_of(kernel: Any) -> Any:
    """What of a kernel has its tile: its form, which may be a kernel itself, or the rows of an expression. Elements of
    one long row have none.
    """
    inner = getattr(kernel, "form", None) or getattr(kernel, "rows", None)
    return kernel if hasattr(kernel, "tile") or inner is None else form_of(inner)


def check_row(tile: Any, shift: int) -> None:
    t, rank = np.arange(tile.threads_per_row)[:, None], np.arange(tile.cluster)
    counted, held = np.zeros(tile.n, int), 0
    for k in range(tile.per_thread):
        first = np.asarray(tile.first(t, rank, k, shift))
        assert (first[:, 0] + tile.reach(0) >= -shift).all()
        columns = (first[..., None] + np.arange(tile.vec)).reshape(-1, tile.vec)
        inside = (columns >= 0) & (columns < tile.n)
        counted += np.bincount(columns[inside], minlength=tile.n)
        held = held + inside.sum(1)
        whole, told = inside.all(1), (tile.n, tile.vec, shift, k)
        assert tile.starts_outside(k) or (columns >= 0).all(), told
        assert tile.ends_outside(k) or (columns < tile.n).all(), told
        ragged = tile.starts_outside(k) or (tile.v.masked and tile.ends_outside(k))
        assert ragged or (whole == inside.any(1)).all(), told
        wanted = np.broadcast_to(tile.predicate(k, first), first.shape).ravel()
        assert (wanted == inside.any(1)).all(), told
        assert not tile.sparse(k) or (whole.sum() < whole.size / 2 and tile.ends_outside(k)), told
    assert (counted == 1).all(), (tile.n, tile.vec, shift, np.nonzero(counted != 1)[0])
    assert not tile.even or np.unique(held).size == 1, tile.n


def check_ring(ring: Any, variant: Any) -> None:
    """No two elements of a ring have a byte in common, and all lie in it."""
    taken = np.zeros(ring.bytes, int)
    for key in ring.keys:
        mX = interpreter.Tensor(interpreter.Pointer(None, 0, kernel_calls.KINDS[key.dtype]), 1)
        sX = ring.view(interpreter.Pointer(None, 0, interpreter.Uint8), mX, key.name)
        start, offsets, kind = sX._access()
        for byte in range(kind.size):
            np.add.at(taken, start + offsets + byte, 1)
    assert taken.max() == 1


def numbered(kind: Any, size: int) -> Any:
    """A tensor of each thread's whose bytes are 0, 1, 2, ..."""
    rX = interpreter.CUTE.make_rmem_tensor((size,), kind)
    interpreter.CUTE.recast_tensor(rX, interpreter.Uint8).store(np.arange(size * kind.size)[:, None])
    return rX


@pytest.mark.parametrize("vec", [4, 8, 16])
@pytest.mark.parametrize("name", ["Float32", "BFloat16", "Uint8"])
def test_vectors_are_cut_from_two_neighbours(name: str, vec: int) -> None:
    """At every element, known beforehand or by every thread for itself, by a branch or without."""
    kind, windows = interpreter.KINDS[name], module("lib.realign")
    places = np.arange(0, vec * kind.size, kind.size)

    def check(rX: Any, past: Any) -> None:
        found = np.asarray(interpreter.CUTE.recast_tensor(rX, interpreter.Uint8).load())
        assert (found == np.arange(vec * kind.size)[:, None] + past).all()

    def body() -> None:
        for past in places.tolist():
            check(windows.settle(numbered(kind, 2 * vec), past), past)
        each = interpreter.Int32(places[np.arange(32) % len(places)])
        check(windows.settle(numbered(kind, 2 * vec), each), np.asarray(each))
        for rX in windows.settle_all([numbered(kind, 2 * vec), numbered(kind, 2 * vec)], each):
            check(rX, np.asarray(each))

    if vec * kind.size <= 16:  # no access is wider
        interpreter.launch(body, (1, 1, 1), (32, 1, 1))
