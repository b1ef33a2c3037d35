"""``enable()``: ``torch.compile`` replaces patterns in models by cute ops. The models themselves stay as they are.

It finds Hugging Face's RMS norms (Llama's and Gemma's form, with the residual add before them), ``F.rms_norm``,
``F.layer_norm``, ``silu(gate) * up``, ``gelu(gate) * up`` and ``F.cross_entropy``. It removes an attention mask that is
computed from sizes alone and is the one of ``is_causal=True``, or masks nothing: Hugging Face's models compute such
masks when they are compiled for training, and any mask keeps attention from its flash kernel.

The pass works on the graph that Dynamo captures, before autograd, so a replaced op brings its own gradient. Values
differ from the original's by rounding only: a cute op rounds once, to the dtype of its input.

>>> import cute_ops_torch.inductor
>>> cute_ops_torch.inductor.enable()  # doctest: +SKIP
>>> torch.compile(model)(**inputs)  # doctest: +SKIP

What was replaced is logged at level INFO by the logger ``cute_ops`` and counted in :data:`replaced`.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Collection
from typing import Any

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from cute_ops.errors import meant, suggesting
from cute_ops_torch import registry
from cute_ops_torch.inductor import cache_key
from cute_ops_torch.inductor.fx import value_of
from cute_ops_torch.inductor.patterns import PATTERNS

log = logging.getLogger("cute_ops")
DEVICES = ("cuda", "cpu")
replaced: Counter[str] = Counter()
"""How often each op has replaced something in this process."""


@suggesting
def enable(ops: Collection[str] | None = None, devices: Collection[str] = ("cuda",)) -> None:
    """Let ``torch.compile`` replace patterns from now on. What is compiled already stays.

    Args:
        ops: names of ops to put in, and ``"attention_mask"``; all by default.
        devices: device types whose graphs are changed. On a CPU ops run their references, slower than Inductor's code.

    Raises:
        TypeError: a text instead of a list.
        ValueError: an op that replaces nothing; a device type without cute ops.
    """
    for name, given in (("ops", ops), ("devices", devices)):
        if isinstance(given, str):
            problem = f"argument `{name}` is the text {given!r}, expected a list of names: [{given!r}]."
            raise TypeError(f"cute_ops_torch.inductor.enable: {problem}")
    if wrong := sorted(set(devices) - set(DEVICES)):
        raise ValueError(f"cute_ops_torch.inductor.enable: no cute op runs on devices {wrong}; there are {DEVICES}")
    unknown = set(ops or ()) - set(PATTERNS)
    if unknown:
        named = ", ".join(f"{name}{meant(name, PATTERNS)}" for name in sorted(unknown))
        raise ValueError(f"cute_ops_torch.inductor.enable: {named} replaces nothing; known are {', '.join(PATTERNS)}")
    disable()
    # Code from Inductor's caches calls ops whose fake kernels have not run in this process.
    registry.register_lowerings()
    chosen = tuple(name for name in PATTERNS if ops is None or name in ops)
    config.pre_grad_custom_pass = Replace(chosen, tuple(devices), config.pre_grad_custom_pass)


def disable() -> None:
    """Undo :func:`enable`."""
    if isinstance(config.pre_grad_custom_pass, Replace):
        config.pre_grad_custom_pass = config.pre_grad_custom_pass.previous


class Replace(CustomGraphPass):
    """The pass. It first runs the one that was set before it."""

    def __init__(self, ops: tuple[str, ...], devices: tuple[str, ...], previous: Any) -> None:
        self.ops, self.devices, self.previous = ops, devices, previous

    def __call__(self, graph: Graph) -> None:
        for earlier in self._earlier():
            earlier(graph)
        found: Counter[str] = Counter()
        for name in self.ops:
            for node in list(graph.nodes):
                value = value_of(node)
                if node.users and value is not None and value.device.type in self.devices:
                    found[name] += bool(PATTERNS[name](graph, node))
        found = +found
        if found:
            graph.eliminate_dead_code()
            graph.lint()
            replaced.update(found)
            log.info("torch.compile: replaced by cute ops: %s", ", ".join(f"{n} x {k}" for n, k in found.items()))

    def uuid(self) -> Any:
        before = [earlier.uuid() if isinstance(earlier, CustomGraphPass) else None for earlier in self._earlier()]
        if not all(before):
            return None  # an earlier pass without a uuid: torch must not cache
        what = (cache_key.package(), self.ops, self.devices, before)
        return hashlib.sha256(repr(what).encode()).digest()

    def _earlier(self) -> tuple[Any, ...]:
        if self.previous is None:
            return ()
        return tuple(self.previous) if isinstance(self.previous, (list, tuple)) else (self.previous,)
