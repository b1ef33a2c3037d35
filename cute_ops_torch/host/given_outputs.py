"""Outputs that the caller gives: ``cute_ops_torch.rmsnorm(x, weight, out=buffer)``.

Kernels fill outputs that are compact, or lie as their declaration says. What lies otherwise, and what a call makes that
a mode observes, is made anew and copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from cute_ops.declaration.messages import message
from cute_ops.declaration.op import Op
from cute_ops_torch.host.launch import Launcher
from cute_ops_torch.library.modes import EXACT, modes_active
from cute_ops_torch.library.mutation import check_outputs
from cute_ops_torch.library.schema import resolver
from cute_ops_torch.library.tensors import DTYPES, arrays, bind_tensors, check_inputs

Call = Callable[..., Any]
# An output's dtype and shape; None where the call does not have it.
Expected = tuple[torch.dtype, tuple[Any, ...]] | None


class GivenOutputs:
    """``call(out, *inputs, *attributes, *scalars)`` fills ``out`` with an op's outputs and returns it. Kernels take the
    tensors of these devices; for others the registered op runs.
    """

    def __init__(self, op: Op, overload: Call, launcher: Callable[[], Launcher], devices: tuple[str, ...]) -> None:
        self.op, self.overload, self.launcher, self.devices = op, overload, launcher, devices

    def __call__(self, out: Any, *args: Any) -> Any:
        op, arity = self.op, len(self.op.inputs)
        tensors, attrs = args[:arity], args[arity:]
        check_inputs(op, tensors, ...)
        found = out if isinstance(out, (tuple, list)) else (out,)
        if len(found) != len(op.shown):
            self._refuse(TypeError, f"{len(found)} tensors, expected {len(op.shown)}: {', '.join(op.shown)}", tensors)
        outputs = dict(zip(op.shown, found, strict=True))
        self._refuse_gradients((*tensors, *found))
        if torch.compiler.is_compiling() or modes_active():
            self._copy(outputs, args)
            return out
        bound = bind_tensors(op, tensors, attrs).outputs
        expected = {n: None if (a := bound[n]) is None else (DTYPES[a.dtype], tuple(a.shape)) for n in outputs}
        given = self._checked(outputs, expected, tensors)
        every = [t for t in (*tensors, *given.values()) if t is not None]
        if any(type(t) not in EXACT or t.is_neg() for t in every):
            self._copy(outputs, args)
            return out
        check_outputs(op, tensors, given)
        if given and every[0].device.type in self.devices:
            self.launcher().write(tensors, attrs, given)
        else:
            self._copy(outputs, args)
        return out

    def _refuse_gradients(self, tensors: Sequence[Any]) -> None:
        """Raise RuntimeError, in the words of torch's own functions, if a gradient is wanted."""
        if torch.is_grad_enabled() and any(torch.is_tensor(t) and t.requires_grad for t in tensors):
            raise RuntimeError(
                f"{self.op.called}(): functions with out=... arguments don't support automatic differentiation, but "
                "one of the arguments requires grad."
            )

    def _copy(self, outputs: Mapping[str, Any], args: Sequence[Any]) -> None:
        """Make the outputs anew and copy them to the given ones."""
        tensors = args[: len(self.op.inputs)]
        raw = self.overload(*args)
        results = resolver(self.op)(tensors, raw if isinstance(raw, tuple) else (raw,))
        found = dict(zip(self.op.outputs, results, strict=True))
        expected = {n: None if (t := found[n]) is None else (t.dtype, tuple(t.shape)) for n in outputs}
        for name, out in self._checked(outputs, expected, tensors).items():
            out.copy_(found[name])

    def _checked(
        self, outputs: Mapping[str, Any], expected: Mapping[str, Expected], tensors: Sequence[Any]
    ) -> dict[str, torch.Tensor]:
        """The outputs that the call has, each once."""
        device, checked = next(t.device for t in tensors if t is not None), {}
        for name, out in outputs.items():
            twin, wanted = self.op.outputs[name].same_as, expected[name]
            if wanted is None:
                if out is not None and not (twin and out is outputs[twin]):
                    self._refuse(TypeError, f"a tensor for `{name}`, which this call does not have", tensors)
                continue
            if twin and expected[twin] is not None and out is outputs[twin]:
                self._refuse(ValueError, f"one tensor for `{twin}` and `{name}`", tensors)
            if not isinstance(out, torch.Tensor):
                self._refuse(TypeError, f"{type(out).__name__} for `{name}`, expected a tensor", tensors)
            have = (out.dtype, tuple(out.shape))
            if have != wanted:
                texts = [f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in (have, wanted)]
                kind = TypeError if have[0] != wanted[0] else ValueError
                self._refuse(kind, f"{texts[0]} for `{name}`, expected {texts[1]}", tensors)
            if out.device != device:
                self._refuse(ValueError, f"a tensor on {out.device} for `{name}`, expected {device}", tensors)
            checked[name] = out
        return checked

    def _refuse(self, kind: type[Exception], what: str, tensors: Sequence[Any]) -> NoReturn:
        raise kind(message(self.op, f"out= has {what}.", arrays(self.op, tensors)))
