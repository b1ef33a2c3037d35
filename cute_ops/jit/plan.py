"""Plans: which kernel a call runs, and with which tensors.

A plan is a pure function of the binding, the memory of its arrays, the target, whether dims that are static while few
are compile-time constants, and the config, which :mod:`cute_ops.autotune.dispatch` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from cute_ops.declaration.binding import Binding, own_lead
from cute_ops.declaration.config import Config, Problem
from cute_ops.declaration.messages import message
from cute_ops.declaration.shapes import Array
from cute_ops.hardware import sm
from cute_ops.jit import source_digest, toolchain
from cute_ops.jit.layout import Layout, Memory, View, compact, layout, number_key, tensor_key, vector_alignment
from cute_ops.jit.target import Target
from cute_ops.jit.variant import Variant


class Signature(NamedTuple):
    """A call on a target, as a kernel and a heuristic see it, before a config is chosen.

    Attributes:
        binding: the call.
        static: compile-time dims, None for a dynamic one.
        layout: its tensors.
        problem: what the config is chosen for.
        tunable: whether measuring may choose the config; not for a kernel that serves any sizes.
    """

    binding: Binding
    static: Mapping[str, int | None]
    layout: Layout
    problem: Problem
    tunable: bool


class Plan(NamedTuple):
    """How to run a binding: the variant, the workspaces, views for arrays that need one, and for inputs that are copied
    first the strides of the copies.
    """

    variant: Variant
    workspaces: Mapping[str, Array]
    views: Mapping[str, View]
    copies: Mapping[str, tuple[int, ...]] = {}


def plan(
    binding: Binding,
    memory: Mapping[str, Memory],
    target: Target,
    *,
    fixed: bool = True,
    config: Config | None = None,
) -> Plan:
    """The plan of a call with a given config.

    Args:
        binding: a checked call with concrete sizes.
        memory: of inputs, and of outputs that the caller gives; all others are compact and 16-byte aligned.
        target: what the kernel is compiled for.
        fixed: whether dims that are static while few are compile-time constants.
        config: the kernel's config; the heuristic's by default.

    Raises:
        ValueError: an input's strides or alignment are not those that its declaration demands.
        NotImplementedError: the target is older than the op's kernels.
    """
    call = signature(binding, memory, target, fixed)
    return configured(call, binding.op.config(call.problem) if config is None else config)


def signature(binding: Binding, memory: Mapping[str, Memory], target: Target, fixed: bool = True) -> Signature:
    """All that a plan needs besides a config; takes and raises what :func:`plan` does."""
    op = binding.op
    shared = _shared(binding)
    _refuse_old(binding, target)
    static = {d: binding.dims[d] if fixed or d not in op.few else None for d in op.static if d in binding.dims}
    tensors = layout(binding, memory, static)
    present = {name: key for name, key in tensors.keys.items() if key}
    declared = {name: op.inputs.get(name) or op.outputs[name] for name in present}
    aligns = {name: vector_alignment(declared[name], key) for name, key in present.items()}
    choices = {name: t for name, t in declared.items() if isinstance(t.contiguous, tuple) and len(t.contiguous) > 1}
    problem = Problem(
        m=binding.rows, n=static.get("n"), dims=binding.dims, dtypes={name: key.dtype for name, key in present.items()},
        aligns=aligns,
        attrs={name: binding.attrs[name] for name in op.attrs if not (op.fallback and name == "fused")},
        arch=target.arch, sm_count=target.sm_count,
        contiguous={n: t.may_be_contiguous[t.axes.index(present[n].contiguous)] for n, t in choices.items()},
        shared=shared,
    )  # fmt: skip
    return Signature(binding, static, tensors, problem, op.space is not None and None not in static.values())


def _shared(binding: Binding) -> tuple[str, ...]:
    """Inputs that broadcast, if they have fewer rows than the op."""
    given = [(name, t, binding.inputs[name]) for name, t in binding.op.inputs.items() if t.rows and t.broadcast]
    return tuple(name for name, t, a in given if a and math.prod(own_lead(t, a)) != binding.rows)


def _refuse_old(binding: Binding, target: Target) -> None:
    op, number = binding.op, sm(target.arch)
    if number < op.least_sm:
        least, have = (f"{n // 10}.{n % 10}" for n in (op.least_sm, number))
        old = f"its kernels need SM {least} or newer, the target is SM {have}."
        raise NotImplementedError(message(op, old, binding.inputs, binding.dims, binding.dtypes))


def configured(call: Signature, config: Config) -> Plan:
    """The plan of a call with this config."""
    op = call.binding.op
    keys, workspaces = dict(call.layout.keys), {}
    arrays = op.workspace(call.problem, config) if op.workspace else {}
    for name, scratch in arrays.items():
        keys[name] = None
        if scratch is not None:
            workspaces[name] = scratch
            shape, dynamic = scratch.shape, (None,) * len(scratch.shape)
            keys[name] = tensor_key(name, scratch.dtype, shape, dynamic, Memory(compact(shape)))
    again = [name for name in op.mutates if keys[name]]
    numbers = [number_key(name, default) for name, default in op.scalars.items()]
    variant = Variant(
        op=op.name, kernel=op.kernel, arch=call.problem.arch, names=(*keys, *again, *op.scalars),
        args=(*keys.values(), *(keys[name] for name in again), *numbers),
        static=tuple(call.static.items()), attributes=tuple(call.problem.attrs.items()),
        settings=tuple(sorted(config.items())), toolchain=toolchain.versions(),
        sources=source_digest.key(op.kernel, op.sources), declared=op.sources,
    )  # fmt: skip
    return Plan(variant, workspaces, call.layout.views, call.layout.copies)
