"""Rotations of many families are one op: what a function computes, and models that run it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops_torch.huggingface.rotations import ALL, FIRST, HALVES, OTHER, PAIRS, Rotation, rotation_of
from tests.torch.test_torch_patch_families import check, make

pytest.importorskip("transformers")

# Halves or neighbours, whole heads or some columns, tables of the heads' dtype or of float32.
KNOWN = {
    "llama": Rotation(FIRST, HALVES, False, False, False, (1, 2)),
    "phi3": Rotation(FIRST, HALVES, False, True, False, (1, 2)),
    "olmo2": Rotation(FIRST, HALVES, False, False, True, (1, 2)),
    "cohere": Rotation(OTHER, PAIRS, True, False, True, (1, 2)),
    "glm": Rotation(FIRST, "", True, True, False, (1, 2)),
    "gpt_oss": Rotation(ALL, "", False, False, False, (1, 2)),
}


def function_of(family: str) -> Any:
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb


@pytest.mark.parametrize("family", KNOWN)
def test_functions_are_rotations(family: str) -> None:
    assert rotation_of(function_of(family), f"{HALVES} {PAIRS}") == KNOWN[family]


def test_tables_that_are_not_known_to_be_equal_are_none() -> None:
    assert rotation_of(function_of("llama"), "") is None
    assert rotation_of(function_of("llama"), PAIRS) is None
    assert rotation_of(function_of("cohere"), HALVES) is None
    assert rotation_of(function_of("glm"), "") == KNOWN["glm"]


def test_what_is_no_rotation_of_ours() -> None:
    llama: Any = function_of("llama")

    def scaled(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        q, k = llama(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return q * 1.01, k

    def one(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return llama(q, k, cos, sin)[0]

    def swapped(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return llama(q, k, cos, sin)[::-1]

    def widened(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return tuple(x.double() for x in llama(q, k, cos, sin))

    def without_option(q: Any, k: Any, cos: Any, sin: Any) -> Any:
        return llama(q, k, cos, sin)

    for function in (scaled, one, swapped, widened, torch.add, None):
        assert rotation_of(function, HALVES) is None
    assert rotation_of(without_option, HALVES) == KNOWN["llama"]._replace(dims=(1,))


@pytest.mark.parametrize("family", [family for family in KNOWN if family != "llama"])
def test_models_run_them(family: str) -> None:
    found = check(family)
    assert [each.op for each in found].count("rope") == 2
    assert not [each for each in found.left if each.kind == "rotary function"]


@pytest.mark.parametrize("family", ["olmo2", "cohere", "glm", "phi3"])
def test_narrow_heads_keep_their_dtype(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The op runs in bfloat16, and what it gives is as near to float32's as the original's is."""
    calls: list[torch.dtype] = []
    rope = cute_ops_torch.functions.rope
    monkeypatch.setattr(cute_ops_torch.functions, "rope", lambda x, *a, **k: calls.append(x.dtype) or rope(x, *a, **k))
    tokens = torch.randint(3, 97, (2, 16), generator=torch.Generator().manual_seed(5))
    model = make(family).eval()
    with torch.no_grad():
        exact = model(input_ids=tokens).logits
        model = model.to(torch.bfloat16)
        theirs = (model(input_ids=tokens).logits - exact).abs().max()
        cute_ops_torch.patch(model)
        ours = (model(input_ids=tokens).logits - exact).abs().max()
    assert calls == [torch.bfloat16] * 4
    assert ours <= 2 * theirs + 1e-3
