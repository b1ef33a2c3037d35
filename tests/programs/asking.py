"""For the programs of ``test_processes.py``: compiles kernels of ``quick.py`` and prints the outcome."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from cute_ops import FLOATS, Array, CompileError, Op, Tensor
from cute_ops.autotune.dispatch import choose
from cute_ops.declaration.binding import bind
from cute_ops.jit import cache
from cute_ops.jit.compile_pool import Pool, worker
from cute_ops.jit.target import parse
from cute_ops.jit.variant import Variant
from cute_ops.ops import silu_mul


def variant(kernel: str, n: int = 64, module: str = "quick") -> Variant:
    op = Op(
        "asking", inputs={"x": Tensor("*m n", "T")}, outputs={"out": Tensor("*m n", "T")}, dtypes={"T": FLOATS},
        reference=lambda xp, x: x, kernel=f"{module}:{kernel}",
    )  # fmt: skip
    return choose(bind(op, {"x": Array((4, n), "bfloat16")}), {}, parse("sm_90a")).variant


def tuned() -> dict[str, int]:
    """The tile of a call whose op has a choice: it is looked up among those that were measured."""
    call = bind(silu_mul, dict.fromkeys(("gate", "up"), Array((512, 64), "bfloat16")))
    return dict(choose(call, {}, parse("sm_90a")).variant.config)


def compiled(kernel: str, n: int = 64, by: Pool = worker, path: str = "/nowhere/a.so", module: str = "quick") -> str:
    """What a compile by a worker says; these kernels never give an object."""
    try:
        by.compile(variant(kernel, n, module), Path(path))
    except CompileError as error:
        return str(error)
    return "compiled"


def got(kernel: str, n: int = 64) -> str:
    """The same through the cache."""
    try:
        cache.get(variant(kernel, n))
    except CompileError as error:
        return str(error)
    return "compiled"


def told(by: Pool = worker) -> dict[str, Any]:
    """What the compile process sees."""
    return json.loads(compiled("Telling", by=by).splitlines()[-1].partition("ValueError: ")[2])


def begun() -> int:
    """Wait until a compile begins; the process that compiles."""
    path, deadline = Path(os.environ["CUTE_OPS_TEST_BEGUN"]), time.monotonic() + 200
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("no compile begins")
        time.sleep(0.01)
    return int(path.read_text())


def let_go() -> None:
    """Let the compile that has begun, which waits for it, go on."""
    Path(os.environ["CUTE_OPS_TEST_BEGUN"]).unlink()
