"""Let the gradient of a rotation read the gradients of queries, keys and values without the copy that joins them.

A projection to all three is one op with one result, which the program splits, so autograd joins their gradients by a
copy. A kernel of ours rotates three arrays back and writes one, and so needs no copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from cute_ops.composite.qkv_rope import SIZES
from cute_ops.ops.rotary.rope import rope_bwd_joined
from cute_ops_torch.inductor.aten import AtenEmitter
from cute_ops_torch.inductor.effects import example
from cute_ops_torch.registry import define

_NAMES = {f"cute::qkv_rope_{size}_bwd": size for size in SIZES}


def take_apart(graph: Graph) -> int:
    """Let each gradient of a rotation read the parts of what is joined for it; returns how many do."""
    found = 0
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name in _NAMES:
            # A graph leaves out arguments that are the schema's defaults.
            default = {each.name: each.default_value for each in schema.arguments}
            given = default | dict(zip(default, node.args, strict=False)) | node.kwargs
            found += _without_copy(graph, node, given, _NAMES[schema.name])
    return found


def _without_copy(graph: Graph, node: Node, given: dict[str, Any], size: int) -> bool:
    joined, cos, sin, heads, *_ = given.values()
    if not isinstance(joined, Node) or joined.target is not torch.ops.aten.cat.default or len(joined.users) > 1:
        return False
    parts: Any = joined.args[0]
    shape = example(joined).shape
    axis = joined.args[1] if len(joined.args) > 1 else 0
    every = shape[-1] // size
    columns = [each * size for each in (2 * heads - every, every - heads, every - heads)]
    if axis not in (-1, len(shape) - 1) or [example(part).shape[-1] for part in parts] != columns:
        return False
    rows = [each if isinstance(each, int) else -1 for each in shape[:-1]]
    if rows.count(-1) > 1 or (-1 in rows and 0 in rows):
        return False
    emitter = AtenEmitter(graph, node, lambda value: None)
    reshape = torch.ops.aten.reshape.default
    by_head = [
        emitter.function(reshape, part, [*rows, n // size, size]) for part, n in zip(parts, columns, strict=True)
    ]
    define(rope_bwd_joined).lower()
    back = emitter.function(define(rope_bwd_joined).overload, *by_head, cos, sin, *rope_bwd_joined.attrs.values())
    node.replace_all_uses_with(emitter.function(reshape, back, [*rows, shape[-1]]))
    graph.erase_node(node)
    graph.erase_node(joined)
    return True
