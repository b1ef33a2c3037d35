"""Finds ops by name: ours, and those of a user's module or file.

``rmsnorm`` is one of ours. ``package.module:name`` and ``path/to/file.py:name`` are ops that a module or file binds to
that name. ``.grad`` after a name means its gradient. The name of a step of the gradient, of a narrowed op or of an
unrolled one may follow, too: ``file.py:norm.norm_bwd_only_dx``, ``file.py:add_n.add_n_of_3``. For a function decorated
by ``fused`` without declared shapes, ``file.py:gelu_add`` is the op of tiles, ``file.py:gelu_add.trt`` that of a tile,
a row and a tile, and ``file.py:clipped.t(limit=2.0)`` one with an attribute: :mod:`cute_ops.ops.expression.by_call`
explains the letters.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from cute_ops.declaration import lists
from cute_ops.declaration.op import Op
from cute_ops.errors import meant

if TYPE_CHECKING:
    from cute_ops.ops.expression.by_call import ByCall


@cache
def ours() -> dict[str, Op]:
    """Every op of this package by name, gradients included."""
    # Start-up time: a program with an op of its own may need none of ours.
    from cute_ops.composite import qkv_rope
    from cute_ops.composite.group_norm import group_norm_first, group_norm_last, group_norm_long
    from cute_ops.composite.linear_add_rmsnorm import linear_add_rstd, scaled_rows
    from cute_ops.composite.models import MODELS
    from cute_ops.ops import ATTENTION, OPS, PARTS, PRODUCTS
    from cute_ops.ops.gemm.gated_dgrad import gated_dgrad, gated_dgrad_again, gated_linear_kn
    from cute_ops.ops.gemm.linear import PRODUCTS as PLAIN_PRODUCTS
    from cute_ops.ops.gemm.linear import linear_acc
    from cute_ops.ops.gemm.mlp_products import parts
    from cute_ops.ops.gemm.row_copy import row_copy
    from cute_ops.ops.gemm.sums import column_sum
    from cute_ops.ops.norm import group_norm
    from cute_ops.ops.reduction.kept_mean import kept_mean
    from cute_ops.ops.routing import balance
    from cute_ops.ops.routing.gathered import gathered_dots, gathered_sum, scattered_dots, scattered_rows
    from cute_ops.ops.routing.places import class_places
    from cute_ops.ops.routing.route import expert_probabilities, expert_totals, route_slopes, routed_rows
    from cute_ops.ops.routing.topk import topk_step

    by_layout: tuple[Callable[[bool], Op], ...] = gated_dgrad, gated_dgrad_again, linear_add_rstd
    by_layout += partial(linear_acc, "T"), *(partial(qkv_rope.qkv_rope, size) for size in qkv_rope.SIZES)
    inside = gated_linear_kn(), scaled_rows(), *(make(kn) for make in by_layout for kn in (False, True))
    inside += (*parts(False), *parts(True), column_sum(), row_copy())
    inside += (
        kept_mean,
        topk_step,
        routed_rows,
        class_places,
        gathered_sum,
        scattered_rows,
        gathered_dots,
        scattered_dots,
        expert_probabilities,
        expert_totals,
        route_slopes,
    )
    inside += (group_norm_first, group_norm_long, group_norm_last, *group_norm.PARTS)
    inside += (balance.expert_balance, *balance.PARTS)
    every = (*OPS, *PRODUCTS, *ATTENTION, *MODELS, *PLAIN_PRODUCTS, *inside, *PARTS)
    return {op.name: op for forward in every for op in _family(forward)}


@cache
def _by_epilogue() -> dict[str, Op]:
    """Products of calls of ``linear`` with an epilogue that has a name, by theirs; gradients included."""
    from cute_ops.ops.gemm.by_call import op_of_call  # start-up time, as in ours()
    from cute_ops.ops.gemm.named import EPILOGUES

    found: dict[str, Op] = {}
    for epilogue, layout in itertools.product(EPILOGUES, ("n k", "k n")):
        behind = ("*m n",) if epilogue == "add" else ()  # the residual, after the bias
        for shapes in ((*first, *behind) for first in (("n",), (None,))):
            op = op_of_call(epilogue, shapes, layout=layout)
            found |= {each.name: each for each in _family(op)}
    return found


def _family(op: Op) -> list[Op]:
    """An op, the ops of its gradient, whole and narrowed, the ops that their programs call, and the ops of batches."""
    whole = (op, *op.steps, *([op.saving] if op.saving else []))
    programs = [program for each in whole for program in (each.program, each.fallback and each.fallback.program)]
    called = {found: None for program in programs if program for found in program.ops}
    batched = [found for each in whole if (found := each.batched) and not found.program]
    return [*(found for each in whole for found in (each, *each.narrowed)), *called, *batched]


def find(name: str) -> Op:
    """The op of a name.

    Raises:
        ValueError: there is none; the message lists the known ops.
    """
    if ":" not in name:
        if name not in ours():
            if product := _by_epilogue().get(name):
                return product
            from cute_ops.composite.models import MODELS  # as in ours()
            from cute_ops.ops import ATTENTION, OPS, PRODUCTS

            public = ", ".join(op.name for op in (*OPS, *PRODUCTS, *ATTENTION, *MODELS))
            known = f"there are {public}, their gradients (rmsnorm_bwd), and yours as module:name or file.py:name"
            raise ValueError(f"no op {name!r}{meant(name, ours())}; {known}")
        return ours()[name]
    place, _, attribute = name.rpartition(":")
    module, (first, *rest) = load(place), re.split(r"\.(?![^(]*\))", attribute)
    found = getattr(module, first, None)
    if (made := _by_call(found)) is not None:
        text = rest.pop(0) if rest and rest[0] != "grad" else ""
        found = _of_call(made, text)
    for step in rest:
        if not isinstance(found, Op):
            break
        found = (
            found.grad if step == "grad" else {op.name: op for op in _family(found)}.get(step, lists.named(found, step))
        )
    if not isinstance(found, Op):
        ops = of_module(module)
        raise ValueError(f"{place} has no op {attribute!r}{meant(attribute, ops)}; it has {', '.join(ops) or 'none'}")
    return found


def find_all(name: str, gradients: bool = True) -> list[Op]:
    """The op of a name, with those of its gradient unless ``gradients`` is false, or every op of a module or file.
    Composites are left out; an op with lists is those that its cases call.

    Raises:
        ValueError: there is none.
    """
    if ":" in name or not _is_place(name):
        op = find(name)
        ops = [op, *op.steps] if gradients else [op]
    else:
        ops = [each for op in of_module(load(name)).values() for each in (op, *op.steps)]
    found = {id(one): one for op in ops if not op.program for one in op.instances}
    if not found:
        raise ValueError(f"{name} declares no op with a kernel")
    return list(found.values())


def of_module(module: ModuleType) -> dict[str, Op]:
    """The ops that a module binds, by name; for a function without declared shapes, the op of tiles."""
    found = {}
    for name, value in list(vars(module).items()):
        made = _by_call(value)
        if made is not None or isinstance(value, Op):
            found[name] = value if made is None else _of_call(made)
    return found


def _by_call(value: Any) -> ByCall | None:
    """The :class:`ByCall` of a function that an adapter's ``fused`` has decorated; None for other values."""
    return vars(value).get("by_call") if type(value) is FunctionType else None


