"""Layers around matrix products, each as a user of PyTorch writes it and as our public function, for sample.py.

A :class:`Product` is one layer at one size. It has what device_time.py asks of a problem, so that it is checked,
compiled ahead and measured in the same way; its contenders are PyTorch's eager functions (cuBLAS), torch.compile, and
ours with ``fused="auto"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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
    directions: ClassVar[tuple[str, ...]] = ("fwd", "both")

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
    """The contender's function for a layer; None where it has none."""
    found = LAYERS[layer]
    if contender == "torch eager":
        return found.eager
    if contender == "torch.compile":
        return torch.compile(found.eager, fullgraph=True, dynamic=False, options={"max_autotune": True})
    if contender == "ours (torch)":
        import cute_ops_torch

        function = getattr(cute_ops_torch, found.ours)
        return lambda *tensors: function(*tensors, **found.attrs)
    return None
