"""Strides of a graph's values after a new tensor takes the place of one with other strides.

An op of ours writes its results row by row. If the program had other strides, the nodes that read a result change
theirs, too: views, and functions that torch computes in the layout of their inputs (sums, activations, convolutions,
group norms), and so on. Parts that are replaced later must see the new strides. The program must return the old ones:
its outputs are copied into them, by Inductor in the kernel that computes the output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from heapq import heappop, heappush
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node

from cute_ops_torch.inductor.effects import example, has_effects, name_of, storage_of, written_by
from cute_ops_torch.inductor.emit import Emitter

_GIVEN = ("placeholder", "get_attr")


def lie_alike(made: torch.Tensor, was: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same strides."""
    strides = zip(made.stride(), was.stride(), was.shape, strict=True)
    return all(_text_of(a) == _text_of(b) for a, b, size in strides if not (isinstance(size, int) and size == 1))


def _text_of(size: Any) -> str:
    """A size as a number or a symbol: to compare texts guards nothing."""
    return str(size.node.expr) if isinstance(size, torch.SymInt) else str(size)


def same_sizes(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether sizes are the same numbers or the same symbols; nothing is guarded."""
    return [*map(_text_of, a)] == [*map(_text_of, b)]


def relaid(graph: Graph, instead: Mapping[Node, Any]) -> dict[Node, Any] | None:
    """The new values of all nodes whose strides change once some nodes hold other values; None if they may not change.

    They may not change if a view cannot be made of the new values, if a value that was a copy would share memory that
    is written to, or if a result that changes is a view of an argument or of another result.
    """
    order, found, waiting = {node: i for i, node in enumerate(graph.nodes)}, dict[Node, Any](), list[tuple[int, Node]]()

    def read(node: Node) -> None:
        for user in node.users:
            heappush(waiting, (order[user], user))

    for node in instead:
        read(node)
    while waiting:
        node = heappop(waiting)[1]
        if node in instead:
            continue
        if node.op == "output":
            if any(
                each in instead or (each in found and not _can_be_copied(each, node)) for each in node.all_input_nodes
            ):
                return None
            continue
        values = {**instead, **found}
        made = None if name_of(node.target) == "as_strided" else _run(node, values)
        if made is None or _shares_what_is_written(graph, node, made, values):
            if _is_needed(node, instead):
                return None
        elif not _alike(made, found.get(node, example(node))):
            found[node] = made
            read(node)
    return found


def relay(values: Mapping[Node, Any]) -> None:
    """Give nodes new values, and copy those that the program returns into their old strides."""
    for node, value in values.items():
        was = example(node)
        node.meta["val" if "val" in node.meta else "example_value"] = value
        for output in [user for user in node.users if user.op == "output"]:
            output.replace_input_with(node, _copied(node, was, output))


def _can_be_copied(node: Node, output: Node) -> bool:
    """Whether the program cannot tell a copy of its result from the result: it is a dense array of Dynamo's graph, its
    dims in some order, that shares its memory with no argument and no other result.
    """
    was = example(node)
    if "example_value" not in node.meta or type(was) is not FakeTensor or not (memory := storage_of(was)):
        return False
    results = set(output.all_input_nodes)
    others = (each for each in node.graph.nodes if each is not node and (each.op in _GIVEN or each in results))
    return _order_of(was) is not None and all(storage_of(example(each)) != memory for each in others)


def _order_of(was: FakeTensor) -> tuple[int, ...] | None:
    """The order of a tensor's dims in which it is laid out row by row; None where there is none."""
    try:
        with _without_trace(was.fake_mode.shape_env), was.fake_mode:
            order = tuple(sorted(range(was.ndim), key=was.stride, reverse=True))
            return order if was.permute(order).is_contiguous() else None
    except Exception:  # sizes that depend on data cannot be compared
        return None


def _copied(node: Node, was: FakeTensor, output: Node) -> Node:
    """A node that copies the value of another one into the strides of ``was``."""
    order = _order_of(was)
    assert order is not None, node
    emit = Emitter(node.graph, output, lambda _: None)
    rows = emit.function(torch.clone, emit.method("permute", node, order), memory_format=torch.contiguous_format)
    return emit.method("permute", rows, tuple(order.index(dim) for dim in range(len(order))))


def _alike(made: Any, was: Any) -> bool:
    if isinstance(made, (tuple, list)):
        return len(made) == len(was) and all(map(_alike, made, was))
    if not isinstance(made, torch.Tensor):
        return True
    return isinstance(was, torch.Tensor) and lie_alike(made, was)


def _run(node: Node, values: Mapping[Node, Any]) -> Any:
    """The result of a node's function for other values of its inputs; None if it does not take them."""
    was = example(node)
    run = getattr(torch.Tensor, str(node.target), None) if node.op == "call_method" else node.target
    if not callable(run) or was is None or isinstance(run, torch._ops.HigherOrderOperator):
        return None
    args, kwargs = torch.fx.map_arg(
        (node.args, dict(node.kwargs)), lambda each: values[each] if each in values else example(each)
    )
    fakes = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)]
    mode: Any = fakes[0].fake_mode if fakes else nullcontext()
    sizes: Any = mode.shape_env if fakes else None
    with torch.no_grad(), torch._C._DisableAutocast(), _without_trace(sizes), mode, enable_python_dispatcher():
        try:
            made = run(*args, **kwargs)
        except Exception:  # it may be any function, of operands in several dtypes under autocast
            made = _run_in_one_dtype(run, args, kwargs, was)
        return torch.utils._pytree.tree_map(_as, made, was) if _has_sizes(made, was) else None


