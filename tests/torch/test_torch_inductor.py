"""The graph pass: what it finds in models as they are written, what it leaves alone, and what comes out."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cute_ops_torch.inductor import graph_pass


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    torch._dynamo.reset()
    graph_pass.replaced.clear()
    graph_pass.enable(devices=("cpu",))
    yield
    graph_pass.disable()
    assert torch._inductor.config.pre_grad_custom_pass is None


def only_the_pass(module: torch.fx.GraphModule, inputs: Any) -> Any:
    """A compiler that does nothing else."""
    torch._inductor.config.pre_grad_custom_pass(module.graph)
    module.recompile()
    return module


def check(function: Callable[..., Any], *tensors: torch.Tensor, found: dict[str, int]) -> None:
    """After the pass, forward and backward are as they were, and these ops were put in."""
    leaves = [t.requires_grad_(t.is_floating_point()) for t in tensors]
    wanted = [t for t in leaves if t.requires_grad]
    results = []
    for call in (torch.compile(function, fullgraph=True, dynamic=True, backend=only_the_pass), function):
        outs = call(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        grads = torch.autograd.grad(sum(o.float().cos().sum() for o in outs), wanted)
        results.append([*outs, *grads])
    assert dict(graph_pass.replaced) == found
    for got, expected in zip(*results, strict=True):
        assert got.dtype == expected.dtype
        eps = max(torch.finfo(t.dtype).eps for t in (got, tensors[0]))
        torch.testing.assert_close(got, expected, rtol=0, atol=16 * eps * max(1.0, expected.abs().max().item()))


class Llama(nn.Module):
    def __init__(self, n: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.rand(n)), eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def llama(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * normed.to(x.dtype)


def gemma(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (out * (1.0 + weight.float())).type_as(x)


def block(norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        residual = residual + x.sin()
        return residual + norm(residual, weight).sin()

    return function


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for norm in (llama, gemma):
        graph_pass.replaced.clear()
        check(
            lambda x, w, norm=norm: norm(x.sin(), w),
            rand(3, 5, 64, dtype=dtype),
            rand(64, dtype=dtype),
            found={"rmsnorm": 1},
        )
    graph_pass.replaced.clear()
    # With a weight in float32 the result is in float32, too.
    found = {"rmsnorm": 1} if dtype == torch.float32 else {"fused": 1}
    check(lambda x, w: llama(x.sin(), w), rand(3, 64, dtype=dtype), rand(64), found=found)


@pytest.mark.slow
def test_residual_add_before_a_norm() -> None:
    for norm in (llama, gemma):
        graph_pass.replaced.clear()
        check(block(norm), rand(4, 64), rand(4, 64), rand(64), found={"add_rmsnorm": 1})
    graph_pass.replaced.clear()  # a sum that broadcasts is not the op's
    check(block(llama), rand(64), rand(4, 64), rand(64), found={"fused": 1})


def test_functional_norms() -> None:
    check(lambda x, w: F.rms_norm(x.sin(), (64,), w, 1e-5), rand(4, 64), rand(64), found={"rmsnorm": 1})
    graph_pass.replaced.clear()
    for dtype in (torch.float32, torch.bfloat16):  # so small that eps counts
        check(lambda x: F.rms_norm(1e-3 * x.sin(), (64,)), rand(4, 64, dtype=dtype), found={"fused": 1})
        graph_pass.replaced.clear()
    check(lambda x, w: F.rms_norm(x.sin(), (4, 64), w), rand(3, 4, 64), rand(4, 64), found={})


def test_layernorm() -> None:
    check(
        lambda x, w, b: F.layer_norm(x.sin(), (64,), w, b, 1e-6),
        rand(4, 64),
        rand(64),
        rand(64),
        found={"layernorm": 1},
    )


def test_gated() -> None:
    check(lambda g, u: F.silu(g.sin()) * u.cos(), rand(4, 64), rand(4, 64), found={"silu_mul": 1})
    graph_pass.replaced.clear()
    tanh = lambda g, u: u.cos() * F.gelu(g.sin(), approximate="tanh")  # noqa: E731
    check(tanh, rand(4, 64), rand(4, 64), found={"gelu_mul": 1})
    graph_pass.replaced.clear()
    check(lambda g, u: F.gelu(g.sin()) * u, rand(4, 64), rand(4, 64), found={"gelu_mul": 1})
    graph_pass.replaced.clear()  # a gate that broadcasts, and one that is read elsewhere
    check(lambda g, u: F.silu(g.sin()) * u, rand(4, 64), rand(64), found={"fused": 1})
    graph_pass.replaced.clear()
    check(lambda g, u: (lambda a: a * u + a)(F.silu(g.sin())), rand(4, 64), rand(4, 64), found={"fused": 1})


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str) -> None:
    target = torch.tensor([3, -100, 5, 0])
    loss = lambda x: F.cross_entropy(x.sin(), target, reduction=reduction, label_smoothing=0.1)  # noqa: E731
    check(loss, rand(4, 33), found={"cross_entropy": 1})
    graph_pass.replaced.clear()
    check(lambda x: F.cross_entropy(x.sin(), target.clamp(0), torch.ones(33)), rand(4, 33), found={})


def test_cross_entropy_reads_logits_before_their_cast() -> None:
    target, seen = torch.tensor([3, -100, 5, 0]), []

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x.sin().float().view(-1, 33), target)

    def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(only_the_pass(module, inputs))
        return seen[-1]

    x = rand(2, 2, 33, dtype=torch.bfloat16).requires_grad_()
    got, expected = torch.compile(loss, backend=compiler)(x), loss(x)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*[torch.autograd.grad(v, x) for v in (got, expected)], rtol=1e-2, atol=1e-3)
    assert "float" not in [node.target for node in seen[0].graph.nodes]


def attention(mask: Callable[..., torch.Tensor | None], **options: Any) -> Callable[..., torch.Tensor]:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q.sin(), k, v, mask(q.shape[-2], k.shape[-2]), **options).cos()

    return function


def positions(m: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(m)[:, None], torch.arange(n)


def check_attention(mask: Callable[..., Any], m: int, n: int, kind: str | None, **options: Any) -> None:
    """After the pass, attention is called with ``is_causal``, with nothing, or with the mask as before."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    seen: list[Any] = []

    def compiler(module: torch.fx.GraphModule, inputs: Any) -> Any:
        only_the_pass(module, inputs)
        seen.extend(node for node in module.graph.nodes if "attention" in str(node.target))
        return module

    graph_pass.replaced.clear()
    tensors = [torch.randn(2, 4, rows, 16) for rows in (m, n, n)]
    function = attention(mask, **options)
    got = torch.compile(function, backend=compiler, fullgraph=True, dynamic=False)(*tensors)
    torch.testing.assert_close(got, function(*tensors), rtol=1e-5, atol=1e-5)
    (node,) = seen
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False)) | node.kwargs
    masked = given.get("attn_mask") is not None
    assert (given.get("is_causal", False), masked) == {"causal": (True, False), "all": (False, False)}.get(
        str(kind), (options.get("is_causal", False), kind != "absent")
    )
    assert graph_pass.replaced["attention_mask"] == (kind in ("causal", "all"))


