"""A user's own op is a first-class op in both frameworks."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import cute_ops_jax
import cute_ops_torch
from cute_ops import Array, testing
from cute_ops.autotune.dispatch import foresee
from cute_ops.declaration.binding import bind
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.target import parse

softcap, fused = (pytest.importorskip(name) for name in ("softcap", "fused"))
softcap_torch, softcap_jax = cute_ops_torch.register(softcap.softcap), cute_ops_jax.register(softcap.softcap)
gelu_add_torch, gelu_add_jax = (each.register(fused.gelu_add_op) for each in (cute_ops_torch, cute_ops_jax))
FOLDER = Path(softcap.__file__).parent
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(), (7,), (3, 5)]


def arrays(shape: tuple[int, ...], n: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((2, *shape, n))
    made = np.stack([x * 20, dout])
    return tuple(made.astype(testing.numpy_dtype(dtype)))  # type: ignore[return-value]


def in_torch(x: np.ndarray, dout: np.ndarray, dtype: str, device: str, **attrs: Any) -> tuple[np.ndarray, np.ndarray]:
    def tensor(a: np.ndarray) -> torch.Tensor:
        return torch.tensor(a.astype(np.float32), device=device, dtype=getattr(torch, dtype))

    leaf = tensor(x).requires_grad_()
    out = softcap_torch(leaf, **attrs)
    (dx,) = torch.autograd.grad(out, leaf, tensor(dout))
    kind = testing.numpy_dtype(dtype)
    return tuple(t.detach().float().cpu().numpy().astype(kind) for t in (out, dx))  # type: ignore[return-value]


def in_jax(x: np.ndarray, dout: np.ndarray, device: str, **attrs: Any) -> tuple[np.ndarray, np.ndarray]:
    with jax.default_device(jax.devices(device)[0]):
        out, pull = jax.vjp(lambda x: softcap_jax(x, **attrs), jnp.asarray(x))
        return np.asarray(out), np.asarray(pull(jnp.asarray(dout))[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("n", [256, 7])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradient(device: str, dtype: str, n: int, shape: tuple[int, ...]) -> None:
    x, dout = arrays(shape, n, dtype)
    attrs = {"cap": 20.0}
    for out, dx in (in_torch(x, dout, dtype, device, **attrs), in_jax(x, dout, device, **attrs)):
        testing.check(softcap.softcap, {"x": x}, attrs, (out,))
        testing.check(softcap.softcap_bwd, {"x": x, "dout": dout}, attrs, (dx,))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_same_bits_in_both_frameworks(dtype: str) -> None:
    x, dout = arrays((64,), 1000, dtype)
    for a, b in zip(in_torch(x, dout, dtype, "cuda"), in_jax(x, dout, "cuda"), strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.gpu
def test_strided_rows_on_gpu() -> None:
    wide = torch.randn(2, 5, 512, device="cuda")
    x = wide[:, 1:4, 3:259]
    torch.testing.assert_close(softcap_torch(x, cap=20.0), 20 * torch.tanh(x / 20))


def test_gradient_is_that_of_the_reference() -> None:
    x = np.linspace(-90, 90, 64)
    step = 1e-6
    ahead, behind = (softcap.reference(np, x + s, cap=20.0) for s in (step, -step))
    slope = softcap.reference_bwd(np, x, np.ones_like(x), cap=20.0)
    np.testing.assert_allclose(slope, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("device", DEVICES)
def test_a_fused_function_and_its_gradient(device: str) -> None:
    rng = np.random.default_rng(0)
    x, bias, residual = (rng.standard_normal(shape).astype("float32") for shape in ((3, 256), 256, (3, 256)))
    leaves = [torch.tensor(a, device=device, requires_grad=True) for a in (x, bias, residual)]
    out = gelu_add_torch(*leaves)
    wanted = torch.nn.functional.gelu(leaves[0] + leaves[1]) + leaves[2]
    torch.testing.assert_close(out, wanted)
    gradients, exact = (torch.autograd.grad(y.square().sum(), leaves) for y in (out, wanted))
    torch.testing.assert_close(gradients, exact)
    with jax.default_device(jax.devices(device)[0]):
        in_jax = jax.grad(lambda *a: jnp.sum(gelu_add_jax(*a) ** 2), argnums=(0, 1, 2))(x, bias, residual)
    for found, gradient in zip(in_jax, gradients, strict=True):
        np.testing.assert_allclose(found, gradient.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("op", [softcap.softcap, softcap.softcap_bwd], ids=lambda op: op.name)
@pytest.mark.parametrize(("dtype", "vectors"), [("float32", "v4.b32"), ("bfloat16", "v4.b32"), ("float16", "v4.b32")])
def test_kernel_compiles_for_hopper(op: Op, dtype: str, vectors: str, tmp_path: Path) -> None:
    inputs = {name: Array((2, 33, 256), dtype) for name in op.inputs}
    variant = foresee(bind(op, inputs), {}, parse("sm_90a")).variant
    worker.compile(variant, tmp_path / "kernel.so", dump=tmp_path)
    assert (tmp_path / "kernel.so").stat().st_size > 0
    (ptx,) = (p.read_text(encoding="utf-8") for p in tmp_path.glob("*.ptx"))
    assert f"ld.global.{vectors}" in ptx
    assert f"st.global.{vectors}" in ptx


@pytest.mark.slow
def test_script_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for framework in ("torch", "jax"):
        runpy.run_path(str(FOLDER / f"run_{framework}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "PyTorch, " in said and "JAX, " in said


def test_declaration_and_kernel_fit_in_80_lines() -> None:
    lines = sum(
        len((FOLDER / name).read_text(encoding="utf-8").splitlines()) for name in ("softcap.py", "softcap_kernel.py")
    )
    assert lines < 80
