"""Special numbers, and each primitive of expressions as a function of them and in the primitives of both frameworks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

ROW = {"axis": -1, "keepdims": True}
Function = Callable[..., Any]
TINY, LARGEST = 2.0**-149, 2.0**128 - 2.0**104
# NaN, infinities, zeros, subnormal and least normal numbers, where functions overflow or are flat, and ordinary ones.
_POSITIVE = (
    np.inf, 0.0, TINY, 2.0**-127, 2.0**-126, 2.0**-60, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 17.5, 88.5, 89.5, 104.5, 130.0,
    300.0, 449.0, 65520.0, 2.0**63, 2.0**64, LARGEST,
)  # fmt: skip
NUMBERS = np.array([np.nan, *_POSITIVE, *(-x for x in _POSITIVE)], np.float32)
# Of rows, each of which has one of the special numbers, or several.
ROWS = np.array(
    [
        [special if i == place else x for i, x in enumerate((0.5, -2.0, 3.0, 1.0, -0.25))]
        for special in (np.nan, np.inf, -np.inf, 0.0, -0.0, LARGEST, TINY) for place in (0, 2, 4)
    ] + [[np.nan] * 5, [np.inf, -np.inf, 1, 2, 3], [np.nan, np.inf, -np.inf, 0, 1], [np.inf] * 5, [-np.inf] * 5],
    np.float32,
)  # fmt: skip


class Primitive(NamedTuple):
    """A primitive, or what is written with some.

    Attributes:
        ours: the function to trace, of up to three operands.
        torch, jax: the same in these frameworks' primitives.
        rows: whether it reduces rows.
    """

    ours: Function
    torch: Function
    jax: Function
    rows: bool = False

    @property
    def operands(self) -> tuple[str, ...]:
        return self.ours.__code__.co_varnames[1 : self.ours.__code__.co_argcount]


def pairs(count: int) -> list[np.ndarray]:
    """Every combination of special numbers, of which three have fewer; an array ``[rows, 47]`` for each operand."""
    some = NUMBERS if count < 3 else NUMBERS[[0, 1, 2, 6, 8, 9, 10, 24, 25, 30, 32, 33]]
    grids = np.meshgrid(*[some] * count, indexing="ij")
    return [np.reshape(grid, (-1, len(some))) for grid in grids]


def unary(name: str) -> Function:
    return lambda xp, x: getattr(xp, name)(x)


def binary(name: str) -> Function:
    return lambda xp, x, y: getattr(xp, name)(x, y)


def reduction(name: str) -> Function:
    return lambda xp, x: getattr(xp, name)(x, **ROW)


def power(k: float) -> Function:
    return lambda xp, x: x**k


def primitives(torch: Any, jax: Any) -> dict[str, Primitive]:
    """The table, for these modules; either may be None."""
    jnp = jax and jax.numpy
    functional = torch and torch.nn.functional
    made: dict[str, Primitive] = {}

    def same(name: str, function: Function, rows: bool = False) -> None:
        made[name] = Primitive(
            function,
            lambda *a: function(_Named(torch, functional), *a),
            lambda *a: function(_Named(jnp, jax.nn, jax.lax), *a),
            rows,
        )

    for name in (
        "exp",
        "exp2",
        "log",
        "log1p",
        "log2",
        "tanh",
        "sqrt",
        "floor",
        "round",
        "sign",
        "abs",
        "reciprocal",
        "square",
    ):
        same(name, unary(name))
    for name in ("sigmoid", "silu", "relu", "softplus", "erf", "rsqrt", "gelu", "gelu_tanh", "ndtr"):
        same(name, unary(name))
    for name in ("sin", "cos"):
        same(name, unary(name))
    same("stop_gradient", lambda xp, x: xp.stop_gradient(xp.exp(x)) * x)
    for name in ("minimum", "maximum"):
        same(name, binary(name))
    same("add", lambda xp, x, y: x + y)
    same("subtract", lambda xp, x, y: x - y)
    same("multiply", lambda xp, x, y: x * y)
    same("divide", lambda xp, x, y: x / y)
    same("negative", lambda xp, x: -x)
    same("clip", lambda xp, x: xp.clip(x, -1.5, 2.0))
    same("clip between", lambda xp, x, y, z: xp.clip(x, y, z))
    same("where", lambda xp, x, y: xp.where(x > 0, y, x))
    same("where untaken", lambda xp, x: xp.where(x > 0, xp.log(x), -1.0))
    same("comparisons", lambda xp, x, y: xp.where((x < y) | ~(x <= y) & (x == y), x, 2.0 * y))
    same("not equal", lambda xp, x: xp.where(x != x, 1.0, 3.0 * x))
    for k in (-8, -3, -2, -1, -0.5, 0.5, 2, 3, 4, 7):
        same(f"power {k}", power(k))
    same("one over square", lambda xp, x: 1 / (x * x))
    for name in ("max", "min", "sum", "mean"):
        same(name, reduction(name), rows=True)
    same("softmax", lambda xp, x: xp.exp(x - xp.max(x, **ROW)) / xp.sum(xp.exp(x - xp.max(x, **ROW)), **ROW), rows=True)
    for name in ("logsumexp", "var", "std"):
        same(name, reduction(name), rows=True)
    same("softmax of a row", lambda xp, x: xp.softmax(x, axis=-1), rows=True)
    same("centred", lambda xp, x: x - xp.mean(x, **ROW), rows=True)
    same("range", lambda xp, x: xp.max(x, **ROW) - xp.min(x, **ROW) + x, rows=True)
    return made


class _Named:
    """The array API's names of a framework's functions."""

    def __init__(self, *spaces: Any) -> None:
        self.spaces = [s for s in spaces if s]

    def __getattr__(self, name: str) -> Any:
        first = self.spaces[0]
        is_torch = first.__name__ == "torch"
        if name in ("max", "min"):
            return (
                (lambda x, **_: getattr(first, f"a{name}")(x, -1, keepdim=True)) if is_torch else getattr(first, name)
            )
        if name == "gelu_tanh":
            gelu = self.spaces[1].gelu
            return lambda x: gelu(x, approximate="tanh") if is_torch else gelu(x, approximate=True)
        if name == "gelu" and not is_torch:
            return lambda x: self.spaces[1].gelu(x, approximate=False)
        if name == "ndtr":
            return first.special.ndtr if is_torch else __import__("jax.scipy.stats").scipy.stats.norm.cdf
        if name in ("var", "std", "logsumexp") and is_torch:
            options: dict[str, Any] = {} if name == "logsumexp" else {"correction": 0}
            return lambda x, **_: getattr(first, name)(x, -1, keepdim=True, **options)
        if name == "softmax" and is_torch:
            return lambda x, **_: first.softmax(x, -1)
        if name == "stop_gradient" and is_torch:
            return first.Tensor.detach
        if name == "clip" and is_torch:
            return first.clamp
        found = next((space for space in self.spaces if hasattr(space, name)), None)
        return getattr(found, name)


def is_nan(*arrays: Any) -> Any:
    return np.any([np.isnan(a) for a in arrays], axis=0)


def is_subnormal(*arrays: Any) -> Any:
    return np.any([(np.abs(a) < 2.0**-126) & (a != 0) for a in arrays], axis=0)


def is_huge(*arrays: Any) -> Any:
    """Where the hardware's reciprocal of a finite number is 0."""
    return np.any([(np.abs(a) >= 2.0**126) & np.isfinite(a) for a in arrays], axis=0)


