"""Calls of ops whose kernels the interpreter runs, and problems to call them with: ``verify --interpret``."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from cute_ops import FLOATS, testing
from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import Array
from cute_ops.hardware import VECTOR_BYTES
from cute_ops.jit.layout import Memory as Place
from cute_ops.jit.layout import View, compact
from cute_ops.jit.plan import Plan, plan
from cute_ops.jit.target import parse
from cute_ops.jit.variant import TensorKey
from cute_ops.ops import OPS, PARTS
from cute_ops.testing import interpreter

ALL = [op for part in (*OPS, *PARTS) for each in (part, *part.steps) for op in (each, *each.narrowed)]
OURS = ("cutlass", "cute_ops.kernels")
LAYOUTS = ("compact", "off", "apart", "spaced")
KINDS = {str(kind.dtype): kind for kind in interpreter.KINDS.values()}
_modules: dict[str, Any] = dict(interpreter.MODULES)


@contextmanager
def interpreted(module: str = "cute_ops.kernels") -> Iterator[None]:
    """Our modules of kernels, this module and those beside it with the interpreter's objects in place of the DSL's."""
    own = {module} | {name for name, each in list(_modules.items()) if not name.startswith(OURS)}

    def take() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name in own or (name[:1] == "c" and name.startswith(OURS))]
        return {name: sys.modules.pop(name) for name in names}

    before = take()
    sys.modules.update(_modules)
    loaded = {*sys.modules}
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        # Modules that a kernel imports may hold the interpreter's objects, too; libraries hold none.
        own |= {name for name in {*sys.modules} - loaded if _beside(name, module)}
        _modules.update(take())
        sys.modules.update(before)


def _beside(name: str, module: str) -> bool:
    """Whether a module's file is in the folder of another one's."""
    files = [getattr(sys.modules.get(each), "__file__", None) for each in (name, module)]
    return all(files) and Path(files[0] or "").parent == Path(files[1] or "").parent


class Call(NamedTuple):
    """A problem, its inputs, and how these, and outputs that are not compact, lie in memory; ``more(seed)`` draws other
    inputs of its kind.
    """

    op: Op
    arrays: Mapping[str, np.ndarray | None]
    where: Mapping[str, Place]
    attrs: Mapping[str, Any]
    said: str
    more: Callable[[int], Mapping[str, np.ndarray | None]]
    tile: Mapping[str, int] | None = None

    def planned(self) -> tuple[Binding, Plan]:
        """By the tile, where there is none by the heuristic or what was measured to be better."""
        given = {name: None if a is None else Array(a.shape, str(a.dtype)) for name, a in self.arrays.items()}
        binding = bind(self.op, given, self.attrs)
        return binding, plan(binding, self.where, parse("sm_90a"), config=self.tile)


def made(op: Op, rows: int, n: int, dtype: str, layout: str, rng: np.random.Generator, **sizes: int) -> Call:
    """A call with random inputs. Each row has one number that is large beside the others: where a kernel leaves that
    out, or takes it twice, its result is another one in every dtype. ``sizes``: of dims that are as in the op's first
    case otherwise.
    """
    absent = testing.left_out(op, rng, 0.3)
    dtypes = _drawn_dtypes(op, dtype, rng)
    dims = op.example((rows,), n, sizes)
    if "t" in dims:  # tokens and classes of an embedding
        dims |= {"t": 30 * rows, "c": 40}
    case = Case("", dims, dtypes, absent)
    attrs = dict(op.attrs)
    attrs |= {name: values[int(rng.integers(len(values)))] for name, values in op.choices.items()}
    if "heads" in attrs and "h" in dims:  # how many are rotated, which has no default
        attrs["heads"] = int(rng.integers(1, dims["h"] + 1))
    case = case._replace(dims={**case.dims, **{d: f(case.dims, attrs) for d, f in op.derived.items()}})
    large = np.arange(rows) + rng.integers(n)

    def draw(seed: int) -> dict[str, np.ndarray | None]:
        arrays = testing.inputs(op, case, dtype, seed)
        for name in ("x", "residual", "residual_out", "dout", "logits", "gate"):
            tensor, array = op.inputs.get(name), arrays.get(name)
            if tensor and tensor.dims and array is not None and array.ndim == 2 and array.size:
                array[np.arange(rows), large % array.shape[1]] *= 8
        op.arrange(np, arrays)
        return arrays

    arrays = draw(int(rng.integers(1 << 30)))
    where = {name: place(op.inputs[name], array, layout) for name, array in arrays.items() if array is not None}
    known = ", ".join(f"{k}={v}" for k, v in {**dtypes, **attrs}.items())
    return Call(op, arrays, where, attrs, f"{op.name} {rows}x{n} {dtype} {layout} ({known}) without {absent}", draw)


def _drawn_dtypes(op: Op, dtype: str, rng: np.random.Generator) -> dict[str, str]:
    """Dtypes of an op's variables besides its first: random ones half of the time, else those that are no floats."""
    own = next((t.dtype for t in op.inputs.values() if t.dtype in op.dtypes and not t.upper_bound), "")
    wide = {t.dtype for t in op.inputs.values() if t.rows and t.dims}  # of rows: no narrower than the first one's
    free = {v: [d for d in kinds if v not in wide or d in (dtype, "float32")] for v, kinds in op.dtypes.items()}
    dtypes = {v: str(rng.choice(kinds)) for v, kinds in free.items() if v != own and kinds}
    if rng.random() < 0.5:
        dtypes = {v: kinds[0] for v, kinds in op.dtypes.items() if kinds[0] not in FLOATS}
    return dtypes


