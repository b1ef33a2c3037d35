"""Functions and modules with other libraries' names: which there are, their arguments, and what is refused."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cute_ops_torch
from cute_ops_torch.compat import causal_conv1d, flash_attn, flash_attn_cute, liger, liger_chunked_loss, quack
from tests.torch.compat_checks import drawn

# What `liger_kernel` 0.8.5, `quack-kernels` 0.6.5, `flash-attn` 2.8.3, `flash-attn-4` 4.0.0b36 and `causal-conv1d`
# 1.7.0 publish.
RECORDED = (Path(__file__).parent / "compat_signatures.txt").read_text(encoding="utf-8").splitlines()
OURS = {
    "liger": liger, "liger_chunked_loss": liger_chunked_loss, "quack": quack, "flash_attn": flash_attn,
    "flash_attn_cute": flash_attn_cute, "causal_conv1d": causal_conv1d,
}  # fmt: skip
THEIRS = {
    "liger": ("liger_kernel", "transformers/*.py"),
    "liger_chunked_loss": ("liger_kernel", "chunked_loss/*.py"),
    "quack": ("quack", "*.py"),
    "flash_attn": ("flash_attn", "flash_attn_interface.py"),
    "flash_attn_cute": ("flash_attn.cute", "interface.py"),
    "causal_conv1d": ("causal_conv1d", "*.py"),
}
Parameters = list[tuple[str, Any]]


def parameters(function: Any) -> Parameters:
    listed = inspect.signature(function).parameters.values()
    return [(p.name, p.default) for p in listed if p.name != "self" and "VAR" not in p.kind.name]


def recorded(line: str) -> tuple[str, str, Parameters]:
    library, _, signature = line.partition(" ")
    name, _, arguments = signature.removesuffix(")").partition("(")
    (call,) = ast.parse(f"def f({arguments}): pass").body
    assert isinstance(call, ast.FunctionDef)
    return library, name, listed(call)


def listed(function: ast.FunctionDef) -> Parameters:
    names = [each.arg for each in function.args.args]
    defaults = [literal(each) for each in function.args.defaults]
    values = [*[inspect.Parameter.empty] * (len(names) - len(defaults)), *defaults]
    return [each for each in zip(names, values, strict=True) if each[0] != "self"]


def literal(default: ast.expr) -> Any:
    try:
        return ast.literal_eval(default)
    except ValueError:
        return ast.unparse(default)


def found(module: Any, name: str) -> Any:
    name, _, method = name.partition(".")
    value = getattr(module, name)
    return getattr(value, method) if method else value


@pytest.mark.parametrize("line", RECORDED, ids=lambda line: line.partition("(")[0])
def test_signatures_are_the_recorded_ones(line: str) -> None:
    library, name, wanted = recorded(line)
    assert parameters(found(OURS[library], name)) == wanted


def test_every_name_is_recorded() -> None:
    names = {tuple(recorded(line)[:2]) for line in RECORDED}
    assert {(library, name) for library, module in OURS.items() for name in module.__all__} <= names


@pytest.mark.parametrize("library", THEIRS)
def test_the_record_is_what_is_installed(library: str) -> None:
    """Read, not imported: quack changes the DSL when it is imported, and some need a GPU."""
    package, files = THEIRS[library]
    spec = importlib.util.find_spec(package) if importlib.util.find_spec(package.partition(".")[0]) else None
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    published: dict[str, list[Parameters]] = {}
    for path in Path(spec.origin).parent.glob(files):
        for name, given in definitions(ast.parse(path.read_text(encoding="utf-8"))):
            published.setdefault(name, []).append(given)
    for line in RECORDED:
        of, name, wanted = recorded(line)
        if of == library and name != "CrossEntropyOutput":  # whose arguments are its fields
            assert wanted in published[name], line


def definitions(module: ast.Module) -> Iterator[tuple[str, Parameters]]:
    """The functions of a module, and of classes what they are made and called with."""
    for each in module.body:
        if isinstance(each, ast.FunctionDef):
            yield each.name, listed(each)
        for method in each.body if isinstance(each, ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "forward"):
                name = each.name + (".forward" if method.name == "forward" else "")  # type: ignore[attr-defined]
                yield name, listed(method)


def test_modules_are_found_and_what_is_missing_is_named() -> None:
    assert cute_ops_torch.compat.liger is liger and importlib.import_module("cute_ops_torch.compat.quack") is quack
    cases: list[tuple[Any, str, str]] = [
        (cute_ops_torch.compat, "flash_atn",
         "module 'cute_ops_torch.compat' has no attribute 'flash_atn' (did you mean flash_attn?); there are "
         "causal_conv1d, flash_attn, flash_attn_cute, liger, liger_chunked_loss, quack"),
        (causal_conv1d, "causal_conv1d_ref",
         "module 'cute_ops_torch.compat.causal_conv1d' has no attribute 'causal_conv1d_ref' (did you mean "
         "causal_conv1d_fn?); there are causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states"),
    ]  # fmt: skip
    for module, name, text in cases:
        with pytest.raises(AttributeError) as caught:
            getattr(module, name)
        assert str(caught.value) == text
    with pytest.raises(
        AttributeError, match=r"cute_ops_torch\.patch\(model\) patches .*; there are CrossEntropyOutput,"
    ):
        liger.apply_liger_kernel_to_llama  # noqa: B018


X, WEIGHT = drawn(2, 5, 32), drawn(32, seed=1)
TARGET = torch.tensor([3, -100, 0, 15, 7, 7])
LOGITS = drawn(6, 16) * 4
Q = drawn(1, 2, 2, 16)
ONE = torch.ones(16)
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: liger.liger_cross_entropy(LOGITS, TARGET, reduce=False), NotImplementedError,
     "liger_cross_entropy: reduce=False is not implemented, only reduce=None."),
    (lambda: liger.liger_fused_linear_cross_entropy(X[0], X[1], TARGET, chunk_mem_const=2), NotImplementedError,
     "liger_fused_linear_cross_entropy: chunk_mem_const=2 is not implemented, only chunk_mem_const=1."),
    (lambda: liger.liger_rms_norm(X, WEIGHT, 1e-6, casting_mode="lama"), NotImplementedError,
     "liger_rms_norm: casting_mode='lama' is not implemented, only 'llama', 'gemma', 'none', None."),
    (lambda: liger.liger_rope(Q, Q, Q, Q, position_ids=TARGET), NotImplementedError,
     "liger_rope: position_ids=int64[6] is not implemented, only position_ids=None."),
    (lambda: liger_chunked_loss.LigerFusedLinearDPOLoss(loss_type="ipo"), NotImplementedError,
     "LigerFusedLinearDPOLoss: loss_type='ipo' is not implemented, only 'sigmoid', 'hinge', 'exo_pair', 'nca_pair', "
     "'robust', 'bco_pair', 'sppo_hard', 'apo_zero', 'apo_down', 'discopop'."),
    (lambda: liger_chunked_loss.LigerFusedLinearGRPOLoss(loss_type="sapo"), NotImplementedError,
     "LigerFusedLinearGRPOLoss: loss_type='sapo' is not implemented, only 'grpo', 'bnpo', 'dr_grpo', 'dapo', 'cispo'."),
    (lambda: liger.LigerSwiGLUMLP(SimpleNamespace(hidden_act="relu")), NotImplementedError,
     "config: hidden_act='relu' is not implemented, only 'silu', 'swish'."),
    (lambda: quack.rmsnorm(X, out_dtype=torch.float16), NotImplementedError,
     "rmsnorm: out_dtype=torch.float16 is not implemented, only None, torch.float32."),
    (lambda: quack.cross_entropy(LOGITS, TARGET, lse_partial=ONE), NotImplementedError,
     "cross_entropy: lse_partial=float32[16] is not implemented, only lse_partial=None."),
    (lambda: quack.mlp_func(X, WEIGHT, WEIGHT, "swiglu"), NotImplementedError,
     "mlp_func: concat_layout=False is not implemented, only concat_layout=True."),
    (lambda: quack.MLP(32, activation="reglu"), NotImplementedError,
     "MLP: activation='reglu' is not implemented, only 'gelu_tanh_approx', 'relu', 'relu_sq', 'silu', 'swiglu', "
     "'geglu'."),
    (lambda: flash_attn.flash_attn_func(Q, Q, Q, 0.1), NotImplementedError,
     "flash_attn_func: dropout_p=0.1 is not implemented, only dropout_p=0.0."),
    (lambda: flash_attn.flash_attn_with_kvcache(Q, Q, Q, num_splits=4), NotImplementedError,
     "flash_attn_with_kvcache: num_splits=4 is not implemented, only num_splits=0."),
    (lambda: flash_attn.flash_attn_with_kvcache(Q, Q, Q, Q, Q, causal=True), ValueError,
     "flash_attn_with_kvcache: cache_seqlens says behind how many keys k and v are written, and is not given."),
    (lambda: flash_attn.flash_attn_func(Q, Q, Q, softmax_scale=0.0), NotImplementedError,
     "flash_attn: softmax_scale=0.0 is not implemented, only positive numbers and None."),
    (lambda: flash_attn.flash_attn_with_kvcache(Q, Q, Q, cache_leftpad=TARGET, block_table=TARGET), ValueError,
     "flash_attn_with_kvcache: cache_batch_idx and cache_leftpad are for caches without block_table."),
    (lambda: flash_attn_cute.flash_attn_func(Q, Q, Q, mask_mod=0), NotImplementedError,
     "flash_attn_func: mask_mod=0 is not implemented, only mask_mod=None."),
    (lambda: flash_attn_cute.flash_attn_func(Q, Q, Q, window_size=(None, -1)), NotImplementedError,
     "flash_attn_func: window_size=(None, -1) is not implemented, only None and numbers from 0 on."),
    (lambda: flash_attn_cute.flash_attn_varlen_func(Q, Q, Q, seqused_q=TARGET), NotImplementedError,
     "flash_attn_varlen_func: seqused_q=int64[6] is not implemented, only seqused_q=None."),
    (lambda: flash_attn_cute.flash_attn_varlen_func(Q, Q, Q, cu_seqlens_k=TARGET), NotImplementedError,
     "flash_attn_varlen_func: cu_seqlens_k without cu_seqlens_q is not implemented."),
    (lambda: causal_conv1d.causal_conv1d_fn(Q[0], ONE, activation="gelu"), NotImplementedError,
     "causal_conv1d_fn: activation='gelu' is not implemented, only None, 'silu', 'swish'."),
    (lambda: causal_conv1d.causal_conv1d_update(drawn(2, 8), drawn(2, 8, 2), drawn(8, 4)), ValueError,
     "causal_conv1d_update: conv_state holds 2 inputs, fewer than width - 1 = 3."),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_what_is_not_computed_is_refused_by_name(index: int) -> None:
    call, kind, text = REFUSED[index]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value) == text


CALLS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "liger": (liger.LigerRMSNorm(32), (X,)),
    "losses": (
        lambda x: liger.liger_cross_entropy(x, TARGET, return_z_loss=True, return_token_accuracy=True).loss, (LOGITS,)
    ),
    "quack": (lambda x, r: quack.rmsnorm(x, WEIGHT, residual=r, prenorm=True)[0], (X, X.flip(0))),
    "flash_attn": (lambda q: flash_attn.flash_attn_func(q, q, q, alibi_slopes=ONE[:4]), (drawn(1, 5, 4, 24),)),
    "flash_attn_cute": (
        lambda q: flash_attn_cute.flash_attn_func(q, q, q, window_size=(3, None), learnable_sink=ONE[:4])[0],
        (drawn(1, 5, 4, 24),),
    ),
    "causal_conv1d": (lambda x, w: causal_conv1d.causal_conv1d_fn(x, w, activation="silu"), (X, drawn(5, 4))),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_compiled_without_a_break(name: str) -> None:
    function, given = CALLS[name]
    inputs = [x.clone().requires_grad_() for x in given]
    out = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    wanted = function(*inputs)
    torch.testing.assert_close(out, wanted)
    gradients = [torch.autograd.grad(each.sum(), inputs) for each in (out, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_under_autocast(dtype: torch.dtype) -> None:
    """A head of float32 is multiplied in autocast's dtype, as Liger's products have it."""
    x, weight, teacher = torch.randn(4, 3, 8), torch.randn(7, 8), torch.randn(7, 8)
    target, ones, labels = torch.randint(0, 7, (4, 3)), torch.ones(4, 3), torch.arange(4) < 2
    losses: list[Callable[[Any, Any, Any], Any]] = [
        lambda x, w, t: liger.liger_fused_linear_cross_entropy(x.flatten(0, 1), w, target.flatten()),
        lambda x, w, t: liger_chunked_loss.LigerFusedLinearDPOLoss()(w, x, target, None, x, t)[0],
        lambda x, w, t: liger_chunked_loss.LigerFusedLinearORPOLoss()(w, x, target)[0],
        lambda x, w, t: liger_chunked_loss.LigerFusedLinearKTOLoss()(x, w, target, None, labels)[0],
        lambda x, w, t: liger_chunked_loss.LigerFusedLinearGRPOLoss()(
            x, w, target, ones, x[:, 0, 0], ref_input=x, ref_weight=t
        )[0],
        lambda x, w, t: liger_chunked_loss.LigerFusedLinearJSDLoss()(
            x.flatten(0, 1), w, x.flatten(0, 1), t, target.flatten()
        ),
    ]
    for loss in losses:
        w = weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype):
            found = loss(x.to(dtype), w, teacher)
        expected = loss(x.to(dtype), w.to(dtype), teacher.to(dtype))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(each, w)[0] for each in (found, expected)))
