"""Fixtures of the JAX adapter's tests: problems from the declarations, devices, and kernels without a GPU.

Every test that asks for ``op`` (one with a gradient), ``any_op``, ``row_op`` (one that writes no input, so that its
results have rows), ``problem``, ``any_problem`` or ``value_problem`` runs for all declarations, so a new op needs no
new test. On the CPU a case keeps its dtypes, attributes and absent inputs, but not its size.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

# Several programs share the GPU in these tests: what XLA's usual allocator frees stays its own process's.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cute_ops import testing
from cute_ops.declaration.case import Case
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import FLOATS
from cute_ops.jit import cache, toolchain
from cute_ops.jit.variant import Variant
from cute_ops.ops import ATTENTION, OPS, PARTS
from cute_ops.ops.gemm.linear import PRODUCTS as PLAIN_PRODUCTS
from cute_ops_jax.primitive import ffi, function, vjp
from cute_ops_jax.primitive.primitive import Composite, OpPrimitive, primitive_of

# For programs on several devices; the first one runs everything else.
jax.config.update("jax_num_cpu_devices", 8)

EVERY = {op.name: op for op in itertools.chain(OPS, PARTS, (op.grad for op in OPS if op.grad))}
NARROWED = {each.name: each for op in OPS for step in op.steps for each in step.narrowed}


DIFFERENTIABLE = tuple(op for op in OPS if op.grad)


class Problem(NamedTuple):
    """One declared case of an op in one dtype."""

    op: Op
    case: Case
    dtype: str

    @property
    def attrs(self) -> dict[str, Any]:
        return testing.attributes(self.op, self.case)

    def inputs(self) -> dict[str, np.ndarray | None]:
        return testing.inputs(self.op, self.case, self.dtype)


def structure_of(case: Case) -> tuple[Any, ...]:
    """What a call's path depends on, whatever its sizes: ranks, dtypes, what is absent or set."""
    sizes = {name: isinstance(size, tuple) and len(size) for name, size in case.dims.items()}
    return sizes, case.dtypes, case.absent, case.leading, sorted(case.attrs)


