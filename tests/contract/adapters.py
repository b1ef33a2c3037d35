"""The two frameworks behind one interface: arrays, gradients, compilation and batching, from and to NumPy."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from ml_dtypes import finfo

from cute_ops.testing import numpy_dtype

Function = Callable[..., Any]
Arrays = Sequence[np.ndarray]


class Adapter:
    """An adapter under test.

    Attributes:
        name: of the framework, ``torch`` or ``jax``.
        ours: the adapter's package.
        package: its name.
        one_array: how its errors call an array.
        subnormal: whether the framework computes with subnormal numbers.
    """

    name: ClassVar[str]
    one_array: ClassVar[str]
    subnormal = True
    ours: Any

    @property
    def package(self) -> str:
        return str(self.ours.__name__)

    def register(self, op: Any) -> Function:
        return self.ours.register(op)  # type: ignore[no-any-return]

    def run(self, op: Any, arrays: Any, attrs: Any) -> tuple[np.ndarray | None, ...]:
        """Call an op by name on NumPy arrays, as ``python -m cute_ops verify`` does."""
        runner = importlib.import_module(f"{self.package}.tools.runner")
        return runner.run(op, arrays, attrs)  # type: ignore[no-any-return]

    # The framework's, by subclass

    def array(self, a: Any, dtype: str | None = None) -> Any:
        """An array of the framework with a NumPy array's values."""
        raise NotImplementedError

    def numpy(self, a: Any) -> np.ndarray:
        """The values of an array of the framework, in its own dtype."""
        raise NotImplementedError

    def dtype(self, a: Any) -> str:
        return self.numpy(a).dtype.name

    def compiled(self, function: Function) -> Function:
        """The function in one compiled program: ``torch.compile`` of a full graph, ``jax.jit``."""
        raise NotImplementedError

    def usual(self, function: Function) -> Function:
        """The function as programs of the framework run it: eagerly in PyTorch, jitted in JAX."""
        return self.compiled(function) if self.name == "jax" else function

    def abstract(self, function: Function, *given: Any) -> Any:
        """Call a function with arrays that have no elements: fake tensors, ``jax.eval_shape``."""
        raise NotImplementedError

    def vmap(self, function: Function, axes: Any = 0) -> Function:
        raise NotImplementedError

    def grad(self, function: Function, wrt: tuple[int, ...]) -> Function:
        """The gradients of a function with one number, as a function: ``torch.func.grad``, ``jax.grad``."""
        raise NotImplementedError

    def loss(self, outputs: Any) -> Any:
        """The sum of the sines of all outputs."""
        raise NotImplementedError

    def vjp(self, function: Function, *given: Any) -> tuple[tuple[Any, ...], Function]:
        """Outputs, and a function from their cotangents to the gradients of all that is given."""
        raise NotImplementedError

    def exact(self, function: Function, given: Arrays, cotangents: Arrays | None = None) -> tuple[list[Any], list[Any]]:
        """Outputs and gradients of a function of the framework's own, in float64; cotangents are ones by default."""
        raise NotImplementedError

    def most_memory(self, function: Function, given: Sequence[Any]) -> int:
        """Bytes that a function of arrays and its gradients hold at once beside these, on the host."""
        raise NotImplementedError

    # From these

    def arrays(self, given: Sequence[Any], dtype: str | None = None) -> list[Any]:
        return [None if a is None else self.array(a, dtype) for a in given]

    def value_and_gradients(
        self, function: Function, given: Sequence[Any], cotangents: Arrays | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Outputs and gradients as NumPy arrays; cotangents are ones by default."""
        outputs, pull = self.vjp(function, *given)
        values = list(map(self.numpy, outputs))
        cotangents = cotangents or [np.ones_like(value) for value in values]
        pulled = pull(*(self.array(c, v.dtype.name) for c, v in zip(cotangents, values, strict=True)))
        return values, list(map(self.numpy, pulled))

    def same(self, one: Any, other: Any) -> None:
        """Values are equal. XLA rounds an expression differently in another program, by a unit or two."""
        found, wanted = self.numpy(one), self.numpy(other)
        assert found.dtype == wanted.dtype
        rtol = 0.0 if self.name == "torch" else 4 * float(finfo(found.dtype).eps)
        np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), rtol=rtol, atol=rtol)


def as_tuple(outputs: Any) -> tuple[Any, ...]:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


class Torch(Adapter):
    name, one_array = "torch", "one dense tensor"

    def __init__(self, device: str = "cpu") -> None:
        self.torch = pytest.importorskip("torch")
        import cute_ops_torch

        self.ours, self.device = cute_ops_torch, device
        self.own = self.torch.nn.functional

    def array(self, a: Any, dtype: str | None = None) -> Any:
        made = np.array(a, None if dtype is None else numpy_dtype(dtype))
        words = self.torch.from_numpy(made.reshape(-1).view(np.uint8))
        return words.view(getattr(self.torch, made.dtype.name)).reshape(made.shape).to(self.device)

    def numpy(self, a: Any) -> np.ndarray:
        words = a.detach().cpu().contiguous().reshape(-1).view(self.torch.uint8).numpy()
        return words.view(numpy_dtype(str(a.dtype).removeprefix("torch."))).reshape(a.shape)

    def compiled(self, function: Function) -> Function:
        self.torch._dynamo.reset()  # it refuses a ninth program of one function
        return self.torch.compile(function, fullgraph=True, backend="aot_eager")  # type: ignore[no-any-return]

    def abstract(self, function: Function, *given: Any) -> Any:
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode() as mode:
            return function(*map(mode.from_tensor, given))

    def vmap(self, function: Function, axes: Any = 0) -> Function:
        return self.torch.vmap(function, axes)  # type: ignore[no-any-return]

    def grad(self, function: Function, wrt: tuple[int, ...]) -> Function:
        return self.torch.func.grad(function, wrt)  # type: ignore[no-any-return]

    def loss(self, outputs: Any) -> Any:
        return sum(out.sin().sum() for out in as_tuple(outputs))

    def vjp(self, function: Function, *given: Any) -> tuple[tuple[Any, ...], Function]:
        leaves = [a.detach().clone().requires_grad_() for a in given]
        outputs = as_tuple(function(*leaves))
        return outputs, lambda *cotangents: self.torch.autograd.grad(outputs, leaves, cotangents)

    def most_memory(self, function: Function, given: Sequence[Any]) -> int:
        leaves = [a.detach().clone().requires_grad_() for a in given]
        with self.torch.profiler.profile(profile_memory=True) as watched:
            function(*leaves).backward()
        changes = sorted((e.time_range.start, e.cpu_memory_usage) for e in watched.events() if e.name == "[memory]")
        assert changes
        return max(itertools.accumulate(change for _, change in changes))

    def exact(self, function: Function, given: Arrays, cotangents: Arrays | None = None) -> tuple[list[Any], list[Any]]:
        outputs, pull = self.vjp(function, *(self.array(a, "float64") for a in given))
        cotangents = cotangents or [np.ones(out.shape) for out in outputs]
        gradients = pull(*(self.array(c, "float64") for c in cotangents))
        return list(map(self.numpy, outputs)), list(map(self.numpy, gradients))


class Jax(Adapter):
    name, one_array = "jax", "one array"
    subnormal = False  # XLA on a CPU takes them for 0

    def __init__(self) -> None:
        self.jax = pytest.importorskip("jax")
        import cute_ops_jax

        self.ours, self.own = cute_ops_jax, self.jax.nn

    def array(self, a: Any, dtype: str | None = None) -> Any:
        return self.jax.numpy.asarray(np.array(a), dtype)

    def numpy(self, a: Any) -> np.ndarray:
        return np.asarray(a)

    def compiled(self, function: Function) -> Function:
        return self.jax.jit(function)  # type: ignore[no-any-return]

    def abstract(self, function: Function, *given: Any) -> Any:
        return self.jax.eval_shape(function, *given)

    def vmap(self, function: Function, axes: Any = 0) -> Function:
        return self.jax.vmap(function, axes)  # type: ignore[no-any-return]

    def grad(self, function: Function, wrt: tuple[int, ...]) -> Function:
        return self.jax.grad(function, wrt)  # type: ignore[no-any-return]

    def loss(self, outputs: Any) -> Any:
        return sum(self.jax.numpy.sin(out).sum() for out in as_tuple(outputs))

    def vjp(self, function: Function, *given: Any) -> tuple[tuple[Any, ...], Function]:
        outputs, pull = self.jax.vjp(lambda *given: as_tuple(function(*given)), *given)
        return outputs, lambda *cotangents: pull(tuple(cotangents))

    def most_memory(self, function: Function, given: Sequence[Any]) -> int:
        program = self.jax.jit(self.jax.value_and_grad(function, tuple(range(len(given))))).lower(*given).compile()
        return int(program.memory_analysis().temp_size_in_bytes)

    def value_and_gradients(
        self, function: Function, given: Sequence[Any], cotangents: Arrays | None = None
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """In one program: to compile each operation by itself takes several times as long."""

        def run(given: Any, cotangents: Any) -> Any:
            outputs, pull = self.vjp(function, *given)
            cotangents = cotangents or [self.jax.numpy.ones_like(out) for out in outputs]
            like = (self.jax.numpy.asarray(c, out.dtype) for c, out in zip(cotangents, outputs, strict=True))
            return outputs, pull(*like)

        outputs, gradients = self.jax.jit(run)(given, cotangents)
        return list(map(np.asarray, outputs)), list(map(np.asarray, gradients))

    def exact(self, function: Function, given: Arrays, cotangents: Arrays | None = None) -> tuple[list[Any], list[Any]]:
        with self.jax.enable_x64(True):
            return self.value_and_gradients(function, [self.array(a, "float64") for a in given], cotangents)


ADAPTERS: dict[str, Callable[[], Adapter]] = {"torch": Torch, "jax": Jax, "torch on cuda": lambda: Torch("cuda")}
