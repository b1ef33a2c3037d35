"""Problems from the declarations as torch tensors. Tests that ask for ``problem``, ``turn`` or ``any_op`` run for
everything declared, ``row_op`` for what writes no input, ``op`` and ``trained`` for what has a gradient, ``narrowed``
for backward ops of some of their outputs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_ops import testing
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS, ITEMSIZE
from cute_ops.declaration.tensor import Tensor
from cute_ops.jit import cache, target
from cute_ops.jit.variant import TensorKey, Variant
from cute_ops.ops import OPS, PARTS
from cute_ops_torch.host import launch
from cute_ops_torch.library.tensors import DTYPES, NAMES
from cute_ops_torch.registry import define
from cute_ops_torch.tools.runner import functional

EVERY = (*OPS, *(op.grad for op in OPS if op.grad), *PARTS)
NARROWED = tuple(each for op in OPS for step in op.steps for each in step.narrowed)


def to_torch(array: np.ndarray | None, device: str = "cpu") -> torch.Tensor | None:
    if array is None:
        return None
    # Through float32, which holds every float dtype of the ops exactly: NumPy has no bfloat16 that torch knows.
    if array.dtype.kind == "i":
        return torch.from_numpy(array).to(device)
    return torch.from_numpy(array.astype(np.float32)).to(DTYPES[str(array.dtype)]).to(device)


def to_numpy(tensor: torch.Tensor | None) -> np.ndarray | None:
    if tensor is None:
        return None
    if not tensor.is_floating_point():
        return tensor.cpu().numpy()
    return tensor.detach().cpu().float().numpy().astype(testing.numpy_dtype(NAMES[tensor.dtype]))


class Problem(NamedTuple):
    """One declared case of an op in one dtype."""

    op: Op
    case: Case
    dtype: str

    @property
    def attrs(self) -> dict[str, Any]:
        return testing.attributes(self.op, self.case)

    @property
    def overload(self) -> Any:
        return define(self.op).overload

    @property
    def raw(self) -> Any:
        return functional(self.op, self.overload)

    def inputs(self) -> dict[str, np.ndarray | None]:
        return testing.inputs(self.op, self.case, self.dtype)

    def tensors(self, device: str = "cpu") -> list[torch.Tensor | None]:
        return [to_torch(a, device) for a in self.inputs().values()]

    def check_into(self, into: Callable[..., Any], made: Any) -> None:
        """Outputs like these results', of NaN, are filled; all others, too, where one is not wanted."""
        arguments = (*self.tensors(), *self.attrs.values())
        written = [t for name, t in zip(self.op.inputs, arguments, strict=False) if name in self.op.mutates]
        results = made if isinstance(made, tuple) else (made,)
        outputs = tuple(torch.full_like(o, torch.nan) for o in results[len(written) :])
        into(*arguments, *outputs)
        self.check((*written, *outputs))
        for k in range(len(outputs)):
            given = [None if i == k else o.fill_(torch.nan) for i, o in enumerate(outputs)]
            into(*arguments, *given)
            assert not any(o.isnan().any() for o in given if o is not None)

    def strided(self) -> list[torch.Tensor | None]:
        """The inputs as slices of wider rows, of NaN or -1; numbers per row as every third of a row."""
        strided = []
        for t, declared in zip(self.tensors(), self.op.inputs.values(), strict=True):
            if t is not None and declared.rows:
                if declared.dims:
                    around = torch.nan if t.is_floating_point() else -1
                    wide = torch.full((*t.shape[:-1], 3 * t.shape[-1] + 5), around, dtype=t.dtype)
                    view = wide[..., t.shape[-1] : 2 * t.shape[-1]]
                else:
                    view = torch.full((*t.shape, 3), -1, dtype=t.dtype)[..., 1]
                view.copy_(t)
                t = view
            strided.append(t)
        return strided

    def check(self, outputs: Any, tensors: Sequence[torch.Tensor | None] | None = None) -> None:
        """Raise unless results are within tolerance of float64, for these inputs or the case's own."""
        arrays = self.inputs()
        if tensors is not None:
            arrays = dict(zip(self.op.inputs, map(to_numpy, tensors), strict=True))
        expected = testing.run_reference(self.op, arrays, self.attrs)
        got = [to_numpy(o) for o in (outputs if isinstance(outputs, tuple) else (outputs,))]
        for value, reference in zip(got, expected, strict=True):
            assert reference is not None or value.shape == (0,)
        present = tuple(None if e is None else g for g, e in zip(got, expected, strict=True))
        testing.check(self.op, arrays, self.attrs, present)


