"""The replacement of an expression that was found in a graph: an op of ours, or Inductor's own code.

Row reductions become ops, which read and write each tensor once. Of a product with an epilogue the model of cycles
expects the times of our kernel and of the framework's product followed by a pass; ours must be shorter. Pointwise
expressions stay with Inductor, which fuses them, too, unless ``max-autotune`` asks for both forms to be measured: then
they become ops, and :mod:`fusion_choice <cute_ops_torch.inductor.fusion_choice>` decides where each is lowered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from cute_ops.composite.gated_mlp import gated_mlp, gated_mlp_apart, mlp_ops
from cute_ops.composite.linear_add_rmsnorm import linear_add_rmsnorm, linear_add_rstd
from cute_ops.composite.mlp import mlp
from cute_ops.declaration.binding import Binding
from cute_ops.declaration.op import Op
from cute_ops.expressions.primitives import PRIMITIVES
from cute_ops.fusion import choose as neutral
from cute_ops.fusion.analyse import Found
from cute_ops.fusion.choose import Choice
from cute_ops.fusion.composite import NAMES as COMPOSITES
from cute_ops.fusion.composite import Composite
from cute_ops.fusion.express import Leaf
from cute_ops.fusion.own import Meanings
from cute_ops.jit import target
from cute_ops.jit.plan import signature
from cute_ops.ops.gemm import mlp_products
from cute_ops_torch.composite.scaled_dot_product import computes
from cute_ops_torch.inductor.complex_numbers import is_of_complex
from cute_ops_torch.inductor.effects import example
from cute_ops_torch.inductor.emit import Call, Refused
from cute_ops_torch.inductor.fusion_choice import asked_for
from cute_ops_torch.inductor.fx import hint
from cute_ops_torch.library.tensors import bind_tensors, memory

# What may be put into graphs, besides the ops that are found by their meaning.
OTHERS = (
    "rope", "fused", "linear", "cross_entropy", "linear_cross_entropy", "attention_mask", "attention", "embedding",
)  # fmt: skip
KNOWN = (*neutral.BY_MEANING, *COMPOSITES, *OTHERS)
DEVICE = "cuda"  # whose expressions Inductor may keep
_STAYS = "Inductor fuses it, too; mode='max-autotune' measures both forms"


class Chooser:
    """The choice for one graph.

    Args:
        names: what may be put in.
        devices: the types of devices whose graphs are changed.
        exact: whether the program's own roundings are kept.
        own: ops of the user's that take part, before all others.
    """

    def __init__(
        self, names: Collection[str], devices: Collection[str], exact: bool, own: Meanings | None = None
    ) -> None:
        self.names, self.devices, self.exact, self.own = names, devices, exact, own or Meanings(())

    def choose(self, found: Found, products: list[int], device: str) -> Choice:
        """The ops that an expression on a device of this type becomes, as far as its text tells."""
        if device not in self.devices:
            return Choice("", why=f"it is not asked for on {device or 'no device'}")
        if (own := self.own.of(found, products)) is not None:
            return Choice("own", own[0].own.op.name, product=own[1], own=own[0])
        return self._of_ours(found, products, device)

    def _of_ours(self, found: Found, products: list[int], device: str) -> Choice:
        """The ops of ours that an expression becomes."""
        choice = neutral.choose(found, products, exact=self.exact)
        if choice.kind == "linear" and _adds_bias(found):
            return Choice("", why="the framework's product adds its bias")
        if choice.kind == "linear" and "linear" not in self.names:
            choice = neutral.choose(found, exact=self.exact)
        if choice.name and choice.name not in self.names:
            return Choice("", why=f"{choice.name} is not asked for")
        if choice.kind == "fused" and not found.reduces and any(map(_is_rotated, found.leaves)):
            return Choice("", why="it is part of a rotation, which only epilogues of products compute")
        return _if_faster(choice, device) if choice.kind == "fused" and not found.reduces else choice

    def judge(self, call: Call) -> float | None:
        """The microseconds that a call is expected to save, where a model tells.

        Raises:
            Refused: none are.
        """
        tensors = [None if node is None else example(node) for node in call.arrays]
        return _gain(call.op, tensors, call.attrs)

    def choose_composite(self, found: Composite, device: str) -> Choice:
        """The composite that a part of a layer on a device of this type becomes."""
        if device not in self.devices:
            return Choice("", why=f"it is not asked for on {device or 'no device'}")
        if found.name not in self.names:
            return Choice("", why=f"{found.name} is not asked for")
        if any(self.own.of(each, range(len(each.leaves))) for each in found.found):
            return Choice("", why="an op of yours computes a part of it")
        choice = Choice("composite", found.name)
        # Inductor has no code for complex numbers: torch's functions write and read them in float32 at each step.
        own = found.name == "rope" and not is_of_complex(found.operands["cos"])
        return _if_faster(choice, device) if own else choice

    def judge_composite(self, name: str, call: Call) -> float | None:
        """The microseconds that the epilogue of its product is expected to save, where a model tells.

        Raises:
            Refused: none are, or the product has so few rows that joining weights costs as much as a pass saves.
        """
        given = dict(zip(call.op.inputs, (node and example(node) for node in call.arrays), strict=True))
        if name in ("attention", "rope"):
            if name == "attention":
                _check_attention(given["q"], given["k"])
            return None
        x = given["x"]
        rows, k = (hint(size) for size in (x.numel() // x.shape[-1], x.shape[-1]))
        least = {"gated_mlp": 2 * k if "w_gate" in given else 0, "qkv_rope": k}.get(name, 0)
        if target_of(x.device) is not None and rows < least:
            raise Refused(f"{rows} rows are too few: joining the weights would cost more than a pass")
        if name == "qkv_rope":
            return self.judge(call)
        if name == "linear_add_rmsnorm":
            across = call.op is linear_add_rmsnorm(True)
            return _gain(linear_add_rstd(across), [given[key] for key in ("x", "weight", "residual")], call.attrs)
        if name == "mlp":
            shaped = [given[key] for key in ("x", "w_up", "b_up") if given[key] is not None]
            return _gain(mlp_products.up(call.op is mlp("pre", True), len(shaped) == 3, False), shaped, call.attrs)
        transposed = call.op in (gated_mlp_apart(True), gated_mlp("pre", True))
        halves = [t for key, t in given.items() if key in ("w_gate", "w_up", "w_gate_up")]
        weight = torch.cat(halves, 1 if transposed else 0)
        return _gain(mlp_ops(transposed).gated, [x, weight], call.attrs)


def _if_faster(choice: Choice, device: str) -> Choice:
    """The choice of what Inductor computes in one pass, too."""
    return choice if device != DEVICE or asked_for(torch.device(device)) else Choice("", why=_STAYS)


def _check_attention(q: torch.Tensor, k: torch.Tensor) -> None:
    """Refuse an attention that has no kernel, or of which products are faster."""
    if not computes(q):
        raise Refused("attention takes 16 bits, on a CPU or Hopper")
    if target_of(q.device) is not None and (why := neutral.too_few_queries(tuple(q.shape), tuple(k.shape))):
        raise Refused(why)


def _gain(op: Op, tensors: Sequence[torch.Tensor | None], attrs: Sequence[Any]) -> float | None:
    """The microseconds that a call is expected to save, where a model tells; raises :class:`Refused` if none are."""
    on = target_of(next(t.device for t in tensors if t is not None))
    if op.fallback is None or on is None:
        return None
    given = [None if t is None else _concrete(t) for t in tensors]
    binding = bind_tensors(op, given, attrs)
    if binding.dtype_without_kernel is not None:
        raise Refused(f"no kernel of a product takes {binding.dtype_without_kernel}")
    return expected_gain(binding, memory(op, given, addresses=False), on)


def target_of(device: torch.device) -> target.Target | None:
    """The GPU that kernels run on; None on a CPU."""
    return target.of_device(device.index or 0) if device.type == "cuda" else None


def expected_gain(binding: Binding, lies: Any, on: target.Target) -> float | None:
    """The microseconds that our kernel of a product with an epilogue is expected to save; None of what was measured to
    be as fast, without a model.

    Raises:
        Refused: the framework's product and a pass are expected to be faster.
    """
    fallback = binding.op.fallback
    assert fallback is not None
    problem = signature(binding, lies, on).problem
    reason = fallback.when(problem)
    if reason:
        raise Refused(f"the framework's product is expected to be faster: {reason}")
    times = fallback.expected(problem) if fallback.expected else None
    return times and times[1] - times[0]


def _concrete(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, with the sizes that were traced."""
    sizes, strides = (tuple(map(hint, numbers)) for numbers in (tensor.shape, tensor.stride()))
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="meta")


def _adds_bias(found: Found) -> bool:
    """Whether an expression only adds a bias, as the framework's product does, too: of columns or both halves."""
    words = [node.primitive for node in found.expression.nodes if node.primitive in PRIMITIVES]
    operands = sorted(str(leaf.operand) for leaf in found.leaves)
    return {*words} == {"add"} and operands in (["r", "t"], ["2r", "2t"]) and len(words) == len(found.roots)


def _is_rotated(leaf: Leaf) -> bool:
    return leaf.node.op == "primitive" and isinstance(leaf.node.attr, tuple)
