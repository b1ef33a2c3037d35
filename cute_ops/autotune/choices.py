"""Measured choices between our kernel of a product and the framework's product.

With ``CUTE_OPS_TUNE=1`` the first call of a class measures both, as do calls that ``torch.compile`` compiles in the
mode ``max-autotune``. The cache folder keeps the result for both frameworks.

It is kept among the winners, for the heuristic's config and the kernel's sources, under the class of calls and one more
word, or two where n or k is off a vector: then our kernel reads copies, and cuBLAS is slower than at other sizes of the
class.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from cute_ops import env
from cute_ops.autotune import winners
from cute_ops.autotune.winners import Winner
from cute_ops.declaration.op import Op
from cute_ops.errors import CacheError
from cute_ops.jit.plan import Signature
from cute_ops.ops.gemm import choice

log = logging.getLogger("cute_ops")
WORD, OFF_VECTOR, FIELD, OURS, THEIRS = "fused=auto", "off-vector", "runs", "kernel", "framework"

_known: dict[winners.Key, Times] = {}
_asked: set[str] = set()  # names of ops that a compiler was asked to run in their fastest form


class Times(NamedTuple):
    """Microseconds of a call by our kernel, and by the framework's product with what follows it."""

    ours: float
    theirs: float

    @property
    def reason(self) -> str:
        """Why the framework's product runs; empty where our kernel is as fast."""
        return f"{self.theirs:.3g} us were measured, {self.ours:.3g} of our kernel" if self.theirs < self.ours else ""


def ask(op: Op) -> None:
    """Measure this op's calls from now on, unless ``CUTE_OPS_TUNE=0`` says that nothing measured shall be used."""
    _asked.add(op.name)


def asked(op: Op) -> bool:
    """Whether the first call of a class shall be measured."""
    mode = env.TUNE.read()
    return mode == "1" or (mode != "0" and op.name in _asked)


def measured(op: Op, call: Signature) -> Times | None:
    """The measurement of a class of calls; None if there is none, or none is to be used."""
    if env.TUNE.read() == "0":
        return None
    key = _key(op, call)
    if key not in _known:
        for known in winners.stores():
            winner = known.get(key)
            if winner and winner.measured.get("sources") == winners.sources_of(op) and "us" in winner.measured:
                _known[key] = Times(*winner.measured["us"])
                break
    return _known.get(key)


def keep(op: Op, call: Signature, times: Times) -> None:
    """Use what was measured from now on, and keep it for other processes."""
    key = _key(op, call)
    _known[key] = times
    (name, heuristic), runs = key, THEIRS if times.reason else OURS
    log.info("measured %s: %.3g us by our kernel, %.3g by the framework's product", name, times.ours, times.theirs)
    try:
        winners.remember(
            [Winner(name, dict(heuristic), {FIELD: runs}, {"us": [*times], "sources": winners.sources_of(op)})]
        )
    except CacheError as error:
        log.warning("%s", error)


def forget() -> None:
    """Drop what this process knows; files on disk stay."""
    _known.clear()
    _asked.clear()


def _key(op: Op, call: Signature) -> winners.Key:
    name, heuristic = winners.key_of(op, call.problem, op.config(call.problem))
    return f"{name}{f' {OFF_VECTOR}' if choice.off_vector(call.problem) else ''} {WORD}", heuristic
