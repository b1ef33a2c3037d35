"""Binding + memory layouts + target -> the variant to run and the scratch arrays it needs.

Kernels see a row-wise tensor either *flat*, compact and of any rank, or *strided*, with free strides on
its leading dims. Leading dims that memory allows to merge are merged first (a view, never a copy), so
that ``qkv[:, :, :h]`` costs no more than what its strides force.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

from cute_ops import env
from cute_ops.autotune import winners
from cute_ops.binding import Binding, expanded_shape, own_lead
from cute_ops.config import Problem
from cute_ops.errors import message
from cute_ops.hardware import sm
from cute_ops.jit import source_digest, toolchain
from cute_ops.jit.target import Target
from cute_ops.jit.variant import VECTOR, TensorKey, Variant
from cute_ops.op import Tensor
from cute_ops.shapes import ITEMSIZE, Array

# Every distinct value of a static dim is one more compile; from this many on, an op uses one kernel in
# which the dim is dynamic.
STATIC_LIMIT = 64
_static_seen: dict[str, set[tuple[int, ...]]] = {}


class Memory(NamedTuple):
    """Where an array lies: strides in elements and an address (or its alignment) in bytes."""

    strides: tuple[int, ...]
    address: int = 0


class View(NamedTuple):
    """How to pass an array: reinterpreted, without a copy, with this shape and these strides."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Plan(NamedTuple):
    """One way to run a binding: the variant, the scratch arrays, and views for arrays that need one."""

    variant: Variant
    workspaces: Mapping[str, Array]
    views: Mapping[str, View]


