"""The calls of an op from one place in a compiled graph."""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_ops.constants import make_room
from cute_ops.declaration.op import Op
from cute_ops_torch.host import codegen
from cute_ops_torch.host.compiled_call import Run
from cute_ops_torch.host.guards import aligned
from cute_ops_torch.host.launch import Launcher


class CallSite(NamedTuple):
    """The state that all calls from one place in a compiled graph share.

    Attributes:
        given: names of the inputs that are not None.
        attrs: all attributes.
        wanted: names of the outputs that are read.
        anywhere: names of the inputs that may lie at any address; others are 16-byte aligned.
        sized: whether sizes differ from call to call; a key of them is the first argument then.
    """

    given: tuple[str, ...]
    attrs: tuple[Any, ...]
    wanted: tuple[str, ...]
    anywhere: tuple[str, ...]
    sized: bool


def call_site(op: Op, site: CallSite, launcher: Launcher) -> Run:
    """``call([key, ]*given inputs, *wanted outputs)``: looks at sizes and alignment only, where these may differ."""
    fills: dict[Any, Run] = {}

    def plan(key: Any, *given: Any) -> Run:
        inputs = dict(zip(site.given, given, strict=True))
        make_room(fills)
        fill = fills[key] = launcher.find([inputs.get(name) for name in op.inputs], site.attrs).fill(site.wanted)
        return fill

    values = {"_get": fills.get, "_plan": plan}
    outputs = [f"_out{k}" for k, _ in enumerate(site.wanted)]
    key, given, tensors = "_key" if site.sized else "None", ", ".join(site.given), ", ".join([*site.given, *outputs])
    parameters = f"_key, {tensors}" if site.sized else tensors
    make = codegen.maker(
        codegen.GUARDED, f"{op.name}.site", values, name=op.name, parameters=parameters, arguments=parameters,
        condition=aligned(dict.fromkeys(site.anywhere, 0)) if site.anywhere else "True",
        result=f"(_get({key}) or _plan({key}, {given}))({tensors})",
    )  # fmt: skip
    call: Run = make(_otherwise=any_call(op, site, launcher.into), **values)
    return call


def any_call(op: Op, site: CallSite, into: Run) -> Run:
    """The call of a site by ``into(*inputs, *attributes, *outputs)``, whatever the calls are like."""

    def call(*args: Any) -> None:
        tensors = args[1:] if site.sized else args
        count = len(site.given)
        inputs = dict(zip(site.given, tensors[:count], strict=True))
        outputs = dict(zip(site.wanted, tensors[count:], strict=True))
        into(*map(inputs.get, op.inputs), *site.attrs, *map(outputs.get, op.outputs))

    return call
