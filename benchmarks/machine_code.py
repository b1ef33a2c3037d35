"""Machine code of kernels at two states of the sources: what a refactoring of them must not change.

    python benchmarks/machine_code.py out/now.json --before HEAD~3

compiles every variant of :data:`VARIANTS` for its GPU, here and at an earlier commit (or in a folder that holds a
checkout), without a GPU. It prints instructions, registers and bytes of local memory of each kernel, marks those that
differ, and lists by how many of which instruction. An earlier state that was recorded is read from its file instead:

    python benchmarks/machine_code.py out/now.json --before out/before.json

Variants are those of products; with ``--rows`` those of the ops on rows, by their heuristics, some 600.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
# Columns of the table: a title and the instructions that it counts.
GROUPS = {
    "HGMMA": r"HGMMA", "HMMA": r"HMMA", "UTMA": r"UTMA\w*", "LDSM": r"LDSM", "STSM": r"STSM", "barrier": r"BAR|SYNCS",
    "LDG": r"LDG", "STG": r"STG", "spills": r"STL|LDL",
}  # fmt: skip
TILE, ROW, COLUMN = "*m n", "n", "*m 1"


# --- what is compiled


class Product(NamedTuple):
    """A product's variant.

    Attributes:
        name: of its line in the table.
        op: makes the op; ops are made by the checkout that is measured.
        config: fields of its config in place of those that the op chooses.
        sizes: m, n and k; of a batch the number of matrices before them.
    """

    name: str
    op: Callable[[], Any]
    config: dict[str, Any]
    sizes: tuple[int, ...] = (8192, 4096, 4096)
    dtype: str = "bfloat16"
    arch: str = "sm_90a"


def cooperative(m: int, n: int, stages: int, cluster: tuple[int, int] = (1, 1), **more: int) -> dict[str, Any]:
    return _form("cooperative", m, n, stages, cluster, more)


def pingpong(m: int, n: int, stages: int, cluster: tuple[int, int] = (1, 1), **more: int) -> dict[str, Any]:
    return _form("pingpong", m, n, stages, cluster, more)


def _form(form: str, m: int, n: int, stages: int, cluster: tuple[int, int], more: dict[str, int]) -> dict[str, Any]:
    clusters = 132 // (cluster[0] * cluster[1])
    sizes = {"tile_m": m, "tile_n": n, "stages": stages, "clusters": clusters, "store_stages": 4}
    return {"form": form, **sizes, "cluster_m": cluster[0], "cluster_n": cluster[1], **more}


def plain(name: str) -> Callable[[], Any]:
    """An op of :mod:`cute_ops.ops.gemm` by its name."""

    def op() -> Any:
        from cute_ops.ops.gemm import accumulate, linear

        return next(getattr(module, name) for module in (linear, accumulate) if hasattr(module, name))

    return op


def batch(name: str) -> Callable[[], Any]:
    return lambda: plain(name)().batched


def fused(epilogue: Callable[..., Any], **declared: Any) -> Callable[[], Any]:
    def op() -> Any:
        from cute_ops.ops.gemm.fused import fused_linear

        return fused_linear(epilogue, **declared)

    return op


def gelu(xp: Any, acc: Any, bias: Any) -> Any:
    return xp.gelu(acc + bias)


def saving(xp: Any, acc: Any, bias: Any) -> Any:
    pre = acc + bias
    return pre, xp.gelu(pre)


def residual(xp: Any, acc: Any, residual: Any) -> Any:
    return acc + residual


def swiglu(xp: Any, acc: Any) -> Any:
    n = acc.shape[-1] // 2
    return xp.silu(acc[..., :n]) * acc[..., n:]


def gated_saving(xp: Any, acc: Any, bias: Any) -> Any:
    n = acc.shape[-1] // 2
    gate, up = acc[..., :n] + bias[..., :n], acc[..., n:] + bias[..., n:]
    return gate, up, xp.silu(gate) * up


def gated_dgrad(xp: Any, acc: Any, pre: Any) -> Any:
    n = pre.shape[-1] // 2
    gate, up = pre[..., :n], pre[..., n:]
    s = xp.sigmoid(gate)
    return acc * up * (s + gate * s * (1 - s)), acc * gate * s


def everything(xp: Any, acc: Any, scale: Any, bias: Any, residual: Any, factor: Any) -> Any:
    return xp.clip(acc * scale + bias, -2.0, 2.0) * factor + residual


def add_rstd(xp: Any, acc: Any, residual: Any) -> Any:
    out = acc + residual
    return out, xp.rsqrt(xp.mean(out * out, axis=-1, keepdims=True) + 1e-6)


def gated_reductions(xp: Any, acc: Any, scale: Any) -> Any:
    n = acc.shape[-1] // 2
    out = xp.silu(acc[..., :n]) * acc[..., n:]
    return xp.max(xp.abs(out), axis=-1, keepdims=True) * scale, out, xp.sum(out, axis=-1, keepdims=True)


def rope(xp: Any, acc: Any, bias: Any, cos: Any, sin: Any) -> Any:
    x = acc + bias
    turned = x * cos + xp.rotate_half(x, 64) * sin
    return xp.where(xp.arange(acc.shape[-1]) < 192, turned, x)


def qk_norm(xp: Any, acc: Any, norm: Any, cos: Any, sin: Any) -> Any:
    x = acc * xp.rsqrt(xp.group_mean(acc * acc, 64) + 1e-6) * norm
    return x * cos + xp.rotate_half(x, 64) * sin


GELU = fused(gelu, operands={"bias": ROW})
SAVING = fused(saving, operands={"bias": ROW}, outputs={"pre": TILE, "out": TILE}, dtypes={"pre": "float32"})
RESIDUAL = fused(residual, operands={"residual": TILE})
GATED = fused(swiglu, weight="2n k")
GATED_SAVING = fused(gated_saving, operands={"bias": "2n"}, weight="k 2n", outputs={"pre": "*m 2n", "out": TILE})
GATED_DGRAD = fused(gated_dgrad, operands={"pre": "*m 2n"}, weight="k n", outputs={"dpre": "*m 2n"})
EVERYTHING = fused(everything, operands={"scale": "*m", "bias": ROW, "residual": TILE, "factor": ""})
ADD_RSTD = fused(add_rstd, operands={"residual": TILE}, outputs={"out": TILE, "rstd": COLUMN})
REDUCTIONS = fused(
    gated_reductions, operands={"scale": "*m"}, weight="2n k",
    outputs={"largest": "*m", "out": TILE, "total": COLUMN},
)  # fmt: skip
TABLES = {"cos": "*#m 32", "sin": "*#m 32"}
ROPE = fused(rope, operands={"bias": ROW, **TABLES})
QK_NORM = fused(qk_norm, operands={"norm": ROW, **TABLES})

VARIANTS = (
    # Forms, tiles and clusters.
    Product("linear cooperative 128x256 cluster 2x1", plain("linear"), cooperative(128, 256, 4, (2, 1))),
    Product("linear cooperative 128x256 cluster 1x2", plain("linear"), cooperative(128, 256, 4, (1, 2))),
    Product("linear cooperative 256x128", plain("linear"), cooperative(256, 128, 4)),
    Product("linear cooperative 128x192", plain("linear"), cooperative(128, 192, 4, store_stages=3)),
    Product("linear pingpong 128x192 cluster 2x1", plain("linear"), pingpong(128, 192, 4, (2, 1))),
    Product("linear pingpong 128x160", plain("linear"), pingpong(128, 160, 5, store_stages=2)),
    Product("linear pingpong 128x128 cluster 1x2", plain("linear"), pingpong(128, 128, 6, (1, 2))),
    Product("linear pingpong 64x256", plain("linear"), pingpong(64, 256, 4)),
    Product("linear pingpong 64x64", plain("linear"), pingpong(64, 64, 8, store_stages=2)),
    Product("linear odd columns", plain("linear"), cooperative(128, 256, 4, (2, 1)), (8192, 4095, 4096)),
    Product("linear_float32 float16", plain("linear_float32"), cooperative(256, 128, 4, (1, 2)), dtype="float16"),
    Product("linear_dx pingpong 128x128", plain("linear_dx"), pingpong(128, 128, 6)),
    Product("linear_dweight pingpong 128x160", plain("linear_dweight"), pingpong(128, 160, 5, (2, 1), store_stages=2)),
    Product("linear_dweight cooperative 128x256", plain("linear_dweight"), cooperative(128, 256, 4, (2, 1))),
    Product("linear_dweight_add", plain("linear_dweight_add"), cooperative(128, 256, 3, (2, 1), tile_stages=4)),
    Product("linear batch", batch("linear"), cooperative(128, 256, 4, (2, 1)), (4, 1024, 4096, 4096)),
    Product("linear_dx batch", batch("linear_dx"), pingpong(128, 128, 6), (4, 1024, 4096, 4096)),
    # Small m: k is split, and a second kernel adds up.
    Product("linear 16 rows", plain("linear"), {}, (16, 4096, 4096)),
    Product("linear_dx 64 rows", plain("linear_dx"), {}, (64, 4096, 4096)),
    Product("gated 16 rows", GATED, {}, (16, 4096, 4096)),
    Product("saving 64 rows", SAVING, {}, (64, 4096, 4096)),
    # Epilogues.
    Product("gelu cooperative", GELU, cooperative(128, 256, 4, (2, 1))),
    Product("gelu pingpong", GELU, pingpong(128, 128, 5, (2, 1))),
    Product("saving", SAVING, pingpong(128, 128, 4)),
    Product("residual cooperative", RESIDUAL, cooperative(128, 256, 3, (2, 1), tile_stages=4)),
    Product("residual pingpong", RESIDUAL, pingpong(128, 128, 5, (2, 1), tile_stages=4)),
    Product("residual odd columns", RESIDUAL, cooperative(128, 256, 3, (2, 1)), (8192, 4095, 4096)),
    Product("gated cooperative", GATED, cooperative(128, 256, 4, (2, 1))),
    Product("gated pingpong", GATED, pingpong(128, 128, 5)),
    Product("gated_saving", GATED_SAVING, {}),
    Product("gated_dgrad", GATED_DGRAD, {}),
    Product("everything", EVERYTHING, {}),
    Product("add_rstd cooperative", ADD_RSTD, cooperative(128, 128, 5, (2, 1), tile_stages=4)),
    Product("add_rstd pingpong", ADD_RSTD, pingpong(128, 128, 5, (2, 1), tile_stages=4)),
    Product("row reductions of gated", REDUCTIONS, {}),
    Product("rope cooperative", ROPE, cooperative(128, 256, 4, (2, 1))),
    Product("rope pingpong", ROPE, pingpong(128, 128, 5)),
    Product("qk_norm", QK_NORM, {}),
    # mma.sync.
    Product("linear without TMA", plain("linear"), {}, (8192, 4095, 1001)),
    Product("linear sm_80", plain("linear"), {}, arch="sm_80"),
    Product("linear_dweight sm_80", plain("linear_dweight"), {}, arch="sm_80"),
    Product("gated sm_80", GATED, {}, arch="sm_80"),
    Product("add_rstd sm_120a", ADD_RSTD, {}, arch="sm_120a"),
)


class Rows(NamedTuple):
    """A call of an op on rows, which runs with the config of its heuristic.

    Attributes:
        name: of its line in the table.
        op: the op.
        layout: of its inputs, see :func:`cute_ops.testing.kernel_calls.place`.
    """

    name: str
    op: Any
    dtype: str
    rows: int
    n: int
    layout: str


# Of the ops on rows: so that each form is among them, with aligned rows and with others.
SIZES = (
    ("bfloat16", 8192, 4096, "compact"), ("bfloat16", 8192, 4096, "spaced"), ("bfloat16", 64, 4096, "compact"),
    ("bfloat16", 8192, 4099, "compact"), ("bfloat16", 8192, 1000, "apart"), ("float32", 8192, 8192, "compact"),
    ("bfloat16", 8192, 50257, "compact"), ("bfloat16", 300, 131_072, "compact"),
    ("bfloat16", 8192, 1_000_003, "compact"), ("bfloat16", 8192, 96, "compact"), ("float32", 8192, 777, "compact"),
)  # fmt: skip


def calls_on_rows() -> list[Rows]:
    from cute_ops.testing.kernel_calls import ALL

    ops = [op for op in ALL if "gemm" not in str(op.kernel)]
    return [Rows(" ".join([op.name, *map(str, size)]), op, *size) for op in ops for size in SIZES]


# --- compiled and counted


def variant_of(call: Product | Rows) -> Any:
    return _of_product(call) if isinstance(call, Product) else _on_rows(call)


def _on_rows(call: Rows) -> Any:
    from cute_ops.testing import kernel_calls

    _, plan = kernel_calls.shaped(call.op, call.rows, call.n, call.dtype, call.layout).planned()
    return plan.variant


def _of_product(product: Product) -> Any:
    from cute_ops import Case, testing
    from cute_ops.declaration.binding import bind
    from cute_ops.jit.plan import plan
    from cute_ops.jit.target import parse

    op, (*lead, m, n, k) = product.op(), product.sizes
    specs = testing.specs(op, Case("", {"b": tuple(lead), "m": m if lead else (m,), "n": n, "k": k}), product.dtype)
    binding, target = bind(op, specs), parse(product.arch)
    chosen = dict(plan(binding, {}, target).variant.config)
    return plan(binding, {}, target, config={**chosen, **product.config}).variant


class Kernel(NamedTuple):
    """The machine code of one kernel.

    Attributes:
        instructions: how many there are of each name.
        registers: of a thread.
        local: bytes of stack and of local memory of a thread.
        digest: of the disassembly.
    """

    instructions: dict[str, int]
    registers: int
    local: int
    digest: str

    @property
    def total(self) -> int:
        return sum(self.instructions.values())

    def count(self, pattern: str) -> int:
        whole = re.compile(rf"(?:{pattern})(?:\..*)?")
        return sum(number for name, number in self.instructions.items() if whole.fullmatch(name))


def compiled(call: Product | Rows) -> list[Kernel]:
    """A variant's kernels, the largest first."""
    from cute_ops.jit.compile_pool import worker
    from cute_ops.tools import sass

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        worker.compile(variant_of(call), path)
        used, text = sass.resources(path), sass.sass(path)
    found = []
    _, *pieces = re.split(r"Function : (\S+)", text)
    for name, code in zip(pieces[::2], pieces[1::2], strict=True):
        (resources,) = (each for each in used if each.kernel == name)
        names = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", code, re.MULTILINE)
        body = code[code.index("/*0000*/") :]  # without names
        digest = hashlib.sha256(body.encode()).hexdigest()[:12]
        found.append(Kernel(dict(Counter(names)), resources.registers, resources.stack + resources.local, digest))
    return sorted(found, key=lambda kernel: -kernel.total)


