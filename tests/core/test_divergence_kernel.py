"""The kernel of divergences of long rows, run by the interpreter on drawn problems."""

import numpy as np
import pytest

from cute_ops import FLOATS, Op, testing
from cute_ops.declaration.case import Case
from cute_ops.ops.reduction.divergence import divergence, divergence_saving
from cute_ops.testing import kernel_calls
from cute_ops.testing.kernel_calls import LAYOUTS, Call

# Threads of a CTA and of a row in it, and CTAs of a row.
TILES = [(128, 16, 1), (64, 64, 1), (64, 64, 4)]


@pytest.mark.parametrize("op", [divergence, divergence_saving], ids=lambda op: op.name)
def test_rows_in_registers(op: Op) -> None:
    rng = np.random.default_rng(len(op.name))
    for beta in (0.0, 0.3, 0.5, 1.0):
        threads, share, cluster = TILES[int(rng.integers(len(TILES)))]
        n = 8200 + int(rng.integers(900)) // (1 if rng.random() < 0.5 else 8) * 8
        case = Case("", {"m": (int(rng.integers(1, 6)),), "n": n}, attrs={"beta": beta, "temperature": 1.0 + beta})
        arrays = testing.inputs(op, case, str(rng.choice(FLOATS[1:])), int(rng.integers(1 << 30)))
        # What is common to all logits leaves no trace.
        arrays = {name: x + np.array(100, x.dtype) for name, x in arrays.items() if x is not None}
        where = {name: kernel_calls.place(op.inputs[name], x, str(rng.choice(LAYOUTS))) for name, x in arrays.items()}
        call = Call(op, arrays, where, case.attrs, "", lambda seed, given=arrays: given)
        tile = dict(call.planned()[1].variant.config) | {"threads": threads, "threads_per_row": share, "resident": 1}
        tile = {key: value for key, value in tile.items() if key not in ("keep", "cluster")}
        kernel_calls.check(call._replace(tile={**tile, "form": "one_pass", "cluster": cluster}), watched=beta == 0.5)
