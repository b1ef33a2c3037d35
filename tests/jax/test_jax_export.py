"""Programs that travel with their kernels: exported here, without a GPU, and run in a process that knows nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import cute_ops_jax
from cute_ops import Op, bundle, testing
from cute_ops.errors import CacheError
from cute_ops.ops import OPS
from cute_ops_jax import exporting, targets

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
    """One norm for any number of rows, with its gradient, for two architectures; really compiled."""
    where = tmp_path_factory.mktemp("exported") / "program"
    b, s = jax.export.symbolic_shape("b, s")
    x, w = jax.ShapeDtypeStruct((b, s, 64), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)
    cute_ops_jax.export(where, forward, x, w, arch=["sm_90a", "sm_80"], vjp_order=1)
    return where


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


def test_the_folder_holds_what_each_program_calls(exported: Path) -> None:
    programs = json.loads((exported / "program.json").read_text())["programs"]
    assert sorted(programs) == ["sm_80:108", "sm_90a:132"]
    held = bundle.Bundle(exported / "kernels")
    assert held.verify() == 4
    for name, program in programs.items():
        variants = [held.variant(s) for s in program["kernels"]]
        assert {v.op for v in variants} == {"rmsnorm", "rmsnorm_bwd"}
        assert {v.arch for v in variants} == {name.partition(":")[0]}


def test_kernels_are_registered_from_the_bundle_alone(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax_tvm_ffi

    from cute_ops import cache

    names: list[str] = []
    monkeypatch.setattr(jax_tvm_ffi, "register_ffi_target", lambda name, *args, **kwargs: names.append(name))
    monkeypatch.setattr(cache, "get", lambda variant: pytest.fail("asked the cache"))
    monkeypatch.setattr(targets, "_known", {})
    symbols = json.loads((exported / "program.json").read_text())["programs"]["sm_90a:132"]["kernels"]
    for _ in range(2):
        exporting._register(bundle.Bundle(exported / "kernels"), symbols)
    assert names == symbols


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(targets, "cuda_devices", list)
    monkeypatch.setattr(targets, "_known", {})
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


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("chapter one")
    with pytest.raises(CacheError, match="is not empty and no exported program"):
        cute_ops_jax.export(tmp_path, forward, jnp.ones((2, 64)), jnp.ones(64), arch="sm_90a")


def test_a_program_for_cpus_asks_for_no_gpu(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It replaces what was there, and runs on the CPU of a machine with a GPU, too."""
    monkeypatch.delenv("CUTE_OPS_ARCH", raising=False)
    monkeypatch.setattr(targets, "device_target", lambda: pytest.fail("asked for a GPU"))
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

    monkeypatch.setattr(targets, "device_target", no_gpu)
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


@pytest.mark.feature("FFI: export with symbolic rows, and its gradient where there is one")
def test_symbolic_rows_reach_the_kernel(
    any_op: Op, through_ffi: Any, fake_kernels: Any, close: Callable[..., Any]
) -> None:
    """Exported once for any number of rows, gradients included; the CUDA lowering with the reference as the kernel."""
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

        def values(function: Any, arrays: Any = arrays, wrt: Any = wrt) -> Any:
            def chosen(*given: Any) -> Any:
                filled = {**dict(enumerate(arrays)), **dict(zip(wrt, given, strict=True))}
                return function(*filled.values())

            outputs, pull = jax.vjp(chosen, *(arrays[i] for i in wrt))
            return outputs, pull(jax.tree.map(jnp.cos, outputs))

        close(values(program), values(testing.plain(any_op, cute_ops_jax.register(any_op))))
    assert len({s for s, _ in fake_kernels.calls}) == (2 if any_op.grad else 1)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["shard_map", "explicit"])
def test_a_program_of_eight_devices(kind: AxisType, through_ffi: Any, fake_kernels: Any, close: Any) -> None:
    """Inside of shard_map, and with explicit axes, each device's kernel is in the program as it is exported."""
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
