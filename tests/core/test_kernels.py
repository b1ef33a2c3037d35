"""Every op and dtype compiles for every architecture without a GPU, and the machine code passes these checks:
no stack, no spills, 16-byte loads and stores where rows are aligned, registers within reach of 1024 threads
per CTA where the tile asks for them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cute_ops import Array, Op, hardware
from cute_ops.autotune.dispatch import choose
from cute_ops.calls import lookup
from cute_ops.declaration.binding import bind
from cute_ops.declaration.shapes import ITEMSIZE
from cute_ops.files import cache_dir
from cute_ops.jit import cache, loader, target
from cute_ops.jit.compile_pool import worker
from cute_ops.jit.layout import Memory, compact
from cute_ops.jit.target import parse
from cute_ops.jit.variant import Variant
from cute_ops.ops import OPS, PARTS, add_rmsnorm, append_kv, rmsnorm
from cute_ops.ops.expression.formula import KERNEL as FUSED
from cute_ops.tools import sass
from tests.emulator import machine_code
from tests.ops import writing

ALL = [o for op in (*OPS, *PARTS) for o in (op, op.grad) if o is not None]
REGISTERS = 65536
Compiled = Callable[[Variant], Path]


def variant_of(
    op: Op,
    dtype: str,
    n: int,
    arch: str,
    memory: dict[str, Memory] | None = None,
    absent: tuple[str, ...] = (),
    **attrs: Any,
) -> Variant:
    given = {name: t for name, t in op.inputs.items() if name not in absent}
    sizes = op.example((4096,), n)
    arrays: dict[str, Array | None] = {n: Array(t.of(sizes), op.dtype_near(t, dtype)) for n, t in given.items()}
    return choose(bind(op, arrays, attrs), memory or {}, parse(arch)).variant


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Compiled:
    """Variant -> its machine code, compiled once for all tests of all of pytest's processes."""
    shared = tmp_path_factory.getbasetemp()
    shared = (shared.parent if hasattr(request.config, "workerinput") else shared) / "machine-code"
    shared.mkdir(exist_ok=True)

    def cubin(variant: Variant) -> Path:
        path = shared / f"{variant.symbol}.cubin"
        if not path.exists():
            own = path.with_name(f"{os.getpid()}-{path.name}")
            worker.compile(variant, own)
            own.rename(path)  # whole: another process may look for it
        return path

    return cubin


# One kernel but for a formula, or for one more summand: they take dtypes, lengths and layouts in turn.
TWINS = [
    *(
        tuple(name + end for name in names)
        for names in (
            ("softmax", "log_softmax"), ("sum", "mean"), ("silu_mul", "gelu_mul"), ("swiglu", "geglu"),
            ("silu", "gelu", "relu2"),
        )
        for end in ("", "_bwd")
    ),
    # The first one, which takes the longest rows, needs more registers.
    ("add_rmsnorm_bwd", "rmsnorm_bwd"), ("add_rmsnorm_fp8", "rmsnorm_fp8"),
]  # fmt: skip


def turn(op: Op) -> slice:
    """What an op takes of what twins take in turn."""
    names = next((names for names in TWINS if op.name in names), (op.name,))
    return slice(names.index(op.name), None, len(names))


# Both sizes of a dtype where most code paths are, one dtype everywhere else, so that each has its turn.
TARGETS = [("float32", "sm_90a"), ("bfloat16", "sm_90a"), ("float16", "sm_80")]
LATER = ("sm_100a", "sm_120a")


def targets(op: Op) -> list[tuple[str, str]]:
    """Where later architectures have the config of sm_90a, ops take them in turn: what is traced is the same, and only
    NVIDIA's compiler knows of another target.
    """
    usual, *later = (variant_of(op, "bfloat16", 4096, arch).config for arch in ("sm_90a", *LATER))
    at = ALL.index(op) + ALL.index(op) // 2  # so that forwards take both, and backwards
    archs = LATER[at % 2 :][:1] if later == [usual, usual] else LATER
    return [*TARGETS, *(("bfloat16", arch) for arch in archs)][turn(op)]


