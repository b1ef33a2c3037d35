"""What is measured: a grid of problems, their tensors and the least bytes they move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import formulas
import models
import torch

from cute_ops.declaration.binding import Binding, bind
from cute_ops.declaration.op import Op
from cute_ops.declaration.shapes import ITEMSIZE, Array
from cute_ops.ops import OPS, cross_entropy_step, rope_bwd_joined, swiglu_again
from cute_ops_torch.tools.measure import random_input

BY_NAME = {op.name: op for op in (*OPS, swiglu_again, cross_entropy_step, rope_bwd_joined, *models.OPS, *formulas.OPS)}
DIRECTIONS = ("fwd", "bwd")
FIRST = ("rmsnorm", "add_rmsnorm", "silu_mul")
MAX_SETS = 256
SMALL = 600 << 20  # bytes of a call up to which there is room for eight sets
PROGRAM_BYTES = 2 << 30  # what a jitted program's calls move, so that its dispatch hides behind the one before


class Buffers(NamedTuple):
    """Inputs of one call, and gradients of its outputs."""

    inputs: tuple[torch.Tensor, ...]
    cotangents: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Problem:
    """One op on one shape.

    Args:
        op: name of the op.
        rows: number of rows.
        n: size of a row; where a row has several dims, their product.
        dtype: dtype of activations.
        weight: dtype of the weight, or of an optimizer's state; that of the activations where None.
        residual: dtype of the residual, likewise.
        strided: rows are a slice of rows three times as long.
        hot: one buffer set only, so that what fits stays in L2.
        lead: leading dims, one of them where not said. Inputs that broadcast have the last one only.
        sizes: other dims by name.
        attrs: attributes that differ from the default.
    """

    op: str
    rows: int
    n: int
    dtype: str = "bfloat16"
    weight: str | None = None
    residual: str | None = None
    strided: bool = False
    hot: bool = False
    lead: tuple[int, ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()

    @property
    def declaration(self) -> Op:
        return BY_NAME[self.op]

    @property
    def results(self) -> int:
        """How many outputs a contender returns."""
        return len(self.declaration.shown)

    @property
    def wanted(self) -> list[bool]:
        """Per input, whether it has a gradient."""
        return [name in self.declaration.differentiable for name in self.arrays()]

    @property
    def directions(self) -> tuple[str, ...]:
        """Of an op that also returns columns or experts only the forward: autograd is asked for all outputs. And of one
        whose gradient is several ops.
        """
        op = self.declaration
        whole = any(op.outputs[name].dtype.startswith("int") for name in op.shown) or isinstance(op.grad, tuple)
        return DIRECTIONS if op.grad and not whole else DIRECTIONS[:1]

    @property
    def layout(self) -> str:
        more = [f"{k}={v}" for k, v in (*self.sizes, *self.attrs)] + ["hot"] * self.hot
        return ", ".join(["strided" if self.strided else "flat", *more])

    @property
    def label(self) -> str:
        """``32768x4096 bfloat16 W=float32``."""
        extra = "".join(f" {k}={v}" for k, v in (("W", self.weight), ("R", self.residual)) if v)
        return f"{self.rows}x{self.n} {self.dtype}{extra}" + ("" if self.layout == "flat" else f" {self.layout}")

    def arrays(self) -> dict[str, Array]:
        """The inputs: all that are declared but an initial state, the tables of cached keys where no ``r`` is said, and
        biases of norms without a mean.
        """
        by_variable = {
            "T": self.dtype,
            "W": self.weight or self.dtype,
            "B": self.weight or self.dtype,
            "R": self.residual or self.dtype,
            "C": "float32",
            "I": "int64",
            "K": self.dtype,
            "P": self.dtype,
            "G": self.dtype,
            "S": self.weight or self.dtype,
        }
        lead = self.lead or (self.rows,)
        sizes = {**self.declaration.example(lead, self.n), **dict(self.sizes)}
        made = {}
        for name, t in self.declaration.inputs.items():
            shape = t.of(sizes)
            beside = name == "initial_state" or (self.op == "append_kv" and t.optional and "r" not in dict(self.sizes))
            beside |= name in ("k_scale", "v_scale", "seq_idx")  # of caches in float8, of sequences in a row
            if not beside and (name != "bias" or "rmsnorm" not in self.op):
                # The vectors of an expression are weights.
                kind = by_variable.get("W" if t.dtype.startswith("T_") else t.dtype, t.dtype)
                made[name] = Array(shape[len(lead) - 1 :] if t.broadcast else shape, kind)
        return made

    def binding(self, direction: str) -> Binding:
        """The forward or the backward call."""
        forward = bind(self.declaration, self.arrays(), dict(self.attrs))
        if direction == "fwd":
            return forward
        grad = self.declaration.grad
        if grad is None:
            raise ValueError(f"{self.op} has no gradient")
        saving = self.declaration.saving
        saved = bind(saving, self.arrays(), dict(self.attrs)).outputs if saving else {}
        known = {**forward.inputs, **saved, **forward.outputs, **{f"d{n}": a for n, a in forward.outputs.items()}}
        return bind(grad, {name: known.get(name) for name in grad.inputs}, dict(self.attrs))

    def bytes(self, direction: str) -> int:
        """The least bytes that must move: every input read once, every output written once. Of a cache that is what
        the new keys and values take.
        """
        binding = self.binding(direction)
        op, inputs = binding.op, binding.inputs
        read = [a for name, a in inputs.items() if not op.inputs[name].unread and name not in op.mutates]
        written = [inputs[name.removesuffix("_cache")] for name in op.mutates]
        arrays = [a for a in (*read, *written, *binding.outputs.values()) if a]
        return sum(math.prod(a.shape) * ITEMSIZE[a.dtype] for a in arrays)

    def tensors(self, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        """Random inputs; weights around one, and another slot of a cache for each token: any, or of a contiguous one a
        sequence's first ones.
        """
        generator = torch.Generator(device).manual_seed(seed)
        sizes = {**self.declaration.example(self.lead or (self.rows,), self.n), **dict(self.sizes)}
        made = {}
        for name, (shape, dtype) in self.arrays().items():
            tensor = self.declaration.inputs[name]
            sliced = len(shape) - len(tensor.dims)  # the first dim of a row
            stretch = 3 if self.strided and tensor.rows and tensor.dims and not tensor.broadcast else 1
            full = tuple(size * stretch if i == sliced else size for i, size in enumerate(shape))
            if name == "slots":
                order = torch.randperm(tensor.bound(sizes), generator=generator, device=device)
                if len(shape) == 2:
                    order = torch.arange(tensor.bound(sizes), device=device).reshape(shape[0], -1)[:, : shape[1]]
                made[name] = order.flatten()[: self.rows].reshape(shape).to(getattr(torch, dtype))
                continue
            if name == "index":
                experts = dict(self.attrs)["experts"]
                made[name] = torch.randint(experts, shape, generator=generator, device=device)
                continue
            if name == "place":
                order = torch.randperm(math.prod(shape), generator=generator, device=device)
                made[name] = order.to(torch.int32).reshape(shape)
                continue
            values = random_input(self.declaration, name, Array(full, dtype), sizes, generator)
            made[name] = values if stretch == 1 else values.narrow(sliced, 0, shape[sliced])
        return made

    def cotangents(self, device: torch.device, seed: int) -> tuple[torch.Tensor, ...]:
        """Random gradients of the outputs; none for an op without a gradient."""
        if self.declaration.grad is None:
            return ()
        generator = torch.Generator(device).manual_seed(1000 + seed)
        outputs = self.binding("fwd").outputs
        made = [a for name in self.declaration.shown if (a := outputs[name])]
        return tuple(torch.randn(a.shape, generator=generator, device=device).to(getattr(torch, a.dtype)) for a in made)

    def buffers(self, device: torch.device, seed: int) -> Buffers:
        return Buffers(tuple(self.tensors(device, seed).values()), self.cotangents(device, seed))


def set_count(problem: Problem, direction: str, device: torch.device) -> int:
    """Buffer sets that exceed three times L2 together, and that fill a jitted program."""
    if problem.hot:
        return 1
    if device.type != "cuda":
        return 4
    least = problem.bytes(direction)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    fill = min(64, math.ceil(getattr(problem, "program_bytes", PROGRAM_BYTES) / least))
    return min(max(8 if least < SMALL else 4, math.ceil(3 * l2 / least), fill), MAX_SETS)


def grid(ops: Sequence[str], quick: bool = False) -> list[Problem]:
    """The problems, those of the README first."""
    found: list[Problem] = []
    if "rmsnorm" in ops:
        found += [Problem("rmsnorm", *s) for s in (_NORM[:4] if quick else _NORM)]
    if "add_rmsnorm" in ops:
        found += [Problem("add_rmsnorm", *s) for s in (_NORM[1:3] if quick else _NORM)]
    if "silu_mul" in ops:
        found += [Problem("silu_mul", *s) for s in (_GATED[:2] if quick else _GATED)]
    for op, problems in _PROBLEMS.items():
        if op in ops:
            found += problems[:1] if quick else problems
    if not quick:
        found += [p for p in _SPECIAL if p.op in ops]
    return found


def by_importance(problems: Sequence[Problem]) -> list[Problem]:
    """What a run that is cut short should have comes first: three ops, then a problem of each other, then the rest."""
    firsts = {p.op: p for p in reversed(problems)}
    return sorted(problems, key=lambda p: 0 if p.op in FIRST else 1 if firsts[p.op] is p else 2)


def smoke(ops: Sequence[str]) -> list[Problem]:
    """Tiny problems that take every path, for machines without a GPU."""
    found = []
    for op in ops:
        heads = tuple((dim, 4) for dim in BY_NAME[op].static if dim.startswith("h"))
        lead, sizes = ((2, 3), (*heads, ("d", 16), ("r", 8))) if heads else ((), ())
        if op == "append_kv":
            found += [_append((6,), 2, 16, 8, pairs=6), _append((2, 3), 2, 16, pairs=8, strided=True)]
        attrs = (("eps", 0.1),) if op == "adamw" else ()
        if op in TINY:
            found.append(TINY[op])
            continue
        found += [
            Problem(op, 6, 64, lead=lead, sizes=sizes, attrs=attrs),
            Problem(op, 6, 64 if sizes else 33, dtype="float32", strided=True, lead=lead, sizes=sizes, attrs=attrs),
        ]
    return found


_NORM = (
    (32768, 4096), (32768, 1024), (16384, 8192), (4096, 32768), (65536, 128), (2048, 131072), (16384, 4097),
)  # fmt: skip
_GATED = ((32768, 4096), (16384, 14336), (131072, 768), (16384, 4097))


def _heads(op: str, batch: int, seqlen: int, heads: int, headdim: int, pairs: int, **more: Any) -> Problem:
    sizes = (("h", heads), ("d", headdim), ("r", pairs))
    return Problem(op, batch * seqlen, heads * headdim, lead=(batch, seqlen), sizes=sizes, **more)


def _scaled(op: str, *shapes: tuple[int, int]) -> tuple[Problem, ...]:
    """With a scale per row, and per block of 128 columns."""
    whole = tuple(Problem(op, *s) for s in shapes)
    return whole + tuple(Problem(op, *s, attrs=(("block", 128),)) for s in shapes if s[1] % 128 == 0)


def _qk(op: str, batch: int, seqlen: int, heads: int, kv_heads: int, headdim: int = 128, **more: Any) -> Problem:
    sizes = (("hq", heads), ("hk", kv_heads), ("d", headdim), ("r", headdim // 2))
    n = (heads + kv_heads) * headdim
    return Problem(op, batch * seqlen, n, lead=(batch, seqlen), sizes=sizes, **more)


def _conv(batch: int, seqlen: int, channels: int, width: int = 4, activation: str = "silu", **more: Any) -> Problem:
    sizes, attrs = (("s", seqlen), ("w", width)), (("activation", activation),)
    return Problem("causal_conv1d", batch * seqlen, channels, lead=(batch,), sizes=sizes, attrs=attrs, **more)


def _append(
    lead: tuple[int, ...], heads: int, headdim: int, of_values: int | None = None, pairs: int = 0, **more: Any
) -> Problem:
    """Into a cache with twice as many slots as tokens: with pages of 16 slots, or where ``lead`` is (batch, seqlen) a
    contiguous one. ``pairs``: those of a key that are rotated.
    """
    e, tokens = of_values or headdim, math.prod(lead)
    pages, size = (lead[0], 2 * lead[1]) if len(lead) > 1 else (max(tokens // 8, 1), 16)
    sizes = (("p", pages), ("s", size), ("h", heads), ("d", headdim), ("e", e), *([("r", pairs)] if pairs else []))
    return Problem("append_kv", tokens, heads * (headdim + e), lead=lead, sizes=sizes, **more)


def _topk(rows: int, n: int, k: int, **more: Any) -> Problem:
    return Problem("topk", rows, n, attrs=(("k", k),), **more)


def permuted(op: str, rows: int, n: int, each: int, experts: int = 0, **more: Any) -> Problem:
    """Tokens, each of which ``each`` of so many experts get."""
    sizes = (("r", rows), ("k", each), ("t", rows * each))
    return Problem(op, rows, n, sizes=sizes, attrs=(("experts", experts),) if experts else (), **more)


def rotated_at(rows: int, heads: int, headdim: int, **more: Any) -> Problem:
    """Tokens at positions of a table of 8192."""
    sizes = (("h", heads), ("d", headdim), ("r", headdim // 2), ("p", 8192))
    return Problem("rope_at", rows, heads * headdim, lead=(rows,), sizes=sizes, **more)


def normed_heads(op: str, rows: int, heads: int, headdim: int, **more: Any) -> Problem:
    return Problem(op, rows, heads * headdim, sizes=(("h", heads), ("n", headdim)), **more)


def grouped(op: str, batch: int, channels: int, positions: int, **more: Any) -> Problem:
    """An image of so many positions, in 32 groups of channels where nothing else is said."""
    sizes = (("c", channels), ("s", positions))
    return Problem(op, batch, channels * positions, lead=(batch,), sizes=sizes, **more)


def packed_heads(rows: int, heads: int, rotated: int, headdim: int, **more: Any) -> Problem:
    """Heads of queries, keys and values, the first of which are rotated."""
    sizes, attrs = (("h", heads), ("d", headdim), ("r", headdim // 2)), (("heads", rotated),)
    return Problem("rope_packed", rows, heads * headdim, lead=(rows,), sizes=sizes, attrs=attrs, **more)


def rotated_to_fp8(rows: int, heads: int, headdim: int, **more: Any) -> Problem:
    sizes = (("h", heads), ("d", headdim), ("r", headdim // 2))
    return Problem("rope_fp8", rows, heads * headdim, lead=(rows,), sizes=sizes, **more)


def convolved(batch: int, channels: int, seqlen: int, width: int = 4, **more: Any) -> Problem:
    sizes, attrs = (("n", channels), ("s", seqlen), ("w", width)), (("activation", "silu"),)
    name = "causal_conv1d_channels_first"
    return Problem(name, batch, channels * seqlen, lead=(batch,), sizes=sizes, attrs=attrs, **more)


# On a CPU, of the ops whose sizes are more than a row's length.
TINY = {
    **{op: normed_heads(op, 6, 3, 16) for op in ("head_rmsnorm", "head_layernorm")},
    **{op: grouped(op, 2, 6, 15, attrs=(("groups", 3),)) for op in ("group_norm_first", "group_norm_last")},
    "rope_fp8": rotated_to_fp8(6, 2, 16), "rope_packed": packed_heads(6, 5, 3, 16),
    "causal_conv1d_channels_first": convolved(2, 6, 33),
    "permute_tokens": permuted("permute_tokens", 6, 33, 2, 4),
    "unpermute_tokens": permuted("unpermute_tokens", 6, 33, 2),
    "rope_at": rotated_at(6, 2, 16), "topk": _topk(6, 33, 3),
}  # fmt: skip
_ROWS = ((16384, 8192), (32768, 4096), (65536, 1024), (262144, 128), (4096, 32768), (16384, 4097), (64, 4096))
_EXACT = (("approximate", "none"),)
_PROBLEMS: dict[str, tuple[Problem, ...]] = {
    "layernorm": (
        Problem("layernorm", 65536, 768), Problem("layernorm", 65536, 1024), Problem("layernorm", 32768, 4096),
        Problem("layernorm", 4096, 32768), Problem("layernorm", 16384, 4097), Problem("layernorm", 64, 1024),
        Problem("layernorm", 65536, 384, dtype="float32"), Problem("layernorm", 32768, 1280, dtype="float16"),
        Problem("layernorm", 4096, 50257),
    ),
    "gelu_mul": (
        Problem("gelu_mul", 32768, 4096), Problem("gelu_mul", 32768, 4096, attrs=_EXACT), Problem("gelu_mul", 64, 9216),
    ),
    "swiglu": (
        Problem("swiglu", 32768, 4096), Problem("swiglu", 16384, 14336), Problem("swiglu", 131072, 768),
        Problem("swiglu", 16384, 4097), Problem("swiglu", 64, 14336),
    ),
    "geglu": (
        Problem("geglu", 32768, 4096), Problem("geglu", 32768, 4096, attrs=_EXACT), Problem("geglu", 16384, 4097),
    ),
    "silu": (Problem("silu", 32768, 4096),),
    "gelu": (Problem("gelu", 32768, 4096), Problem("gelu", 32768, 4096, attrs=_EXACT), Problem("gelu", 64, 4096)),
    "relu2": (Problem("relu2", 32768, 4096),),
    "rmsnorm_fp8": _scaled(
        "rmsnorm_fp8", (16384, 4096), (16384, 8192), (32768, 1024), (16384, 7168), (4096, 32768), (16384, 4097),
        (64, 4096),
    ),
    "add_rmsnorm_fp8": _scaled("add_rmsnorm_fp8", (16384, 4096), (16384, 8192), (64, 4096)),
    "quantize_fp8": _scaled("quantize_fp8", (16384, 8192), (16384, 14336), (64, 4096)),
    "silu_mul_fp8": _scaled("silu_mul_fp8", (16384, 4096), (16384, 14336), (32768, 2048), (64, 14336)),
    "cross_entropy": (
        Problem("cross_entropy", 16384, 8192), Problem("cross_entropy", 32768, 1024),
        Problem("cross_entropy", 8192, 32000), Problem("cross_entropy", 4096, 131072),
        Problem("cross_entropy", 8192, 50257), Problem("cross_entropy", 2048, 262144),
        Problem("cross_entropy", 4096, 32000, dtype="float32"), Problem("cross_entropy", 64, 32000),
        Problem("cross_entropy", 8, 128256),
    ),
    "softmax": (
        Problem("softmax", 16384, 8192), Problem("softmax", 32768, 1024), Problem("softmax", 4096, 131072),
        Problem("softmax", 8192, 50257), Problem("softmax", 16384, 4096, dtype="float32"), Problem("softmax", 64, 4096),
    ),
    "cross_entropy_step": (Problem("cross_entropy_step", 16384, 8192), Problem("cross_entropy_step", 2048, 128256)),
    "swiglu_again": (Problem("swiglu_again", 16384, 8192),),
    "adamw": tuple(Problem("adamw", 16384, 8192, weight=w, attrs=(("eps", 0.1),)) for w in (None, "float32")),
    "log_softmax": (Problem("log_softmax", 16384, 8192), Problem("log_softmax", 4096, 131072)),
    "sum": (Problem("sum", 16384, 8192), Problem("sum", 32768, 1024), Problem("sum", 64, 4096)),
    "mean": (Problem("mean", 16384, 8192), Problem("mean", 2048, 131072)),
    "rope": (
        _heads("rope", 4, 8192, 32, 128, 64), _heads("rope", 4, 8192, 32, 128, 64, strided=True),
        _heads("rope", 4, 8192, 8, 128, 64), _heads("rope", 4, 8192, 64, 96, 12), _heads("rope", 64, 1, 32, 128, 64),
    ),
    "qk_norm_rope": (
        _qk("qk_norm_rope", 4, 4096, 32, 8), _qk("qk_norm_rope", 4, 4096, 32, 8, strided=True),
        _qk("qk_norm_rope", 4, 8192, 16, 8), _qk("qk_norm_rope", 64, 1, 32, 8),
    ),
    # Channels of Mamba-2 2.7B, Jamba, Mamba 370M, LFM2, and a step of decoding.
    "causal_conv1d": (
        _conv(8, 4096, 5376), _conv(4, 8192, 8192), _conv(8, 4096, 2048), _conv(8, 4096, 2048, 3, "none"),
        _conv(1, 2048, 5376), _conv(64, 1, 5376), _conv(8, 4096, 5376, strided=True),
        _conv(8, 4096, 2048, dtype="float32"),
    ),
    **{name: tuple(Problem(name, *s) for s in _ROWS) for name in formulas.FUNCTIONS},
    # Prefills and steps of decoding: Llama 3 8B, also from a fused projection, DeepSeek-V3, Qwen 2.5 0.5B.
    "append_kv": (
        _append((32768,), 8, 128), _append((32768,), 8, 128, strided=True), _append((4096,), 128, 192, 128),
        _append((131072,), 2, 64), _append((256,), 8, 128), _append((64,), 8, 128, dtype="float32"),
        _append((64,), 2, 64), _append((32768,), 8, 128, pairs=64), _append((4, 8192), 8, 128),
        _append((4, 8192), 8, 128, pairs=64), _append((4, 8192), 8, 128, pairs=64, strided=True),
        _append((256,), 8, 128, pairs=64), _append((64, 1), 8, 128, pairs=64),
    ),
    # Routing of Mixtral, Qwen3-MoE, DeepSeek-V3 and GPT-OSS; sampling from Llama 3 and Qwen3.
    "topk": (
        _topk(65536, 128, 8), _topk(524288, 128, 8), _topk(1048576, 64, 4), _topk(262144, 256, 8, dtype="float32"),
        _topk(1024, 128256, 8), _topk(512, 151936, 50, dtype="float32"), _topk(8, 128256, 50),
    ),
    "route": (Problem("route", 65536, 128, attrs=(("k", 8),)), Problem("route", 262144, 8, attrs=(("k", 2),))),
    "permute_tokens": (permuted("permute_tokens", 8192, 4096, 2, 8), permuted("permute_tokens", 16384, 2048, 8, 128)),
    "unpermute_tokens": (permuted("unpermute_tokens", 8192, 4096, 2), permuted("unpermute_tokens", 16384, 2048, 8)),
    "l2norm": (Problem("l2norm", 524288, 128), Problem("l2norm", 131072, 768), Problem("l2norm", 32768, 4096)),
    "rope_at": (rotated_at(32768, 32, 128), rotated_at(32768, 8, 128)),
    "divergence": (Problem("divergence", 8192, 32000), Problem("divergence", 2048, 128256)),
    "soft_cross_entropy": (Problem("soft_cross_entropy", 131072, 1000), Problem("soft_cross_entropy", 4096, 32000)),
    "cross_entropy_metrics": (
        Problem("cross_entropy_metrics", 8192, 32000),
        Problem("cross_entropy_metrics", 8192, 32000, attrs=(("label_smoothing", 0.1),)),
        Problem("cross_entropy_metrics", 2048, 128256),
    ),
    "add_layernorm": (Problem("add_layernorm", 32768, 4096), Problem("add_layernorm", 65536, 768)),
    "head_rmsnorm": (normed_heads("head_rmsnorm", 16384, 32, 128), normed_heads("head_rmsnorm", 4096, 96, 128)),
    "head_layernorm": (normed_heads("head_layernorm", 16384, 32, 128),),
    # Of Stable Diffusion's UNet and decoder.
    **{
        op: (grouped(op, 64, 320, 4096), grouped(op, 16, 512, 16384), grouped(op, 32, 1280, 1024),
             grouped(op, 64, 320, 4096, attrs=(("activation", "silu"),)))
        for op in ("group_norm_first", "group_norm_last")
    },
    "rope_packed": (packed_heads(32768, 48, 40, 128),),
    "rope_fp8": (rotated_to_fp8(32768, 48, 128),),
    "cross_entropy_of_slice": (Problem("cross_entropy_of_slice", 8192, 32064),),
    **{
        op: (Problem(op, 16384, 4096, attrs=(("p", 0.1),)), Problem(op, 32768, 1024, attrs=(("p", 0.1),)))
        for op in ("dropout_add_rmsnorm", "dropout_add_layernorm")
    },
    "adamw_stochastic": (Problem("adamw_stochastic", 16384, 8192, attrs=(("eps", 0.1),)),),
    "causal_conv1d_channels_first": (convolved(8, 5376, 4096), convolved(8, 2048, 4096)),
    "scaled_fp8": (Problem("scaled_fp8", 16384, 4096), Problem("scaled_fp8", 16384, 14336)),
    "rope_bwd_joined": (_qk("rope_bwd_joined", 4, 4096, 32, 8), _qk("rope_bwd_joined", 4, 4096, 32, 8, 64)),
}  # fmt: skip
_SPECIAL = (
    Problem("rmsnorm", 64, 4096, hot=True),
    Problem("rmsnorm", 64, 4096),
    Problem("rmsnorm", 8, 16384),
    Problem("rmsnorm", 32768, 4096, weight="float32"),
    Problem("rmsnorm", 32768, 4096, strided=True),
    Problem("rmsnorm", 16384, 4096, dtype="float32"),
    Problem("rmsnorm", 32768, 2304),
    Problem("rmsnorm", 4096, 50257),
    Problem("rmsnorm", 1024, 262144),
    Problem("add_rmsnorm", 64, 4096),
    Problem("add_rmsnorm", 16384, 4096, residual="float32", weight="float32"),
    Problem("add_rmsnorm", 16384, 4096, strided=True),
    Problem("silu_mul", 64, 14336),
    Problem("silu_mul", 16384, 4096, dtype="float32"),
    Problem("silu_mul", 16384, 4096, strided=True),
)