def test_attention_masks_that_are_known() -> None:
    def causal(m: int, n: int) -> torch.Tensor:
        i, j = positions(m, n)
        return j <= i

    def packed(m: int, n: int) -> torch.Tensor:  # Hugging Face's, of one sequence
        i = torch.arange(m).unsqueeze(0).expand(2, -1)
        place = (torch.diff(i, prepend=i[:, :1] - 1, dim=-1) != 1).cumsum(-1)
        return (place[:, None, :, None] == place[:, None, None, :]) & causal(m, n)

    check_attention(causal, 9, 9, "causal")
    check_attention(packed, 9, 9, "causal")

    def methods(m: int, n: int) -> torch.Tensor:  # as some versions of Dynamo write operators
        i, j = positions(m, n)
        return j.__le__(i).__and__(i.__eq__(i))

    check_attention(methods, 9, 9, "causal")
    check_attention(lambda m, n: torch.ones(m, n, dtype=torch.bool).tril(), 9, 9, "causal", scale=0.3)
    check_attention(lambda m, n: (positions(m, n)[0] - positions(m, n)[1] < 9) & causal(m, n), 9, 9, "causal")
    check_attention(lambda m, n: torch.ones(2, 1, m, n, dtype=torch.bool), 5, 9, "all")


@pytest.mark.slow
def test_attention_masks_that_stay() -> None:
    def causal(m: int, n: int) -> torch.Tensor:
        return positions(m, n)[1] <= positions(m, n)[0]

    def window(m: int, n: int) -> torch.Tensor:
        return causal(m, n) & (positions(m, n)[0] - positions(m, n)[1] < 4)

    def written(m: int, n: int) -> torch.Tensor:
        mask = torch.ones(m, n, dtype=torch.bool).tril()
        mask[0, 1] = True
        return mask

    check_attention(window, 9, 9, None)
    check_attention(written, 9, 9, None)
    check_attention(causal, 5, 9, None)  # is_causal of so many rows means this, but torch has changed its mind before
    check_attention(lambda m, n: causal(m, n).float(), 9, 9, None)  # is added
    check_attention(lambda m, n: causal(m, n) | (torch.randn(m, n) > 0) | True, 9, 9, None)  # no two calls alike
    check_attention(lambda m, n: None, 9, 9, "absent", is_causal=True)
    given = causal(9, 9)
    check_attention(lambda m, n: given, 9, 9, None)  # an input: another call may bring another


