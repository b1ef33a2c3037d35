"""Layers around matrix products, each as a user of PyTorch writes it and as our public function, for sample.py.

A :class:`Product` is one layer at one size. It has what device_time.py asks of a problem, so that it is checked,
compiled ahead and measured in the same way; its contenders are PyTorch's eager functions (cuBLAS), torch.compile, XLA,
quack where it has the layer, and ours with ``fused="auto"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from problems import Buffers

Call = Callable[..., Any]
EPS = 1e-6


class Layer(NamedTuple):
    """A layer: what is called, and the shapes of its inputs by the letters of (m, n, k).

    Attributes:
        eager: by PyTorch.
        ours: the name of our function in ``cute_ops_torch``.
        inputs: a word for each input, a letter a dim; ``N`` is twice n.
        attrs: of our function.
        products: matrix products of ``m n k`` multiply-adds.
    """

    eager: Call
    ours: str
    inputs: tuple[str, ...]
    attrs: dict[str, Any]
    products: int = 1


def swiglu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.silu(gate) * up


LAYERS = {
    "linear": Layer(F.linear, "linear", ("mk", "nk"), {}),
    "linear, bias": Layer(F.linear, "linear", ("mk", "nk", "n"), {"epilogue": "bias"}),
    "linear, gelu": Layer(
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
        "linear_gelu", ("mk", "nk", "n"), {"approximate": "tanh"},
    ),
    "linear, silu": Layer(lambda x, w, b: F.silu(F.linear(x, w, b)), "linear_silu", ("mk", "nk", "n"), {}),
    "linear, residual": Layer(lambda x, w, r: F.linear(x, w) + r, "linear_add", ("mk", "nk", "mn"), {}),
    "linear, gate": Layer(swiglu, "gated_linear", ("mk", "Nk"), {}, 2),
    "gated MLP": Layer(
        lambda x, w, down: F.linear(swiglu(x, w), down), "gated_mlp", ("mk", "Nk", "kn"), {}, 3,
    ),
    "MLP, gelu": Layer(
        lambda x, up, b, down, c: F.linear(F.gelu(F.linear(x, up, b)), down, c), "mlp", ("mk", "nk", "n", "kn", "k"),
        {}, 2,
    ),
    "norm, linear": Layer(
        lambda x, g, w: F.linear(F.rms_norm(x, x.shape[-1:], g, EPS), w), "rmsnorm_linear", ("mk", "k", "nk"),
        {"eps": EPS},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Product:
    """One layer at one size: ``m`` rows of ``k`` elements to ``n``.

    Directions are ``fwd``, without gradients, and ``both``, forward and backward as in training.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    # What a problem of device_time.py may be besides.
    attrs: ClassVar[tuple[()]] = ()
    strided: ClassVar[bool] = False
    hot: ClassVar[bool] = False
    weight: ClassVar[None] = None
    residual: ClassVar[None] = None
    program_bytes: ClassVar[int] = (
        0  # no more calls in a JAX program than L2 asks for: each takes XLA longer to compile
    )
    directions: ClassVar[tuple[str, ...]] = ("fwd", "both")

    results: ClassVar[int] = 1

    @property
    def rows(self) -> int:
        return self.m

    @property
    def layout(self) -> str:
        return f"k={self.k}"

    @property
    def label(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.dtype}"

    @property
    def wanted(self) -> list[bool]:
        return [True] * len(self.shapes())

    def shapes(self) -> list[tuple[int, ...]]:
        """Of the inputs."""
        size = {"m": self.m, "n": self.n, "k": self.k, "N": 2 * self.n}
        return [tuple(size[letter] for letter in word) for word in LAYERS[self.op].inputs]

    @property
    def columns(self) -> int:
        """Of the output."""
        return self.k if self.op in ("gated MLP", "MLP, gelu") else self.n

    def flops(self, direction: str) -> int:
        """Of the products alone; a gradient has two for each."""
        return 2 * LAYERS[self.op].products * math.prod((self.m, self.n, self.k)) * (1 if direction == "fwd" else 3)

    def bytes(self, direction: str) -> int:
        """Each input and output once, and each gradient."""
        elements = sum(map(math.prod, self.shapes())) + self.m * self.columns
        return elements * (4 if self.dtype == "float32" else 2) * (1 if direction == "fwd" else 2)

    def buffers(self, device: torch.device, seed: int) -> Buffers:
        """Random normal numbers; weights scaled so that outputs are about one."""
        generator = torch.Generator(device).manual_seed(seed)
        dtype = getattr(torch, self.dtype)

        def made(shape: tuple[int, ...], word: str) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, device=device)
            return (values if word[0] == "m" or len(word) < 2 else values / math.sqrt(shape[-1])).to(dtype)

        inputs = tuple(map(made, self.shapes(), LAYERS[self.op].inputs))
        return Buffers(inputs, (made((self.m, self.columns), "m"),))


