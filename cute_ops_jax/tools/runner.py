"""The JAX side of ``python -m cute_ops verify``: one call of an op on NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import numpy as np

from cute_ops.declaration.op import Op
from cute_ops.testing import Arrays
from cute_ops_jax.primitive.primitive import primitive_of


def device() -> str:
    return "cuda" if jax.default_backend() == "gpu" else "cpu"


def not_checked() -> str:
    """Empty: see the runner of PyTorch, which alone fills memory before a call."""
    return ""


def run(op: Op, arrays: Arrays, attrs: Mapping[str, Any]) -> tuple[np.ndarray | None, ...]:
    """Call the op's primitive under ``jit``; None for absent outputs."""
    names = tuple(name for name, a in arrays.items() if a is not None)
    found = _jitted(op, names, tuple(attrs.items()))(*(arrays[name] for name in names))
    return tuple(None if found[name] is None else np.asarray(found[name]) for name in op.results)


@cache
def _jitted(op: Op, names: tuple[str, ...], attrs: tuple[tuple[str, Any], ...]) -> Any:
    def call(*arrays: Any) -> dict[str, Any]:
        return primitive_of(op)(dict(zip(names, arrays, strict=True)), dict(attrs))

    return jax.jit(call)