def test_attention_masks_of_any_size_stay() -> None:
    function = attention(lambda m, n: positions(m, n)[1] <= positions(m, n)[0])
    tensors = [torch.randn(2, 4, 9, 16) for _ in range(3)]
    got = torch.compile(function, backend=only_the_pass, dynamic=True)(*tensors)
    torch.testing.assert_close(got, function(*tensors))
    assert not graph_pass.replaced


def test_what_is_no_norm_is_none() -> None:
    def inplace(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        x.mul_(2)
        return w * (wide * torch.rsqrt(variance + 1e-5)).to(x.dtype)

    def other_mean(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return w * (x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-5))

    def other_power(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return w * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5))

    def other_base(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return w * (x * torch.rsqrt(x.sin().pow(2).mean(-1, keepdim=True) + 1e-5))

    def transposed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return llama(x.sin().t(), w[:3])

    for function in (other_power, other_base):
        graph_pass.replaced.clear()
        check(function, rand(3, 64), rand(64), found={"fused": 1})
    graph_pass.replaced.clear()
    check(other_mean, rand(3, 64), rand(64), found={"fused": 1})  # what follows the mean
    graph_pass.replaced.clear()
    check(transposed, rand(3, 64), rand(64), found={})
    with torch.no_grad():  # autograd refuses it anyhow
        x, w = rand(3, 64), rand(64)
        torch.testing.assert_close(torch.compile(inplace, backend=only_the_pass)(x, w), inplace(x, w))
    assert not graph_pass.replaced["rmsnorm"]


@pytest.mark.slow
def test_only_the_ops_and_devices_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    x, w = rand(4, 64), rand(64)
    graph_pass.enable()  # cuda only
    torch.compile(llama)(x, w)
    assert not graph_pass.replaced
    graph_pass.enable(("silu_mul",), ("cpu",))
    torch._dynamo.reset()
    torch.compile(llama)(x, w)
    assert not graph_pass.replaced
    graph_pass.enable(devices=("cpu",))
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, "cute_ops"):
        torch.compile(llama)(x, w)
    assert "torch.compile: replaced by cute ops: rmsnorm x 1" in caplog.text
    with pytest.raises(ValueError, match=r"no cute op runs on devices \['gpu'\]; there are \('cuda', 'cpu'\)"):
        graph_pass.enable(devices=("cuda", "gpu"))
    with pytest.raises(ValueError, match=r"rmsnrom \(did you mean rmsnorm\?\), stack replaces nothing; known are "):
        graph_pass.enable(("stack", "rmsnrom"))


