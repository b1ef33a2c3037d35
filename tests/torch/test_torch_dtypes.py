"""Functions of tiles of several dtypes in compiled graphs and as raw ops; the rest is in tests/contract."""

from __future__ import annotations

import torch

from cute_ops_torch import fused
from tests.ops import mixing


def test_dtypes_under_compile_and_in_raw_ops() -> None:
    function = fused(mixing.momentum)
    x, y, z = torch.randn(3, 8).bfloat16(), torch.randn(3, 8), torch.randn(3, 8).half()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for given in ((x, y, z), (y, x, x)):
        for out, wanted in zip(compiled(*given), function(*given), strict=True):
            assert torch.equal(out, wanted) and out.dtype == wanted.dtype
    op = mixing.of(mixing.momentum, "BFH").op
    torch.library.opcheck(getattr(torch.ops.cute, op.name).default, (x.requires_grad_(), y, z))
