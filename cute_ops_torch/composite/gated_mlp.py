"""The gated MLP, whose backward has the activation's gradient in a product: :mod:`cute_ops.composite.gated_mlp`."""

from __future__ import annotations

import torch

from cute_ops.composite import gated_mlp as declared
from cute_ops.composite.docstrings import continued
from cute_ops_torch.composite.autocast import autocast
from cute_ops_torch.composite.constant import functions
from cute_ops_torch.library.tensors import checked

Tensor = torch.Tensor
_gated_mlp = functions(declared.gated_mlp)


@checked
@continued(declared.DOC)
def gated_mlp(
    x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str = "silu", *, fused: str = "auto",
    save: str = "pre", transposed: bool = False, halves: bool = False,
) -> Tensor:  # fmt: skip
    """``out = (activation(x @ gate.T) * (x @ up.T)) @ w_down.T`` with ``gate, up = w_gate_up[:n], w_gate_up[n:]``."""
    x, w_gate_up, w_down = autocast(x, w_gate_up, w_down)
    options = save, transposed, w_gate_up.ndim > 2 and not halves, halves
    out: Tensor = _gated_mlp(*options)(x, w_gate_up, w_down, activation, fused)
    return out
