"""Writes torch's multi-head attention out in Dynamo's graph, where it is one node: products, attention, a product.

So its attention and its products are found as those of other models are. Weights that nothing reads are not computed,
and transposes by which ``torch.nn.MultiheadAttention`` brings the batch behind the sequence are undone. In evaluation
without gradients a whole ``torch.nn.TransformerEncoderLayer`` is one node; it is written out, too.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from cute_ops_torch.composite.multi_head import MultiHead, multi_head_attention, torch_attention, written_attention
from cute_ops_torch.inductor.attention_mask import ALL, CAUSAL, sides_of
from cute_ops_torch.inductor.effects import example, name_of
from cute_ops_torch.inductor.fx import calls, value_of
from cute_ops_torch.inductor.insertion import Insertion
from cute_ops_torch.inductor.strides import lie_alike, relaid, relay, same_sizes

_HALVES = (torch.bfloat16, torch.float16)
WRITTEN_OUT = (F.multi_head_attention_forward, torch._transformer_encoder_layer_fwd)
_PADDING = 1  # the type of a layer's mask of the batch and keys
_ARGUMENTS = inspect.signature(F.multi_head_attention_forward)
# Arguments that ours lacks.
_OTHERS = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")


def write_out(graph: Graph, node: Node) -> bool:
    """Write a call of multi-head attention, or of an encoder's layer, out if it computes in 16 bits, without a mask or
    with one that ours or torch's attention takes, and nothing reads its weights.
    """
    return (_write_attention if node.target is WRITTEN_OUT[0] else _write_layer)(graph, node)


def _write_attention(graph: Graph, node: Node) -> bool:
    given = _ARGUMENTS.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    said = given.arguments
    result = _only_result(node)
    if result is None or any(said[name] not in (None, False) for name in _OTHERS) or not _are_plain(node):
        return False
    dropout = _number(said["dropout_p"]) if said["training"] else 0.0
    if (dropout and said["need_weights"]) or (said["is_causal"] and said["attn_mask"] is None):
        return False
    masked = said["attn_mask"] is not None or said["key_padding_mask"] is not None
    call = _call(said)
    attend = written_attention if said["need_weights"] and masked else torch_attention(dropout)

    def run(given: MultiHead) -> torch.Tensor:
        made = multi_head_attention(given, attend)
        return made.transpose(0, 1) if given.batch_first else made

    return _put(graph, result, run, call)


def _write_layer(graph: Graph, node: Node) -> bool:
    if node.kwargs:
        return False
    given: Any = node.args
    layer, made = Layer(*given), value_of(node)
    sides = ALL if layer.mask is None else _sides_of_layer(graph, layer, node)
    if made is None or made.dtype not in _HALVES or not _are_plain(node) or sides not in (ALL, CAUSAL):
        return False
    return _put(graph, node, lambda given: encoder_layer(given, sides == CAUSAL), layer._replace(mask=None))


def _sides_of_layer(graph: Graph, layer: Layer, node: Node) -> tuple[int, int] | None:
    """The band of keys that a layer's mask shows, as :func:`sides_of` says it; None if the mask is none. A padding mask
    has a row for each example, which says nothing of queries unless all are shown. Boolean masks, which are true where
    they hide, are none.
    """
    mask, sides = value_of(layer.mask), sides_of(graph, layer.mask, node)
    is_added = mask is not None and mask.is_floating_point()
    return sides if is_added and (layer.mask_type != _PADDING or sides == ALL) else None


class Layer(NamedTuple):
    """The arguments of torch's function of a layer of an encoder, with its names but for those of weights: of the
    attention, the norms and the MLP.
    """

    src: Any
    embed_dim: int
    num_heads: int
    in_weight: Any
    in_bias: Any
    out_weight: Any
    out_bias: Any
    use_gelu: bool
    norm_first: bool
    eps: float
    norm1_weight: Any
    norm1_bias: Any
    norm2_weight: Any
    norm2_bias: Any
    up_weight: Any
    up_bias: Any
    down_weight: Any
    down_bias: Any
    mask: Any = None
    mask_type: int | None = None


def encoder_layer(layer: Layer, causal: bool) -> torch.Tensor:
    """The result of a ``torch.nn.TransformerEncoderLayer`` in evaluation, by torch's functions of its parts."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        projections = layer.in_weight, layer.in_bias, (None,) * 3, layer.out_weight, layer.out_bias
        given = MultiHead(x, x, x, layer.num_heads, *projections, causal=causal, batch_first=True)
        return multi_head_attention(given, torch_attention(0.0))

    def mlp(x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, layer.up_weight, layer.up_bias)
        hidden = F.gelu(hidden) if layer.use_gelu else torch.relu(hidden)
        return F.linear(hidden, layer.down_weight, layer.down_bias)

    def norm1(x: torch.Tensor) -> torch.Tensor:
        return torch.layer_norm(x, (layer.embed_dim,), layer.norm1_weight, layer.norm1_bias, layer.eps)

    def norm2(x: torch.Tensor) -> torch.Tensor:
        return torch.layer_norm(x, (layer.embed_dim,), layer.norm2_weight, layer.norm2_bias, layer.eps)

    x = layer.src
    if layer.norm_first:
        x = torch.add(x, attend(norm1(x)))
        return torch.add(x, mlp(norm2(x)))
    x = norm1(torch.add(x, attend(x)))
    return norm2(torch.add(x, mlp(x)))


