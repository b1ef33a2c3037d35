"""Random sequences of what is done to a Hugging Face model that is compiled with the graph pass.

Those of :mod:`tests.torch.drawn_treatments`, with ``torch.compile`` in the place of ``patch``: of the whole model or of
its ``forward``, with or without dynamic shapes and exact roundings. It gives what a model gives that stays eager while
it is switched between training and evaluation, called with other sizes, checkpointed, adapted, frozen, resized, loaded
and copied. More of them than the suite runs: ``python -m tests.torch.drawn_compiled --count 50``.
"""

from __future__ import annotations

import random

import torch

from cute_ops_torch import inductor
from tests.drawing import check_seeds
from tests.torch import drawn_treatments
from tests.torch.drawn_graphs import both_passes
from tests.torch.drawn_programs import enabled, only_the_pass
from tests.torch.drawn_treatments import State, drawn


def check(seed: int) -> None:
    rng = random.Random(seed)
    if "compiled" in drawn(seed)[1]:
        return  # which resets what is compiled, and switches to another backend
    torch._dynamo.reset()
    with enabled(exact=rng.random() < 0.3):
        drawn_treatments.check(seed, _INSTEAD)
        graphs = [entry for entry in inductor.report() if entry.what == "a graph"]
    assert not graphs, graphs


def _compile(state: State, rng: random.Random) -> State:
    """Whole, or its ``forward``, which hooks and adapters around it call."""
    if state.patches:
        model = drawn_treatments.base_of(state.model)
        backend = both_passes if rng.random() < 0.3 else only_the_pass
        dynamic = True if rng.random() < 0.3 else None
        if rng.random() < 0.5:
            model.compile(backend=backend, dynamic=dynamic)
        else:
            model.__dict__.pop("forward", None)
            model.forward = torch.compile(model.forward, backend=backend, dynamic=dynamic)
    return state


def _end(state: State, rng: random.Random) -> State:
    if state.patches:
        model = drawn_treatments.base_of(state.model)
        model.__dict__.pop("forward", None)
        model._compiled_call_impl = None
    return state


def _copy(state: State, rng: random.Random) -> State:
    """A copy of a model has no other model's ``forward``."""
    return drawn_treatments.TREATMENTS["deepcopy"](_end(state, rng), rng)


_INSTEAD = {"patch": _compile, "unpatch": _end, "patch again": _compile, "deepcopy": _copy}


if __name__ == "__main__":
    check_seeds(check, "sequences")
