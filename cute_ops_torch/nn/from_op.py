"""Classes of modules, made of the declarations of ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, ClassVar

import torch
from torch import nn

from cute_ops.composite.layers import Layer
from cute_ops.declaration.op import Op
from cute_ops.declaration.tensor import Tensor
from cute_ops.errors import suggesting, wrong_arguments
from cute_ops_torch.registry import register

_PUBLIC = "cute_ops_torch.nn"
# What modules of torch.nn take by position after sizes: norms and GELU.
_BY_POSITION = {"eps", "approximate"}
# How parts of names are written.
_WORDS = {
    "rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "swiglu": "SwiGLU", "geglu": "GeGLU", "silu": "SiLU",
    "gelu": "GELU", "relu2": "ReLU2", "rope": "RoPE", "qk": "QK", "fp8": "FP8", "l2norm": "L2Norm", "topk": "TopK",
    "causal": "Causal", "conv1d": "Conv1d",
}  # fmt: skip


def class_name(op: Op) -> str:
    """``add_rmsnorm_fp8`` is ``AddRMSNormFP8``."""
    return "".join(_WORDS.get(word, word.capitalize()) for word in op.name.split("_"))


@suggesting
def module(op: Op, namespace: str = "cute", *, given: Sequence[str] = ()) -> type[nn.Module]:
    """A class of modules from a declaration, which may be your own.

    Inputs that rows share are parameters, but for those that a call is ``given``: a ``weight`` starts as one, less the
    attribute ``weight_offset`` where there is one; others start as zero. The constructor takes the sizes of their
    dims, the op's attributes and options, a flag for each optional parameter that is no weight (``bias=False``),
    ``device`` and ``dtype``; by position only sizes and what :mod:`torch.nn`'s modules take next. The module is called
    with the other inputs.
    """
    learned = {name: t for name, t in op.inputs.items() if not t.rows and t.dims and name not in given}
    flags = [name for name, t in learned.items() if t.optional and not name.endswith("weight")]
    sizes = list(dict.fromkeys(size for t in learned.values() for dim in t.dims for size in dim.names))
    options = {**op.keywords, **op.options}
    either, keyword = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
    signature = Signature(
        [
            *(Parameter(name, either) for name in sizes),
            *(Parameter(name, either, default=options[name]) for name in options if name in _BY_POSITION),
            *(Parameter(name, keyword, default=options[name]) for name in options if name not in _BY_POSITION),
            *(Parameter(name, keyword, default=False) for name in flags),
            *(Parameter(name, keyword, default=None) for name in ("device", "dtype") if learned),
        ]
    )
    attributes = {
        "_learned": learned, "_flags": flags, "_size_names": sizes, "_options": options, "__signature__": signature,
        "_function": staticmethod(register(op, namespace)), "__module__": _PUBLIC,
        "forward": _forward(op, [*learned, *options]),
        "__doc__": f":func:`cute_ops_torch.{op.name}` as a module, see :func:`cute_ops_torch.nn.module`.",
    }  # fmt: skip
    return type(class_name(op), (_OpModule,), attributes)


def _forward(op: Op, held: Sequence[str]) -> Callable[..., Any]:
    """``forward`` of an op's module: takes the inputs that the module does not hold."""
    free = [name for name in op.inputs if name not in held]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > len(free):
            raise TypeError(f"{op.name}: takes at most {len(free)} inputs ({', '.join(free)}), got {len(args)}")
        own = {name: getattr(self, name) for name in held}
        return self._function(**dict(zip(free, args, strict=False)), **kwargs, **own)

    # torch.compile keeps what it compiled, and how often, by code object: each class has its own.
    forward.__code__ = forward.__code__.replace(co_name=f"{op.name}_forward")
    either = Parameter.POSITIONAL_OR_KEYWORD
    defaults = {name: None if op.inputs[name].optional else Parameter.empty for name in free}
    forward.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter("self", either), *(Parameter(name, either, default=value) for name, value in defaults.items())]
    )
    return forward


class _OpModule(nn.Module):
    """Base of the classes that :func:`module` makes; its class variables are named there. ``layer`` is the row of ours,
    which says what starts as in a linear layer.
    """

    layer: ClassVar[Layer | None] = None
    _learned: ClassVar[Mapping[str, Tensor]]
    _flags: ClassVar[Sequence[str]]
    _size_names: ClassVar[Sequence[str]]
    _options: ClassVar[Mapping[str, Any]]
    __signature__: ClassVar[Signature]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if problem := wrong_arguments(self.__signature__, args, kwargs):
            raise TypeError(f"cute.{type(self).__name__}: {problem}")
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        self._sizes = [values[name] for name in self._size_names]
        for name in self._options:
            setattr(self, name, values[name])
        for name, t in self._learned.items():
            learns = values.get(name, True)
            empty = torch.empty(t.of(values), device=values["device"], dtype=values["dtype"]) if learns else None
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        learned = self.layer.learned if self.layer else {}
        parameters = dict(self.named_parameters())
        for name, parameter in parameters.items():
            if name in learned and learned[name].start is None:
                bound = parameters["weight"].shape[-1] ** -0.5
                nn.init.uniform_(parameter, -bound, bound)
                continue
            start = 1.0 - getattr(self, "weight_offset", 0.0) if name.endswith("weight") else 0.0
            nn.init.constant_(parameter, start)

    def extra_repr(self) -> str:
        options = [(name, getattr(self, name), default) for name, default in self._options.items()]
        changed = [f"{name}={value!r}" for name, value, default in options if value != default]
        flags = [f"{name}=True" for name in self._flags if getattr(self, name) is not None]
        return ", ".join([*map(str, self._sizes), *changed, *flags])