@contextmanager
def _without_trace(sizes: Any) -> Iterator[None]:
    """Let functions run that guard sizes, or return tensors of new ones, as ``x[mask]``: tracing knows of neither."""
    if sizes is None:
        yield
        return
    with sizes.suppress_guards(), sizes.ignore_fresh_unbacked_symbols():
        yield


def _has_sizes(made: Any, was: Any) -> bool:
    """Whether a result has the sizes of another one; those that depend on data are new each time."""
    if isinstance(made, (tuple, list)):
        return len(made) == len(was) and all(map(_has_sizes, made, was))
    if isinstance(made, torch.Tensor):
        return isinstance(was, torch.Tensor) and same_sizes(made.shape, was.shape)
    return (made is None) == (was is None)


def _run_in_one_dtype(run: Any, args: Any, kwargs: Any, was: Any) -> Any:
    """The result of a function whose operands autocast would have cast to the dtype of ``was``; None if it raises."""
    if not isinstance(was, torch.Tensor) or not was.is_floating_point():
        return None

    def cast(each: Any) -> Any:
        return each.to(was.dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each

    try:
        return run(*torch.utils._pytree.tree_map(cast, args), **torch.utils._pytree.tree_map(cast, kwargs))
    except Exception:
        return None


def _as(made: Any, was: Any) -> Any:
    """A tensor in the dtype of another one, which autocast had given, and with a gradient if that has one."""
    if not isinstance(made, torch.Tensor) or not isinstance(was, torch.Tensor):
        return made
    made = made if made.dtype == was.dtype else made.to(was.dtype)
    return made.requires_grad_() if was.requires_grad and not made.requires_grad else made


def _shares_what_is_written(graph: Graph, node: Node, made: Any, values: Mapping[Node, Any]) -> bool:
    """Whether a new value shares its memory with an input of the node where the old one was a copy, as that of
    ``x.contiguous()`` may be, and one of the two is written to.
    """
    if not isinstance(made, torch.Tensor):
        return False
    memory, own = storage_of(made), storage_of(example(node))
    for each in node.all_input_nodes:
        if each in values and storage_of(values[each]) == memory and storage_of(example(each)) != own:
            written = {storage_of(example(one)) for other in graph.nodes for one in written_by(other)}
            return bool({own, storage_of(example(each))} & written)
    return False


def _is_needed(node: Node, instead: Mapping[Node, Any]) -> bool:
    """Whether the program's results or effects depend on a node by a path that passes no replaced node."""
    waiting, seen = [node], {node}
    while waiting:
        each = waiting.pop()
        if each.op == "output" or has_effects(each):
            return True
        more = [user for user in each.users if user not in seen and user not in instead]
        seen.update(more)
        waiting += more
    return False
