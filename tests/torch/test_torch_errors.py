"""Bad input: the core's errors, word for word, from a real call, a fake one and a planned one."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import cute_ops_torch
import cute_ops_torch.inductor
from cute_ops.ops import OPS
from cute_ops_torch.host.launch import Launcher

x = torch.randn(3, 5, 64)

BAD = {
    "shape": (
        (x, torch.ones(32)), ValueError,
        "cute.rmsnorm: argument `weight` has n=32, but n=64.\n"
        "  x:      float32[3, 5, 64]   declared T[*m n]\n"
        "  weight: float32[32]         declared W[n]\n"
        "  bound so far: *m=(3, 5), n=64, T=float32, W=float32",
    ),
    "integer": (
        (x.long(),), TypeError,
        "cute.rmsnorm: argument `x` has dtype int64, expected float32, float16 or bfloat16.\n"
        "  x: int64[3, 5, 64]   declared T[*m n]",
    ),
    "dtype": (
        (x.double(),), TypeError,
        "cute.rmsnorm: argument `x` has dtype float64, expected float32, float16 or bfloat16. Kernels compute in "
        "float32: cast `x` to it, or take the framework's own function where float64 matters.\n"
        "  x: float64[3, 5, 64]   declared T[*m n]",
    ),
    "strided-last-dim": (
        (x.transpose(1, 2),), ValueError,
        "cute.rmsnorm: argument `x` has stride 64 in its last dim, expected 1. Other dims may have any stride; "
        "call .contiguous() where you accept the copy.\n"
        "  x: float32[3, 64, 5]   declared T[*m n]\n"
        "  bound so far: *m=(3, 64), n=5, T=float32",
    ),
    "mixed-devices": (
        (x, torch.ones(64, device="meta")), ValueError,
        "cute.rmsnorm: argument `weight` is on meta, but `x` is on cpu.\n"
        "  x:      float32[3, 5, 64]   declared T[*m n]\n"
        "  weight: float32[64]         declared W[n]",
    ),
    "scalar": (
        (torch.tensor(1.0),), ValueError,
        "cute.rmsnorm: argument `x` has 0 dims, expected at least 1: T[*m n].\n"
        "  x: float32[]   declared T[*m n]\n"
        "  bound so far: T=float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_op_of_16_bits_says_what_to_do_with_wider_floats(dtype: torch.dtype) -> None:
    q, cache = torch.ones(1, 1, 2, 64, dtype=dtype), torch.ones(1, 8, 2, 64, dtype=dtype)
    with pytest.raises(TypeError) as raised:
        cute_ops_torch.decode_attention(q, cache, cache, torch.ones(1, dtype=torch.int32))
    assert str(raised.value).splitlines()[0] == (
        f"cute.decode_attention: argument `q` has dtype {str(dtype)[6:]}, expected bfloat16 or float16. Its kernels "
        "take floats of 16 bits: cast `q` to one of these, or take the framework's own function."
    )


def test_an_unknown_argument_is_named() -> None:
    with pytest.raises(TypeError) as caught:
        cute_ops_torch.rmsnorm(x, epsilon=1.0)
    takes = "it takes `x`, `weight`, `bias`, `eps`, `weight_offset`, `out`."
    assert str(caught.value) == f"cute.rmsnorm: unknown argument `epsilon` (did you mean eps?); {takes}"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: cute_ops_torch.nn.RMSNorm(8, epsilon=1e-5), "cute.RMSNorm: unknown argument `epsilon` (did you mean"),
        (
            lambda: cute_ops_torch.nn.AddRMSNorm(8, epsilon=1e-5),
            "cute.AddRMSNorm: unknown argument `epsilon` (did you mean eps?); it takes `n`, `eps`, ",
        ),
        (
            lambda: cute_ops_torch.nn.LinearGELU(8, 8, approximates="tanh"),
            "cute.LinearGELU: unknown attribute `approximates` (did you mean approximate?); the epilogue bias_gelu has",
        ),
        (
            lambda: cute_ops_torch.nn.RMSNormLinear(8, 8, epsilon=1e-5),
            "cute.RMSNormLinear: unknown attribute `epsilon` (did you mean eps?); the epilogue bias has none.",
        ),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).startswith(text)


TARGET = torch.zeros(5, dtype=torch.long)
ODD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "sparse": (
        lambda: cute_ops_torch.rmsnorm(x[0].to_sparse()), TypeError,
        "cute.rmsnorm: argument `x` must be one dense tensor, got a tensor of layout torch.sparse_coo.",
    ),
    "sparse weight": (
        lambda: cute_ops_torch.rmsnorm(x, torch.ones(64).to_sparse()), TypeError,
        "cute.rmsnorm: argument `weight` must be one dense tensor, got a tensor of layout torch.sparse_coo.",
    ),
    "mkldnn": (
        lambda: cute_ops_torch.silu_mul(x[0], x[0].to_mkldnn()), TypeError,
        "cute.silu_mul: argument `up` must be one dense tensor, got a tensor of layout torch._mkldnn.",
    ),
    "quantized": (
        lambda: cute_ops_torch.rmsnorm(torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)), TypeError,
        "cute.rmsnorm: argument `x` must be one dense tensor, got a quantized tensor.",
    ),
    "nested": (
        lambda: cute_ops_torch.rmsnorm(torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)), TypeError,
        "cute.rmsnorm: argument `x` must be one dense tensor, got a tensor of layout torch.jagged.",
    ),
    "nested strided": (
        lambda: cute_ops_torch.rmsnorm(torch.nested.nested_tensor([x[0], x[1]])), TypeError,
        "cute.rmsnorm: argument `x` must be one dense tensor, got a nested tensor.",
    ),
    "list of classes": (
        lambda: cute_ops_torch.linear_cross_entropy(x[0], x[0], [1, 2, 3]), TypeError,
        "cute.linear_cross_entropy: argument `target` must be one dense tensor, got list.",
    ),
    "module": (
        lambda: cute_ops_torch.linear(x, torch.nn.Linear(64, 64)), TypeError,
        "cute.linear: argument `weight` must be one dense tensor, got Linear.",
    ),
    "operand": (
        lambda: cute_ops_torch.linear(x, x[0], x.numpy(), epilogue="add"), TypeError,
        "cute.linear: argument `operands[0]` must be one dense tensor, got ndarray.",
    ),
    "built in": (
        lambda: cute_ops_torch.fused(torch.nn.functional.gelu), TypeError,
        "cute_ops.fused: argument `function` must be a function written in Python, got the built-in gelu.",
    ),
    "numpy": (
        lambda: cute_ops_torch.linear_cross_entropy(x[0].numpy(), x[0], TARGET), TypeError,
        "cute.linear_cross_entropy: argument `hidden` must be one dense tensor, got ndarray.",
    ),
    "number": (
        lambda: cute_ops_torch.linear(x, x[0], 2.0, epilogue="bias"), TypeError,
        "cute.linear: argument `operands[0]` must be one dense tensor, got float.",
    ),
    "list in place of a weight": (
        lambda: cute_ops_torch.gated_mlp(x, x[0].tolist(), x[0]), TypeError,
        "cute.gated_mlp: argument `w_gate_up` must be one dense tensor, got list.",
    ),
    "NumPy row": (
        lambda: cute_ops_torch.linear(x, x[0], x[0, :1, :1].numpy(), epilogue="bias"), TypeError,
        "cute.linear: argument `operands[0]` must be one dense tensor, got ndarray.",
    ),
    "sparse row": (
        lambda: cute_ops_torch.linear(x, x[0], x[0, :1, :5].to_sparse(), epilogue="bias"), TypeError,
        "cute.linear: argument `operands[0]` must be one dense tensor, got a tensor of layout torch.sparse_coo.",
    ),
    "size": (
        lambda: cute_ops_torch.nn.RMSNorm([5, 64]), ValueError,
        "cute.RMSNorm: n is [5, 64], expected one size: that of the last dim.",
    ),
    "patch": (
        lambda: cute_ops_torch.patch(torch.nn.Linear), TypeError,
        "cute_ops_torch.patch: argument `model` must be a torch.nn.Module, got the class Linear.",
    ),
    "unpatch": (
        lambda: cute_ops_torch.unpatch(None), TypeError,
        "cute_ops_torch.unpatch: argument `model` must be a torch.nn.Module, got NoneType.",
    ),
    "enable": (
        lambda: cute_ops_torch.inductor.enable(ops="rmsnorm"), TypeError,
        "cute_ops_torch.inductor.enable: argument `ops` is the text 'rmsnorm', expected a list of names: ['rmsnorm'].",
    ),
    "devices": (
        lambda: cute_ops_torch.inductor.enable(devices="cpu"), TypeError,
        "cute_ops_torch.inductor.enable: argument `devices` is the text 'cpu', expected a list of names: ['cpu'].",
    ),
    "betas": (
        lambda: cute_ops_torch.optim.AdamW([x], betas=0.9), TypeError,
        "cute_ops_torch.optim.AdamW: argument `betas` is 0.9, expected two numbers.",
    ),
    "three betas": (
        lambda: cute_ops_torch.optim.AdamW([x], betas=(0.9, 0.9, 0.9)), TypeError,
        "cute_ops_torch.optim.AdamW: argument `betas` is (0.9, 0.9, 0.9), expected two numbers.",
    ),
    "lr": (
        lambda: cute_ops_torch.optim.AdamW([x], lr="1e-3"), TypeError,
        "cute_ops_torch.optim.AdamW: argument `lr` must be a number or a tensor of one, got str.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments_are_named(name: str) -> None:
    call, kind, text = ODD[name]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: cute_ops_torch.softmax("a", out=x),
            "cute.softmax: argument `x` must be one dense tensor, got str.",
        ),
        (
            lambda: cute_ops_torch.quantize_fp8(x, 2**70),
            "cute.quantize_fp8: attribute `block` is an int of 71 bits, expected a number of 64 bits.",
        ),
        (
            lambda: cute_ops_torch.quantize_fp8(x, Fraction(1, 2)),
            "cute.quantize_fp8: attribute `block` must be int, got a Fraction.",
        ),
        (
            lambda: cute_ops_torch.rope(x[:, :, None], x[0, :, :32], x[0, :, :32], interleaved=None),
            "cute.rope: attribute `interleaved` must be bool, got None.",
        ),
    ],
)  # fmt: skip
def test_values_of_other_kinds(call: Callable[[], Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert str(caught.value).splitlines()[0] == text


def test_a_flag_of_another_type_leaves_no_op_behind() -> None:
    tensors = [torch.ones(shape) for shape in ((2, 8), (8, 6), (2, 6), (6,))]
    with pytest.raises(TypeError, match=r"cute\.linear_add_rmsnorm: option `transposed` must be bool, got 'yes'"):
        cute_ops_torch.linear_add_rmsnorm(*tensors, transposed="yes")
    cute_ops_torch.linear_add_rmsnorm(*tensors, transposed=True)


def test_a_size_as_torchs_norms_take_it() -> None:
    assert repr(cute_ops_torch.nn.RMSNorm((64,))) == repr(cute_ops_torch.nn.RMSNorm(64))


def test_an_error_inside_of_a_function_stays_as_it_is() -> None:
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        cute_ops_torch.inductor.enable(ops=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^cute\.linear_cross_entropy: argument `hidden` has dtype int64"):
        cute_ops_torch.linear_cross_entropy(x[0].long(), x[0].long(), torch.zeros(5, dtype=torch.long))


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("way", ["function", "raw", "planned"])
def test_texts(name: str, way: str, compiled: Any) -> None:
    arguments, kind, text = BAD[name]
    call: Callable[..., Any] = {
        "function": cute_ops_torch.rmsnorm,
        "raw": torch.ops.cute.rmsnorm,
        "planned": Launcher(OPS[0]).launch,
    }[way]
    with pytest.raises(kind) as caught:
        call(*arguments)
    assert str(caught.value) == text
    assert not compiled.calls


@pytest.mark.parametrize("name", [n for n in BAD if n != "mixed-devices"])
def test_fakes_raise_the_same(name: str) -> None:
    arguments, kind, text = BAD[name]
    with FakeTensorMode() as mode, pytest.raises(kind) as caught:
        torch.ops.cute.rmsnorm(*map(mode.from_tensor, arguments))
    assert str(caught.value) == text


OLD_GPU = """\
cute.rmsnorm: device 0 has compute capability 7.5; kernels exist for 8.0.
  x: float32[3, 5, 64]   declared T[*m n]
  bound so far: *m=(3, 5), n=64, T=float32"""


def test_a_gpu_without_a_kernel_says_so(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_ops.jit import target

    def refuse(index: int) -> None:
        raise NotImplementedError("cute_ops: device 0 has compute capability 7.5; kernels exist for 8.0")

    monkeypatch.setattr(target, "of_device", refuse)
    with pytest.raises(NotImplementedError) as caught:
        Launcher(OPS[0]).launch(x)
    assert str(caught.value) == OLD_GPU


def test_raw_inference_only_ops_say_so() -> None:
    x = torch.randn(3, 64, requires_grad=True)
    _, scale = torch.ops.cute.rmsnorm_fp8(x)
    with pytest.raises(NotImplementedError) as caught:
        scale.sum().backward()
    assert str(caught.value) == (
        "cute.rmsnorm_fp8: is for inference only, it has no gradient; rmsnorm has one.\n"
        "  x: float32[3, 64]   declared T[*m n]"
    )


@pytest.mark.drawn(0.5, among="inductor")
@pytest.mark.slow
@pytest.mark.fault(
    "a compiled program calls an op that has no gradient, with inputs that require one",
    "it runs, as in eager mode; a backward through the op raises an error that says why it has no gradient", "nothing",
)  # fmt: skip
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_ops_without_a_gradient_run_in_compiled_programs(backend: str) -> None:
    ops, x, target = torch.ops.cute, torch.randn(4, 8, requires_grad=True), torch.tensor([1, 0, 7, 3])
    calls: dict[str, Callable[..., Any]] = {
        "cross_entropy_step": lambda x: ops.cross_entropy_step(x, target, torch.ones(4)),
        "swiglu_again": lambda x: ops.swiglu_again(x, x[:, :4].detach()),
        "rmsnorm_fp8": lambda x: ops.rmsnorm_fp8(x)[1:],
        "rmsnorm_bwd": lambda x: ops.rmsnorm_bwd(x, x, None)[:1],
        "embedding_bwd": lambda x: (ops.embedding_bwd(target, x.detach(), x),),
    }
    twice = 2 * torch.eye(8)  # a product, for which Inductor has no C++ to compile
    for name, call in calls.items():

        def both(x: torch.Tensor, call: Callable[..., Any] = call) -> Any:
            return call(x), x @ twice

        torch._dynamo.reset()
        (expected, _), (found, doubled) = both(x), torch.compile(both, backend=backend, fullgraph=True)(x)
        torch.testing.assert_close(found, expected)
        doubled.sum().backward(retain_graph=True)  # what does not come from the op has its gradient
        assert x.grad is not None and (x.grad == 2).all()
        x.grad = None
        refusals = []
        for outputs in (expected, found):
            with pytest.raises(
                NotImplementedError, match=rf"^cute\.{name}: (has no gradient of its|is for infer)"
            ) as e:
                outputs[0].sum().backward()
            refusals.append(str(e.value))
        assert refusals[0] == refusals[1]