@pytest.mark.drawn(0.2)
@pytest.mark.parametrize(
    ("op", "dtype", "arch"),
    [pytest.param(op, *each, id="-".join([op.name, *each])) for op in ALL for each in targets(op)],
)
def test_no_stack_and_no_spills(op: Op, dtype: str, arch: str, compiled: Compiled) -> None:
    if hardware.sm(arch) < op.least_sm:
        with pytest.raises(
            NotImplementedError, match=rf"^cute\.{op.name}: its kernels need SM 8\.9 or newer, the target is SM 8\.0"
        ):
            variant_of(op, dtype, 4096, arch)
        return
    variant = variant_of(op, dtype, 4096, arch)
    kernels = sass.resources(compiled(variant))
    assert kernels
    for kernel in kernels:
        assert (kernel.stack, kernel.local) == (0, 0), kernel
        assert kernel.registers * variant.config["threads"] <= REGISTERS, kernel


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_strided_caches_and_slices_do_not_spill(arch: str, compiled: Compiled) -> None:
    """Pages of keys and values side by side, tokens of a fused projection; with tables, which are two loads for a pair
    of vectors, and without.
    """
    caches, new = Memory((2 * 16 * 8 * 128, 8 * 128, 128, 1)), Memory((3 * 8 * 128, 128, 1))
    memory = {"k_cache": caches, "v_cache": caches, "k": new, "v": new}
    for absent, loads in ((("cos", "sin"), 8), ((), 12)):
        variant = variant_of(append_kv, "bfloat16", 1, arch, memory, (*absent, "k_scale", "v_scale"))
        assert {variant.tensors[name].layout for name in memory} == {"strided"}
        path = compiled(variant)
        assert [(kernel.stack, kernel.local) for kernel in sass.resources(path)] == [(0, 0)]
        code = sass.sass(path)
        moved = len(re.findall(r"LDG\.E\S*\.128", code)), len(re.findall(r"STG\.E\S*\.128", code))
        assert moved == (loads, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["store", "follow", "axpy", "axpy_bwd"])
def test_kernels_that_write_inputs_and_take_numbers_compile(name: str, cache_folder: Path) -> None:
    """What is exported takes inputs that are written twice, and numbers by value, of any Python number."""
    ops = writing.store, writing.follow, writing.axpy, writing.axpy.grad
    (op,) = (op for op in ops if op.name == name)
    variant = variant_of(op, "bfloat16", 64, "sm_90a")
    function = cache.get(variant)
    with pytest.raises(TypeError) as raised:
        function()
    taken = re.findall(r"_vararg_\d+: (Tensor\(.*?, \w+\)|\w+)", str(raised.value))
    assert len(taken) == sum(key is not None for key in variant.args)
    numbers = [key.dtype for key in variant.args if key and key.layout == "number"]
    assert [word for word in taken if "(" not in word] == numbers
    if not target.device_count():
        with pytest.raises(RuntimeError, match="Cuda Runtime Error"):  # all arguments are what it takes
            loader.preload(function, variant, 0)


