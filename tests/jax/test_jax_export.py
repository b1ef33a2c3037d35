"""Programs exported with their kernels, without a GPU, and run in a fresh process without the declarations."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import cute_ops_jax
from cute_ops import Op, testing
from cute_ops.errors import CacheError
from cute_ops.files import ownership
from cute_ops.jit import bundle
from cute_ops.ops import OPS
from cute_ops.ops.gemm.linear import linear
from cute_ops_jax import exporting, loading
from cute_ops_jax.primitive import ffi

ROOT = Path(cute_ops_jax.__file__).parents[1]
pytest.importorskip("flatbuffers")

FRESH = """
import sys
sys.modules["torch"] = sys.modules["cutlass"] = None
import jax, jax.numpy as jnp, numpy as np
import cute_ops_jax
program = cute_ops_jax.load(sys.argv[1])
with np.load(sys.argv[2]) as given:
    x, w = given["x"], given["w"]
gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(program(x, w))), (0, 1)))
dx, dw = gradient(x, w)
np.savez(sys.argv[3], out=program(x, w), dx=dx, dw=dw)
"""


def forward(x: Any, w: Any) -> Any:
    return cute_ops_jax.rmsnorm(x, w)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A norm for any number of rows, with its gradient, compiled for two architectures by the real compiler."""
    where = tmp_path_factory.mktemp("exported") / "program"
    b, s = jax.export.symbolic_shape("b, s")
    x, w = jax.ShapeDtypeStruct((b, s, 64), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)
    cute_ops_jax.export(where, forward, x, w, arch=["sm_90a", "sm_80"], vjp_order=1)
    return where


@pytest.mark.slow
def test_a_fresh_process_needs_neither_compiler_nor_code(exported: Path, tmp_path: Path, close: Any) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((3, 5, 64), np.float32), rng.standard_normal(64, np.float32)
    np.savez(tmp_path / "in.npz", x=x, w=w)
    command = [sys.executable, "-c", FRESH, str(exported), str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUTE_OPS_CACHE_DIR": str(tmp_path / "none")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "none").exists()
    with np.load(tmp_path / "out.npz") as got:
        close(got["out"], forward(x, w))
        close((got["dx"], got["dw"]), jax.grad(lambda x, w: jnp.sum(jnp.sin(forward(x, w))), (0, 1))(x, w))


@pytest.mark.slow
def test_the_folder_holds_what_each_program_calls(exported: Path) -> None:
    programs = json.loads((exported / "program.json").read_text())["programs"]
    assert sorted(programs) == ["sm_80:108", "sm_90a:132"]
    held = bundle.Bundle(exported / "kernels")
    assert held.verify() == 4
    for name, program in programs.items():
        variants = [held.variant(s) for s in program["kernels"]]
        assert {v.op for v in variants} == {"rmsnorm", "rmsnorm_bwd"}
        assert {v.arch for v in variants} == {name.partition(":")[0]}


@pytest.mark.slow
def test_kernels_are_registered_from_the_bundle_alone(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax_tvm_ffi

    from cute_ops.jit import cache

    names: list[str] = []
    monkeypatch.setattr(jax_tvm_ffi, "register_ffi_target", lambda name, *args, **kwargs: names.append(name))
    monkeypatch.setattr(cache, "get", lambda variant: pytest.fail("asked the cache"))
    monkeypatch.setattr(ffi, "_known", {})
    symbols = json.loads((exported / "program.json").read_text())["programs"]["sm_90a:132"]["kernels"]
    for _ in range(2):
        loading._register(bundle.Bundle(exported / "kernels"), symbols)
    assert names == symbols


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(ffi, "cuda_devices", list)
    monkeypatch.setattr(ffi, "_known", {})
    monkeypatch.setenv("CUTE_OPS_ARCH", arch)


def test_another_gpu_is_refused(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, "sm_120a")
    with pytest.raises(CacheError) as caught:
        cute_ops_jax.load(exported)
    assert str(caught.value) == (
        f"cute_ops: {exported} was exported for sm_80:108, sm_90a:132, this GPU is sm_120a: export it again with "
        "arch='sm_120a'"
    )


def test_damage_is_told(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch, "sm_90a")
    copy = tmp_path / "copy"
    shutil.copytree(exported, copy)
    symbol = json.loads((copy / "program.json").read_text())["programs"]["sm_90a:132"]["kernels"][0]
    with (copy / "kernels" / "kernels" / f"{symbol}.so").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CacheError, match=f"the checksum of {symbol}.so does not match"):
        cute_ops_jax.load(copy)
    with (copy / "sm_90a-132.jax").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CacheError, match=r"the checksum of sm_90a-132\.jax does not match: export it again"):
        cute_ops_jax.load(copy)
    (copy / "program.json").unlink()
    with pytest.raises(CacheError, match="holds no exported program"):
        cute_ops_jax.load(copy)