def functional_masks(graph: Graph) -> None:
    """Fill new tensors of zeros out of place where torch's modules make masks of them in place."""
    for node in graph.find_nodes(op="call_method", target="masked_fill_"):
        zeros, made = node.args[0], value_of(node)
        alone = isinstance(zeros, Node) and calls(zeros, "zeros_like") and [*zeros.users] == [node]
        if alone and made is not None and not made.requires_grad:
            node.target = "masked_fill"


def _number(given: Any) -> float:
    """A number, which is guarded where the graph has a symbol of it."""
    return float(guard_scalar(example(given)) if isinstance(given, Node) else given)


def _only_result(node: Node) -> Node | None:
    """The node of a call's first result; None where it is in none of 16 bits, or something reads the second one."""
    places = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    others = [user for user in node.users if user.target is not operator.getitem]
    result = places.pop(0, None)
    read = others or any(each.users for each in places.values())
    made = value_of(result)
    return result if not read and made is not None and made.dtype in _HALVES else None


def _are_plain(node: Node) -> bool:
    given = [each for each in map(example, node.all_input_nodes) if isinstance(each, torch.Tensor)]
    return all(type(each) is FakeTensor and not each.is_nested for each in given)


def _call(said: Mapping[str, Any]) -> MultiHead:
    """The arguments of ``F.multi_head_attention_forward`` as a :class:`MultiHead`. Where ``nn.MultiheadAttention`` has
    transposed batch and sequence of its three inputs before the call, these are the inputs, batch first.
    """
    sources = [_turned(said[name]) for name in ("query", "key", "value")]
    batch_first = None not in sources
    query, key, value = sources if batch_first else [said[name] for name in ("query", "key", "value")]
    causal = said["is_causal"] and said["key_padding_mask"] is None and not said["need_weights"]
    weights = said["q_proj_weight"], said["k_proj_weight"], said["v_proj_weight"]
    own = said["use_separate_proj_weight"]
    return MultiHead(
        query, key, value, said["num_heads"], None if own else said["in_proj_weight"], said["in_proj_bias"], weights,
        said["out_proj_weight"], said["out_proj_bias"], None if causal else said["attn_mask"],
        said["key_padding_mask"], causal, batch_first,
    )  # fmt: skip


def _turned(node: Node) -> Any:
    """``x`` of ``x.transpose(1, 0)`` of three dims; None of others."""
    made = value_of(node)
    turned = made is not None and made.ndim == 3 and calls(node, "transpose") and {*node.args[1:]} == {0, 1}
    return node.args[0] if turned else None


def _put(graph: Graph, node: Node, run: Callable[[Any], torch.Tensor], call: Any) -> bool:
    """Put what a function calls in the place of a node, if all that read the node take what it returns."""
    was, recorder = example(node), _Recorder(graph, node)
    try:
        made = recorder.record(run, call)
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        recorder.put.undo()
        return False
    new = example(made)
    fits = was.dtype == new.dtype and same_sizes(was.shape, new.shape)
    others = ({} if lie_alike(new, was) else relaid(graph, {node: new})) if fits else None
    if others is None:
        recorder.put.undo()
        return False
    relay(others)
    node.replace_all_uses_with(made)
    return True


class _Recorder(TorchFunctionMode):
    """Puts a node before another one for each of torch's functions that Python code calls.

    Args:
        graph: Dynamo's graph.
        before: the node; what it has by gradients and autocast, others get, too.
    """

    def __init__(self, graph: Graph, before: Node) -> None:
        super().__init__()
        self.put = Insertion(graph, before)
        self._nodes: dict[int, Node] = {}

    def record(self, run: Callable[[Any], torch.Tensor], given: Any) -> Node:
        """The node of what a function returns, which is given the values of nodes."""
        values = map_aggregate(given, self._value)
        mode = next(each.fake_mode for each in tree_leaves(values) if isinstance(each, FakeTensor))
        with _as_there(self.put), mode, enable_python_dispatcher(), self:
            made = run(values)
        return self._nodes[id(made)]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = func(*args, **kwargs)
        if isinstance(value, (tuple, list)) and any(isinstance(each, torch.Tensor) for each in value):
            whole = self._call(func, args, kwargs, tuple(value))
            for i, each in enumerate(value):
                self._call(operator.getitem, (whole, i), {}, each)
        elif isinstance(value, torch.Tensor):
            self._call(func, args, kwargs, value)
        return value

    def _call(self, func: Any, args: Any, kwargs: Any, value: Any) -> Node:
        name, graph = str(func.__name__), self.put.graph
        is_method = getattr(torch.Tensor, name, None) is func
        create, target = (graph.call_method, name) if is_method else (graph.call_function, func)
        positional, named = map_aggregate((args, kwargs), self._node)
        node = self.put.insert(create, target, positional, named, value)
        self._nodes[id(value)] = node
        return node

    def _value(self, given: Any) -> Any:
        if not isinstance(given, Node):
            return given
        value = example(given)
        self._nodes[id(value)] = given
        return value

    def _node(self, given: Any) -> Any:
        return self._nodes.get(id(given), given) if isinstance(given, torch.Tensor) else given


@contextmanager
def _as_there(put: Insertion) -> Iterator[None]:
    """Gradients and autocast as they are where nodes are put."""
    entered: dict[Node, Any] = {}
    for node in put.graph.nodes:
        if node is put.before:
            break
        if node.op == "call_function" and name_of(node.target) == "_enter_autocast":
            entered[node] = node.args
        elif node.op == "call_function" and name_of(node.target) == "_exit_autocast":
            entered.pop(node.args[0], None)
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(example(put.before).requires_grad))
        for device, dtype, enabled, cached in entered.values():
            stack.enter_context(torch.autocast(device, dtype, enabled, cached))
        yield
