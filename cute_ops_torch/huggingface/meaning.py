"""Modules recognised by what they compute, where the source of their ``forward`` is not known.

A norm, an activation or a gated MLP is traced on fake tensors, and the canonical text of its graph says which op it
equals, whatever it is written with. Before it is used, op and original are compared on random inputs of one to five
dims, gradients included. What is known of a module holds for others of its class that have attributes, parameters and
buffers of the same names, and the same numbers, flags, texts and functions among them. A module where one of these has
changed since runs its original ``forward``.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from cute_ops.fusion.analyse import Found, analyse
from cute_ops.fusion.graph import Node
from cute_ops_torch import functions
from cute_ops_torch.huggingface import recorded_meanings, residual_norm
from cute_ops_torch.huggingface.bypass import calls, declined, takes, unchanged
from cute_ops_torch.huggingface.match import Forward, Replacement, innermost, named_as
from cute_ops_torch.huggingface.residual_norm import Norm
from cute_ops_torch.huggingface.trial import (
    Watching,
    agreeing_ranks,
    all_close,
    attributes_of_class,
    is_plain,
    is_shape,
    names_of,
    set_training,
    trial,
)

log = logging.getLogger("cute_ops")
# In which dtypes, and whether in training, modules are traced.
_TRACES = ((torch.float32, True), (torch.float32, False), (torch.bfloat16, True), (torch.float16, False))
_LEAVES = ("rmsnorm", "layernorm", "gelu", "relu2")
_GATES = ("silu_mul", "gelu_mul", "swiglu", "geglu")
_ROWS = (2, 3)
# Of a layer's columns at least so many are compared.
_NARROW = 16
# What is kept of a module that is no op of ours.
_NO_OP = {"op": None, "tensors": (), "attrs": (), "last": ""}
# By class and attributes; None of those that are no op of ours.
_known: dict[Any, Replacement | None] = {}


class Meaning(NamedTuple):
    """The expression that a module computes.

    Attributes:
        op: the op's name.
        tensors: for each argument of the op the parameter that it is, or the linear layer whose output it is; empty
            for the module's input.
        attrs: the op's attributes.
        last: of an MLP the linear layer that follows.
    """

    op: str
    tensors: tuple[tuple[str, str], ...]
    attrs: tuple[tuple[str, Any], ...]
    last: str = ""


def replacement_of(module: nn.Module) -> Replacement | None:
    """The replacement of a module by its meaning; None where no op of ours has it."""
    shape = _shape(module)
    if shape is None or not _takes_one(type(module).forward):
        return None
    state = state_of(module)
    classes = tuple(type(child) for child in module.modules())
    key = (type(module), type(module).forward, state, names_of(module), classes)
    if key not in _known:
        _known[key] = _replacement(module, shape, state)
    return _known[key]


def meaning_of(module: nn.Module, n: int) -> Meaning | None:
    """The op of ours that a module computes of rows of n elements, in every dtype, in training and in evaluation; None
    if there is none.
    """
    logged = logging.getLogger("torch._subclasses.fake_tensor")  # says what a forward refuses, which is no error here
    before, logged.disabled = logged.disabled, True
    try:
        with trial(module) as seen:
            found = {_traced_meaning(module, n, dtype, mode) for dtype, mode in _TRACES}
    finally:
        logged.disabled = before
    return found.pop() if len(found) == 1 and not seen.more else None


def _shape(module: nn.Module) -> int | None:
    """The length of the rows that a module of one of the three kinds takes; None of other modules."""
    layers = [child for child in module.modules() if isinstance(child, nn.Linear)]
    if layers:
        within = all(not [*child.parameters(recurse=False)] for child in module.modules() if child not in layers)
        return layers[0].in_features if len(layers) > 1 and within else None
    if [*module.children()]:
        return None
    tensors = [*module.parameters(), *module.buffers()]
    if not tensors:
        return next((value[0] for value in vars(module).values() if is_shape(value) and len(value) == 1), 12)
    sizes = {tuple(tensor.shape) for tensor in tensors}
    return next(iter(sizes))[0] if len(sizes) == 1 and tensors[0].ndim == 1 else None


@cache
def _takes_one(forward: Any) -> bool:
    """Whether a ``forward`` that is written in Python and is not torch's takes one tensor."""
    forward = innermost(forward)
    if forward is None or forward.__module__.startswith("torch."):
        return False
    parameters = [*inspect.signature(forward).parameters.values()][1:]
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters[1:])


