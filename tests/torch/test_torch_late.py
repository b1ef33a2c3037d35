"""Epilogues whose reductions depend on each other, in PyTorch: values, gradients, and on a GPU the passes that run."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from cute_ops_torch import linear
from tests.ops import late

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EXACT = {
    late.softmax: lambda acc, bias: (acc + bias).softmax(-1),
    late.layer_norm: lambda acc, w, b: (torch.nn.functional.layer_norm(acc, acc.shape[-1:], w, b, 1e-5), acc),
    late.log_sum_exp: lambda acc: acc.logsumexp(-1, keepdim=True),
    late.total: lambda acc: acc.sum(-1, keepdim=True),
}  # fmt: skip


def value_and_gradients(function: Any, given: list[torch.Tensor], cotangents: list[torch.Tensor] | None = None) -> Any:
    outputs = function(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    cotangents = cotangents or [torch.randn_like(out) for out in outputs]
    cotangents = [c.to(out.dtype) for c, out in zip(cotangents, outputs, strict=True)]
    return outputs, torch.autograd.grad(outputs, given, cotangents), cotangents


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", EXACT, ids=lambda function: function.__name__)
def test_values_and_gradients(function: Any, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    n, rows = (24, 6) if device == "cpu" else (1024, 200)
    shapes = (rows, 32), (n, 32), *[(n,)] * len(late.OPERANDS[function])
    given = [torch.randn(s, device=device).to(dtype) / (4 if s == (n, 32) else 1) for s in shapes]
    given = [t.requires_grad_() for t in given]
    wide = [t.detach().double().requires_grad_() for t in given]
    for fused in ("auto", "never"):
        for save in ("pre", "none"):
            found = value_and_gradients(partial(linear, epilogue=function, fused=fused, save=save), given)
            exact = value_and_gradients(lambda x, w, *a: EXACT[function](x @ w.mT, *a), wide, found[2])
            for got, wanted in zip((*found[0], *found[1]), (*exact[0], *exact[1]), strict=True):
                # Of 16 bits the product, the result and the gradient of the product are rounded.
                error = (got.double() - wanted).norm() / wanted.norm()
                assert error < (2e-6 if dtype is torch.float32 else 1.5 * 2.0**-8), (fused, save, error)
            rows_alone = function in (late.log_sum_exp, late.total)
            assert found[0][0].dtype == (torch.float32 if rows_alone else dtype)
    with pytest.raises(ValueError, match="no kernel computes a product and such reductions of its rows"):
        linear(*given, epilogue=function, fused="always")


def test_compiled_calls_and_dtypes() -> None:
    def both(xp: Any, acc: Any, residual: Any) -> Any:
        return xp.astype(acc + residual, "float32"), xp.astype(acc, residual.dtype)

    x, weight, residual = torch.randn(6, 32).bfloat16(), torch.randn(24, 32).bfloat16(), torch.randn(6, 24).half()
    outputs = linear(x, weight, residual, epilogue=both)
    assert [out.dtype for out in outputs] == [torch.float32, torch.float16]
    for function, operands in ((both, [residual]), (late.softmax, [torch.randn(24)])):
        run = lambda *a, f=function: linear(*a, epilogue=f)  # noqa: E731
        for out, wanted in zip(
            torch.compile(run, fullgraph=True, backend="aot_eager")(x, weight, *operands),
            run(x, weight, *operands),
            strict=True,
        ):
            assert torch.equal(out, wanted)