def test_a_pass_that_was_there_stays() -> None:
    seen: list[Any] = []
    graph_pass.disable()
    with torch._inductor.config.patch(pre_grad_custom_pass=seen.append):
        graph_pass.enable(devices=("cpu",))
        torch.compile(llama)(rand(4, 64), rand(64))
        assert len(seen) == 1
        assert graph_pass.replaced["rmsnorm"] == 1
        assert torch._inductor.config.pre_grad_custom_pass.uuid() is None
        graph_pass.disable()
        assert torch._inductor.config.pre_grad_custom_pass == seen.append
    graph_pass.enable(devices=("cpu",))
    first = torch._inductor.config.pre_grad_custom_pass.uuid()
    graph_pass.enable(("rmsnorm",), ("cpu",))
    assert first
    assert first != torch._inductor.config.pre_grad_custom_pass.uuid()


@pytest.mark.slow
def test_gradients_of_an_untouched_llama() -> None:
    """As AOTAutograd traces them; Inductor would build its own kernels of all that is not ours."""
    from torch._dynamo.backends.debugging import aot_eager
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, use_cache=False,
    )  # fmt: skip
    model, tokens = LlamaForCausalLM(config), torch.randint(0, 97, (2, 9))
    compiled = torch.compile(model, backend=lambda module, inputs: aot_eager(only_the_pass(module, inputs), inputs))
    results = []
    for call in (model, compiled):
        model.zero_grad()
        loss = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        results.append((loss, [p.grad.clone() for p in model.parameters()]))
    expected_ops = {
        "rmsnorm": 1, "add_rmsnorm": 1, "linear_add_rmsnorm": 1, "gated_mlp": 1, "cross_entropy": 1,
        "attention_mask": 1, "embedding": 1, "rope": 2,
    }  # fmt: skip
    assert dict(graph_pass.replaced) == expected_ops
    (expected, grads), (got, ours) = results
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, grads, rtol=1e-4, atol=1e-5)