def state_of(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The numbers, flags, texts and functions that a module, the modules in it and their classes have as attributes.

    What a class has and its module, too, stands there for both: ``type(self).eps`` and ``self.eps`` may differ.
    """
    return tuple(
        (f"{owner}.{key}", value)
        for owner, attributes in _attributes(module)
        for key, value in attributes.items()
        if is_plain(value) and key not in ("training", "_is_hf_initialized")
        and not key.startswith("_cute")
    )  # fmt: skip


def _attributes(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """The attributes of a module and of those in it, and those of their classes that theirs hide, by their owners."""
    for name, child in module.named_modules():
        own, shared = vars(child), attributes_of_class(type(child))
        yield name, {**shared, **own}
        yield f"{name}.__class__".lstrip("."), {key: value for key, value in shared.items() if key in own}


def _replacement(module: nn.Module, n: int, state: Any) -> Replacement | None:
    try:
        meaning, ranks = checked_meaning(module, n, state)
        if meaning is None:
            return None
    except Exception as error:  # a forward may raise, or branch on what a trace does not know
        log.debug("%s is not recognised: %s: %s", type(module).__name__, type(error).__name__, error)
        return None
    log.debug("%s computes %s", type(module).__name__, meaning.op)
    ours = _forward(meaning, dict(state), {name: type(child) for name, child in module.named_modules()}, ranks)
    others = [
        name for name, _ in module.named_children() if name not in {meaning.last, *dict(meaning.tensors).values()}
    ]
    unused = others[0] if len(others) == 1 else ""
    is_norm = meaning.op in ("rmsnorm", "layernorm") and ranks >= {3, 4}  # what layers and heads give it
    norm = _read_norm(meaning, ours) if is_norm else None
    return Replacement(
        meaning.op, lambda module, model: True, lambda original: named_as(ours, original), unused, norm=norm
    )


def _read_norm(meaning: Meaning, ours: Any) -> Callable[[Any], Norm | None]:
    """A function that reads a norm from a module of this meaning: None where the module's attributes changed."""
    places, attrs = dict(meaning.tensors), dict(meaning.attrs)

    def read(module: Any) -> Norm | None:
        if not ours.same(module):
            return None
        weight, bias = (getattr(module, places[name]) if name in places else None for name in ("weight", "bias"))
        return Norm(meaning.op, weight, bias, attrs["eps"], attrs.get("weight_offset", 0.0))

    return read


def checked_meaning(module: nn.Module, n: int, state: Any) -> tuple[Meaning | None, frozenset[int]]:
    """The op that a module computes, which another process or a trace found, if it agrees with the original; and the
    numbers of dims of inputs for which it does.
    """
    key = recorded_meanings.key_of(module, n, state)
    if (found := recorded_meanings.meanings.recall(key)) is not None:
        if found["op"] is None:
            return None, frozenset()
        tensors, attrs = (tuple((name, value) for name, value in found[each]) for each in ("tensors", "attrs"))
        meaning = Meaning(found["op"], tensors, attrs, found["last"])
        if meaning.op in (*_LEAVES, *_GATES) and (ranks := _agreeing(module, meaning, n)):
            return meaning, ranks
    traced = meaning_of(module, n)
    ranks = _agreeing(module, traced, n) if traced is not None else frozenset()
    if traced is not None and not ranks:  # which another process may see otherwise
        return None, ranks
    recorded_meanings.meanings.keep(key, _NO_OP if traced is None else traced._asdict())
    return traced, ranks


def _traced_meaning(module: nn.Module, n: int, dtype: torch.dtype, training: bool) -> Meaning | None:
    from cute_ops_torch.inductor.front import Front  # importing Inductor's neighbours takes a second
    from cute_ops_torch.inductor.trace import traced

    set_training(module, training)
    with torch.device("meta"):
        x = torch.empty(*_ROWS, n, dtype=dtype)
    graph, names = traced(module, (x,), dtype=dtype)
    front = Front(graph)
    places = dict(zip(front.inputs, [*names, ""], strict=True))
    layers = {node: layer for node in front.graph.nodes if (layer := _layer(node, places, module)) is not None}
    analysis = analyse(front.graph, whole=[node for node in layers if node.op != "contract"])
    reasons = analysis.reasons.keys() - layers.keys()
    if reasons or [output.dtype for output in front.graph.outputs] != [str(dtype).removeprefix("torch.")]:
        return None
    (output,) = front.graph.outputs
    gates = [found for found in analysis.found if found.meaning is not None and found.meaning.op in _GATES]
    return _of_mlp(gates, output, places, layers) if gates else _of_leaf(analysis.found, output, places)


def _of_leaf(expressions: Sequence[Found], output: Node, places: Mapping[Node, str]) -> Meaning | None:
    """One op of the module's input and its tensors."""
    (found,) = expressions if len(expressions) == 1 else (None,)
    if found is None or found.roots != (output,):
        return None
    meaning = found.meaning
    if meaning is None or meaning.op not in _LEAVES or not all(leaf.node in places for leaf in found.leaves):
        return None
    tensors = tuple((name, places[leaf.node]) for name, leaf in zip(meaning.operands, found.leaves, strict=True))
    return Meaning(meaning.op, tensors, tuple(sorted(meaning.attrs.items())))


def _of_mlp(gates: list[Found], output: Node, places: Mapping[Node, str], layers: Mapping[Node, str]) -> Meaning | None:
    """A gated MLP: the linear layers whose outputs the gate reads, and the one that follows."""
    (gate, *more), last = gates, layers.get(output)
    if more or last is None or _input(output) is not gate.roots[0] or gate.meaning is None:
        return None
    found = [layers.get(leaf.node) for leaf in gate.leaves]
    if any(
        layer is None or places.get(_input(leaf.node)) != "" for layer, leaf in zip(found, gate.leaves, strict=True)
    ):
        return None
    tensors = tuple((name, str(layer)) for name, layer in zip(gate.meaning.operands, found, strict=True))
    return Meaning(gate.meaning.op, tensors, tuple(sorted(gate.meaning.attrs.items())), last)


def _input(layer: Node) -> Node:
    """The input of the linear layer with this output."""
    product = layer if layer.op == "contract" else next(arg for arg in layer.args if arg.op == "contract")
    return product.args[0]


def _layer(output: Node, places: Mapping[Node, str], module: nn.Module) -> str | None:
    """The name of the linear layer that a node is the output of, whether it is a product or that and a bias."""
    if (output.op, output.attr) == ("primitive", "add"):
        for product, bias in (output.args, output.args[::-1]):
            owner = _of_weight(product, places, module)
            if owner is not None and places.get(bias) == f"{owner}.bias":
                return owner
        return None
    owner = _of_weight(output, places, module)
    return None if owner is None or module.get_submodule(owner).bias is not None else owner


def _of_weight(product: Node, places: Mapping[Node, str], module: nn.Module) -> str | None:
    if product.op != "contract":
        return None
    owner, _, own = places.get(product.args[1], "").rpartition(".")
    plain = own == "weight" and product.attr[1] == (1,) and isinstance(module.get_submodule(owner), nn.Linear)
    return owner if plain else None


def _forward(
    meaning: Meaning, state: Mapping[str, Any], types: Mapping[str, type[nn.Module]], ranks: frozenset[int]
) -> Forward:
    """A ``forward`` that runs the op for inputs of these numbers of dims. It leaves to the original what the recognised
    module was not.
    """
    function = getattr(functions, meaning.op)
    attrs, arguments = dict(meaning.attrs), dict(meaning.tensors)
    layers = {*arguments.values(), meaning.last} - {""}
    others = tuple((name, cls, unchanged(cls)) for name, cls in types.items() if name and name not in layers)
    places = ((name.rpartition("."), value) for name, value in state.items())
    checked = tuple((owner, key, value) for (owner, _, key), value in places if owner not in layers)

    def same(self: nn.Module) -> bool:
        for owner, key, value in checked:
            if getattr(within(self, owner), key, None) != value:
                return False
        for name, cls, is_unchanged in others:
            child = within(self, name)
            kind = type(child)
            if getattr(kind, "_cute_original", kind) is not cls or not calls(child, kind.forward):
                return False
            if not is_unchanged(child):
                return False
        return True

    is_norm = meaning.op in ("rmsnorm", "layernorm")

    def of_leaf(self: nn.Module, x: torch.Tensor) -> Any:
        if is_norm and (normed := residual_norm.pop(self, x)) is not None:
            return normed
        tensors = {name: getattr(self, place) if place else x for name, place in arguments.items()}
        if torch.is_autocast_enabled(x.device.type):
            return NotImplemented
        return function(**tensors, **attrs) if _alike(x, *tensors.values()) else declined(self, *tensors.values())

    def of_mlp(self: nn.Module, x: torch.Tensor) -> Any:
        tensors = {name: self.get_submodule(layer)(x) for name, layer in arguments.items()}
        first, *rest = tensors.values()
        if not takes(*tensors.values()) or any((t.dtype, t.shape) != (first.dtype, first.shape) for t in rest):
            return NotImplemented
        return self.get_submodule(meaning.last)(function(**tensors, **attrs))

    run = of_mlp if meaning.last else of_leaf

    def forward(self: nn.Module, hidden_states: torch.Tensor, *more: Any, **options: Any) -> Any:
        other = more or options or hidden_states.ndim not in ranks
        return NotImplemented if other or not same(self) else run(self, hidden_states)

    vars(forward)["same"] = same
    return forward


def within(module: nn.Module, name: str) -> Any:
    """The submodule of a name, or what else is in its place; None where there is nothing."""
    found: Any = module
    for part in name.split(".") if name else ():
        found = getattr(found, part, None)
    return found


def _alike(x: torch.Tensor, *tensors: torch.Tensor) -> bool:
    """Whether our op takes a module's input and parameters, which have an element for each column and its dtype."""
    fits = all(t is x or (t.shape == x.shape[-1:] and t.dtype == x.dtype) for t in tensors)
    return x.ndim > 0 and fits and takes(*tensors)


def _agreeing(module: nn.Module, meaning: Meaning, n: int) -> frozenset[int]:
    """The numbers of dims of inputs for which op and original agree; empty where the module is no function of its input
    and its plain attributes. Large layers are compared by fewer columns, unless the module asks for their number.
    """
    own = {name: tensor.shape for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    part = _part(own.values()) if meaning.last else 1
    for each in dict.fromkeys((part, 1)):
        shapes = {name: tuple(size // each for size in shape) for name, shape in own.items()}

        def agrees(rows: tuple[int, ...], watching: Watching) -> bool:
            return _agrees(module, meaning, (*rows, n // each), shapes, watching)  # noqa: B023

        if ranks := agreeing_ranks(module, agrees):
            return ranks
    return frozenset()


def _part(shapes: Iterable[torch.Size]) -> int:
    """A number that divides the sizes of all tensors so that few elements are left."""
    sizes = {size for shape in shapes for size in shape}
    most = math.gcd(*sizes)
    return next(part for part in range(max(min(sizes) // _NARROW, 1), 0, -1) if most % part == 0)


def _agrees(
    module: nn.Module, meaning: Meaning, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]],
    watching: Watching,
) -> bool:  # fmt: skip
    """Whether op and original give the same results and gradients for random numbers of this shape."""
    draw = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=draw).mul_(scale).requires_grad_()

    # Sums of many columns would be large, and their roundings, too.
    own = {name: random(size, min(4 / size[-1] ** 0.5, 1.0) if len(size) > 1 else 1.0) for name, size in shapes.items()}
    x = random(shape)
    with torch.enable_grad():
        with watching():
            want = torch.func.functional_call(module, own, (x,))
            cotangent = torch.randn(want.shape, generator=draw)
            wanted: Any = torch.autograd.grad(want, [x, *own.values()], cotangent, allow_unused=True)
        got = _computed(meaning, own, x)
        given: Any = torch.autograd.grad(got, [x, *own.values()], cotangent, allow_unused=True)
    return all_close([(got, want), *zip(given, wanted, strict=True)])


def _computed(meaning: Meaning, own: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    function: Callable[..., torch.Tensor] = getattr(functions, meaning.op)
    if not meaning.last:
        return function(**{name: own[place] if place else x for name, place in meaning.tensors}, **dict(meaning.attrs))

    def linear(x: torch.Tensor, layer: str) -> torch.Tensor:
        return nn.functional.linear(x, own[f"{layer}.weight"], own.get(f"{layer}.bias"))

    tensors = {name: linear(x, layer) for name, layer in meaning.tensors}
    return linear(function(**tensors, **dict(meaning.attrs)), meaning.last)
