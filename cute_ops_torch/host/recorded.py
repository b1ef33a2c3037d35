"""The program of a composite as one function: what its first call ran, without the program's Python.

A program chooses what it runs by the shapes, the strides and the alignment of its tensors and by its attributes. The
guard of a call compares all of these, so a call like an earlier one runs the same ops and the same functions of torch.
The first run writes them down as a line of source each: of an op with a kernel the planned call, which needs no guard
of its own. Later runs cost the host what these calls cost.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from cute_ops.declaration.binding import Binding
from cute_ops.declaration.op import Op
from cute_ops.declaration.program import Program
from cute_ops_torch.host import codegen
from cute_ops_torch.library import program as programs
from cute_ops_torch.library.inplace import is_compact
from cute_ops_torch.library.reference import run_reference
from cute_ops_torch.library.schema import resolver
from cute_ops_torch.library.tensors import bind_tensors, readable

Tensor = torch.Tensor
Run = Callable[..., Any]
# Functions that read no element: those that return no tensor, those that may return a view, and those that only
# allocate.
_FACTS = {
    "__get__", "__len__", "data_ptr", "dim", "element_size", "get_device", "is_contiguous", "is_floating_point",
    "is_neg", "ndimension", "nelement", "numel", "size", "storage_offset", "stride", "untyped_storage",
}  # fmt: skip
_VIEWS = {
    "__get__", "__getitem__", "as_strided", "broadcast_to", "contiguous", "detach", "expand", "flatten", "permute",
    "reshape", "squeeze", "t", "to", "transpose", "unflatten", "unsqueeze", "view",
}  # fmt: skip
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty"}
_ALLOCATIONS = {*_EMPTY, "new_full", "new_ones", "new_zeros"}
_PLAIN: tuple[type, ...] = (
    bool, int, float, str, slice, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None),
    type(...),
)  # fmt: skip


# ``placed(tensor, sizes, strides)``: the memory of a tensor from its first element on, as Inductor's programs have it.
# It takes a quarter of the time of a view, and is none to torch.
placed: Run = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
MOST_LINES = 2000  # of a source: that of a loop of many steps would take seconds to compile


def recorded(binding: Binding, program: Program, otherwise: Run) -> Run:
    """``run(*inputs)`` of a program's calls like this one, on the inputs that are there, for calls that no mode of
    torch and no autocast observes. What cannot be repeated, such as a program that reads elements or makes
    thousands of calls, runs by ``otherwise``.
    """
    repeat: Run | None = None

    def run(*given: Any) -> Any:
        nonlocal repeat
        if repeat is not None:
            return repeat(*given)
        if len({id(t) for t in given}) < len(given):  # which of two inputs is read cannot be told
            return otherwise(*given)
        record = Record(given)
        with record:
            out = record.run(binding, program)
        repeat = record.function(f"{binding.op.name}.program", out) or otherwise
        return out

    return run


class _Line(NamedTuple):
    """A call as source, with the names of the tensors that it reads and makes; ``pure``: it writes no other one;
    ``view``: it is a view of what it reads.
    """

    text: str
    reads: list[str]
    makes: list[str]
    pure: bool = False
    view: bool = False


class Record(TorchFunctionMode):
    """Notes what a program runs on these inputs, while it runs.

    Attributes:
        lines: what ran.
        values: what the source refers to.
        complete: whether the lines repeat all that ran.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors, self.given = given, [f"_in{k}" for k, _ in enumerate(given)]
        self.lines: list[_Line] = []
        self.values: dict[str, Any] = {"_as_strided": torch.as_strided, "_placed": placed}
        self.complete = True
        self._number = count()
        # By identity, which another tensor may get later.
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        # Of a view what it is a view of, which is no view itself.
        self._bases: dict[str, str] = {}
        for name, t in zip(self.given, given, strict=True):
            self._named(t, name)

    def run(self, binding: Binding, program: Program) -> Any:
        tensors, there = iter(self.tensors), [a is not None for a in binding.inputs.values()]
        return run_reference(binding, [next(tensors) if given else None for given in there], program, self.run_op)

    def run_step(self, op: Op, tensors: Sequence[Any], attrs: Sequence[Any]) -> Any:
        """Run an op on inputs that may be None; returns what the raw op returns, None for what is absent."""
        if op.program is not None:
            return run_reference(bind_tensors(op, tensors, attrs), tensors, op.program, self.run_op)
        made = self.run_op(op, dict(zip(op.inputs, tensors, strict=True)), dict(zip(op.attrs, attrs, strict=True)))
        return tuple(made.values()) if len(made) > 1 else next(iter(made.values()))

    def function(self, label: str, out: Any) -> Run | None:
        """A function that runs all lines and returns ``out``; None if none can."""
        results = out if isinstance(out, tuple) else (out,)
        outputs = ["None" if t is None else self._name(t) for t in results]
        if not self.complete or None in outputs:
            return None
        body, read = list[str](), {*outputs, *self.given}
        for line in reversed(self.lines):
            if line.pure and read.isdisjoint(line.makes):
                continue
            # Memory is given back as early as by a program.
            last = [name for name in dict.fromkeys([*line.reads, *line.makes]) if name not in read]
            read.update(last)
            body += [f"        del {', '.join(last)}\n"] if last else []
            # A result that is a view is one to torch, too.
            shown = line.view and line.makes[0] in outputs
            body.append(f"        {line.text.replace('_placed', '_as_strided', 1) if shown else line.text}\n")
        make = codegen.maker(
            codegen.RECORDED, label, self.values, name="run", parameters=", ".join(self.given),
            body="".join(reversed(body)), returned=", ".join(map(str, outputs)) + "," * isinstance(out, tuple),
        )  # fmt: skip
        made: Run = make(**self.values)
        return made

    def run_op(
        self, op: Op, inputs: Mapping[str, Any], attrs: Mapping[str, Any], inplace: bool = False, over: bool = False
    ) -> Any:
        """Run another op, as :func:`cute_ops_torch.library.program.call` does, while this mode is entered; ``over``:
        the memory of what is given may be written to in place, too.
        """
        tensors = [None if (t := inputs.get(name)) is None else readable(d, t) for name, d in op.inputs.items()]
        values = [*{**op.keywords, **attrs}.values()]
        mode: Any = self
        mode.__exit__(None, None, None)  # the op's own functions are no part of the program
        try:
            reused = self._written(op, tensors, over) if inplace else {}
            planned = None if inplace and not reused else programs.planned[op](tensors, values)
            if planned is None:
                reused, function, arguments = {}, programs.functions[op](inplace), [*tensors, *values]
            else:
                function = planned.fill(tuple(reused)) if reused else planned.unobserved or planned.run
                given = [*(t for t in tensors if t is not None), *reused.values()]
                arguments = [*given, *values[len(op.attrs) :]]
            raw = function(*arguments)
        finally:
            mode.__enter__()
        self.note(function, arguments, {}, raw)
        if reused:
            fresh = iter(raw or ())
            raw = tuple(reused[name] if name in reused else next(fresh) for name in op.outputs)
        made = resolver(op)(tensors, raw if isinstance(raw, tuple) else (raw,))
        return dict(zip(op.outputs, made, strict=True))

    def _written(self, op: Op, tensors: Sequence[Any], over: bool) -> dict[str, Tensor]:
        """The inputs whose memory an op's outputs take, by output. Empty unless the program has made these inputs, or
        may write ``over`` what it is given: then nothing else reads them.
        """
        places = {name: list(op.inputs).index(t.donates) for name, t in op.outputs.items() if t.donates}
        found = {name: tensors[place] for name, place in places.items()}
        names = [self._name(t) for t in found.values()]
        own = all(name and (over or self._bases.get(name, name) not in self.given) for name in names)
        return found if own and all(map(is_compact, found.values())) else {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        out = func(*args, **kwargs)
        tensors = [isinstance(t, Tensor) for t in (out if isinstance(out, tuple | list) else (out,))]
        if not any(tensors) and name in _FACTS:
            return out
        self.complete &= all(tensors) or (out is None and name == "__setitem__")
        is_view = self.complete and name in _VIEWS and isinstance(out, Tensor) and self._view(args[0], out)
        if self.complete and not is_view:
            self.note(func, args, kwargs, out, name in _VIEWS | _ALLOCATIONS)
        return out

    def _view(self, of: Tensor, out: Tensor) -> bool:
        """Note a view by its sizes and strides; whether it is one, and begins where its tensor does."""
        source = self._name(of)
        if out is of or source is None:
            return out is of
        if of.dtype != out.dtype or of.data_ptr() != out.data_ptr() or of.is_neg() != out.is_neg() or not out.numel():
            return False
        if of.shape == out.shape and of.stride() == out.stride():
            self._named(out, source)
        else:
            sizes, strides = self._constant(tuple(out.shape)), self._constant(out.stride())
            name, source = self._named(out), self._bases.get(source, source)
            self._bases[name] = source
            self.lines.append(_Line(f"{name} = _placed({source}, {sizes}, {strides})", [source], [name], True, True))
        return True

    def note(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, pure: bool = False
    ) -> None:  # fmt: skip
        """Note a call that returned ``out``; ``pure``: it may be left out if nobody reads that."""
        several = isinstance(out, tuple | list)
        if getattr(function, "__name__", "") in _EMPTY and (text := self._allocated(out)):
            name = self._named(out)
            self.lines.append(_Line(f"{name} = {text}", [], [name], True))
            return
        reads, results = list[str](), [t for t in (out if several else (out,)) if t is not None]
        texts = [self._text(a, reads) for a in args] + [f"{n}={self._text(a, reads)}" for n, a in kwargs.items()]
        written = all(self._name(t) for t in results)  # in place: it has its name already
        makes = [self._name(t) or self._named(t) for t in results]
        target = "" if written else f"{', '.join(makes)}{',' * several} = "
        text = f"{target}{self._constant(function)}({', '.join(texts)})"
        self.lines.append(_Line(text, reads, makes, pure and not written))
        self.complete &= len(self.lines) <= MOST_LINES

    def _allocated(self, out: Tensor) -> str:
        """Source that allocates a tensor like this one by Inductor's allocator, in a third of the time; empty where
        that does not know which device is meant.
        """
        new = getattr(torch._C._dynamo.guards, f"_empty_strided_{out.device.type}", None)
        if new is None or (out.is_cuda and torch.cuda.device_count() > 1) or out.is_pinned():
            return ""
        return f"{self._constant(new)}({', '.join(map(self._constant, (tuple(out.shape), out.stride(), out.dtype)))})"

    def _text(self, value: Any, reads: list[str]) -> str:
        """Source of an argument."""
        if isinstance(value, Tensor):
            reads.append(self._name(value) or "")
            self.complete &= bool(reads[-1])
            return reads[-1]
        if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
            texts = "".join(f"{self._text(each, reads)}, " for each in value)
            return f"({texts})" if isinstance(value, tuple) else f"[{texts}]"
        self.complete &= isinstance(value, _PLAIN)
        return repr(value) if value is None or type(value) in (bool, int, str) else self._constant(value)

    def _name(self, tensor: Tensor) -> str | None:
        known, name = self._names.get(id(tensor), (None, None))
        return name if known is not None and known() is tensor else None

    def _named(self, tensor: Tensor, name: str = "") -> str:
        """Give a tensor a name."""
        name = name or f"_t{next(self._number)}"
        self._names[id(tensor)] = weakref.ref(tensor), name
        return name

    def _constant(self, value: Any) -> str:
        name = f"_c{len(self.values)}"
        self.values[name] = value
        return name