def structure_of(case: Case) -> tuple[Any, ...]:
    """What a call's path depends on, whatever its sizes: ranks, how rows are aligned, dtypes, what is absent or set."""
    sizes = {name: len(v) if isinstance(v, tuple) else math.gcd(v, 8) for name, v in case.dims.items()}
    return sizes, case.dtypes, case.absent, case.leading, sorted(case.attrs)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    gpu = next(metafunc.definition.iter_markers("gpu"), None) is not None
    # On a CPU the reference runs: sizes, and float16 beside bfloat16, show nothing new. What depends on no dtype takes
    # one a case, in turn; values, which are the reference's own, one a set of inputs.
    kinds = (
        ("problem", EVERY, FLOATS if gpu else ("turn",)), ("narrowed", NARROWED, FLOATS if gpu else ("turn",)),
        ("turn", EVERY, ("turn",)), ("trained", [op for op in OPS if op.grad], ("turn",)),
    )  # fmt: skip
    for fixture, ops, dtypes in kinds:
        if fixture not in metafunc.fixturenames:
            continue
        problems, seen = [], set()
        for op, dtype in itertools.product(ops, dtypes):
            for i, case in enumerate(op.cases if gpu else map(testing.small, op.cases)):
                look = (op.name, dtype, case if gpu else case.absent if fixture == "problem" else structure_of(case))
                if str(look) not in seen:
                    seen.add(str(look))
                    own = FLOATS[i % len(FLOATS)] if dtype == "turn" else dtype
                    problems.append(pytest.param(Problem(op, case, own), id=f"{op.name}-{own}-{case.name}"))
        metafunc.parametrize(fixture, problems)
    with_rows = [op for op in PARTS if any(t.rows for t in op.inputs.values())]
    for fixture, ops in (
        ("op", [op for op in OPS if op.grad]), ("any_op", [*OPS, *with_rows]),
        ("row_op", [op for op in (*OPS, *with_rows) if not op.mutates and any(t.rows for t in op.inputs.values())]),
    ):  # fmt: skip
        if fixture in metafunc.fixturenames:
            some = metafunc.config.some_of(ops, metafunc.definition)
            metafunc.parametrize(fixture, some, ids=lambda op: op.name)


