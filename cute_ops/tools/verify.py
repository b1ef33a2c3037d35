"""Checks every case and dtype of an op against float64 in every installed framework: ``python -m cute_ops verify``.

On a GPU the kernels run, with outputs and workspaces in memory that was just filled with NaN. Every call is repeated
and must give the same bits each time and in both frameworks. On a CPU the references run, on small cases. A gradient's
kernel is checked against its reference, and that against the derivative of the forward's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from cute_ops import testing
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.errors import meant
from cute_ops.tools import gradient

# The module of each adapter that runs an op for this check; imported only then.
RUNNERS = {"torch": "cute_ops_torch.tools.runner", "jax": "cute_ops_jax.tools.runner"}
Outputs = tuple[np.ndarray | None, ...]


class Runner(Protocol):
    """An adapter's side of the check: ``run`` calls an op once, by a kernel if ``device()`` is cuda; ``not_checked()``
    says what the calls of this process leave unchecked.
    """

    def device(self) -> str: ...

    def not_checked(self) -> str: ...

    def run(self, op: Op, arrays: testing.Arrays, attrs: Mapping[str, Any]) -> Outputs: ...


class Verdict(NamedTuple):
    """One op, case and dtype in one framework; ``problem`` is empty if the outputs are right.

    Of a gradient's reference, which needs no framework, ``framework`` is "gradient" and ``calls`` is 0.
    """

    op: str
    case: str
    dtype: str
    framework: str
    device: str
    calls: int
    problem: str = ""


def installed(wanted: Sequence[str] = ()) -> dict[str, Runner]:
    """The runners of the installed frameworks.

    Raises:
        ValueError: a wanted framework is unknown or not installed.
    """
    for name in wanted:
        if name not in RUNNERS:
            raise ValueError(f"no framework {name!r}{meant(name, RUNNERS)}; there are {', '.join(RUNNERS)}")
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} is not installed here")
    # Both frameworks use the GPU: JAX must not reserve its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    names = wanted or [name for name in RUNNERS if find_spec(name) is not None]
    return {name: cast(Runner, import_module(RUNNERS[name])) for name in names}


def verify(
    ops: Iterable[Op], runners: Mapping[str, Runner], dtypes: Sequence[str] = (), repeats: int = 20,
    sizes: Mapping[str, Sequence[int]] = {},
) -> Iterator[Verdict]:  # fmt: skip
    """Check ops, whole and narrowed: one verdict for each op, case, dtype and framework, and one for each gradient.

    Args:
        dtypes: of the first dtype variable that a case leaves open; by default all that it may have.
        repeats: calls on a GPU, which must give the same bits.
        sizes: sizes of dims by name that replace those of the cases, in every combination.
    """
    whole = [one for each in ops for one in each.instances]
    combined = [dict(zip(sizes, chosen, strict=True)) for chosen in product(*sizes.values())]
    for op in [found for each in whole for found in (each, *each.narrowed)]:
        for case, asked in product(op.cases, combined):
            if op.steps:
                yield _gradient(op, case, asked)
            for dtype in _dtypes_of(op, case, dtypes):
                yield from _case(op, case, dtype, runners, repeats, asked)


def _dtypes_of(op: Op, case: Case, wanted: Sequence[str]) -> list[str]:
    """The dtypes, those that are wanted if any are, of the first dtype variable that a case leaves open."""
    free = [t for t in op.inputs.values() if t.dtype in op.dtypes and t.dtype not in case.dtypes and not t.upper_bound]
    choices = op.dtype_choices(free[0]) if free else FLOATS
    return [d for d in wanted or choices if d in choices or not free]


def _resized(case: Case, asked: Mapping[str, int]) -> Case:
    """The case with these sizes, which its name tells; leading dims become one."""
    known = {n: size for n, size in asked.items() if n in case.dims}
    dims = {n: (size,) if isinstance(case.dims[n], tuple) else size for n, size in known.items()}
    name = " ".join([case.name, *(f"{n}={size}" for n, size in known.items())])
    return case._replace(name=name, dims={**case.dims, **dims})


def _case(
    op: Op, case: Case, dtype: str, runners: Mapping[str, Runner], repeats: int, asked: Mapping[str, int]
) -> Iterator[Verdict]:
    first: tuple[str, Outputs] | None = None
    for name, runner in runners.items():
        device = runner.device()
        kernels = device == "cuda"
        scaled = _resized(case if kernels else testing.small(case, op=op), asked)
        arrays, attrs = testing.inputs(op, scaled, dtype), testing.attributes(op, scaled)
        calls = repeats if kernels else 1
        try:
            outputs = runner.run(op, arrays, attrs)
            testing.check(op, arrays, attrs, outputs)
            for _ in range(calls - 1):
                _same("a repeated call", op, outputs, runner.run(op, arrays, attrs))
            if kernels and first:
                _same(f"{first[0]} on the same GPU", op, first[1], outputs)
            first = (name, outputs)
            problem = ""
        except Exception as error:  # every failure of a kernel is reported in its line
            problem = problem_of(error)
        yield Verdict(op.name, scaled.name, dtype, name, device, calls, problem)


def _gradient(op: Op, case: Case, asked: Mapping[str, int]) -> Verdict:
    """Whether the backward op's reference is the derivative of the forward's."""
    case = _resized(testing.small(case, op=op), asked)
    try:
        gradient.check(op, case)
        problem = ""
    except Exception as error:  # also where a reference takes no float64
        problem = problem_of(error)
    return Verdict(op.name, case.name, "float64", "gradient", "cpu", 0, problem)


def problem_of(error: Exception) -> str:
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


def _same(other: str, op: Op, before: Outputs, after: Outputs) -> None:
    for name, a, b in zip(op.results, before, after, strict=True):
        if a is None and b is None:
            continue
        if a is None or b is None or a.tobytes() != b.tobytes():
            count = "all" if a is None or b is None else int(np.sum(a.view(np.uint8) != b.view(np.uint8)))
            raise AssertionError(f"{op.name}: output {name} differs from {other} in {count} bytes: a race?")
