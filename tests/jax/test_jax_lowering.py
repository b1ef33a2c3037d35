"""The CUDA lowering without a GPU: its text, and the whole FFI path on the CPU with the reference as kernel."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cute_ops_jax
from cute_ops import Array, Op, Tensor, testing
from cute_ops.autotune import dispatch
from cute_ops.declaration.binding import bind
from cute_ops.jit import cache, loader, target
from cute_ops.jit.layout import folded
from cute_ops.ops import softmax
from cute_ops_jax.primitive import ffi, function, lowering, primitive
from cute_ops_jax.primitive.primitive import primitive_of
from tests.ops.product import product

COMPILE_AHEAD = ffi.compile_ahead


def shaped(op: Op, lead: tuple[int, ...], dtype: Any = jnp.float32) -> dict[str, jax.ShapeDtypeStruct]:
    some = testing.sample(op, lead, 64, np.random.default_rng(0), jnp.dtype(dtype).name)
    return {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in zip(op.inputs, some, strict=True)}


def text_of(tensor: Tensor, op: Op, rows: int) -> str:
    """``tensor<15x64xf32>``: with leading dims folded."""
    kind = "i32" if tensor.upper_bound else "f32"
    return f"tensor<{'x'.join(map(str, tensor.of(op.example((rows,), 64))))}x{kind}>"


def cuda_text(function: Callable[..., Any], *args: Any) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def custom_calls(text: str) -> list[str]:
    return [line for line in text.splitlines() if "custom_call" in line]


def test_one_call_on_rows_named_after_its_variant(op: Op, fake_kernels: Any) -> None:
    for one in (op, op.grad):
        fake_kernels.variants.clear()
        inputs = shaped(one, (3, 5))
        text = cuda_text(lambda arrays, one=one: primitive_of(one)(arrays, {}), inputs)
        (call,) = custom_calls(text)
        (variant,) = fake_kernels.variants
        assert f"@{variant.symbol}(" in call
        assert re.fullmatch(rf"cute_{one.name}_[0-9a-f]{{24}}", variant.symbol)
        types = re.search(r": \((.*?)\) -> (.*)", call)
        assert types
        expected = [text_of(t, one, 15) for t in one.inputs.values()]
        assert types[1].split(", ") == expected
        # Outputs, then workspaces, all of them known to the kernel.
        present = [k for k in variant.args if k]
        assert types[2].count("tensor<") == len(present) - len(one.inputs)
        # No attributes ever, row-major layouts, and the variant sees rank 2.
        assert "mhlo.backend_config = {}" in call
        layouts = re.findall(r"dense<([^>]*)> : tensor<\dxindex>", call)
        assert layouts
        assert set(layouts) <= {"[2, 1, 0]", "[1, 0]", "0"}
        assert all(k.rank == len(t.dims) + bool(t.rows) for k in present if (t := one.inputs.get(k.name)))
        assert all(k.layout == "flat" for k in present)
        per_row = {n for n, t in {**one.inputs, **one.outputs}.items() if t.rows and not t.dims}
        assert all(k.align == 16 for k in present if k.name not in per_row)


def test_workspaces_are_results_that_nobody_reads(fake_kernels: Any) -> None:
    _, weight = shaped_pair()
    many = jax.ShapeDtypeStruct((30000, 64), jnp.bfloat16)  # few rows need no workspace
    text = cuda_text(jax.grad(lambda x, w: jnp.sum(cute_ops_jax.rmsnorm(x, w)), (0, 1)), many, weight)
    (call,) = [line for line in custom_calls(text) if "rmsnorm_bwd" in line]
    variant = next(v for v in fake_kernels.variants if v.op == "rmsnorm_bwd")
    scratch = [name for name, key in variant.tensors.items() if key and name.endswith("_partials")]
    assert scratch == ["dweight_partials"]
    results = re.search(r"%(\d+):3 = ", call)
    assert results, call
    assert f"%{results[1]}#0" in text
    assert f"%{results[1]}#1" in text
    assert f"%{results[1]}#2" not in text


def shaped_pair() -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return jax.ShapeDtypeStruct((300, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.float32)


def test_every_rank_and_row_count_of_small_problems_shares_a_forward_kernel(op: Op, fake_kernels: Any) -> None:
    symbols = set()
    for lead in ((), (7,), (7, 1), (1, 7, 1)):
        cuda_text(testing.plain(op, cute_ops_jax.register(op)), *shaped(op, lead).values())
    symbols = {v.symbol for v in fake_kernels.variants}
    assert len({v.args for v in fake_kernels.variants}) == 1
    assert len(symbols) <= 2  # one row may have a tile of its own


@pytest.mark.some_ops
def test_zero_rows_launch_nothing(op: Op, fake_kernels: Any) -> None:
    function = cute_ops_jax.register(op)

    def loss(*given: Any) -> Any:
        return sum(jnp.sum(o) for o in jax.tree.leaves(function(*given)))

    text = cuda_text(jax.grad(loss, testing.argnums(op)), *shaped(op, (0,)).values())
    assert not custom_calls(text)
    assert not fake_kernels.variants


NOTHING = {
    "k": ((2, 3, 0), (2, 4, 0)), "m": ((2, 0, 5), (2, 4, 5)), "n": ((2, 3, 5), (2, 0, 5)), "b": ((0, 3, 5), (0, 4, 5)),
}  # fmt: skip


@pytest.mark.parametrize("dim", NOTHING)
def test_a_product_of_nothing_is_its_epilogue(dim: str, fake_kernels: Any) -> None:
    """A sum over no ``k`` is zero, to which the bias is added; gradients are as large as what they are of."""
    function = cute_ops_jax.register(product)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in NOTHING[dim])
    bias = rng.standard_normal(w.shape[1]).astype(np.float32)
    expected = x @ np.swapaxes(w, -1, -2) + bias
    text = cuda_text(lambda *given: jax.vjp(function, *given)[1](expected), x, w, bias)
    assert not custom_calls(text) and not fake_kernels.variants


@pytest.mark.some_ops
def test_other_platforms_take_the_reference(op: Op, fake_kernels: Any) -> None:
    lowered = jax.jit(cute_ops_jax.register(op)).trace(*shaped(op, (2,)).values())
    for platform in ("cpu", "tpu"):
        assert not custom_calls(lowered.lower(lowering_platforms=(platform,)).as_text())
    assert not fake_kernels.variants


def test_vmap_on_cuda_folds_into_rows(op: Op, fake_kernels: Any) -> None:
    inputs = {
        n: a if op.inputs[n].rows is None else jax.ShapeDtypeStruct((2, *a.shape), a.dtype)
        for n, a in shaped(op, (5,)).items()
    }
    axes = tuple(0 if t.rows else None for t in op.inputs.values())
    (call,) = custom_calls(cuda_text(jax.vmap(cute_ops_jax.register(op), axes), *inputs.values()))
    for tensor in (*op.inputs.values(), *op.outputs.values()):
        assert text_of(tensor, op, 10) in call


@pytest.mark.parametrize("gradient", [False, True])
def test_an_op_is_bound_and_planned_once(gradient: bool, fake_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing, abstract evaluation, differentiation and lowering share the checked call."""
    bound, planned = [], []
    bind, choose = primitive.bind, dispatch.choose
    monkeypatch.setattr(primitive, "bind", lambda op, *given: bound.append(op.name) or bind(op, *given))
    monkeypatch.setattr(dispatch, "choose", lambda call, *a: planned.append(call.op.name) or choose(call, *a))
    primitive._bound.cache_clear()

    def loss(x: Any, weight: Any) -> Any:
        return jnp.sum(jnp.sin(cute_ops_jax.add_rmsnorm(x, x, weight)[0]))

    cuda_text(jax.grad(loss) if gradient else loss, jax.ShapeDtypeStruct((2, 3, 72), jnp.float32), jnp.ones(72))
    assert bound == planned == ["add_rmsnorm", "add_rmsnorm_bwd_only_dx_dresidual"][: 1 + gradient]