def record(path: Path, only: str, rows: bool) -> None:
    calls = [call for call in (calls_on_rows() if rows else VARIANTS) if re.search(only, call.name)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = list(pool.map(compiled, calls))
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {call.name: [k._asdict() for k in found] for call, found in zip(calls, kernels, strict=True)}
    path.write_text(json.dumps(named), encoding="utf-8")


# --- compared


def recorded(before: str, only: str, rows: bool) -> Path:
    """The file of an earlier state: itself, or recorded of a checkout's folder or of a commit."""
    path = Path(before)
    if path.is_file():
        return path
    out = Path(tempfile.mkdtemp()) / "before.json"
    if path.is_dir():
        _record_there(path, out, only, rows)
        return out
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "-q", "--detach", checkout, before], check=True)
        try:
            _record_there(checkout, out, only, rows)
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", checkout], check=True)
    return out


def _record_there(checkout: Path, out: Path, only: str, rows: bool) -> None:
    """By the checkout's own script, which knows its modules; by this one where it has none, or measures no rows."""
    own = checkout / "benchmarks" / "machine_code.py"
    script = own if own.exists() and ("--rows" in own.read_text() or not rows) else Path(__file__)
    command = [sys.executable, str(script), str(out), "--only", only, "--checkout", str(checkout), *["--rows"] * rows]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def read(path: Path) -> dict[str, list[Kernel]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    # The end of a kernel is filled up with instructions that do nothing.
    for kernel in (kernel for kernels in found.values() for kernel in kernels):
        kernel["instructions"].pop("NOP", None)
    return {name: [Kernel(**kernel) for kernel in kernels] for name, kernels in found.items()}


def table(now: dict[str, list[Kernel]], before: dict[str, list[Kernel]] | None) -> tuple[list[str], int]:
    """The lines of the table, and how many variants differ."""
    width = 2 + max(map(len, now))
    lines = ["".join([f"{'':{width}}", *(f"{title:>8}" for title in (*GROUPS, "all", "regs", "local")), "  before"])]
    differing = 0
    for name, kernels in now.items():
        earlier = (before or {}).get(name, [])
        states = []
        for i, kernel in enumerate(kernels):
            old = earlier[i] if i < len(earlier) else None
            numbers = (*map(kernel.count, GROUPS.values()), kernel.total, kernel.registers, kernel.local)
            states.append(_state(kernel, old) if before is not None else "")
            row = "".join(f"{number:>8}" for number in numbers)
            lines.append(f"{name if i == 0 else '  and':{width}}{row}  {states[-1]}")
        differing += any(state not in ("", "same code", "same counts") for state in states)
    return lines, differing


def _state(now: Kernel, before: Kernel | None) -> str:
    if before is None:
        return "not there"
    if now.digest == before.digest:
        return "same code"
    used = [
        f"{name} {getattr(before, name)} -> {getattr(now, name)}"
        for name in ("registers", "local")
        if getattr(before, name) != getattr(now, name)
    ]
    change = Counter(now.instructions)
    change.subtract(before.instructions)
    changed = [f"{number:+d} {name}" for name, number in sorted(change.items(), key=lambda kv: -abs(kv[1])) if number]
    if not used and not changed:
        return "same counts"
    return f"all {before.total} -> {now.total}: {', '.join(used + changed)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("out", type=Path, help="where to write what was counted here")
    parser.add_argument("--before", help="a commit, the folder of a checkout, or the file of a recorded state")
    parser.add_argument("--only", default="", help="a regular expression that variants' names contain")
    parser.add_argument("--rows", action="store_true", help="variants of the ops on rows in place of products")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the folder whose sources are compiled")
    given = parser.parse_args(arguments)
    # Not an installed package. The processes that compile find the sources in the same place.
    sys.path.insert(0, str(given.checkout.resolve()))
    os.environ["PYTHONPATH"] = sys.path[0]
    record(given.out, given.only, given.rows)
    before = read(recorded(given.before, given.only, given.rows)) if given.before else None
    lines, differing = table(read(given.out), before)
    print("\n".join(lines))
    if before is not None:
        print(f"{differing} variants differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