# Llama of two layers.
FAMILIES: dict[str, dict[str, int]] = {
    "Llama": {
        "rmsnorm": 1, "add_rmsnorm": 2, "linear_add_rmsnorm": 2, "gated_mlp": 2, "cross_entropy": 1,
        "attention_mask": 2, "embedding": 1, "rope": 4,
    },
    "Qwen3": {
        "rmsnorm": 3, "add_rmsnorm": 1, "linear_add_rmsnorm": 1, "gated_mlp": 1, "cross_entropy": 1,
        "attention_mask": 1, "embedding": 1, "rope": 2,
    },
    # Its norms after attention and MLP, the residual adds and the norms of the sums are one expression each.
    "Gemma3": {
        "rmsnorm": 2, "fused": 3, "gated_mlp": 1, "cross_entropy": 1, "attention_mask": 1, "embedding": 1, "rope": 2,
    },
    # A layer norm reads products, whose biases it adds, too.
    "Bert": {"fused": 4, "mlp": 1, "cross_entropy": 1, "embedding": 3},
}  # fmt: skip


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_other_untouched_models(family: str) -> None:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    sizes["num_hidden_layers"] = 2 if family == "Llama" else 1
    if family != "Bert":
        sizes |= {"num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
    name = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    kind = {"Bert": "BertForMaskedLM"}.get(family, f"{family}ForCausalLM")
    torch.manual_seed(0)
    config = getattr(transformers, name)(vocab_size=97, hidden_dropout_prob=0.0, **sizes)
    config.attention_probs_dropout_prob = 0.0
    model, tokens = getattr(transformers, kind)(config), torch.randint(0, 97, (2, 9))
    expected = model(input_ids=tokens, labels=tokens).loss
    loss = torch.compile(model, backend=only_the_pass, fullgraph=True)(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert dict(graph_pass.replaced) == FAMILIES[family]


PROGRAM = """
from op_of_a_user import op

doubled = cute_ops_torch.register(op, "users")

def called(x, w):
    return cute_ops_torch.rmsnorm(x, w, eps=1e-5)

def written_out_by_inductor(x, w):
    return doubled(x.sin()) + w * 0

def written_out(x, w):
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)

def loss(x, w):
    return F.cross_entropy(x.float().view(-1, 64), torch.arange(4)) + w.sum()

def of_its_own(x, w):
    y = x.float()
    return (y - y.mean(-1, keepdim=True)) * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1) + w

def product(x, w):
    return F.gelu(F.linear(x * w, x.sin()))

def head(x, w):
    return F.cross_entropy(F.linear(x, x.cos()), torch.arange(4)) + w.sum()

def hits(function, dtype=torch.float32):
    counters.clear()
    x, w = torch.randn(4, 64, dtype=dtype, requires_grad=True), torch.randn(64, requires_grad=True)
    out = torch.compile(function, fullgraph=True)(x, w)
    out.sum().backward()
    torch.testing.assert_close(out, function(x, w), rtol=1e-2, atol=1e-2)
    return counters["aot_autograd"]["autograd_cache_hit"]

first = hits(called)
fusion_choice.DEVICES, fusion_choice.fused_wins = {"cpu"}, lambda ours, theirs: True
with torch._inductor.config.patch(max_autotune_pointwise=True):
    print(first, hits(written_out_by_inductor))
if run != "edited":
    cute_ops_torch.inductor.enable(devices=("cpu",))
    print(hits(written_out), hits(loss, torch.bfloat16), hits(of_its_own), hits(product), hits(head))
    print(*cute_ops_torch.inductor.replaced)
if run == "again":
    torch._dynamo.reset()
    cache_key.package = lambda: "another state of this package" + "0" * 32
    print(hits(called))
"""
# Fresh processes but for the imports, which take longer than a program.
FORKS = """
import os, pathlib, sys, torch, torch._inductor.compile_fx, cute_ops_torch.inductor.graph_pass
import torch.nn.functional as F
from torch._dynamo.utils import counters
from cute_ops_torch.inductor import cache_key, fusion_choice

for run, factor in (("first", 2), ("again", 2), ("edited", 3)):
    pathlib.Path(sys.argv[2], "maths_of_a_user.py").write_text(f"def reference(xp, x):\\n    return x * {factor}\\n")
    print(run, flush=True)
    if not (child := os.fork()):
        exec(sys.argv[1])
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{run} failed")
"""
USER = """
from cute_ops import FLOATS, Op, Tensor
from maths_of_a_user import reference

rows = Tensor("*m n", "T")
backward = Op("doubled_bwd", inputs={"dout": rows}, outputs={"dx": rows}, dtypes={"T": FLOATS}, reference=reference,
              kernel="nowhere:K")
op = Op("doubled", inputs={"x": rows}, outputs={"out": rows}, dtypes={"T": FLOATS}, reference=reference,
        kernel="nowhere:K", grad=backward)
"""


@pytest.mark.drawn(0.35, among="second processes")
@pytest.mark.slow
def test_a_fresh_process_runs_what_another_compiled(tmp_path: Path) -> None:
    """Ops that are called, one that Inductor has written out, and those that the pass puts in: from the cache that
    spares AOTAutograd, too. What another version of this package has compiled is compiled anew, and so is what holds a
    reference that was edited, here in a module that the reference's imports: else the numbers would be the old ones.
    """
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # sources that differ by one digit may have the bytecode of each other
    (tmp_path / "op_of_a_user.py").write_text(USER)
    command = [sys.executable, "-c", FORKS, PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    first, again, edited = re.split("first|again|edited", done.stdout)[1:]
    ops = ["rmsnorm", "cross_entropy", "fused", "linear", "linear_cross_entropy"]
    assert first.split() == ["0"] * 7 + ops
    assert again.split()[:7] == ["1"] * 7 and again.split()[-1] == "0"
    assert edited.split() == ["1", "0"]