def tampered(where: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the record and correct the checksums."""
    record = json.loads((where / "program.json").read_text())
    for program in record["programs"].values():
        program["sha256"] = hashlib.sha256((where / program["file"]).read_bytes()).hexdigest()
    change(record)
    (where / "program.json").write_text(json.dumps(record))


@pytest.fixture(scope="module")
def exported_on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that calls no kernel."""
    where = tmp_path_factory.mktemp("exported") / "program"
    cute_ops_jax.export(where, forward, jnp.ones((2, 64)), jnp.ones(64), platforms="cpu", vjp_order=1)
    return where


@pytest.fixture
def on_cpu(exported_on_cpu: Path, tmp_path: Path) -> Path:
    """A copy of the exported program."""
    return Path(shutil.copytree(exported_on_cpu, tmp_path / "program"))


@pytest.mark.parametrize("name", ["../any.jax", "/etc/hostname", "any.jax/..", "link.jax", "", "a\0b", "\ud800"])
@pytest.mark.fault("the record of an exported program names a file outside of its folder", "an error", "nothing")
def test_files_outside_are_not_read(on_cpu: Path, name: str) -> None:
    shutil.copy(on_cpu / "any.jax", on_cpu.parent / "any.jax")
    (on_cpu / "link.jax").symlink_to("../any.jax")
    tampered(on_cpu, lambda record: record["programs"]["any"].update(file=name))
    with pytest.raises(CacheError, match=r"no file inside of it|not a file but a link|holds no exported program"):
        cute_ops_jax.load(on_cpu)


@pytest.mark.fault("others can write an exported program, or it belongs to another user", "an error", "nothing")
@pytest.mark.parametrize(
    ("name", "mode", "owner"),
    [
        (".", 0o777, 0), (".", 0o775, 0), ("program.json", 0o666, 0), ("any.jax", 0o664, 0), ("..", 0o777, 0),
        *(pytest.param(name, mode, 65534, marks=pytest.mark.as_root)
          for name, mode in ((".", 0o755), ("program.json", 0o644), ("any.jax", 0o644), ("..", 0o755))),
    ],
)  # fmt: skip
def test_a_program_of_others_is_refused(on_cpu: Path, name: str, mode: int, owner: int) -> None:
    (on_cpu / name).chmod(mode)
    if owner:
        os.chown(on_cpu / name, owner, owner)
    with pytest.raises(CacheError, match=r"exported program .*; it is code: put it into a new folder"):
        cute_ops_jax.load(on_cpu)
    if owner:
        os.chown(on_cpu / name, 0, 0)


def test_what_is_exported_is_for_its_owner_to_write(tmp_path: Path, any_umask: None) -> None:
    """With a umask that makes files writable by others, load would refuse the export, or the folder that it is in."""
    outer = tmp_path / "outer"
    cute_ops_jax.export(outer / "program", forward, jnp.ones((2, 64)), jnp.ones(64), platforms="cpu")
    assert not any(path.stat().st_mode & 0o022 for path in (outer, *outer.rglob("*")))
    assert callable(cute_ops_jax.load(outer / "program"))


@pytest.mark.fault("an exported program contains a callback into Python", "an error", "nothing")
@pytest.mark.parametrize("target", ["xla_ffi_python_cpu_callback", "CustomSPMDPartitioning", "somebody_elses"])
@pytest.mark.parametrize("where", ["forward", "gradient"])
def test_a_program_with_a_callback_is_refused(on_cpu: Path, target: str, where: str) -> None:
    """XLA would follow the callback's number in this process, where it may be anything: a segmentation fault."""

    @jax.custom_vjp
    def called(x: Any) -> Any:
        return native(x) if where == "forward" else x * 2

    def native(x: Any) -> Any:
        call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype), vmap_method="sequential")
        return call(x, index=np.uint64(2**40))

    called.defvjp(lambda x: (called(x), None), lambda _, g: (native(g) if where == "gradient" else g,))
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target)]
    made = jax.export.export(jax.jit(called), platforms=["cpu"], disabled_checks=allowed)(jnp.ones((2, 64)))
    (on_cpu / "any.jax").write_bytes(made.serialize(vjp_order=1))
    tampered(on_cpu, lambda record: None)
    with pytest.raises(CacheError, match=f"its program calls {target}, which no exported program does"):
        cute_ops_jax.load(on_cpu)


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(programs={}),
        lambda record: record.update(programs=[]),
        lambda record: record.update(platforms="cpu"),
        lambda record: record["programs"]["any"].update(kernels=[7]),
        lambda record: record["programs"]["any"].update(file=["any.jax"]),
        lambda record: record.update(format="2"),
        lambda record: record.pop("programs"),
    ],
)
def test_a_record_of_other_types(on_cpu: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tampered(on_cpu, change)
    with pytest.raises(CacheError, match="holds no exported program: "):
        cute_ops_jax.load(on_cpu)


@pytest.mark.parametrize("data", [b"", b"\0" * 100, os.urandom(1000), b"[" * 100_000])
def test_a_program_of_other_bytes(on_cpu: Path, data: bytes) -> None:
    (on_cpu / "any.jax").write_bytes(data)
    tampered(on_cpu, lambda record: None)
    with pytest.raises(CacheError, match="its program cannot be read"):
        cute_ops_jax.load(on_cpu)
    (on_cpu / "program.json").write_bytes(b"[" * 100_000)
    with pytest.raises(CacheError, match="nested too deeply"):
        cute_ops_jax.load(on_cpu)


@pytest.mark.fault(
    "a program is exported again while another process loads it", "the process loads the old or the new one", "nothing",
)  # fmt: skip
def test_a_program_that_is_replaced_while_it_loads(on_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced after the record was read: the old files are gone, and the new program has other bytes."""
    read = ownership.Folder.read

    def replaced(self: ownership.Folder, name: str) -> bytes:
        if name == "any.jax":
            monkeypatch.undo()
            cute_ops_jax.export(
                on_cpu, lambda x, w: forward(x, w) + 1, jnp.ones((2, 64)), jnp.ones(64), platforms="cpu"
            )
        return read(self, name)

    monkeypatch.setattr(ownership.Folder, "read", replaced)
    x, w = jnp.arange(128.0).reshape(2, 64), jnp.ones(64)
    np.testing.assert_array_equal(cute_ops_jax.load(on_cpu)(x, w), forward(x, w) + 1)


@pytest.mark.fault("the disk is full while an export replaces another", "an error; the old one stays", "nothing")
def test_an_export_that_fails_leaves_the_one_before(on_cpu: Path) -> None:
    before = {path: path.read_bytes() for path in on_cpu.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            cute_ops_jax.export(on_cpu, forward, jnp.ones((2, 32)), jnp.ones(32), platforms="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path: path.read_bytes() for path in on_cpu.iterdir()} == before
    assert [path.name for path in on_cpu.parent.iterdir()] == ["program"]


def test_what_somebody_put_into_an_export_is_kept(on_cpu: Path) -> None:
    """A folder with any ``program.json`` in it was once deleted."""
    (on_cpu / "thesis.txt").write_text("chapter one")
    with pytest.raises(CacheError, match=r"holds thesis\.txt, which we did not write: move that elsewhere"):
        cute_ops_jax.export(on_cpu, forward, jnp.ones((2, 64)), jnp.ones(64), platforms="cpu")
    assert (on_cpu / "thesis.txt").exists() and callable(cute_ops_jax.load(on_cpu))


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("chapter one")
    with pytest.raises(CacheError, match="is not empty and no exported program"):
        cute_ops_jax.export(tmp_path, forward, jnp.ones((2, 64)), jnp.ones(64), arch="sm_90a")


def test_a_program_for_cpus_asks_for_no_gpu(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The export replaces the former one, and runs on the CPU of a machine with a GPU, too."""
    monkeypatch.delenv("CUTE_OPS_ARCH", raising=False)
    monkeypatch.setattr(ffi, "device_target", lambda: pytest.fail("asked for a GPU"))
    where = tmp_path / "program"
    shutil.copytree(exported, where)
    x, w = jnp.arange(128.0).reshape(2, 64), jnp.ones(64)
    cute_ops_jax.export(where, forward, x, w, platforms="cpu")
    assert sorted(p.name for p in where.iterdir()) == ["any.jax", "program.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["program"]
    np.testing.assert_array_equal(cute_ops_jax.load(where)(x, w), forward(x, w))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert callable(cute_ops_jax.load(where))


def test_what_to_export_for_must_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def export(**options: Any) -> None:
        cute_ops_jax.export(tmp_path / "program", forward, jnp.ones((2, 64)), jnp.ones(64), **options)

    def no_gpu() -> Any:
        raise RuntimeError("cute_ops: no CUDA driver")

    monkeypatch.setattr(ffi, "device_target", no_gpu)
    with pytest.raises(ValueError, match=r"no GPU is here to build for \(cute_ops: no CUDA driver\): name one, arch="):
        export()
    with pytest.raises(ValueError, match="unknown platform 'gpu'; known: cpu, cuda, rocm, tpu"):
        export(platforms=["gpu"], arch="sm_90a")
    with pytest.raises(ValueError, match="no platform"):
        export(platforms=[], arch="sm_90a")
    assert not list(tmp_path.iterdir())


def test_other_custom_calls_stay_forbidden(tmp_path: Path, fake_kernels: Any) -> None:
    call = jax.ffi.ffi_call("somebody_elses", jax.ShapeDtypeStruct((2, 64), jnp.float32))
    with pytest.raises(ValueError, match="somebody_elses"):
        exporting._serialized(lambda x: call(cute_ops_jax.rmsnorm(x)), ["cuda"], 0, (jnp.ones((2, 64)),), {})


@pytest.mark.drawn(0.4)
@pytest.mark.slow
@pytest.mark.some_ops
@pytest.mark.feature("FFI: export with symbolic rows, and its gradient where there is one")
def test_symbolic_rows_reach_the_kernel(
    any_op: Op, through_ffi: Any, fake_kernels: Any, close: Callable[..., Any]
) -> None:
    """One export serves any number of rows, gradients included: the CUDA lowering with the reference as the kernel."""
    function = testing.plain(any_op, through_ffi(any_op))
    b, s = jax.export.symbolic_shape("b, s")
    kinds = [a.dtype for a in testing.sample(any_op, (2, 3), 6, np.random.default_rng(0))]
    shaped = [
        jax.ShapeDtypeStruct(t.of(any_op.example((b, s), 6)), kind)
        for t, kind in zip(any_op.inputs.values(), kinds, strict=True)
    ]
    data, _ = exporting._serialized(function, ["cpu"], 1 if any_op.grad else 0, shaped, {})
    program = jax.export.deserialize(bytearray(data)).call
    for lead in ((1, 1), (3, 5)):
        arrays = testing.sample(any_op, lead, 6, np.random.default_rng(1))
        wrt = testing.argnums(any_op)

        def values(function: Any, *arrays: Any, wrt: Any = wrt) -> Any:
            def chosen(*given: Any) -> Any:
                filled = {**dict(enumerate(arrays)), **dict(zip(wrt, given, strict=True))}
                return function(*filled.values())

            outputs, pull = jax.vjp(chosen, *(arrays[i] for i in wrt))
            return outputs, pull(jax.tree.map(jnp.cos, outputs))

        by_reference = testing.plain(any_op, cute_ops_jax.register(any_op))
        close(*(jax.jit(partial(values, function))(*arrays) for function in (program, by_reference)))
    assert len({s for s, _ in fake_kernels.calls}) == (2 if any_op.grad else 1)


ANY_SIZE = ("rmsnorm", "softmax", "quantize_fp8", "causal_conv1d")


@pytest.mark.drawn(0.4)
@pytest.mark.parametrize("own", [*(op for op in OPS if op.name in ANY_SIZE), linear], ids=lambda own: own.name)
def test_other_symbolic_sizes_reach_the_kernel(
    own: Op, through_ffi: Any, fake_kernels: Any, close: Callable[..., Any]
) -> None:
    """So do all that are no constants of every kernel; what is one while its sizes are few is dynamic then."""
    call, by_reference = (testing.plain(own, make(own)) for make in (through_ffi, cute_ops_jax.register))
    bound = {n for t in own.inputs.values() for d in t.dims for n in d.names}
    free = sorted(bound - (set(own.static) - set(own.few)))
    b, m, *sizes = jax.export.symbolic_shape(", ".join(["b", "m", *(f"4*{n}_4" if n in "nk" else n for n in free)]))
    symbolic = own.example((b, m), 8) | dict(zip(free, sizes, strict=True))
    dtype = "bfloat16" if own is linear else "float32"
    kinds = [a.dtype for a in testing.sample(own, (2, 3), 8, np.random.default_rng(0), dtype)]
    tensors = own.inputs.values()
    shaped = [jax.ShapeDtypeStruct(t.of(symbolic), kind) for t, kind in zip(tensors, kinds, strict=True)]
    # A gradient's weight is summed up in a scratch array as wide as a row.
    order = int(own.name in ("rmsnorm", "softmax"))
    data, _ = exporting._serialized(call, ["cpu"], order, shaped, {})
    program = jax.export.deserialize(bytearray(data)).call
    for lead, n in (((3, 5), 8), ((1, 2), 24)):
        arrays = testing.sample(own, lead, n, np.random.default_rng(1), dtype)
        close(program(*arrays), by_reference(*arrays))
        if order:
            for k in range(len(arrays)):
                close(*(gradient(function, arrays, k) for function in (program, by_reference)))
    for variant in fake_kernels.variants:
        assert all(variant.dims[name] is None for name in own.few)
        assert {key.row_align for key in variant.args if key and key.shape[1:] == (None,)} <= {4, 8, 16}


def test_sizes_that_kernels_have_as_constants(fake_kernels: Any) -> None:
    (w,) = jax.export.symbolic_shape("w")
    shaped = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 9, 8), (8, w))]
    conv = next(op for op in OPS if op.name == "causal_conv1d")
    unchecked = cute_ops_jax.register(without_check(conv))
    with pytest.raises(NotImplementedError, match=r"sizes may not be symbolic: w=w is a constant of every kernel\."):
        exporting._serialized(unchecked, ["cuda"], 0, shaped, {})


