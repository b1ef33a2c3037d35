"""Calls with arrays that lie anywhere: a kernel is compiled, another program runs, or the call is refused as planned.

A sample of drawn calls; ``CUTE_OPS_SWEEP=NUMBER`` compiles so many kernels.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cute_ops.autotune.dispatch import choose, fallback
from cute_ops.hardware import sm
from cute_ops.jit import cache
from cute_ops.jit.target import parse
from cute_ops.jit.variant import Variant
from cute_ops.ops import ATTENTION, OPS, PARTS
from cute_ops.ops import PRODUCTS as NAMED
from cute_ops.ops.gemm.accumulate import linear_dweight_add
from cute_ops.ops.gemm.linear import PRODUCTS
from tests.ops.drawn_layouts import DrawnCall, draws, family
from tests.ops.epilogues import DIFFERENTIABLE as WITH_EPILOGUES
from tests.ops.fusing import OPS as FUSED
from tests.ops.reducing import OPS as REDUCING

EVERY = family([*OPS, *PARTS, *ATTENTION, *NAMED, *PRODUCTS, linear_dweight_add, *WITH_EPILOGUES, *FUSED, *REDUCING])
SEED = int(os.environ.get("CUTE_OPS_SEED", "34"))
COMPILED = int(os.environ.get("CUTE_OPS_SWEEP", "4"))
TARGETS = (parse("sm_90a"), parse("sm_80"))


def planned(call: DrawnCall, arch: int) -> Variant | str:
    """The kernel that a call runs, or why none does."""
    binding, memory = call
    target = TARGETS[arch] if sm(TARGETS[1].arch) >= binding.op.least_sm else TARGETS[0]
    try:
        if fallback(binding, memory, target) is not None:
            return "another program"
        return choose(binding, memory, target).variant
    except (ValueError, NotImplementedError) as error:
        refusal = str(error)
    # Only our own kernel refuses what the program in its place takes anywhere.
    anywhere = binding.op.fallback.anywhere if binding.op.fallback and binding.attrs["fused"] != "always" else ()
    said = re.match(rf"cute\.{binding.op.called}: (?:argument|attribute) `(\w+)`", refusal)
    assert said and said[1] not in anywhere, f"{call}\n{refusal}"
    return "refused"


@pytest.mark.slow
def test_what_is_planned_compiles(cache_folder: Path) -> None:
    """What no kernel can read is refused before one is compiled, by the name of the op and the argument."""
    rng, counts, kernels = np.random.default_rng(SEED), Counter[str](), dict[str, tuple[Variant, str]]()
    for call in draws(EVERY, max(600, 4 * COMPILED), rng):
        found = planned(call, int(rng.integers(2)))
        counts[found if isinstance(found, str) else "a kernel"] += 1
        if not isinstance(found, str):
            kernels[found.symbol] = found, str(call)
    assert min(counts.values()) > 20 and len(counts) == 3, counts
    chosen = [kernels[symbol][0] for symbol in rng.permutation(sorted(kernels))[:COMPILED]]
    failed = [(kernels[built.variant.symbol][1], built.error) for built in cache.build_all(chosen) if built.error]
    assert not failed, f"{len(failed)} of {len(chosen)}, seed {SEED}\n" + "\n".join(f"{c}\n{e}\n" for c, e in failed)
