"""Modules over the functions: one for every op."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from cute_ops.op import Op
from cute_ops.ops import OPS
from cute_ops_torch import functions
from cute_ops_torch.composite.linear_cross_entropy import linear_cross_entropy
from cute_ops_torch.library.register import register
from cute_ops_torch.library.schema import define


class RMSNorm(nn.Module):
    """:func:`cute_ops_torch.rmsnorm` with a learned weight.

    Args:
        n: size of the last dim.
        eps: added to the mean square.
        weight_offset: added to the weight; 1.0 is Gemma's. The weight starts at ``1 - weight_offset``.
        bias: learn a bias too.
        device: where the parameters are.
        dtype: a float dtype; it need not be that of the input.
    """

    def __init__(
        self,
        n: int,
        eps: float = 1e-6,
        weight_offset: float = 0.0,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.n, self.eps, self.weight_offset = n, eps, weight_offset
        self.weight = nn.Parameter(torch.empty(n, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(n, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the plain norm: scale one, bias zero."""
        nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        offset = f", weight_offset={self.weight_offset}" if self.weight_offset else ""
        return f"{self.n}, eps={self.eps}{offset}, bias={self.bias is not None}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions.rmsnorm(x, self.weight, self.bias, self.eps, self.weight_offset)


class AddRMSNorm(RMSNorm):
    """:func:`cute_ops_torch.add_rmsnorm` with a learned weight: ``(x, residual) -> (out, residual_out)``."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return functions.add_rmsnorm(x, residual, self.weight, self.bias, self.eps, self.weight_offset)


class LayerNorm(nn.Module):
    """:func:`cute_ops_torch.layernorm` with a learned weight and bias.

    Args:
        n: size of the last dim.
        eps: added to the variance.
        bias: learn a bias.
        device: where the parameters are.
        dtype: a float dtype; it need not be that of the input.
    """

    def __init__(
        self,
        n: int,
        eps: float = 1e-5,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.n, self.eps = n, eps
        self.weight = nn.Parameter(torch.empty(n, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(n, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the plain norm: scale one, bias zero."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.n}, eps={self.eps}, bias={self.bias is not None}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functions.layernorm(x, self.weight, self.bias, self.eps)


class LinearCrossEntropy(nn.Module):
    """:func:`cute_ops_torch.linear_cross_entropy` with a learned weight: ``(hidden, target) -> loss``.

    Args:
        n: size of the hidden states' last dim.
        classes: number of classes.
        bias: learn a bias.
        ignore_index, label_smoothing, z_loss, reduction: the function's.
        device: where the parameters are.
        dtype: of the parameters, and of the hidden states.
    """

    def __init__(
        self,
        n: int,
        classes: int,
        bias: bool = False,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.n, self.classes = n, classes
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index, "label_smoothing": label_smoothing, "z_loss": z_loss, "reduction": reduction,
        }  # fmt: skip
        self.weight = nn.Parameter(torch.empty(classes, n, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(classes, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As :class:`torch.nn.Linear` starts."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.n**-0.5), self.n**-0.5)

    def extra_repr(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{self.n}, {self.classes}, bias={self.bias is not None}, {options}"

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, self.weight, target, self.bias, **self.options)


# How parts of names are written.
_WORDS = {
    "rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "swiglu": "SwiGLU", "geglu": "GeGLU", "qk": "QK", "fp8": "FP8",
}  # fmt: skip


def class_name(op: Op) -> str:
    """``add_rmsnorm_fp8`` is ``AddRMSNormFP8``."""
    return "".join(_WORDS.get(word, word.capitalize()) for word in op.name.split("_"))


_SOURCE = """
def forward(self, {tensors}):
    return self._function({arguments})
"""


def module(op: Op, namespace: str = "cute") -> type[nn.Module]:
    """A class of modules of a declaration, of one's own too.

    Inputs that rows share are parameters: a ``weight`` starts as one, less the attribute ``weight_offset`` where there
    is that, others as zero. A module is made of the sizes of their dims, the op's attributes and options, a flag for
    each parameter that may be absent and is no weight (``bias=False``), ``device`` and ``dtype``. It is called with the
    other inputs.
    """
    learned = {name: t for name, t in op.inputs.items() if not t.rows and t.dims}
    flags = [name for name, t in learned.items() if t.optional and not name.endswith("weight")]
    sizes = list(dict.fromkeys(dim.name for t in learned.values() for dim in t.dims))
    given = {**op.attrs, **op.options}
    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature(
        [
            *(inspect.Parameter(name, either) for name in sizes),
            *(inspect.Parameter(name, either, default=value) for name, value in given.items()),
            *(inspect.Parameter(name, keyword, default=False) for name in flags),
            *(inspect.Parameter(name, keyword, default=None) for name in ("device", "dtype") if learned),
        ]
    )

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        self._sizes = {name: values[name] for name in sizes}
        for name in given:
            setattr(self, name, values[name])
        for name, t in learned.items():
            here = values.get(name, True)
            empty = torch.empty(t.of(values), device=values["device"], dtype=values["dtype"]) if here else None
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))
        self.reset_parameters()

    def reset_parameters(self: Any) -> None:
        for name, parameter in self.named_parameters():
            start = 1.0 - getattr(self, "weight_offset", 0.0) if name.endswith("weight") else 0.0
            nn.init.constant_(parameter, start)

    def extra_repr(self: Any) -> str:
        changed = [f"{name}={getattr(self, name)!r}" for name in given if getattr(self, name) != given[name]]
        here = [f"{name}=True" for name in flags if getattr(self, name) is not None]
        return ", ".join([*map(str, self._sizes.values()), *changed, *here])

    source = _SOURCE.format(
        tensors=", ".join(f"{n}=None" if t.optional else n for n, t in op.inputs.items() if n not in learned),
        arguments=", ".join(
            f"self.{name}" if name in learned or name in given else name for name in (*op.inputs, *given)
        ),
    )  # fmt: skip
    made = {
        "__init__": __init__, "__signature__": signature, "__module__": __name__, "reset_parameters": reset_parameters,
        "extra_repr": extra_repr, "forward": define(source, f"module {op.name}", __name__=__name__)["forward"],
        "_function": staticmethod(register(op, namespace)),
        "__doc__": f":func:`cute_ops_torch.{op.name}` as a module, see :func:`cute_ops_torch.nn.module`.",
    }  # fmt: skip
    return type(class_name(op), (nn.Module,), made)


_OPS = {class_name(op): op for op in OPS}
_WRITTEN = ("AddRMSNorm", "LayerNorm", "LinearCrossEntropy", "RMSNorm")
__all__ = ["module", *sorted({*_OPS, *_WRITTEN})]


def __getattr__(name: str) -> Any:
    """Classes are made when they are first asked for."""
    if name not in _OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = module(_OPS[name])
    return made


def __dir__() -> list[str]:
    return sorted(__all__)