# Rows that leave a thread 64 registers: their weight and bias wait outside until the row's sum is known.
@pytest.mark.parametrize(
    ("op", "n", "dtype"),
    [(rmsnorm, 16384, "bfloat16"), (rmsnorm, 10240, "float16"), (add_rmsnorm, 32768, "bfloat16")],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_long_rows_beside_a_weight_and_a_bias_do_not_spill(op: Op, n: int, dtype: str, compiled: Compiled) -> None:
    variant = variant_of(op, dtype, n, "sm_90a")
    assert variant.config["threads"] * variant.config["resident"] > 512
    assert [(kernel.stack, kernel.local) for kernel in sass.resources(compiled(variant))] == [(0, 0)]


class Wanted(NamedTuple):
    """A kernel whose instructions tests read."""

    op: Op
    dtype: str
    n: int
    attrs: tuple[tuple[str, Any], ...] = ()


# In one of two dtypes, in turn.
ALIGNED = [Wanted(op, ("bfloat16", "float32")[i % 2], 4096) for i, op in enumerate(ALL)]
POINTWISE_LOADS = [Wanted(op, "bfloat16", 4096) for op in ALL if op.kernel == FUSED or op.name == "adamw"]
ANYWHERE = [
    Wanted(op, "bfloat16", 4097, tuple(attrs.items()))
    for op in ALL if op.name in ("swiglu", "geglu_bwd", "quantize_fp8", "rmsnorm_fp8", "add_rmsnorm_fp8")
    for attrs in ({}, *({"block": value} for value in op.choices.get("block", ())[1:]))
]  # fmt: skip
# Neighbours in tests' order, each once.
DISASSEMBLED = list(dict.fromkeys([*ALIGNED, *POINTWISE_LOADS, *ANYWHERE]))
AT_ONCE = 12


def named(wanted: Wanted) -> Any:
    return pytest.param(wanted, id="-".join([wanted.op.name, *(str(value) for _, value in wanted.attrs)]))


def reads_instructions(item: pytest.Item) -> bool:
    """Whether a test of this module reads a kernel's instructions."""
    return item.path == Path(__file__) and "disassembled" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def disassembled(compiled: Compiled, request: pytest.FixtureRequest) -> Callable[[Wanted], str]:
    """A kernel's instructions. To start the disassembler takes longer than to compile a kernel, so that it gets
    neighbours' code at once, as one piece, and the pieces of what it prints are kept for all of pytest's processes.
    """
    drawn = {item.callspec.params["wanted"] for item in request.session.items if reads_instructions(item)}
    every = [wanted for wanted in DISASSEMBLED if wanted in drawn]

    def code(wanted: Wanted) -> str:
        path = place(wanted)
        if not path.exists():
            start = every.index(wanted) // AT_ONCE * AT_ONCE
            _disassemble([place(each) for each in every[start : start + AT_ONCE]])
        return path.read_text()

    def place(wanted: Wanted) -> Path:
        variant = variant_of(wanted.op, wanted.dtype, wanted.n, "sm_90a", **dict(wanted.attrs))
        return compiled(variant).with_suffix(".sass")

    return code


def _disassemble(places: list[Path]) -> None:
    """Write the instructions of these cubins beside them."""
    texts = machine_code.disassembled([path.with_suffix(".cubin").read_bytes() for path in places])
    for path, text in zip(places, texts, strict=True):
        cache_dir.write_whole(path.parent, {path.name: text.encode()})


@pytest.mark.drawn(0.3)
@pytest.mark.slow
@pytest.mark.parametrize("wanted", [named(each) for each in ALIGNED])
def test_aligned_rows_move_16_bytes_at_a_time(wanted: Wanted, disassembled: Callable[[Wanted], str]) -> None:
    (op, dtype, *_), code = wanted, disassembled(wanted)
    if any(t.dims and not t.unread for t in op.inputs.values()):
        assert re.search(r"LDG\.E\S*\.128|LDGSTS\S*\.128|UBLKCP", code), "no 16-byte load"
    # Narrower outputs take as many elements at a time as the inputs.
    narrow = min(ITEMSIZE[op.dtype_near(t, dtype)] for t in op.results.values()) < 2
    width = 16 * 8 // ITEMSIZE[dtype] if narrow else 128
    # A thread of the gradient of a convolution has registers for so many channels.
    width = min(width, 8 * ITEMSIZE[dtype] * variant_of(op, dtype, wanted.n, "sm_90a").config.get("channels", 128))
    if any(t.dims for t in op.results.values()):
        assert re.search(rf"STG\.E\S*\.{width}\b|UBLKCP" if width > 32 else r"STG\.E ", code), "no wide store"
    assert not re.search(r"\b(LDL|STL)\b", code), "local memory"


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.parametrize("wanted", [named(each) for each in POINTWISE_LOADS])
def test_loads_of_a_pointwise_kernel_wait_for_none_of_them(
    wanted: Wanted, disassembled: Callable[[Wanted], str]
) -> None:
    op, lines = wanted.op, re.findall(r"/\*[0-9a-f]{4,}\*/ +(.*?);", disassembled(wanted))
    places = [i for i, line in enumerate(lines) if re.search(r"\bLDG\.E\S*\.128", line)]
    assert len(places) >= sum(t.dims != () for t in op.inputs.values())
    loaded: set[int] = set()
    for line in lines[places[0] : places[-1] + 1]:
        written, *read = [int(number) for number in re.findall(r"\bR(\d+)", line)] or [-1]
        assert loaded.isdisjoint(read), f"{line} waits for a load, and so do the loads after it"
        if "LDG" in line:
            loaded |= set(range(written, written + 4))


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("wanted", [named(each) for each in ANYWHERE])
def test_rows_that_start_anywhere_move_16_bytes_at_a_time(
    wanted: Wanted, disassembled: Callable[[Wanted], str]
) -> None:
    code = disassembled(wanted)
    # Alone are a row's elements on its edges; in loops of bytes, weights and edges are one instruction each. STRONG are
    # those of the one vector at a tensor's end, behind a branch that no other row takes.
    narrow = r"LDG\.E\S*\.[US](?:8|16)\b(?!\.STRONG)"
    assert len(re.findall(r"LDG\.E\S*\.128", code)) > len(re.findall(narrow, code))
    assert re.search(r"STG\.E\S*\.128", code)


# Lengths that take every path: scalars, odd, several rows a warp, one CTA, clusters, beyond registers.
LENGTHS = (1, 2, 7, 96, 128, 1000, 4097, 8192, 50257, 131072, 262144)


def lengths(op: Op) -> list[int]:
    """Those that differ in more than a constant: one of each tile and alignment, and no more than one where the op has
    no such dim. Of large clusters, those whose CTAs have as much to do are one tile.
    """
    kinds: dict[Any, int] = {}
    for n in LENGTHS:
        variant = variant_of(op, "bfloat16", n, "sm_90a")
        tile = dict(variant.config)
        if tile.get("cluster", 1) > 2:
            tile["cluster"] = -(n // tile["cluster"])
        aligned = tuple(a and (a.row_align, a.shape if "n" not in op.static else ()) for a in variant.args)
        kinds[tuple(tile.items()), aligned] = n
    return list(kinds.values())[turn(op)]


@pytest.mark.drawn(0.12)
@pytest.mark.parametrize(
    ("op", "n"), [(op, n) for op in ALL for n in lengths(op)], ids=lambda v: v.name if isinstance(v, Op) else None
)
def test_every_length_compiles(op: Op, n: int, compiled: Compiled) -> None:
    """With at most four registers on the stack; some with a bias, which takes more in the longest rows."""
    absent = () if n in (128, 4097) else ("bias",)
    kernels = sass.resources(compiled(variant_of(op, "bfloat16", n, "sm_90a", absent=absent)))
    assert max(kernel.stack for kernel in kernels) <= 16, kernels
    if "bias" in op.inputs and n == 262144:
        compiled(variant_of(op, "bfloat16", n, "sm_90a"))


CHOICES = [
    pytest.param(op, {name: value}, id=f"{op.name}-{name}-{value}")
    for op in (*OPS, *PARTS) for name, values in op.choices.items() for value in values[1:]
]  # fmt: skip


@pytest.mark.drawn(0.3)
@pytest.mark.parametrize("n", [1001, 4096])
@pytest.mark.parametrize(("op", "attrs"), CHOICES)
def test_other_attributes_compile(op: Op, attrs: dict[str, Any], n: int, compiled: Compiled) -> None:
    """Without a stack, but for the four registers of convolutions whose rows start anywhere, as of every length."""
    kernels = sass.resources(compiled(variant_of(op, "bfloat16", n, "sm_90a", **attrs)))
    most = 16 if op.name == "causal_conv1d" and n % 8 else 0
    assert all(kernel.stack <= most and kernel.local == 0 for kernel in kernels), kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["cross_entropy", "cross_entropy_metrics", "cross_entropy_of_slice", "soft_cross_entropy"]
)
def test_losses_and_their_gradients_compile_with_every_option(name: str, compiled: Compiled) -> None:
    """Label smoothing sums the logits, too: a reduction of its own, which no case asks for."""
    loss = lookup.find(name)
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 30.0, "logit_scale": 0.5}
    for op in (loss, loss.grad):
        assert op is not None
        attrs = {name: value for name, value in options.items() if name in op.attrs}
        compiled(variant_of(op, "bfloat16", 4096, "sm_90a", **attrs))


