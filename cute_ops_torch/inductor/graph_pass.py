"""``enable()``: ``torch.compile`` runs models on our ops. The models themselves stay as they are.

A pass over the graph that Dynamo captures, before autograd, replaces what one of our ops computes by the op, which
brings its own gradient: found by its meaning (:mod:`cute_ops.fusion`), whatever it is written with. Losses are found by
their call (:mod:`cute_ops_torch.inductor.losses`), and an attention mask that says no more than ``is_causal=True`` is
removed (:mod:`cute_ops_torch.inductor.attention_mask`). Multi-head attention of ``torch.nn``, which is one node in that
graph, is written out before (:mod:`cute_ops_torch.inductor.multi_head`). Products that are left after autograd take
their neighbours along (:mod:`cute_ops_torch.inductor.after_autograd`).

>>> import cute_ops_torch.inductor
>>> cute_ops_torch.inductor.enable()  # doctest: +SKIP
>>> torch.compile(model)(**inputs)  # doctest: +SKIP
>>> print(cute_ops_torch.inductor.report())  # doctest: +SKIP
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from cute_ops.declaration.op import Op
from cute_ops.errors import meant, suggesting
from cute_ops.fusion.own import Meanings, Own
from cute_ops.fusion.report import Entry, Report
from cute_ops_torch import registry
from cute_ops_torch.inductor import cache_key
from cute_ops_torch.inductor.after_autograd import ReplaceAfter, passes
from cute_ops_torch.inductor.attention_mask import replace_mask
from cute_ops_torch.inductor.calls import replace_call
from cute_ops_torch.inductor.choice import KNOWN, Chooser
from cute_ops_torch.inductor.dynamo import sweep
from cute_ops_torch.inductor.effects import is_transformed
from cute_ops_torch.inductor.fx import value_of
from cute_ops_torch.inductor.losses import replace_loss
from cute_ops_torch.inductor.multi_head import WRITTEN_OUT, functional_masks, write_out
from cute_ops_torch.inductor.report import entries_of, entry_of_node
from cute_ops_torch.inductor.rewrite import Rewritten, Unreadable, rewrite

log = logging.getLogger("cute_ops")
DEVICES = ("cuda", "cpu")
_CALLED = {"attention": "scaled_dot_product_attention"}
replaced: Counter[str] = Counter()
"""How often each op has replaced something in this process."""
_entries: list[Entry] = []


class Enabled:
    """The result of :func:`enable`: as a context manager it ends with a call of :func:`disable`."""

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *error: object) -> None:
        disable()


@suggesting
def enable(
    ops: Collection[str] | None = None, devices: Collection[str] = ("cuda",), *, exact: bool = False,
    logits: bool = True, own: Sequence[Op | Own] = (),
) -> Enabled:  # fmt: skip
    """Let ``torch.compile`` run models on our ops from now on. What is compiled already stays.

        cute_ops_torch.inductor.enable()
        model = torch.compile(model)

    Also a context manager, ``with enable(): ...``, for what is compiled inside.

    Args:
        ops: names of ops to put in, and ``"fused"`` (an op of its own), ``"linear"`` (a product with an epilogue) and
            ``"attention_mask"``; all by default.
        devices: device types whose graphs are changed. On a CPU ops run their references, slower than Inductor's code.
        exact: round every value as the model does, where otherwise values inside of a replaced part stay in float32 and
            its outputs are rounded once.
        logits: keep logits that a model returns beside its loss. With False a model that is trained returns NaNs of
            their shape in one element per row: its loss comes straight from the hidden states, and neither logits nor
            their gradient, zeros where nothing uses them, ever exist. :func:`patch` and Liger return None there.
        own: ops of your own, which replace what their references compute, before any of ours: ``[op]``. Of a product
            say what follows it: ``[Own(op, meaning, product=("x", "weight"))]`` with ``meaning(xp, acc, bias)``.

    Raises:
        TypeError: a text instead of a list; one of your own that is no op.
        ValueError: an op that replaces nothing; a device type without cute ops; an op of your own of which no
            expression says what it computes.
    """
    for name, given in (("ops", ops), ("devices", devices)):
        if isinstance(given, str):
            problem = f"argument `{name}` is the text {given!r}, expected a list of names: [{given!r}]."
            raise TypeError(f"cute_ops_torch.inductor.enable: {problem}")
    if wrong := sorted(set(devices) - set(DEVICES)):
        raise ValueError(f"cute_ops_torch.inductor.enable: no cute op runs on devices {wrong}; there are {DEVICES}")
    unknown = set(ops or ()) - set(KNOWN)
    if unknown:
        named = ", ".join(f"{name}{meant(name, KNOWN)}" for name in sorted(unknown))
        raise ValueError(f"cute_ops_torch.inductor.enable: {named} replaces nothing; known are {', '.join(KNOWN)}")
    meanings = _meanings(own)
    disable()
    # Code from Inductor's caches calls ops whose fake kernels have not run in this process.
    registry.register_lowerings()
    chosen = tuple(name for name in KNOWN if ops is None or name in ops)
    timing = getattr(config, "pre_grad_pass_timing", "")
    config.pre_grad_custom_pass = Replace(
        chosen, tuple(devices), exact, config.pre_grad_custom_pass, timing, logits,
        own=meanings,
    )  # fmt: skip
    if timing:
        # Before torch looks for compiled code: the pass makes the ops that such code calls.
        config.pre_grad_pass_timing = "early"
    key = repr((cache_key.package(), chosen, tuple(devices), exact, _key_of(meanings)))
    config.post_grad_custom_pre_pass = ReplaceAfter(
        chosen, tuple(devices), exact, config.post_grad_custom_pre_pass, entries=_entries, replaced=replaced, key=key,
        own=meanings,
    )  # fmt: skip
    _entries.clear()
    return Enabled()


def _meanings(own: Sequence[Op | Own]) -> Meanings:
    try:
        return Meanings(own)
    except (TypeError, ValueError) as error:
        raise type(error)(f"cute_ops_torch.inductor.enable: {error}") from error


def _key_of(own: Meanings) -> str:
    """The key of ops of the user's, with their meanings, in Inductor's caches."""
    return repr(([cache_key.of_op(each.op) for each in own.ops], own.key))


def disable() -> None:
    """Undo :func:`enable`."""
    now = config.pre_grad_custom_pass
    if isinstance(now, Replace):
        config.pre_grad_custom_pass = now.previous
        if now.timing:
            config.pre_grad_pass_timing = now.timing  # type: ignore[assignment]
    after = config.post_grad_custom_pre_pass
    if isinstance(after, ReplaceAfter):
        config.post_grad_custom_pre_pass = after.previous


def report() -> Report:
    """The report on all graphs since :func:`enable`: every product and region, what it became, or why it stays.

    ``print`` shows a table. A graph that is compiled again, for other shapes, counts again.
    """
    return Report("torch.compile", _entries)


class Replace(CustomGraphPass):
    """The pass. It first runs the one that was set before it.

    Attributes:
        ops: what may be put in.
        devices: the types of devices whose graphs are changed.
        exact: whether the program's own roundings are kept.
        previous: the pass, or passes, that were set before.
        timing: torch's setting of when passes run, as it was; empty in versions without it.
        logits: whether logits that a model returns are kept.
        own: ops of the user's.
    """

    def __init__(
        self, ops: tuple[str, ...], devices: tuple[str, ...], exact: bool, previous: Any, timing: str = "",
        logits: bool = True, *, own: Meanings | None = None,
    ) -> None:  # fmt: skip
        self.own = Meanings(()) if own is None else own
        self.ops, self.devices, self.exact, self.logits = ops, devices, exact, logits
        self.previous, self.timing = previous, timing

    def __call__(self, graph: Graph) -> None:
        for earlier in self._earlier():
            earlier(graph)
        if not self._concerns(graph):
            return
        found: Counter[str] = Counter()
        entries: list[Entry] = []
        if "attention" in self.ops and not self.exact:
            self._write_out(graph)
        if "attention_mask" in self.ops:
            entries += _without_masks(graph)
            found.update(entry.becomes for entry in entries)
        owner = graph.owning_module
        assert owner is not None
        made: Rewritten | None = None
        try:
            made = rewrite(owner, Chooser(self.ops, self.devices, self.exact, self.own), self.exact)
            found.update(part.choice.name for part in made.parts if part.choice.kind)
        except Unreadable as error:  # a model must compile, whatever it is written with
            log.warning("torch.compile: a graph stays as it is: %s", error)
            entries.append(Entry("", "a graph", str(error), "", "", 1))
        for node in list(graph.nodes):
            if entry := self._replaced(graph, node):
                found[entry.becomes] += 1
                entries.append(entry)
        if found:
            sweep(graph)
            graph.lint()
            replaced.update(found)
            log.info("torch.compile: replaced by cute ops: %s", ", ".join(f"{n} x {k}" for n, k in found.items()))
        _entries.extend([*(entries_of(made, graph) if made else ()), *entries])

    def _write_out(self, graph: Graph) -> None:
        """Write multi-head attention out, whose parts are then found."""
        called = [each for target in WRITTEN_OUT for each in graph.find_nodes(op="call_function", target=target)]
        if on := [each for each in called if any(map(self._lies_on, each.all_input_nodes))]:
            functional_masks(graph)
            if sum(write_out(graph, node) for node in on):
                sweep(graph)

    def _lies_on(self, node: Node) -> bool:
        """Whether a node's tensor is on a device whose graphs are changed."""
        value = value_of(node)
        return value is not None and value.device.type in self.devices

    def _replaced(self, graph: Graph, node: Node) -> Entry | None:
        """The entry of a call that an op of ours takes the place of, as it now does; None of any other."""
        value = value_of(node)
        if not node.users or value is None or value.device.type not in self.devices:
            return None
        if value.is_nested or is_transformed(value):
            return None
        name, why = replace_loss(graph, node, self.ops, self.logits)
        if name:
            return entry_of_node(name, "cross entropy", node)._replace(why=why)
        if not self.exact and (name := replace_call(graph, node, self.ops)):
            return entry_of_node(name, f"a call of torch's {_CALLED.get(name, name)}", node)
        return None

    def _concerns(self, graph: Graph) -> bool:
        return any(map(self._lies_on, graph.nodes))

    def uuid(self) -> Any:
        before = [earlier.uuid() if isinstance(earlier, CustomGraphPass) else None for earlier in self._earlier()]
        if not all(before):
            return None  # an earlier pass without a uuid: torch must not cache
        what = cache_key.package(), self.ops, self.devices, self.exact, self.logits, _key_of(self.own), before
        return hashlib.sha256(repr(what).encode()).digest()

    def _earlier(self) -> tuple[Any, ...]:
        return passes(self.previous)


def _without_masks(graph: Graph) -> list[Entry]:
    """Leave out masks of attention that say no more than ``is_causal``; an entry of each."""
    made = [
        entry_of_node("attention_mask", "a mask that says no more than is_causal", node)
        for node in list(graph.nodes)
        if node.users and not is_transformed(value_of(node)) and replace_mask(graph, node)
    ]
    if made:
        sweep(graph)
    return made
