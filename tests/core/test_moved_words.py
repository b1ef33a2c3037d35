"""Kernels move the words that they loaded to where a row wants them: their PTX, run on the CPU, at every offset."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.emulator.ptx import Kernel

DTYPES = {4: np.uint32, 2: np.uint16, 1: np.uint8}


@pytest.fixture(scope="session")
def moving() -> Any:
    """It imports the compiler, which takes a second: for these tests, not while tests are collected."""
    return importlib.import_module("tests.emulator.moving")


def numbered(count: int, itemsize: int) -> bytearray:
    """Elements 1, 2, ...: nothing past them can be read."""
    return bytearray(np.arange(1, count + 1).astype(DTYPES[itemsize]).tobytes())


def run(kernel: Kernel, x: bytearray, number: int, thread: int, itemsize: int, elements: int) -> np.ndarray:
    out = bytearray(elements * itemsize)
    kernel.run(x, out, number, thread=thread)
    return np.frombuffer(out, DTYPES[itemsize])


def test_the_compiler_still_takes_two_branches_for_one(moving: Any, tmp_path: Path) -> None:
    """libNVVM 13.0 to 13.5 merges two ``shufflevector`` of one vector, whichever lanes they take."""
    found = []
    for hidden in (True, False):
        kernel = Kernel(moving.compile_to_ptx(moving.Halves(hidden), tmp_path))
        outputs = [run(kernel, numbered(4, 4), 0, thread, 4, 64) for thread in (0, 1)]
        found.append([outputs[thread].reshape(32, 2)[thread].tolist() for thread in (0, 1)])
    assert found[0] == [[1, 2], [3, 4]]
    assert found[1] != found[0], (
        "the compiler is mended: `column_params._realigned` need not select whole words, docs/kernels.md need not "
        "warn, and this test can go"
    )


# One vector a thread; several of a few threads, of a warp's and more, and of one; rows at any element, or every second.
@pytest.mark.drawn(0.4)
@pytest.mark.parametrize(("n", "threads"), [(131, 32), (257, 8), (517, 32), (1030, 64), (71, 1)])
@pytest.mark.parametrize("rows", ["bfloat16", "float32"])
@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_a_weight_beside_rows_that_start_anywhere(
    rows: str, weights: str, n: int, threads: int, moving: Any, tmp_path: Path
) -> None:
    columns = moving.Columns(rows, weights, n, threads)
    tile, itemsize = columns.tile, moving.ITEMSIZE[weights]
    kernel = Kernel(moving.compile_to_ptx(columns, tmp_path))
    weight = numbered(n, itemsize)
    for row in range(tile.vec):
        shift = row * n % tile.v.unit if tile.v.shifted else 0
        for thread in {0, 1 % threads, threads - 1}:
            out = run(kernel, weight, row, thread, itemsize, tile.per_thread * threads * tile.vec)
            vectors = out.reshape(tile.per_thread, threads, tile.vec)[:, thread]
            column = (np.arange(tile.per_thread)[:, None] * threads + thread) * tile.vec + np.arange(tile.vec) - shift
            inside = (column >= 0) & (column < n)
            np.testing.assert_array_equal(vectors[inside], column[inside] + 1)


@pytest.mark.parametrize(("itemsize", "vec"), [(4, 4), (4, 2), (4, 1), (2, 8), (2, 4), (2, 2), (1, 16), (1, 8), (1, 4)])
def test_vectors_of_a_row_that_starts_anywhere(itemsize: int, vec: int, moving: Any, tmp_path: Path) -> None:
    n, threads = 62 * vec - 1, 32
    kernel = Kernel(moving.compile_to_ptx(moving.Windows(itemsize, vec, n), tmp_path))
    for start in range(vec):
        row = numbered(start + n, itemsize)
        x = np.frombuffer(row, DTYPES[itemsize])
        for thread in (0, 1, threads - 2, threads - 1):
            out = run(kernel, row, start, thread, itemsize, (4 + vec) * threads * vec)
            vectors = out.reshape(4 + vec, threads, vec)[:, thread]
            first = np.array([thread, threads + thread, thread, threads + thread])[:, None] * vec + start
            known = thread * vec + np.arange(vec)[:, None]  # of the memory that the row lies in
            place = np.vstack([first, known]) + np.arange(vec)
            inside = (place >= start) & (place < start + n)
            np.testing.assert_array_equal(vectors[inside], x[place[inside]])


@pytest.mark.parametrize(("itemsize", "vec"), [(4, 4), (4, 2), (2, 8), (2, 4), (2, 2), (1, 16), (1, 8), (1, 4), (4, 1)])
def test_ends_of_a_row_are_stored_by_pieces(itemsize: int, vec: int, moving: Any, tmp_path: Path) -> None:
    n = 3 * vec + 1
    kernel = Kernel(moving.compile_to_ptx(moving.Ends(itemsize, vec, n), tmp_path))
    x, elements = numbered(8 * vec, itemsize), np.arange(1, 8 * vec + 1).astype(DTYPES[itemsize])
    for number in range(-2 * vec, vec + 1):
        out = bytearray(len(x))
        for thread in range(8):
            kernel.run(x, out, number % 2**64, thread=thread)
        column = np.arange(8 * vec) + number
        inside = (column >= 0) & (column < n)
        np.testing.assert_array_equal(np.frombuffer(out, DTYPES[itemsize]), np.where(inside, elements, 0))