def small(cases: tuple[Case, ...], look: Callable[[Case], Any]) -> list[Case]:
    """The cases at small sizes, the first of each look."""
    found: dict[str, Case] = {}
    for case in map(testing.small, cases):
        found.setdefault(str(look(case)), case)
    return list(found.values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = next(metafunc.definition.iter_markers("gpu"), None) is not None
    with_rows = [op for op in PARTS if any(t.rows for t in op.inputs.values())]
    for fixture, ops in (
        ("op", [op for op in OPS if op.grad]), ("any_op", [*OPS, *with_rows]),
        ("row_op", [op for op in (*OPS, *with_rows) if not op.mutates and any(t.rows for t in op.inputs.values())]),
    ):  # fmt: skip
        if fixture in metafunc.fixturenames:
            some = metafunc.config.some_of(ops, metafunc.definition)
            metafunc.parametrize(fixture, some, ids=lambda op: op.name)
    # On the CPU the reference runs: sizes show nothing new, and of its values only what is absent does.
    kinds: tuple[tuple[str, Iterable[Op], Callable[[Case], Any]], ...] = (
        ("problem", DIFFERENTIABLE, lambda case: (case.dtypes, case.absent, sorted(case.attrs))),
        ("any_problem", EVERY.values(), structure_of),
        ("value_problem", EVERY.values(), lambda case: case.absent),
    )  # fmt: skip
    for name, ops, look in kinds:
        if name in metafunc.fixturenames:
            problems = [
                Problem(op, case, dtype)
                for op in ops
                for i, case in enumerate(op.cases if full else small(op.cases, look))
                # On the CPU the dtypes take turns: every problem that goes through the FFI takes one of a process's
                # 1024 targets.
                for dtype in (FLOATS if full else FLOATS[i % len(FLOATS) :][:1])
            ]
            metafunc.parametrize(name, problems, ids=[f"{p.op.name}-{p.case.name}-{p.dtype}" for p in problems])


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[jax.Device]:
    """``gpu`` tests run on the GPU, all others on the CPU, even on a machine with a GPU."""
    platform = "gpu" if request.node.get_closest_marker("gpu") else "cpu"
    try:
        chosen = jax.devices(platform)[0]
    except RuntimeError:
        pytest.skip(f"jax sees no {platform}")
    with jax.default_device(chosen):
        yield chosen


@pytest.fixture
def run_op() -> Callable[..., tuple[np.ndarray | None, ...]]:
    """``run_op(op, inputs, attrs)``: every output of one jitted call as NumPy, None where absent."""

    def run(op: Op, inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[np.ndarray | None, ...]:
        outputs = jax.jit(lambda arrays: primitive_of(op)(arrays, attrs))(inputs)
        return tuple(None if outputs[name] is None else np.asarray(outputs[name]) for name in op.results)

    return run


def as_numpy(tensor: Any) -> np.ndarray:
    """A TVM-FFI tensor on the CPU as a writable NumPy array on the same memory (DLPack has no bfloat16)."""
    dtype = testing.numpy_dtype(str(tensor.dtype))
    size = int(np.prod(tensor.shape, dtype=np.int64)) * dtype.itemsize
    memory = (ctypes.c_uint8 * size).from_address(tensor.data_ptr())
    return np.frombuffer(memory, dtype).reshape(tuple(tensor.shape))


class FakeKernels:
    """Stands in for compiled kernels: TVM-FFI functions that run the reference on the CPU.

    Attributes:
        variants: what was asked for.
        calls: per call, symbol and the shapes of all tensors.
        ops: the declarations by name.
    """

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []
        self.ops = {**EVERY, **NARROWED}

    def get(self, variant: Variant) -> Any:
        import tvm_ffi

        self.variants.append(variant)
        return tvm_ffi.convert(partial(self._run, variant))

    def _run(self, variant: Variant, *given: Any) -> None:
        op = self.ops[variant.op]
        present = [name for name, key in zip(variant.names, variant.args, strict=True) if key]
        count = len(given) - len(op.scalars)
        tensors, numbers = given[:count], dict(zip(present[count:], given[count:], strict=True))
        self.calls.append((variant.symbol, [tuple(t.shape) for t in tensors]))
        arrays: dict[str, np.ndarray] = {}
        for name, array in zip(present, map(as_numpy, tensors), strict=False):
            key = variant.tensors[name]
            assert key is not None
            array = array.transpose(np.argsort(key.passed))
            # What a kernel writes of its inputs comes twice.
            assert arrays.setdefault(name, array).ctypes.data == array.ctypes.data
        inputs = {name: arrays.get(name) for name in op.inputs}
        results = testing.run_reference(op, inputs, {**variant.attrs, **numbers})
        for name, result in zip(op.results, results, strict=True):
            if result is not None:
                arrays[name][...] = result
        for name in arrays.keys() - op.inputs.keys() - op.outputs.keys():
            arrays[name][...] = 7  # a workspace may be written


@pytest.fixture
def fake_kernels(monkeypatch: pytest.MonkeyPatch) -> FakeKernels:
    """``cache.get`` returns fakes, so no compiler is needed. Their variants name a toolchain that does not exist, so
    that no fake is ever taken for a kernel.
    """
    fakes = FakeKernels()
    monkeypatch.setenv("CUTE_OPS_ARCH", "sm_90a")
    monkeypatch.setattr(cache, "get", fakes.get)
    monkeypatch.setattr(ffi, "cuda_devices", list)
    monkeypatch.setattr(toolchain, "versions", lambda: ("fake", ""))
    monkeypatch.setattr(ffi, "_known", {})
    monkeypatch.setattr(ffi, "compile_ahead", lambda: None)
    return fakes


class KernelsOnCpu(OpPrimitive):
    platforms = ("cuda", "cpu")


class ProgramOnCpu(Composite):
    platforms = ("cuda", "cpu")


# By target, the function of the test that runs: a process has 1024 targets for all of its tests.
FUNCTIONS: dict[str, Any] = {}


def call_function(name: str, *given: Any) -> None:
    FUNCTIONS[name](*given)


@pytest.fixture
def ffi_primitive(fake_kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> Callable[[Op], OpPrimitive]:
    """``ffi_primitive(op)``: the primitive of an op whose CUDA lowering runs on the CPU."""
    import jax_tvm_ffi
    import tvm_ffi

    real = jax_tvm_ffi.register_ffi_target

    def register_on_cpu(
        name: str, function: Any, *, arg_spec: list[str], platform: str, allow_cuda_graph: bool
    ) -> None:
        assert (platform, allow_cuda_graph) == ("gpu", True)
        if name not in FUNCTIONS:
            real(name, tvm_ffi.convert(partial(call_function, name)), arg_spec=arg_spec, platform="cpu")
        FUNCTIONS[name] = function

    monkeypatch.setattr(jax_tvm_ffi, "register_ffi_target", register_on_cpu)
    primitives: dict[Op, OpPrimitive] = {}

    def made(op: Op) -> OpPrimitive:
        if op not in primitives:
            primitives[op] = ProgramOnCpu(op) if op.program else KernelsOnCpu(op)
            for one in (op, *(op.without_kernel.ops if op.without_kernel else ())):
                fake_kernels.ops.setdefault(one.name, one)
        return primitives[op]

    return made


@pytest.fixture
def through_ffi(
    ffi_primitive: Callable[[Op], OpPrimitive], monkeypatch: pytest.MonkeyPatch
) -> Callable[[Op], Callable[..., Any]]:
    """``through_ffi(op)``: the op's function, whose CUDA lowering runs on the CPU."""
    # Functions are made when they are first asked for. Make all of them now, so that none uses these primitives.
    for op in (*EVERY.values(), *PLAIN_PRODUCTS, *ATTENTION):
        function.register(op)
    monkeypatch.setattr(vjp, "primitive_of", ffi_primitive)
    return inspect.unwrap(function.register)


def fed_back(function: Callable[..., Any]) -> Callable[..., Any]:
    def once(first: Any, *others: Any) -> Any:
        # Bounded, whatever the function does.
        out = jnp.sin(jax.tree.leaves(function(first, *others))[0].astype(first.dtype))
        return out if out.shape == first.shape else (first * jnp.mean(out, dtype=jnp.float32)).astype(first.dtype)

    return once


@pytest.fixture
def again() -> Callable[..., Any]:
    """``again(function)``: its first output in the shape of its first input, to be fed back to it."""
    return fed_back


class TorchArrays:
    """Conversion of NumPy arrays, bfloat16 ones too, to torch and back."""

    def to_torch(self, arrays: Mapping[Any, np.ndarray | None], device: str) -> list[Any]:
        import torch

        def convert(a: np.ndarray) -> Any:
            if a.dtype == jnp.bfloat16:
                return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16).to(device)
            return torch.from_numpy(a).to(device)

        return [None if a is None else convert(np.array(a)) for a in arrays.values()]

    def to_numpy(self, tensor: Any) -> np.ndarray:
        import torch

        tensor = tensor.detach().cpu()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        if tensor.dtype == torch.float8_e4m3fn:
            return tensor.view(torch.uint8).numpy().view(jnp.float8_e4m3fn)
        return tensor.numpy()


@pytest.fixture
def torch_arrays() -> TorchArrays:
    return TorchArrays()


@pytest.fixture
def close() -> Callable[[Any, Any], None]:
    """Compares float32 results that were computed in different orders."""

    def check(got: Any, expected: Any) -> None:
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert jnp.shape(a) == jnp.shape(b)
            # A sum that cancels keeps the error of its terms, which are about as large as the largest element.
            largest = np.max(np.abs(b), initial=1.0)
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-5 * largest)

    return check