def test_scan_holds_one_call(fake_kernels: Any) -> None:
    def run(x: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (cute_ops_jax.rmsnorm(carry), None), x, None, length=8)[0]

    assert len(custom_calls(cuda_text(run, shaped_pair()[0]))) == 1


def test_attributes_and_toolchain_make_another_kernel(fake_kernels: Any) -> None:
    x = shaped_pair()[0]
    for eps in (1e-6, 1e-5, 1e-6):
        cuda_text(lambda x, eps=eps: cute_ops_jax.rmsnorm(x, eps=eps), x)
    assert len({v.symbol for v in fake_kernels.variants}) == 2
    # A known target is not looked up again.
    assert len(fake_kernels.variants) == 2


def test_architecture_comes_from_the_environment(fake_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for arch in ("sm_80", "sm_100a"):
        monkeypatch.setenv("CUTE_OPS_ARCH", arch)
        cuda_text(lambda x: cute_ops_jax.rmsnorm(x), shaped_pair()[0])
    assert [v.arch for v in fake_kernels.variants] == ["sm_80", "sm_100a"]


def test_kernels_are_loaded_on_every_device_that_they_fit(fake_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, int]] = []
    arches = {0: "sm_90a", 1: "sm_80", 3: "sm_90a"}
    monkeypatch.setattr(ffi, "cuda_devices", lambda: list(arches))
    monkeypatch.setattr(target, "of_device", lambda index: target.parse(arches[index]))
    monkeypatch.setattr(loader, "preload", lambda function, variant, device: loaded.append((variant.symbol, device)))
    for _ in range(2):
        cuda_text(lambda x: cute_ops_jax.rmsnorm(x), shaped_pair()[0])
    (variant,) = fake_kernels.variants
    assert loaded == [(variant.symbol, 0), (variant.symbol, 3)]