@pytest.mark.drawn(0.2)
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_other_layouts_compile(op: Op, arch: str, compiled: Compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    from cute_ops.autotune import dispatch

    if hardware.sm(arch) < op.least_sm:
        return
    rows = {name: t for name, t in op.inputs.items() if t.rows}

    def strided(n: int) -> dict[str, Memory]:
        shapes = {name: t.of(op.example((4096,), n)) for name, t in rows.items()}
        return {
            name: Memory(compact((*shape[:-1], 2 * shape[-1] + 1)), 2) if rows[name].dims else Memory((3,), address=8)
            for name, shape in shapes.items()
        }

    takes = arch in ("sm_80", "sm_90a", "sm_80")[turn(op)]
    if arch == "sm_90a" and takes:
        # Elements one by one: in rows twice as long the code is the same twice.
        compiled(variant_of(op, "float16", 488, arch, strided(488)))
    monkeypatch.setattr(dispatch, "STATIC_LIMIT", 0)
    monkeypatch.setattr(dispatch, "_static_seen", {})
    dynamic = variant_of(op, "bfloat16", 1000, arch, strided(1000) if arch == "sm_80" else None)  # there, both at once
    assert dynamic.dims == {dim: None if dim in op.few else op.cases[0].dims[dim] for dim in op.static}
    if takes:
        compiled(dynamic)