def compact(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a compact row-major array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def plan(
    binding: Binding,
    memory: Mapping[str, Memory],
    target: Target,
    *,
    fixed: bool | None = None,
    tile: Mapping[str, int] | None = None,
    device: int | None = None,
) -> Plan:
    """Choose the variant for a binding.

    Args:
        binding: a checked call with concrete sizes.
        memory: per input; an input that is missing here, and every output, is compact and 16-byte aligned.
        fixed: whether static dims are compile-time constants; by default until there were too many of them.
        tile: the tile; by default what is remembered to be fastest, else the heuristic's.
        device: the GPU, which is measured on where ``CUTE_OPS_TUNE=1`` asks for it.

    Raises:
        ValueError: a last dim that is not contiguous.
        NotImplementedError: the target is older than the op's kernels.
    """
    op = binding.op
    static, views, keys, problem = _look(binding, memory, target, fixed)
    heuristic = op.config(problem)
    # A kernel of dims that are not known has nothing to be tuned for.
    tuned = tile is None and None not in static.values()
    if tuned:
        measure = None if device is None else partial(_measure, binding, memory, target, device)
        tile = winners.choose(op, problem, heuristic, measure)
    elif tile is None:
        tile = heuristic
    workspaces: dict[str, Array] = {}
    for name, scratch in op.workspace(problem, tile).items():
        keys[name] = None
        if scratch is not None:
            workspaces[name] = scratch
            shape, dynamic = scratch.shape, (None,) * len(scratch.shape)
            keys[name] = _tensor_key(name, scratch.dtype, shape, dynamic, Memory(compact(shape)))
    variant = Variant(
        op=op.name, kernel=op.kernel, arch=target.arch, names=tuple(keys), args=tuple(keys.values()),
        static=tuple(static.items()), attributes=tuple(binding.attrs.items()), config=tuple(sorted(tile.items())),
        toolchain=toolchain.versions(), sources=source_digest.key(op.kernel, op.sources), declared=op.sources,
    )  # fmt: skip
    if fixed is None and (record := _recorder()):
        record(binding, memory, variant)
    if tuned:
        winners.note(variant.symbol, op, problem, heuristic)
    return Plan(variant, workspaces, views)


def target_of(binding: Binding, find: Callable[[], Target]) -> Target:
    """What ``find`` gives; where no kernel is built for that GPU, the error tells the call.

    Raises:
        NotImplementedError: a GPU that no kernel is built for.
    """
    try:
        return find()
    except NotImplementedError as error:
        problem = f"{str(error).removeprefix('cute_ops: ')}."
        raise NotImplementedError(message(binding.op, problem, binding.inputs, binding.dims, binding.dtypes)) from None


class _Look(NamedTuple):
    """A binding on a target before a tile is chosen."""

    static: dict[str, Any]
    views: dict[str, View]
    keys: dict[str, TensorKey | None]
    problem: Problem


def problem_of(binding: Binding, memory: Mapping[str, Memory], target: Target) -> Problem:
    """What a tile is chosen for, where static dims are compile-time constants; raises as :func:`plan`."""
    return _look(binding, memory, target, True).problem


def _look(binding: Binding, memory: Mapping[str, Memory], target: Target, fixed: bool | None) -> _Look:
    op = binding.op
    if sm(target.arch) < op.least_sm:
        old = f"its kernels need SM {_version(op.least_sm)} or newer, the target is SM {_version(sm(target.arch))}."
        raise NotImplementedError(message(op, old, binding.inputs, binding.dims, binding.dtypes))
    check_last_dim(binding, memory)
    static = {d: binding.dims[d] for d in op.static}
    if not (_static_allowed(op.name, tuple(static.values())) if fixed is None else fixed):
        static = dict.fromkeys(static)
    views = _merge_leading(binding, memory) | _expanded(binding, memory)
    tensors = {**op.inputs, **op.outputs}
    arrays = {**binding.inputs, **binding.outputs}
    keys: dict[str, TensorKey | None] = {}
    for name, tensor in tensors.items():
        array = arrays[name]
        if array is None:
            keys[name] = None
            continue
        view = views.get(name)
        shape = view.shape if view else array.shape
        where = memory.get(name, Memory(compact(shape)))
        strides = view.strides if view else where.strides
        known = (None,) * (len(shape) - len(tensor.dims)) + tuple(d.of(static) for d in tensor.dims)
        place = Memory(strides, where.address)
        keys[name] = _tensor_key(name, array.dtype, shape, known, place, per_row=not tensor.dims)
    dtypes = {name: key.dtype for name, key in keys.items() if key}
    # What a row has one of limits no vector.
    aligns = {
        name: min(key.align, key.row_align) if tensors[name].dims else VECTOR for name, key in keys.items() if key
    }
    problem = Problem(
        m=binding.rows, n=static.get("n"), dims=binding.dims, dtypes=dtypes, aligns=aligns, attrs=binding.attrs,
        arch=target.arch, sm_count=target.sm_count,
    )  # fmt: skip
    return _Look(static, views, keys, problem)


def _measure(binding: Binding, memory: Mapping[str, Memory], target: Target, device: int) -> Mapping[str, int]:
    from cute_ops.autotune import tuner

    return tuner.now(binding, memory, target, device)


@cache
def _recorder() -> Callable[..., None] | None:
    """Writes what is planned to the manifest that ``CUTE_OPS_RECORD`` names."""
    path = env.path("CUTE_OPS_RECORD")
    if path is None:
        return None
    from cute_ops.aot.manifest import Recorder

    return Recorder(path)


def check_last_dim(binding: Binding, memory: Mapping[str, Memory]) -> None:
    """Raise unless every input's last dim is contiguous."""
    for name, where in memory.items():
        array = binding.inputs[name]
        if array is None or not binding.op.inputs[name].dims:
            continue
        if array.shape[-1] > 1 and math.prod(array.shape) and where.strides[-1] != 1:
            raise ValueError(
                message(
                    binding.op,
                    f"argument `{name}` has stride {where.strides[-1]} in its last dim, expected 1. "
                    "Other dims may have any stride; call .contiguous() where you accept the copy.",
                    binding.inputs,
                    binding.dims,
                    binding.dtypes,
                )
            )


def _version(number: int) -> str:
    """``89`` -> ``8.9``."""
    return f"{number // 10}.{number % 10}"


def limit_static(count: int) -> None:
    """Let each op have kernels for so many sizes of its static dims from now on, as if none had been seen."""
    global STATIC_LIMIT
    STATIC_LIMIT = count
    _static_seen.clear()


def _static_allowed(op: str, values: tuple[int, ...]) -> bool:
    seen = _static_seen.setdefault(op, set())
    if values not in seen and len(seen) >= STATIC_LIMIT:
        return False
    seen.add(values)
    return True


def _tensor_key(
    name: str, dtype: str, shape: tuple, known: tuple, where: Memory, per_row: bool = False
) -> TensorKey:  # fmt: skip
    itemsize = ITEMSIZE[dtype]
    if per_row:
        # One number per row, read alone: any stride, and alignment says nothing.
        layout: Any = "flat" if not _uneven(shape, where.strides) else "scattered"
        return TensorKey(name, dtype, known, layout, align=itemsize, row_align=itemsize)
    # A dim of size 1 (or 0) is never stepped over: its stride says nothing.
    stepped = [s for size, s in zip(shape[:-1], where.strides[:-1], strict=True) if size > 1]
    flat = all(
        size <= 1 or stride == tight for size, stride, tight in zip(shape, where.strides, compact(shape), strict=True)
    )
    strides = compact((2,) * (len(shape) - 1) + shape[-1:])[:-1] if flat else stepped
    return TensorKey(
        name=name, dtype=dtype, shape=known, layout="flat" if flat else "strided",
        align=math.gcd(where.address, VECTOR),
        row_align=math.gcd(VECTOR, *(s * itemsize for s in strides)),
    )  # fmt: skip


def folded(binding: Binding) -> dict[str, tuple[int, ...]]:
    """The shapes of inputs that are compact with leading dims folded: into one, or where an input is shared by the
    outer ones, into outer and inner ones.
    """
    given = {n: (t, a) for n, t in binding.op.inputs.items() if (a := binding.inputs[n]) is not None}
    whole = next((binding.dims[t.rows] for t, _ in given.values() if t.rows), ())

    def reach(tensor: Tensor, array: Array) -> int:
        """How many of the last leading dims the array has; all of them where the others are ones."""
        own = len(own_lead(tensor, array))
        return len(whole) if math.prod(whole[: len(whole) - own]) == 1 else own

    reached = {n: reach(t, a) for n, (t, a) in given.items() if t.rows}
    cuts = sorted({k for k in reached.values() if k})

    def lead(own: int) -> tuple[int, ...]:
        edges = [0, *([k for k in cuts if k <= own] or [0])]
        sizes = [math.prod(whole[len(whole) - b : len(whole) - a]) for a, b in pairwise(edges)]
        return tuple(reversed(sizes))

    return {
        n: (*(lead(reached[n]) if t.rows else ()), *a.shape[len(a.shape) - len(t.dims) :])
        for n, (t, a) in given.items()
    }


def _merge_leading(binding: Binding, memory: Mapping[str, Memory]) -> dict[str, View]:
    """Views that merge leading dims where every row-wise input allows it; none where all are compact.

    Inputs that broadcast keep their own leading dims: row i of the op reads their row i modulo how many they have.
    """
    op = binding.op
    rows = {n: t for n, t in op.inputs.items() if t.rows and not t.broadcast and binding.inputs[n] is not None}
    shapes = {n: tuple(binding.inputs[n].shape) for n in rows}  # type: ignore[union-attr]
    strides = {n: memory[n].strides if n in memory else compact(shape) for n, shape in shapes.items()}
    # A kernel's tensors have dims: one number for the one row of a vector becomes a row of one.
    alone = not all(shapes.values())
    if not alone and not any(_uneven(shapes[n], strides[n]) for n in rows):
        return {}
    lead = binding.dims[next(t.rows for t in rows.values() if t.rows)]
    kept = [i for i, size in enumerate(lead) if size != 1]
    groups: list[list[int]] = []
    for i in kept:
        previous = groups[-1][-1] if groups else None
        if previous is not None and all(strides[n][previous] == strides[n][i] * lead[i] for n in rows):
            groups[-1].append(i)
        else:
            groups.append([i])
    groups = groups or [[]]
    if len(groups) == len(lead):
        return {}
    merged = tuple(math.prod(lead[i] for i in g) for g in groups)

    def view(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> View:
        tail = len(tensor.dims)
        leading = tuple(strides[g[-1]] if g else math.prod(shape[-tail:]) for g in groups)
        return View(merged + shape[len(shape) - tail :], leading + strides[len(strides) - tail :])

    views = {}
    for name, tensor in {**op.inputs, **op.outputs}.items():
        array: Any = binding.inputs.get(name) if name in op.inputs else binding.outputs[name]
        if array is not None and tensor.rows and not tensor.broadcast:
            views[name] = view(tensor, tuple(array.shape), tuple(strides.get(name, compact(array.shape))))
    return views


def _expanded(binding: Binding, memory: Mapping[str, Memory]) -> dict[str, View]:
    """Views of inputs that broadcast along an inner leading dim: rows along it are one and the same."""
    views = {}
    for name, tensor in binding.op.inputs.items():
        array = binding.inputs[name]
        shape = expanded_shape(tensor, array, binding.dims) if array is not None else None
        if array is None or shape is None:
            continue
        strides = memory[name].strides if name in memory else compact(array.shape)
        skipped = len(array.shape) - len(shape)
        own = zip(array.shape[skipped:], shape, strides[skipped:], strict=True)
        views[name] = View(shape, tuple(0 if size != wide else stride for size, wide, stride in own))
    return views


def _uneven(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    return any(size > 1 and stride != tight for size, stride, tight in zip(shape, strides, compact(shape), strict=True))