def test_a_kernel_that_does_not_compile_fails_at_lowering(fake_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_ops import CompileError

    def fail(variant: Any) -> Any:
        raise CompileError("no such instruction")

    monkeypatch.setattr(cache, "get", fail)
    with pytest.raises(CompileError, match="no such instruction"):
        cuda_text(lambda x: cute_ops_jax.rmsnorm(x), shaped_pair()[0])


def test_threads_register_a_target_once(fake_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax_tvm_ffi

    names: list[str] = []
    monkeypatch.setattr(jax_tvm_ffi, "register_ffi_target", lambda name, *args, **kwargs: names.append(name))
    cuda_text(lambda x: cute_ops_jax.rmsnorm(x), shaped_pair()[0])
    (variant,) = fake_kernels.variants
    monkeypatch.setattr(ffi, "_known", {})
    names.clear()
    together = threading.Barrier(4)
    real = fake_kernels.get

    def slow(asked: Any) -> Any:
        function = real(asked)
        together.wait(200)
        return function

    monkeypatch.setattr(cache, "get", slow)
    threads = [threading.Thread(target=ffi.ensure, args=(variant,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == [variant.symbol]


# The whole path on the CPU: lowering, registration, XLA's FFI, TVM-FFI, results back.


@pytest.mark.drawn(0.4)
def test_ffi_values_against_float64(any_problem: Any, through_ffi: Any, fake_kernels: Any) -> None:
    from cute_ops_jax.primitive import vjp

    op, arrays = any_problem.op, any_problem.inputs()
    outputs = jax.jit(lambda given: vjp.primitive_of(op)(given, any_problem.attrs))(arrays)
    got = tuple(None if outputs[n] is None else np.asarray(outputs[n]) for n in op.results)
    testing.check(op, arrays, any_problem.attrs, got)
    ((symbol, shapes),) = fake_kernels.calls
    assert symbol == fake_kernels.variants[-1].symbol
    given = {n: None if a is None else Array(a.shape, str(a.dtype)) for n, a in arrays.items()}
    wanted = folded(bind(op, given, any_problem.attrs))
    assert shapes[: len(wanted)] == list(wanted.values())


def loss_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: sum(jnp.sum(jnp.sin(o)) for o in jax.tree.leaves(function(*given)))


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.some_ops
@pytest.mark.feature("FFI: grad, vmap, scan, checkpoint")
def test_ffi_under_transformations(op: Op, through_ffi: Any, fake_kernels: Any, close: Any, again: Any) -> None:
    """Programs that run through the FFI agree with the reference's own lowering."""
    ours, plain = (testing.plain(op, function) for function in (through_ffi(op), cute_ops_jax.register(op)))
    rng = np.random.default_rng(5)
    arrays = testing.sample(op, (3, 2), 6, rng)
    axes = tuple(1 if t.rows else None for t in op.inputs.values())
    everything = testing.argnums(op)

    def programs(function: Callable[..., Any]) -> Mapping[str, Callable[..., Any]]:
        gradient = jax.grad(loss_of(function), everything)

        def scanned(first: Any, *others: Any) -> Any:
            step = jax.checkpoint(lambda carry: again(function)(carry, *others))
            return jnp.sum(jnp.sin(jax.lax.scan(lambda carry, _: (step(carry), None), first, None, length=2)[0]))

        return {
            "eager": function,
            "grad": gradient,
            "jit": jax.jit(gradient),
            "vmap": jax.vmap(function, axes),
            "vmap of grad": jax.jit(jax.vmap(gradient, axes)),
            "scan, checkpoint, grad": jax.jit(jax.grad(scanned, everything)),
        }

    expected = jax.jit(lambda *given: {name: program(*given) for name, program in programs(plain).items()})(*arrays)
    for name, program in programs(ours).items():
        before = len(fake_kernels.calls)
        close(program(*arrays), expected[name])
        assert len(fake_kernels.calls) > before, name


def test_ffi_of_a_backward_with_a_cotangent_left_out(through_ffi: Any, fake_kernels: Any, close: Any) -> None:
    x, w = np.linspace(-1, 2, 12, dtype=np.float32).reshape(2, 6), np.ones(6, np.float32)
    ours, plain = through_ffi(cute_op("add_rmsnorm")), cute_ops_jax.add_rmsnorm

    def first(function: Any) -> Any:
        return jax.grad(lambda *given: jnp.sum(jnp.sin(function(*given)[0])), (0, 1, 2))(x, x, w)

    close(first(ours), first(plain))
    backward = fake_kernels.variants[-1]
    assert backward.op == "add_rmsnorm_bwd"
    assert backward.tensors["dresidual_out"] is None
    assert backward.tensors["dx"] is None
    assert backward.tensors["dresidual"] is not None


def cute_op(name: str) -> Op:
    from cute_ops.ops import OPS

    return next(op for op in OPS if op.name == name)


def test_registration_is_per_declaration() -> None:
    assert function.register(cute_op("rmsnorm")) is cute_ops_jax.rmsnorm
    assert isinstance(cute_op("rmsnorm").inputs["x"], Tensor)


def test_only_what_runs_here_may_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[int | None] = []
    chosen = dispatch.choose

    def choose(binding: Any, memory: Any, where: Any, device: int | None = None) -> Any:
        devices.append(device)
        return chosen(binding, memory, where)

    monkeypatch.setattr(dispatch, "choose", choose)
    monkeypatch.setattr(target, "device_count", lambda: 1)
    monkeypatch.setattr(target, "of_device", lambda index: target.parse("sm_90a"))
    monkeypatch.delenv("CUTE_OPS_ARCH", raising=False)
    x = bind(softmax, {"x": Array((4, 64), "float32")})
    lowering.choose(x)
    with ffi.lowering_for(target.parse("sm_100a")):
        lowering.choose(x)
    monkeypatch.setenv("CUTE_OPS_ARCH", "sm_80")
    lowering.choose(x)
    assert devices == [0, None, None]


def test_kernels_of_a_program_are_compiled_at_once(fake_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until all four have been asked for, the gradient's kernel, too."""
    monkeypatch.setattr(ffi, "compile_ahead", COMPILE_AHEAD)
    ffi.traced.lowers = True
    all_asked, asked = threading.Barrier(4), list[str]()
    lock = threading.Lock()

    def get(variant: Any) -> Any:
        with lock:
            first = variant.symbol not in asked
            asked.append(variant.symbol)
        if first:
            all_asked.wait(60)
        return fake_kernels.get(variant)

    monkeypatch.setattr(cache, "get", get)
    monkeypatch.setattr(cache, "holds", lambda variant: False)
    x, weight = shaped_pair()
    cuda_text(jax.grad(lambda x, w: jnp.sum(cute_ops_jax.softmax(cute_ops_jax.rmsnorm(x, w)))), x, weight)
    assert sorted(symbol.rpartition("_")[0] for symbol in set(asked)) == [
        "cute_rmsnorm", "cute_rmsnorm_bwd_only_dx", "cute_softmax", "cute_softmax_bwd",
    ]  # fmt: skip