def test_scratch_arrays_that_follow_no_size(fake_kernels: Any) -> None:
    """The gradient of a convolution has the more partial sums the fewer channels there are."""
    (n,) = jax.export.symbolic_shape("8*n")
    shaped = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 9, n), (n, 4))]
    with pytest.raises(
        NotImplementedError, match=r"symbolic: its scratch arrays do not grow as one of them, or as a part of one\."
    ):
        exporting._serialized(cute_ops_jax.causal_conv1d, ["cuda"], 1, shaped, {})


def without_check(op: Op) -> Op:
    """An op that does not look at the values of its sizes, which symbolic ones do not have."""
    made = copy.copy(op)
    made.check, made.grad, made.steps, made.differentiable = lambda binding: None, None, (), ()
    return made


@pytest.mark.parametrize(("text", "align"), [("n", 4), ("2*n", 8), ("8*n", 16), ("8*n + 4", 16), ("n + 1", 4)])
def test_rows_are_aligned_as_they_are_for_all_sizes(text: str, align: int, fake_kernels: Any) -> None:
    (n,) = jax.export.symbolic_shape(text)
    exporting._serialized(cute_ops_jax.softmax, ["cuda"], 0, [jax.ShapeDtypeStruct((2, n), jnp.float32)], {})
    (variant,) = fake_kernels.variants
    assert [key.row_align for key in variant.args if key] == [align, align]