def _of_call(made: ByCall, text: str = "") -> Op:
    try:
        return made.find(text) if text else made.default()
    except TypeError as error:  # also a TraceError
        raise ValueError(str(error)) from error


def _held(value: Any) -> dict[str, Op]:
    """The op or ops that a module's value is or holds, by the text that follows its name."""
    if (made := _by_call(value)) is not None:
        return {f".{text}": op for text, op in made.texts().items()}
    # By type(value), because isinstance may run an object's own code, which may for instance warn.
    return {"": value} if issubclass(type(value), Op) else {}


def place(op: Op) -> str | None:
    """The name that :func:`find` finds an op by; None where no module holds it."""
    if ours().get(op.name) is op or _by_epilogue().get(op.name) is op:
        return op.name
    if op.template is not None:
        one, where = op.template.unrolled(op.counts), place(op.template)
        return where and f"{where}.{one.name}{'' if op is one else f'.{op.name}'}"
    program = sys.modules.get("__main__")  # multiprocessing gives it a second name
    modules = [(where, module) for where, module in list(sys.modules.items()) if module is not program]
    # The program itself comes last: another process could import it only by running it.
    for where, module in (*modules, (getattr(program, "__file__", None), program)):
        for name, value in list(getattr(module, "__dict__", {}).items()) if where else ():
            for behind, held in _held(value).items():
                if op in _family(held):
                    return (
                        f"{where}:{name}{behind}{'' if held is op else '.grad' if held.grad is op else f'.{op.name}'}"
                    )
    return None


def load(place: str) -> ModuleType:
    """A module by name or by file; a file's folder becomes importable, as for a script.

    Raises:
        ValueError: it cannot be imported.
    """
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        path = Path(place).resolve()
        loaded = sys.modules.get(path.stem)
        if loaded is not None and getattr(loaded, "__file__", None) == str(path):
            return loaded
        sys.path.insert(0, str(path.parent))
        spec = spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a module")
        module = sys.modules[path.stem] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(path.stem, None)  # so that the half-initialised module is not found next time
            raise
        return module
    except (Exception, SystemExit) as error:  # a user's module may raise anything, and a script may call sys.exit
        text = str(error) if isinstance(error, (ImportError, OSError)) else f"{type(error).__name__}: {error}"
        if isinstance(error, FileNotFoundError):
            text = f"there is no file {Path(place).resolve()}"
        elif "/" in place and not place.endswith(".py"):
            text = "write file.py, file.py:name, module or module:name"
        elif isinstance(error, ModuleNotFoundError) and error.name == place.partition(".")[0]:
            text += "" if Path(place).exists() else f", and no file {place} is here"
        raise ValueError(f"cannot import {place}: {text}") from error


def _is_place(name: str) -> bool:
    return name.endswith(".py") or (name not in ours() and "." in name)
