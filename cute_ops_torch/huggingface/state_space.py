"""Layers of state-space models: their convolutions along a sequence, and Mamba 2's scan, by our ops.

Hugging Face's modules call ``causal_conv1d_fn`` and ``mamba2_chunk_scan`` of their file, which run packages of kernels
where these are installed, and else torch's ops: a depthwise convolution, and a scan that writes what each token of a
chunk gives each other one for all heads in float32. What the latter compute is compared with ours on random tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from inspect import unwrap
from typing import Any

import torch
from torch import nn

from cute_ops_torch import functions
from cute_ops_torch.composite.chunk_scan import chunk_scan
from cute_ops_torch.huggingface.bypass import takes
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost, rebind

Tensor = torch.Tensor
_CONVOLVE, _SCAN = "causal_conv1d_fn", "mamba2_chunk_scan"
# The package whose function a call runs where it is installed.
_PACKAGES = {_CONVOLVE: "causal_conv1d", _SCAN: "mamba_ssm"}
_ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Convolve ``(batch, channels, seqlen)``, of which channels or tokens are neighbours in memory."""
    if x.stride(-1) == 1:
        return functions.causal_conv1d_channels_first(x, weight, bias, None, activation)
    return functions.causal_conv1d(x.transpose(1, 2), weight, bias, None, activation)[0].transpose(1, 2)


def _convolving(plain: Any) -> Forward:
    """A function in the place of ``causal_conv1d_fn``."""

    def causal_conv1d_fn(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **kwargs: Any
    ) -> Any:
        act = _ACTIVATIONS.get(activation)
        known = act is not None and weight.ndim == 2 and 2 <= weight.shape[1] <= 4 and not _is_packed(kwargs)
        x = hidden_states
        if not known or x.ndim != 3 or not x.numel() or x.shape[1] != len(weight):
            return plain(hidden_states, weight, bias, activation=activation, **kwargs)
        rows = x if x.stride(-1) == 1 else x.transpose(1, 2)
        if not takes(rows, weight, bias):
            return plain(hidden_states, weight, bias, activation=activation, **kwargs)
        return _convolve(x, weight, bias, str(act))

    return causal_conv1d_fn


def _scanning(plain: Any) -> Forward:
    """A function in the place of ``mamba2_chunk_scan``, whose outputs are in the dtype of its tokens."""

    def mamba2_chunk_scan(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int,
        D: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
        dt_softplus: bool = False, dt_limit: Sequence[float] = (0.0, float("inf")), return_final_states: bool = False,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        x = hidden_states
        alike = x.dtype == B.dtype == C.dtype and x.numel() and (D is None or D.ndim == 1)
        if not alike or _is_packed(kwargs) or kwargs.get("z") is not None or not takes(x, dt, A, B, C, D, dt_bias):
            return plain(
                x, dt, A, B, C, chunk_size, D=D, dt_bias=dt_bias, initial_states=initial_states,
                dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=return_final_states, **kwargs,
            )  # fmt: skip
        with torch.autocast(x.device.type, enabled=False):
            step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
            step = nn.functional.softplus(step) if dt_softplus else step
            if not dt_softplus or tuple(dt_limit) != (0.0, float("inf")):
                step = step.clamp(dt_limit[0], dt_limit[1])
            out, last = chunk_scan(x, step, A.float(), B, C, D, initial=initial_states, wants_last=return_final_states)
        return (out, last) if return_final_states else out

    return mamba2_chunk_scan


def _is_packed(kwargs: Any) -> bool:
    """Whether a call has several sequences in one."""
    return any(kwargs.get(name) is not None for name in ("seq_idx", "cu_seqlens"))


@cache
def _is_convolution(function: Any) -> bool:
    """Whether a function convolves as ours does, with and without bias and activation."""
    draw = torch.Generator().manual_seed(5)
    x, weight, bias = (torch.randn(s, generator=draw).requires_grad_() for s in ((2, 6, 9), (6, 4), (6,)))
    ours = _convolving(None)
    return all(
        _agree(function, ours, (given, weight, *more), {"activation": act}, (x, weight, *more))
        for more in ((), (bias,)) for act in (None, "silu") for given in (x, x.mT.contiguous().mT)
    )  # fmt: skip


@cache
def _is_scan(function: Any) -> bool:
    """Whether a function scans as ours does, from a state and from none."""
    draw = torch.Generator().manual_seed(6)
    sizes = ((2, 11, 4, 5), (2, 11, 4), (4,), (2, 11, 2, 3), (2, 11, 2, 3), (4,), (4,), (2, 4, 5, 3))
    x, dt, a, b, c, d, bias, initial = given = [torch.randn(s, generator=draw) for s in sizes]
    a.abs_().neg_()
    for each in given:
        each.requires_grad_()
    ours = _scanning(None)
    options = {"chunk_size": 4, "D": d, "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.1, 2.0)}
    whole = {**options, "initial_states": initial, "return_final_states": True}
    return all(
        _agree(function, ours, (x, dt, a, b, c), more, leaves)
        for more, leaves in ((options, given[:-1]), (whole, given))
    )


def _agree(function: Any, ours: Any, given: Sequence[Any], options: Any, leaves: Sequence[Tensor]) -> bool:
    """Whether two functions give the same results and gradients."""
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            found = [run(*given, **options) for run in (function, ours)]
            outputs = [out if isinstance(out, tuple) else (out,) for out in found]
            slopes = [torch.autograd.grad(sum(o.sin().sum() for o in each), leaves) for each in outputs]
    except Exception:  # it takes other arguments
        return False
    pairs = [*zip(*outputs, strict=True), *zip(*slopes, strict=True)]
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in pairs)


def _calls(name: str, is_ours: Callable[[Any], bool], module: nn.Module, model: nn.Module) -> bool:
    """Whether a ``forward`` calls a function of this name that runs torch's ops, and that is ours."""
    forward = innermost(type(module).forward)
    if forward is None or name not in forward.__code__.co_names or find_spec(_PACKAGES[name]) is not None:
        return False
    function = forward.__globals__.get(name)
    return callable(function) and is_ours(unwrap(function))


def _rebound(name: str, make: Callable[[Any], Forward], forward: Any) -> Forward:
    plain = forward.__globals__[name]
    function = make(plain)
    vars(function)["__wrapped__"] = plain
    return rebind(forward, **{name: function})


CONVOLUTION = Replacement(
    "causal_conv1d", partial(_calls, _CONVOLVE, _is_convolution), partial(_rebound, _CONVOLVE, _convolving)
)
SCAN = Replacement("fused", partial(_calls, _SCAN, _is_scan), partial(_rebound, _SCAN, _scanning))