def gradient(function: Callable[..., Any], arrays: Any, k: int) -> Any:
    return jax.grad(lambda one: jnp.sum(jnp.sin(function(*arrays[:k], one, *arrays[k + 1 :]))))(arrays[k])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["shard_map", "explicit"])
def test_a_program_of_eight_devices(kind: AxisType, through_ffi: Any, fake_kernels: Any, close: Any) -> None:
    """Inside of shard_map, and with explicit axes, the exported program holds each device's kernel."""
    function = through_ffi(next(op for op in OPS if op.name == "rmsnorm"))
    mesh = jax.make_mesh((8,), ("rows",), (kind,), devices=jax.devices("cpu"))
    if kind == AxisType.Auto:
        function = jax.shard_map(function, mesh=mesh, in_specs=(jax.P("rows"), jax.P()), out_specs=jax.P("rows"))
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((16, 6), np.float32), rng.standard_normal(6, np.float32)
    given = jax.device_put(x, NamedSharding(mesh, jax.P("rows"))), jax.device_put(w, NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh):
        data, text = exporting._serialized(function, ["cpu"], 0, given, {})
        program = jax.export.deserialize(bytearray(data))
        fake_kernels.calls.clear()
        got = jax.block_until_ready(jax.jit(program.call)(*given))
    assert "CustomSPMDPartitioning" not in text
    assert program.nr_devices == 8
    close(jax.device_get(got), forward(x, w))
    assert [shapes[0] for _, shapes in fake_kernels.calls] == [(2, 6)] * 8


def test_automatic_axes_cannot_be_exported(through_ffi: Any) -> None:
    function = through_ffi(next(op for op in OPS if op.name == "rmsnorm"))
    mesh = jax.make_mesh((8,), ("rows",), (AxisType.Auto,), devices=jax.devices("cpu"))
    x = jax.device_put(np.ones((16, 6), np.float32), NamedSharding(mesh, jax.P("rows")))
    with pytest.raises(NotImplementedError, match=r"use jax\.shard_map or a mesh with explicit axes\.$"):
        exporting._serialized(function, ["cpu"], 0, (x,), {})