@pytest.fixture(scope="session")
def make_inputs() -> Callable[..., list[torch.Tensor]]:
    """``make(op, rows, n, dtype, device)``: every input of an op, optional ones too."""

    def make(
        op: Op, rows: tuple[int, ...] = (3, 5), n: int = 64, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> list[torch.Tensor]:
        torch.manual_seed(len(op.name))
        sizes = op.example(rows, n)

        def one(t: Tensor) -> torch.Tensor:
            if t.upper_bound:
                kind = torch.int64 if t.dtype in op.dtypes else DTYPES[t.dtype]
                return torch.randint(n, t.of(sizes), device=device, dtype=kind)
            return torch.randn(t.of(sizes), device=device).to(dtype if t.dtype in op.dtypes else DTYPES[t.dtype])

        made = {name: one(t) for name, t in op.inputs.items()}
        if op.mutates and device != "meta":  # where two places of what is written are one, any order may win
            numbers = {name: t.cpu().numpy() for name, t in made.items() if not t.is_floating_point()}
            op.arrange(np, {**made, **numbers})
            made |= {name: torch.from_numpy(a).to(device) for name, a in numbers.items()}
        return list(made.values())

    return make


class Compiled(NamedTuple):
    """What stands for the compiler: the variants it was asked for, how often kernels ran, and the ops it knows."""

    variants: list[Variant]
    calls: list[str]
    ops: dict[str, Op]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Kernels that run the reference on a CPU's memory, so that planning and launching are tested without a GPU.

    Like a compiled kernel, one takes the tensors that are present, and numbers, checks shapes, strides, alignments and
    dtypes against its variant, and writes the outputs where they lie.
    """
    record = Compiled([], [], {op.name: op for op in (*EVERY, *NARROWED)})

    def get(variant: Variant) -> Callable[..., None]:
        record.variants.append(variant)

        def kernel(*given: Any) -> None:
            record.calls.append(variant.op)
            _run(record.ops[variant.op], variant, given)

        return kernel

    monkeypatch.setattr(cache, "get", get)
    monkeypatch.setattr(target, "of_device", lambda index: target.parse("sm_90a"))
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 1)
    return record


def _run(op: Op, variant: Variant, given: Sequence[Any]) -> None:
    present = [key for key in variant.args if key is not None]
    by_name: dict[str, Any] = {}
    for key, value in zip(present, given, strict=True):
        if key.layout == "number":
            assert type(value) in (int, float)
        else:
            _fits(key, value)
            # What a kernel writes of its inputs comes twice.
            assert by_name.setdefault(key.name, value).data_ptr() == value.data_ptr()
            value = value.permute([key.passed.index(i) for i in range(key.rank)])
        by_name[key.name] = value
    arrays = {n: to_numpy(by_name.get(n)) for n in op.inputs}
    by_row = ((arrays[n], len(t.dims)) for n, t in op.inputs.items() if t.rows)
    lead = next((a.shape[: a.ndim - dims] for a, dims in by_row if a is not None), ())
    for name, tensor in op.inputs.items():
        array = arrays[name]
        if tensor.broadcast and array is not None:
            # Row i of the op reads its row i modulo their number, however leading dims were merged.
            rows = array.reshape(-1, *array.shape[array.ndim - len(tensor.dims) :])
            rows = np.concatenate([rows] * (math.prod(lead) // len(rows)))
            arrays[name] = rows.reshape(*lead, *rows.shape[1:])
    numbers = {key.name: by_name[key.name] for key in present if key.layout == "number"}
    results = testing.run_reference(op, arrays, {**variant.attrs, **numbers})
    for name, result in zip(op.results, results, strict=True):
        assert (result is None) == (name not in by_name)
        if result is not None:
            by_name[name].copy_(to_torch(result).reshape(by_name[name].shape))


def _fits(key: TensorKey, tensor: torch.Tensor) -> None:
    assert NAMES[tensor.dtype] == key.dtype
    assert all(key.shape[i] in (None, have) for i, have in zip(key.passed, tensor.shape, strict=True))
    assert tensor.data_ptr() % key.align == 0
    if key.layout == "flat":
        assert tensor.is_contiguous()
    else:
        assert key.layout == "scattered" or tensor.stride(-1) == 1
        stepped = [s for size, s in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
        assert all(s * ITEMSIZE[key.dtype] % key.row_align == 0 for s in stepped)


@pytest.fixture
def check_watched() -> Callable[..., None]:
    """``check_watched(call, expected, namespace)``: modes and the profiler see a call of rmsnorm, same as ever."""
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def check(call: Callable[[], torch.Tensor], expected: torch.Tensor, namespace: str) -> None:
        call()
        assert not seen
        for mode in (Functions, Dispatch):
            with mode():
                got = call()
            assert torch.equal(got, expected)
            assert seen.pop() == f"{namespace}.rmsnorm.default"
            assert not seen
        with torch.profiler.profile() as profile:
            call()
        assert any(event.key == f"{namespace}::rmsnorm" for event in profile.key_averages())

    return check