def of_row(where: Any) -> Any:
    return where.any(-1, keepdims=True)


Where = Callable[..., Any]
# Where a value or a gradient is not the framework's: docs/fused.md says why. By primitive, and ``out`` or ``dx``.
NOT_TORCH: dict[tuple[str, str], Where] = {
    ("sign", "out"): is_nan, ("abs", "dx"): is_nan, ("gelu", "out"): lambda x: x > 2.0**127,
    ("gelu_tanh", "dx"): lambda x: np.abs(x) > 2.0**60, ("power -0.5", "dx"): lambda x: (x == 0) | np.isinf(x),
    ("divide", "dy"): is_subnormal, ("std", "dx"): lambda x: of_row(np.abs(x) > 2.0**60),
    ("std", "out"): lambda x: of_row(np.abs(x) > 2.0**60),
}  # fmt: skip
NOT_JAX: dict[tuple[str, str], Where] = {
    ("abs", "dx"): lambda x: (x == 0) | np.isnan(x), ("relu", "dx"): is_nan, ("rsqrt", "dx"): lambda x: x == 0,
    ("silu", "dx"): lambda x: np.abs(x) > 2.0**127, ("gelu_tanh", "dx"): lambda x: np.abs(x) > 2.0**60,
    ("divide", "dy"): lambda x, y: (np.abs(y) > 2.0**60) | (np.abs(y) < 2.0**-60),
    **{(word, "dx"): lambda x: of_row(np.abs(x) > 2.0**60) for word in ("var", "std")},
    ("clip", "dx"): lambda x: (x == -1.5) | (x == 2),
    **{(primitive, f"d{each}"): is_nan for primitive in ("minimum", "maximum") for each in "xy"},
    **{("clip between", f"d{x}"): lambda x, y, z: is_nan(x, y, z) | ~(y < z) | (x == y) | (x == z) for x in "xyz"},
    **{(f"power {k}", what): lambda x: (x == 0) | (x == -np.inf) for k in (0.5, -0.5) for what in ("out", "dx")},
}  # fmt: skip

# PyTorch 2.15 has other gradients of `clip`: on a bound, of which JAX has half, too, and at NaN.
NOT_TORCH_2_15 = NOT_TORCH | {key: where for key, where in NOT_JAX.items() if key[0].startswith("clip")}


def differ(got: Any, wanted: Any, relative: float = 1e-4) -> Any:
    """Where numbers are not the same, up to rounding; subnormal ones may be 0, and the sign of 0 is not looked at."""
    got, wanted = (np.asarray(a).astype(np.float64) for a in (got, wanted))
    # XLA's tanh of large numbers is up to three units in the last place below 1, so 1 - tanh**2 is up to 3.6e-7.
    near = np.isclose(got, wanted, rtol=relative, atol=1e-6, equal_nan=True) | (got == wanted)
    return ~near


def told(name: str, what: str, wrong: Any, arrays: Any, got: Any, wanted: Any) -> str:
    """The first numbers at which something is wrong; empty where nothing is."""
    places = [tuple(i) for i in np.argwhere(wrong)[:5]]
    lines = [f"  at {[a[i] for a in arrays]}: {got[i]}, not {wanted[i]}" for i in places]
    return "\n".join([f"{name}, {what}, {int(np.sum(wrong))} numbers:", *lines]) if lines else ""
