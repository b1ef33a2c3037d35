"""Kernels of expressions with operands of bools and whole numbers: drawn rows, layouts and dtypes, interpreted."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from cute_ops import Op, fused
from cute_ops.testing import kernel_calls
from cute_ops.testing.kernel_calls import LAYOUTS

SEED = int(os.environ.get("CUTE_OPS_SEED", "47"))
SHAPES = {"tile": "*m n", "row": "n", "column": "*m 1", "scalar": ""}


def masked(xp: Any, x: Any, mask: Any) -> Any:
    return xp.where(mask, x, 0.0)


def softmax(xp: Any, x: Any, mask: Any) -> Any:
    y = xp.where(mask, x, -1e30)
    terms = xp.exp(y - xp.max(y, axis=-1, keepdims=True))
    return terms / xp.sum(terms, axis=-1, keepdims=True)


def chosen(xp: Any, x: Any, ids: Any, w: Any) -> Any:
    return xp.where(ids > 3, x * w, x + ids)


def centred(xp: Any, x: Any, ids: Any, w: Any) -> Any:
    y = chosen(xp, x, ids, w)
    return y - xp.mean(y, axis=-1, keepdims=True)


OPS = {
    f"{function.__name__}_{kind}": fused(
        function, operands={"x": "*m n", name: f"{word} {shape}".strip(), **more}, name=f"{function.__name__}_{kind}"
    )
    for function, name, word, more in (
        (masked, "mask", "bool", {}), (softmax, "mask", "bool", {}),
        (chosen, "ids", "int", {"w": "n"}), (centred, "ids", "int", {"w": "n"}),
    )
    for kind, shape in SHAPES.items()
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_any_rows_layouts_and_dtypes(name: str) -> None:
    print("seed", SEED)
    rng = np.random.default_rng((SEED, *name.encode()))
    for op in (OPS[name], OPS[name].grad):
        for n in (int(8 * rng.integers(1, 200)), int(rng.integers(1, 1500)), int(rng.choice([9001, 20008]))):
            dtype, layout = str(rng.choice(["bfloat16", "float32", "float16"])), str(rng.choice(LAYOUTS))
            kernel_calls.check(kernel_calls.made(op, int(rng.integers(1, 9)), n, dtype, layout, rng))


def test_they_have_no_gradient() -> None:
    op: Op = OPS["chosen_tile"]
    assert op.differentiable == ("x", "w") and op.inputs["ids"].dtype == "I_ids"
    assert op.dtypes["I_ids"] == ("int32", "int64", "uint8") and OPS["masked_tile"].inputs["mask"].dtype == "bool"
    with pytest.raises(ValueError, match="it has no tile of floats"):
        fused(lambda xp, mask: xp.where(mask, 1.0, 0.0), operands={"mask": "bool *m n"}, name="only_mask")
