"""Runs the kernels of ops on a CPU, by NumPy, at every row length: ``python -m cute_ops verify --interpret``.

Each length has a number of rows, a layout in memory, optional inputs and values of attributes, drawn by the seed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from cute_ops import testing
from cute_ops.declaration.dims import Dim
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.testing import kernel_calls
from cute_ops.tools.verify import Verdict, problem_of

LENGTHS = tuple(range(1, 301))
ROWS = (1, 2, 5, 33)
WATCHED = 8  # of so many calls the first is watched for races, which takes longer


def interpret(
    ops: Iterable[Op], dtypes: Sequence[str] = (), sizes: Mapping[str, Sequence[int]] = {}, seed: int = 0,
    seconds: float = float("inf"),
) -> Iterator[Verdict]:  # fmt: skip
    """Check ops, whole and narrowed: one verdict for each op, dtype and size.

    Args:
        dtypes: of the first dtype variable; by default all that it may have.
        sizes: sizes of dims by name, in every combination. By default rows have 1 to 300 elements, and other dims are
            as in the first case, made small.
        seed: of what is drawn.
        seconds: after which nothing more begins.
    """
    end = time.monotonic() + seconds
    for op in [found for each in ops for one in each.instances for found in (one, *one.narrowed)]:
        free = [t for t in op.inputs.values() if t.dtype in op.dtypes and not t.upper_bound]
        choices = op.dtype_choices(free[0]) if free else FLOATS[:1]
        every = product([d for d in dtypes or choices if d in choices], _sizes(op, sizes))
        for count, (dtype, asked) in enumerate(every):
            if time.monotonic() > end:
                return
            verdict, known = _called(op, dtype, asked, seed, watched=count % WATCHED == 0)
            yield verdict
            if not known:
                break


def _sizes(op: Op, sizes: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    names = {name for t in op.inputs.values() for dim in t.dims for name in dim.names}
    names |= {t.rows for t in op.inputs.values() if t.rows}
    every = {**_row_lengths(op, names), **{k: v for k, v in sizes.items() if k in names}}
    return [dict(zip(every, chosen, strict=True)) for chosen in product(*every.values())]


def _row_lengths(op: Op, names: Collection[str]) -> dict[str, Sequence[int]]:
    """Sizes of ``n``, or of ``c`` where the last dim of all inputs is a multiple of it, ``8c``: up to 300 elements."""
    if "n" in names:
        return {"n": LENGTHS}
    last = {t.dims[-1] for t in op.inputs.values() if t.dims}
    if len(last) != 1:
        return {}
    (dim,) = last
    alone = len(dim.names) == 1 and dim == Dim(dim.factor, dim.names)
    return {dim.names[0]: LENGTHS[: LENGTHS[-1] // dim.factor]} if alone else {}


def _called(op: Op, dtype: str, asked: Mapping[str, int], seed: int, watched: bool) -> tuple[Verdict, bool]:
    """The verdict of one call, and whether the interpreter knows all that the kernel uses."""
    rng = np.random.default_rng([seed, *asked.values()])
    rows, layout = int(rng.choice(ROWS)), str(rng.choice(kernel_calls.LAYOUTS))
    sizes: dict[str, Any] = {}
    if op.cases:
        sizes = {k: v for k, v in testing.small(op.cases[0], op=op).dims.items() if not isinstance(v, tuple)}
    sizes |= {"m": rows} if "m" in sizes else {}
    sizes |= asked
    text, known, problem = " ".join(f"{k}={v}" for k, v in asked.items()), True, ""
    try:
        call = kernel_calls.made(op, rows, sizes.pop("n", 1), dtype, layout, rng, **sizes)
        try:
            call.planned()
        except ValueError:  # the declaration refuses such memory
            call = call._replace(where={})
            layout = "compact"
        text = f"{text} rows={rows} {layout}"
        kernel_calls.check(call, watched)
    except (NotImplementedError, ImportError) as error:
        known, problem = False, f"{error}; cute_ops/testing/interpreter.py does not know all of CuTe DSL"
    except Exception as error:  # every failure of a kernel is reported in its line
        problem = problem_of(error)
    return Verdict(op.name, text, dtype, "interpreter", "cpu", 1, problem), known
