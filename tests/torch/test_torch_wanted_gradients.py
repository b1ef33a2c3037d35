"""Gradients that nobody asks for are not computed: the ops that a backward calls, and the values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cute_ops_torch as ours


class Recorded(TorchDispatchMode):
    """The ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "cute":
            self.names.append(function._schema.name.partition("::")[2])
        return function(*args, **(kwargs or {}))


def mlp(x: Any, gate_up: Any, down: Any) -> Any:
    return ours.gated_mlp(x, gate_up, down)


# By function: the shapes of its arguments, the one that needs a gradient, and the ops that compute it.
ALONE: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int, list[str]]] = {
    "rmsnorm": (ours.rmsnorm, ((4, 8), (8,)), 1, ["rmsnorm_bwd_only_dweight"]),
    "layernorm": (ours.layernorm, ((4, 8), (8,), (8,)), 2, ["layernorm_bwd_only_dbias"]),
    "linear": (ours.linear, ((4, 8), (6, 8)), 1, ["linear_dweight"]),
    "gated_mlp": (mlp, ((4, 8), (12, 8), (5, 6)), 2, ["gated_mlp_bwd_only_hidden", "gated_mlp_dw_down"]),
    "mlp": (ours.mlp, ((4, 8), (6, 8), (6,), (5, 6), (5,)), 2, ["mlp_bwd_only_dpre", "mlp_db_up"]),
    "mlp, down": (ours.mlp, ((4, 8), (6, 8), (6,), (5, 6), (5,)), 4, ["mlp_db_down"]),
    "linear_add_rmsnorm": (
        ours.linear_add_rmsnorm, ((4, 8), (6, 8), (4, 6), (6,)), 0,
        ["linear_add_rmsnorm_bwd_only_dresidual", "linear_of_dresidual_dx"],
    ),
    "rmsnorm_linear": (
        ours.rmsnorm_linear, ((4, 8), (8,), (6, 8)), 1,
        ["rmsnorm_linear_dx", "rmsnorm_linear_norm_bwd_only_dnorm_weight"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_a_gradient_alone_computes_no_other(name: str) -> None:
    function, shapes, k, expected = ALONE[name]
    generator = torch.Generator().manual_seed(0)
    arrays = [torch.randn(shape, generator=generator) for shape in shapes]

    def backward(wanted: tuple[int, ...]) -> tuple[list[str], torch.Tensor | None]:
        given = [a.clone().requires_grad_(i in wanted) for i, a in enumerate(arrays)]
        out = function(*given)
        out = out if isinstance(out, torch.Tensor) else out[0]
        with Recorded() as recorded:
            out.sin().sum().backward()
        return recorded.names, given[k].grad

    names, alone = backward((k,))
    assert names == expected
    torch.testing.assert_close(alone, backward(tuple(range(len(arrays))))[1])