def make(contender: str, layer: str) -> Call | None:
    """The contender's function for a layer; None where it has none, or is not installed."""
    found = LAYERS[layer]
    try:
        if contender == "torch eager":
            return found.eager
        if contender == "torch.compile":
            return torch.compile(found.eager, fullgraph=True, dynamic=False, options={"max_autotune": True})
        if contender == "ours (torch)":
            import cute_ops_torch

            function = getattr(cute_ops_torch, found.ours)
            return lambda *tensors: function(*tensors, **found.attrs)
        return {"quack": in_quack, "XLA (jit)": in_jax}[contender]().get(layer)
    except (ImportError, KeyError):
        return None


def in_quack() -> dict[str, Call]:
    """Layers of quack, by the configs that it takes unasked: to tune each size takes minutes. The functions that return
    an activation alone have no gradient. With an epilogue they fail where cutlass does not lie in a folder of the name
    ``site-packages``: the key of an epilogue would have to hold cutlass's functions.
    """
    from quack import rmsnorm
    from quack.linear import linear_act_func, linear_func, linear_gated_func
    from quack.mlp import mlp_func

    def activated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, activation: str) -> torch.Tensor:
        without_gradient()
        return linear_act_func(x, weight, activation, bias, store_preact=False, tuned=False)[1]

    def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        without_gradient()
        return linear_gated_func(x, weight, "swiglu", store_preact=False, tuned=False, concat_layout=True)[1]

    def without_gradient() -> None:
        if torch.is_grad_enabled():
            raise NotImplementedError("an activation alone has no gradient")

    return {
        "linear": lambda x, w: linear_func(x, w, tuned=False),
        "linear, bias": lambda x, w, b: linear_func(x, w, b, tuned=False),
        "linear, gelu": partial(activated, activation="gelu_tanh_approx"),
        "linear, silu": partial(activated, activation="silu"),
        "linear, gate": gated,
        "gated MLP": lambda x, w, down: mlp_func(x, w, down, "swiglu", tuned=False, concat_layout=True),
        "norm, linear": lambda x, g, w: linear_func(rmsnorm(x, g, eps=EPS), w, tuned=False),
    }


def in_jax() -> dict[str, Call]:
    """The layers as a user of jax.numpy writes them."""
    import jax
    import jax.numpy as jnp

    def swiglu(x: Any, weight: Any) -> Any:
        gate, up = jnp.split(x @ weight.T, 2, -1)
        return jax.nn.silu(gate) * up

    def rmsnorm(x: Any, weight: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS) * weight).astype(x.dtype)

    return {
        "linear": lambda x, w: x @ w.T,
        "linear, bias": lambda x, w, b: x @ w.T + b,
        "linear, gelu": lambda x, w, b: jax.nn.gelu(x @ w.T + b, approximate=True),
        "linear, silu": lambda x, w, b: jax.nn.silu(x @ w.T + b),
        "linear, residual": lambda x, w, r: x @ w.T + r,
        "linear, gate": swiglu,
        "gated MLP": lambda x, w, down: swiglu(x, w) @ down.T,
        "MLP, gelu": lambda x, up, b, down, c: jax.nn.gelu(x @ up.T + b, approximate=False) @ down.T + c,
        "norm, linear": lambda x, g, w: rmsnorm(x, g) @ w.T,
    }