def shaped(op: Op, rows: int, n: int, dtype: str, layout: str, **dtypes: str) -> Call:
    """A call whose inputs have shapes and dtypes, but one element of memory each. ``dtypes``: other ones by name."""
    case = Case("", op.example((rows,), n), dtypes)
    arrays = {
        name: None if spec is None else np.broadcast_to(np.zeros((), testing.numpy_dtype(spec.dtype)), spec.shape)
        for name, spec in testing.specs(op, case, dtype).items()
    }
    where = {name: place(op.inputs[name], array, layout) for name, array in arrays.items() if array is not None}
    return Call(op, arrays, where, op.attrs, "", lambda seed: arrays)


def place(tensor: Any, array: np.ndarray, layout: str) -> Place:
    """The place of an input. ``off``: one element past 16 bytes; ``apart``: and rows a vector and an element apart;
    ``spaced``: rows on vectors, more than their length apart.
    """
    size = array.dtype.itemsize
    strides = [*compact(array.shape)]
    if array.ndim > len(tensor.dims) > 0 and layout in ("apart", "spaced"):
        strides[0] += VECTOR_BYTES // size + (layout == "apart")
        if layout == "spaced":
            strides[0] += -strides[0] % (VECTOR_BYTES // size)
    return Place(tuple(strides), size if tensor.dims and layout in ("off", "apart") else 0)


def run(call: Call, watched: bool = False) -> tuple[np.ndarray | None, ...]:
    """The inputs that the kernels write, then their outputs. Each byte of an output is stored once, and nothing past a
    tensor's end is read; before one that starts off 16 bytes is memory. Of an input that is written each byte is stored
    once or never, and what lies before it or between its rows is nobody's.
    """
    binding, found = call.planned()
    memory = interpreter.now.memory = interpreter.Memory()
    interpreter.now.watched, interpreter.now.last = watched, None
    arrays = {**binding.inputs, **binding.outputs, **found.workspaces}
    keys = found.variant.tensors
    places = {name: _allocate(call, name, arrays[name], memory) for name, key in keys.items() if key}
    for name, given in call.arrays.items():
        if name in places and given is not None:
            places[name].array(memory)[...] = given
    tensors = [None if key is None else _tensor(places[name], key, found.views, memory) for name, key in keys.items()]
    module, _, kernel = found.variant.kernel.partition(":")
    with interpreted(module):
        getattr(importlib.import_module(module), kernel)(found.variant)(*tensors, None)
    for name, at in places.items():
        stores, inside = (each[at.start : at.start + at.size] for each in (memory.stores, memory.inside))
        times = set(stores[inside].tolist())
        allowed = {0, 1} if name in call.op.mutates else {int(name in call.op.outputs)}
        if name not in found.workspaces and times - allowed:
            raise AssertionError(f"{call.op.name}: bytes of {name} are stored {times} times")
    return tuple(places[name].array(memory).copy() if name in places else None for name in call.op.results)


class _Bytes(NamedTuple):
    """The place of a tensor's elements in the interpreter's memory."""

    start: int
    size: int
    kind: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def array(self, memory: Any) -> np.ndarray:
        # The array is strided as words, since NumPy cannot stride float8_e5m2.
        flat = memory.bytes[self.start : self.start + self.size].view(self.kind.word)
        strided = np.lib.stride_tricks.as_strided(flat, self.shape, [s * self.kind.size for s in self.strides])
        return strided.view(self.kind.dtype)


def _allocate(call: Call, name: str, array: Any, memory: Any) -> _Bytes:
    """Memory for a tensor; of one that the op writes, what lies between its rows is not part of it."""
    where = call.where.get(name, Place(compact(array.shape)))
    kind = KINDS[array.dtype]
    count = 1 + sum((n - 1) * s for n, s in zip(array.shape, where.strides, strict=True)) if array.shape else 1
    shift, size = where.address % VECTOR_BYTES, kind.size * (count if math.prod(array.shape) else 0)
    start = memory.grow(shift + size)[0]
    if name in (*call.op.mutates, *call.op.outputs):
        inside = memory.inside[start : start + shift + size]
        inside[:] = False
        steps = [s * kind.size for s in where.strides]
        np.lib.stride_tricks.as_strided(inside[shift:], (*array.shape, kind.size), (*steps, 1))[...] = True
    return _Bytes(start + shift, size, kind, tuple(array.shape), tuple(where.strides))


def _tensor(at: _Bytes, key: TensorKey, views: Mapping[str, View], memory: Any) -> Any:
    """The interpreter's tensor of some memory, as the kernel's variant describes it."""
    view = views.get(key.name, View(at.shape, at.strides))
    shape = tuple(interpreter.Int64(n) if k is None else n for n, k in zip(view.shape, key.shape, strict=True))
    return interpreter.Tensor(
        interpreter.Pointer(memory, interpreter.Int64(at.start), at.kind), interpreter.Layout(shape, view.strides)
    )


def check(call: Call, watched: bool = False) -> None:
    """Raise AssertionError where an output is not the reference's; ``watched``: and Race where threads meet."""
    with np.errstate(all="ignore"):
        got = run(call, watched)
        testing.check(
            call.op, call.arrays, call.attrs, got, lambda: map(call.more, range(testing.draws(call.arrays)))
        )  # fmt: skip
