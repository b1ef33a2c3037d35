"""The kernel of an embedding's gradient at rows that start anywhere: its arithmetic on NumPy arrays."""

from __future__ import annotations

import os

import numpy as np
import pytest

from cute_ops import Array
from cute_ops.autotune.dispatch import choose
from cute_ops.declaration.binding import bind
from cute_ops.jit.target import parse
from cute_ops.ops.embedding.sorted_embedding_bwd import sorted_embedding_bwd as op
from cute_ops.testing import kernel_calls

SEED = int(os.environ.get("CUTE_OPS_SEED", "37"))


@pytest.mark.parametrize("n", [63, 64, 65, 70, 257, 1023, 0])
def test_rows_of_any_width(n: int) -> None:
    """Classes of a few tokens, of none, and of whole chunks of tokens; the last width is drawn."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, n))
    for dtype in ("bfloat16", "float32"):
        for layout in ("compact", "apart"):
            for tokens, classes in ((int(rng.integers(1, 60)), int(rng.integers(1, 40))), (300, 3)):
                width = n or int(rng.integers(1, 1500))
                kernel_calls.check(kernel_calls.made(op, 1, width, dtype, layout, rng, t=tokens, c=classes))


def test_threads_share_vectors_of_16_bytes_whatever_the_width() -> None:
    """A group of an odd width has no more threads than a group of the next even one."""
    for n, threads in ((1023, 43), (1024, 64), (1025, 43), (40, 5), (41, 41)):
        dims = {"t": 4096, "c": 32000, "n": n}
        dtypes = {"T": "bfloat16", "I": "int64"}
        arrays = {key: Array(t.of(dims), dtypes.get(t.dtype, t.dtype)) for key, t in op.inputs.items()}
        variant = choose(bind(op, arrays), {}, parse("sm_90a")).variant
        assert variant.config["threads_per_group"] == threads
