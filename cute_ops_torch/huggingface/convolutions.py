"""Convolutions whose windows neither overlap nor leave gaps, such as embeddings of patches: a product of these windows.

cuDNN multiplies such patches at a few percent of the tensor cores' rate: there are few channels, and rows of odd
length. The product's output has channels last, as rows of tokens, which is what models make of it next.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from cute_ops_torch.huggingface.bypass import parameter, takes
from cute_ops_torch.huggingface.match import Replacement
from cute_ops_torch.huggingface.shared_input import projections
from cute_ops_torch.huggingface.source import caller

Tensor = torch.Tensor
_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Elements of 16 bits that rows of a product are a multiple of: tensor cores read others at a fraction of their rate.
_ALIGNMENT = 8


def _convolve(self: Any, input: Tensor) -> Any:
    """Convolve an input with any number of windows."""
    return _multiply(self, input)


def _convolve_whole(self: Any, input: Tensor) -> Any:
    """Convolve an input that is one window: its output lies in memory as a convolution's does."""
    return _multiply(self, input) if input.shape[2:] == self.kernel_size else NotImplemented


def _multiply(self: Any, input: Tensor) -> Any:
    weight, bias = parameter(self, "weight"), self.bias
    if weight is None or (bias is not None and parameter(self, "bias") is None) or not _fits(self, input, weight, bias):
        return NotImplemented
    counts = [n // size for n, size in zip(input.shape[2:], self.kernel_size, strict=True)]
    x = _windows(input, counts, self.kernel_size)
    (out,) = projections(_padded(x), [_padded(weight.flatten(1))], [bias])
    return out.view(len(input), *counts, len(weight)).movedim(-1, 1)


def _fits(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product takes a call. In float32 products and convolutions are rounded by other rules (TF32)."""
    alike = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    if not alike or x.dtype.itemsize != 2 or torch.is_autocast_enabled(x.device.type):
        return False
    batched = x.ndim == weight.ndim and x.shape[1] == weight.shape[1]
    whole = batched and all(n >= size for n, size in zip(x.shape[2:], module.kernel_size, strict=True))
    return whole and takes(x, weight, bias)


def _windows(x: Tensor, counts: list[int], sizes: tuple[int, ...]) -> Tensor:
    """The windows of all examples, a row each, in the order of a kernel's elements."""
    for dim, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        place = 2 + 2 * dim
        x = x.narrow(place, 0, count * size).unflatten(place, (count, size))
    places = [2 + 2 * dim for dim in range(len(sizes))]
    rows = x.permute(0, *places, 1, *(place + 1 for place in places))
    return rows.reshape(-1, x.shape[1] * math.prod(sizes))


def _padded(rows: Tensor) -> Tensor:
    more = -rows.shape[-1] % _ALIGNMENT
    return nn.functional.pad(rows, (0, more)) if more else rows


def _is_of_patches(reads: Callable[[ast.FunctionDef, str], bool], module: Any, model: nn.Module) -> bool:
    """Whether a convolution's windows are the patches of its input, and the module around ``reads`` its output so."""
    if type(module) not in _KINDS or module.padding_mode != "zeros" or module.groups != 1:
        return False
    padded = module.padding != "valid" and any(module.padding)
    apart = module.kernel_size == module.stride and not padded and set(module.dilation) == {1}
    around = caller(module, model) if apart else None
    return around is not None and reads(*around)


def _as_rows(tree: ast.FunctionDef, call: str) -> bool:
    """Whether a ``forward`` reads a module's output by ``view(-1, n)``, as those do whose input is one window."""
    text = ast.unparse(tree)
    return text.count(f"{call}(") == 1 and any(
        isinstance(n, ast.Call) and ast.unparse(n).startswith(f"{call}(") and _is(n.func, "view")
        and len(n.args) == 2 and ast.unparse(n.args[0]) == "-1"
        for n in ast.walk(tree)
    )  # fmt: skip


def _flattens(tree: ast.FunctionDef, call: str) -> bool:
    """Whether a ``forward`` reads a module's output by ``flatten(2)``, and else its shape at most.

    The output's strides are others than a convolution's, at which another view may fail.
    """
    nodes = list(ast.walk(tree))
    around = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
    calls = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == call]
    if len(calls) != 1:
        return False
    use = around[id(calls[0])]
    uses = _uses(use, nodes, around) if isinstance(use, ast.Assign) else [use]
    return bool(uses) and all(_is_flatten(each, around) for each in uses)


def _uses(given: ast.Assign, nodes: list[ast.AST], around: dict[int, ast.AST]) -> list[ast.AST]:
    """The uses of the value of an assignment to one name, but for reading its shape, until the name gets what was
    made of that.
    """
    name = ast.unparse(given.targets[0]) if len(given.targets) == 1 else ""
    reads = [n for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
    later = sorted((n for n in reads if n.lineno > given.lineno), key=lambda n: (n.lineno, n.col_offset))
    found: list[ast.AST] = []
    for read in later:
        if not _is(use := around[id(read)], "shape"):
            found.append(use)
            while not isinstance(use, ast.stmt):
                use = around[id(use)]
            if isinstance(use, ast.Assign) and [ast.unparse(t) for t in use.targets] == [name]:
                break
    return found


def _is_flatten(node: ast.AST, around: dict[int, ast.AST]) -> bool:
    """Whether a node is ``flatten`` of ``x.flatten(2)``."""
    return _is(node, "flatten") and ast.unparse(around[id(node)]).endswith(".flatten(2)")


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


REPLACEMENTS = (
    Replacement("linear", partial(_is_of_patches, _flattens), lambda original: _convolve),
    Replacement("linear", partial(_is_of_patches, _as_rows), lambda original: _convolve_whole),
)
