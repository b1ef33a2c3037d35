"""Misuse raises at trace time, with messages in the core's format, word for word."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from jax.experimental.sparse import BCOO

import cute_ops_jax
from cute_ops import Op, testing
from cute_ops_jax import equinox, nnx
from cute_ops_jax.primitive import ffi

X, W = np.ones((3, 5, 64), np.float32), np.ones(64, np.float32)
KEYS = jax.random.split(jax.random.key(0), 3)


SPARSE = BCOO((np.ones(1, np.float32), np.zeros((1, 1), np.int32)), shape=(6,))


def with_bad(name: str, *args: Any, **kwargs: Any) -> Any:
    return lambda: getattr(cute_ops_jax, name)(*args, **kwargs)


TRACED = """\
attribute `eps` must be float, got a JAX array float32[]: it is part of the compiled kernel, so it is given to \
jax.jit by static_argnames or not at all."""


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (with_bad("rmsnorm", X, x=X), "argument `x` was given twice, by position and by name."),
        (lambda: cute_ops_jax.rmsnorm(X, eps=jnp.float32(1e-6)), TRACED),
        (lambda: jax.jit(lambda eps: cute_ops_jax.rmsnorm(X, eps=eps))(1e-6), TRACED),
        (lambda: jax.grad(lambda eps: cute_ops_jax.rmsnorm(X, None, None, eps).sum())(1e-6), TRACED),
    ],
    ids=["twice", "array", "jit", "grad"],
)
def test_arguments_that_jit_refuses_are_named(call: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == f"cute.rmsnorm: {text}"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            with_bad("rmsnorm", X.astype(object)),
            "cute.rmsnorm: argument `x` must be one array, got a NumPy array of dtype object.",
        ),
        (
            with_bad("rmsnorm", X.astype(">f4")[:2]),
            "cute.rmsnorm: argument `x` must be one array, got a NumPy array of dtype >f4.",
        ),
        (
            with_bad("rmsnorm", KEYS),
            "cute.rmsnorm: argument `x` must be one array, got PRNG keys, key<fry>[3].",
        ),
        (
            jax.jit(with_bad("rmsnorm", X, KEYS)),
            "cute.rmsnorm: argument `weight` must be one array, got PRNG keys, key<fry>[3].",
        ),
        (
            with_bad("rmsnorm", SPARSE),
            "cute.rmsnorm: argument `x` must be one array, got BCOO.",
        ),
        (
            with_bad("rmsnorm", np.zeros(3, "datetime64[D]")),
            "cute.rmsnorm: argument `x` must be one array, got a NumPy array of dtype datetime64[D].",
        ),
        (
            with_bad("rmsnorm", np.ma.masked_array(X)),
            "cute.rmsnorm: argument `x` must be one array, got a masked NumPy array.",
        ),
        (
            with_bad("rmsnorm", jax.ShapeDtypeStruct(X.shape, X.dtype)),
            "cute.rmsnorm: argument `x` must be one array, got ShapeDtypeStruct.",
        ),
        (
            jax.jit(lambda: cute_ops_jax.rmsnorm(jax.new_ref(X))),
            "cute.rmsnorm: argument `x` must be one array, got a mutable reference: read it, ref[...].",
        ),
        (with_bad("linear", X, SPARSE), "cute.linear: argument `weight` must be one array, got BCOO."),
        (
            with_bad("linear", X, X[0], KEYS, epilogue="add"),
            "cute.linear: argument `operands[0]` must be one array, got PRNG keys, key<fry>[3].",
        ),
        (
            with_bad("linear_cross_entropy", X[0], X[0], KEYS),
            "cute.linear_cross_entropy: argument `target` must be one array, got PRNG keys, key<fry>[3].",
        ),
        (
            with_bad("gated_mlp", X, X[0].astype(object), X[0]),
            "cute.gated_mlp: argument `w_gate_up` must be one array, got a NumPy array of dtype object.",
        ),
        (
            with_bad("export", "program", lambda x: x, X, platform="cpu"),
            "cute_ops_jax.export: <lambda>: unknown argument `platform`; it takes `x` (did you mean platforms?).",
        ),
        (
            with_bad("export", "program", lambda x: x, X, vjp_order=True),
            "cute_ops_jax.export: argument `vjp_order` must be 0, or 1 for a gradient, got True.",
        ),
        (with_bad("export", "program", 3), "cute_ops_jax.export: argument `function` must be a function, got int."),
        (
            with_bad("export", lambda x: x, "program", X),
            "cute_ops_jax.export: argument `path` must be a folder's path, got function.",
        ),
        (with_bad("load", None), "cute_ops_jax.load: argument `path` must be a folder's path, got NoneType."),
        (
            lambda: nnx.LinearGELU(8, 8, approximates="tanh", rngs=flax_nnx.Rngs(0)),
            "cute.LinearGELU: unknown attribute `approximates` (did you mean approximate?); the epilogue bias_gelu has",
        ),
        (
            lambda: equinox.LinearSiLU(8, 8, use_bais=False, key=jax.random.key(0)),
            "cute.LinearSiLU: unknown attribute `use_bais` (did you mean use_bias?); the epilogue bias_silu has none.",
        ),
        (
            lambda: nnx.RMSNorm(8, eps=1e-5, rngs=flax_nnx.Rngs(0)),
            "cute.RMSNorm: unknown argument `eps` (did you mean epsilon?); it takes `num_features`, ",
        ),
    ],
)
def test_wrong_arguments(call: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value).startswith(text)


def test_variables_of_flax_are_arrays() -> None:
    weight, add = flax_nnx.Param(jnp.full(64, 2.0)), cute_ops_jax.fused(lambda xp, x, y: x + y)
    np.testing.assert_array_equal(cute_ops_jax.rmsnorm(X, weight), cute_ops_jax.rmsnorm(X, 2 * W))
    np.testing.assert_array_equal(add(X, weight), X + 2)


def some(op: Op) -> list[np.ndarray]:
    return testing.sample(op, (2,), 6, np.random.default_rng(0))


@pytest.mark.some_ops
@pytest.mark.feature("jvp and second order say what to do")
def test_forward_mode_and_second_order_say_what_to_do(op: Op) -> None:
    arrays, wrt = some(op), testing.argnums(op)

    def loss(*given: Any) -> Any:
        filled = {**dict(enumerate(arrays)), **dict(zip(wrt, given, strict=True))}
        return sum(jnp.sum(jnp.sin(o)) for o in jax.tree.leaves(cute_ops_jax.register(op)(*filled.values())))

    given = [arrays[i] for i in wrt]
    for other in (
        lambda *given: jax.jvp(loss, given, given),
        jax.jit(lambda *given: jax.jvp(loss, given, given)),
        jax.jacfwd(jax.jit(loss)),
        jax.hessian(loss),
        jax.grad(lambda *given: jnp.sum(jax.grad(loss)(*given))),
    ):
        with pytest.raises(NotImplementedError) as caught:
            other(*given)
        assert str(caught.value) == (
            f"cute.{op.name}: only its first derivative exists, in reverse mode; for other derivatives differentiate "
            "its reference, op.reference(jax.numpy, ...), or put `fuse` around the derivative if it made the op."
        )


@pytest.mark.some_ops
def test_derivative_of_a_backward_op(op: Op) -> None:
    backward, arrays = cute_ops_jax.register(op.grad), some(op.grad)
    with pytest.raises(NotImplementedError, match=f"^cute.{op.grad.name}: no gradient is declared for it; "):
        jax.grad(lambda first: jnp.sum(jax.tree.leaves(backward(first, *arrays[1:]))[0]))(arrays[0])


def test_unknown_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_OPS_ARCH", "sm_70")
    text = "the environment variable CUTE_OPS_ARCH names no target: unknown architecture 'sm_70'; known: sm_80"
    with pytest.raises(ValueError, match=text):
        jax.jit(lambda x: cute_ops_jax.rmsnorm(x)).trace(X).lower(lowering_platforms=("cuda",))


OLD_GPU = """\
cute.rmsnorm: device 0 has compute capability 7.5; kernels exist for 8.0.
  x: float32[3, 5, 64]   declared T[*m n]
  bound so far: *m=(3, 5), n=64, T=float32"""


def test_a_gpu_without_a_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise NotImplementedError("cute_ops: device 0 has compute capability 7.5; kernels exist for 8.0")

    monkeypatch.delenv("CUTE_OPS_ARCH", raising=False)
    monkeypatch.setattr(ffi.target, "of_device", refuse)
    with pytest.raises(NotImplementedError) as caught:
        jax.jit(lambda x: cute_ops_jax.rmsnorm(x)).trace(X).lower(lowering_platforms=("cuda",))
    assert str(caught.value).startswith(OLD_GPU)


def test_a_machine_without_a_gpu_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise RuntimeError("cute_ops: no CUDA driver (libcuda.so.1) on this machine")

    monkeypatch.delenv("CUTE_OPS_ARCH", raising=False)
    monkeypatch.setattr(ffi.target, "of_device", refuse)
    with pytest.raises(RuntimeError) as caught:
        jax.jit(lambda x: cute_ops_jax.rmsnorm(x)).trace(X).lower(lowering_platforms=("cuda",))
    assert str(caught.value).startswith(
        "cute.rmsnorm: no GPU to lower for: no CUDA driver (libcuda.so.1) on this machine; set CUTE_OPS_ARCH to that "
        "of another machine, such as sm_90a.\n  x: float32[3, 5, 64]   declared T[*m n]"
    )


def test_targets_run_out_with_a_warning_first(
    fake_kernels: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import jax_tvm_ffi

    def lower(n: int) -> None:
        x = jax.ShapeDtypeStruct((4, n), jnp.float32)
        jax.jit(lambda x: cute_ops_jax.rmsnorm(x)).trace(x).lower(lowering_platforms=("cuda",))

    monkeypatch.setattr(jax_tvm_ffi, "register_ffi_target", lambda *args, **kwargs: None)
    counts = iter([ffi.WARN_AT - 1, ffi.WARN_AT, ffi.LIMIT])
    monkeypatch.setattr(jax_tvm_ffi, "registered_count", lambda: next(counts))
    lower(8)
    assert not caplog.records
    lower(16)
    assert [r.getMessage() for r in caplog.records] == [
        "900 of 1024 FFI targets are used in this process; none is ever freed"
    ]
    with pytest.raises(RuntimeError, match="has registered 1024 FFI targets and jax-tvm-ffi holds no more"):
        lower(32)
    lower(8)  # what is registered still runs


def test_modules_are_attributes() -> None:
    assert cute_ops_jax.__getattr__("nnx") is nnx and cute_ops_jax.__getattr__("equinox") is equinox


def test_float64_says_what_to_do() -> None:
    with jax.enable_x64(True), pytest.raises(TypeError) as error:
        cute_ops_jax.rmsnorm(jnp.ones((3, 64), jnp.float64))
    assert str(error.value).startswith(
        "cute.rmsnorm: argument `x` has dtype float64, expected float32, float16 or bfloat16. Kernels compute in "
        "float32: cast `x` to it, or take the framework's own function where float64 matters.\n"
    )
