"""Torch's attention with masks of data, and what is built of its multi-head attention, on a GPU beside float64:
compiled by Inductor after the graph pass, and patched.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_ops_torch
from cute_ops_torch import inductor
from cute_ops_torch.composite import scaled_dot_product
from tests.torch import test_torch_graph_masks as masks
from tests.torch import test_torch_multi_head as multi_head

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    inductor.replaced.clear()
    with inductor.enable(devices=("cuda",)):
        yield


@pytest.mark.parametrize("kind", masks.KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_masks_of_data(kind: str, seed: int) -> None:
    draw, heads = random.Random(f"GPU {kind} {seed}"), 1
    while heads == 1:  # stays torch's
        function, given, in_band = masks.drawn(kind, draw, draw.choice((32, 64, 128)), 400, "cuda")
        heads = given[0].shape[1]
    with sdpa_kernel(SDPBackend.MATH):  # torch's others need not give zeros where all keys are hidden
        found = masks.entries_of(function, *given, backend="inductor")
    assert found.get("attention"), inductor.report()
    said = found["attention"][0]
    assert "captured0" in said
    assert in_band == ("causal" in said or "left=" in said)


def compare(functions: list[Any], of: list[nn.Module], tensors: list[list[Tensor]], strides: bool = True) -> None:
    results = [
        multi_head.run(function, given, [*module.parameters()])
        for function, module, given in zip(functions, of, tensors, strict=True)
    ]
    multi_head.near(*results, strides=strides)


@pytest.mark.parametrize("seed", range(10))
def test_modules_in_the_pass(seed: int) -> None:
    rng = random.Random(f"GPU {seed}")
    size, times = rng.choice((32, 64, 128)), rng.choice((7, 31, 50))
    (narrow, given, options), (wide, _, _) = (
        multi_head.drawn(seed, dtype, size, times) for dtype in (torch.bfloat16, torch.float64)
    )
    wide.load_state_dict(narrow.state_dict())
    narrow, wide = narrow.cuda(), wide.cuda()

    def call(module: nn.Module, dtype: torch.dtype) -> Any:
        made = {name: each.cuda() if torch.is_tensor(each) else each for name, each in options.items()}
        more = {k: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in made.items()}
        return lambda *given: module(*given, **more)[0]

    plain, exact = call(narrow, torch.bfloat16), call(wide, torch.float64)
    tensors = [multi_head.alike(given, dtype, "cuda") for dtype in (torch.bfloat16, torch.bfloat16, torch.float64)]
    compare([torch.compile(plain, fullgraph=True), plain, exact], [narrow, narrow, wide], tensors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_patched_modules(seed: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that neither reads weights nor hides keys, or hides those behind a query."""
    rng = random.Random(f"GPU patched {seed}")
    size, n, first = rng.choice((32, 64, 128)), rng.randint(2, 400), rng.random() < 0.5
    torch.manual_seed(seed)
    of = [nn.MultiheadAttention(2 * size, 2, batch_first=first, device="cuda") for _ in range(3)]
    x = torch.randn(*((3, n) if first else (n, 3)), 2 * size, device="cuda").bfloat16()
    kinds = (torch.bfloat16, torch.bfloat16, torch.float64)
    tensors = [[x.to(dtype).requires_grad_()] for dtype in kinds]
    for each, dtype in zip(of, kinds, strict=True):
        each.load_state_dict(of[0].bfloat16().state_dict())
        each.to(dtype)
    options: dict[str, Any] = {"need_weights": False}
    if causal:
        options |= {"attn_mask": torch.ones(n, n, dtype=torch.bool, device="cuda").triu(1), "is_causal": True}
    calls, plain = list[bool](), scaled_dot_product._attention

    def attention(*args: Any) -> Any:
        calls.append(args[5])
        return plain(*args)

    monkeypatch.setattr(scaled_dot_product, "_attention", attention)
    scaled_dot_product._calls.clear()
    cute_ops_torch.patch(of[0])
    compare([lambda x, of=each: of(x, x, x, **options)[0] for each in of], of, tensors, strides=False)
    assert calls == [causal]


@pytest.mark.parametrize("mask", ["none", "causal", "hinted", "padding"])
def test_encoders_in_the_pass(mask: str) -> None:
    rng = random.Random(f"GPU {mask}")
    torch.manual_seed(3)
    options: Any = {
        "norm_first": rng.random() < 0.5, "batch_first": rng.random() < 0.5, "dropout": 0.0,
        "activation": rng.choice(("relu", "gelu")),
    }  # fmt: skip
    of = [multi_head.Encoder(mask, **options).to("cuda", torch.bfloat16) for _ in range(2)]
    of.append(multi_head.Encoder(mask, **options).to("cuda", torch.float64))
    for each in of[1:]:
        each.load_state_dict(of[0].state_dict())
    n = 150
    x = torch.randn(*((3, n) if options["batch_first"] else (n, 3)), multi_head.E, device="cuda").bfloat16()
    padding = torch.arange(n, device="cuda") >= torch.tensor([[n], [n // 2], [1]], device="cuda")
    tensors = [[x.to(dtype).requires_grad_()] for dtype in (torch.bfloat16, torch.bfloat16, torch.float64)]
    ours = torch.compile(of[0], fullgraph=True)
    compare([lambda x, of=each: of(x, padding) for each in (ours, *of[1:])], of, tensors)
    assert inductor.replaced["attention"] == 2
