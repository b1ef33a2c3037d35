"""torch.export and AOTInductor: any number of rows, saved, loaded where the model's code is not."""

from __future__ import annotations

import io
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import cute_ops_torch
from cute_ops import Op
from cute_ops.ops import OPS
from cute_ops.ops.gemm import by_call
from cute_ops_torch.tools import runner
from tests.ops.offered_products import PRODUCTS

# The code is a list of calls, compiled once.
QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}
EXAMPLE = Path(__file__).parents[2] / "examples" / "aot_inductor"


def as_list(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


def forms(op: Op, inputs: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    required = sum(not t.optional for t in op.inputs.values())
    return [inputs[:count] for count in {len(op.inputs), required}]


class Calls(torch.nn.Module):
    """Each op with all inputs, and, where some are optional, with those only that it needs; attributes by op."""

    def __init__(self, ops: Sequence[Op], attrs: Mapping[str, Mapping[str, Any]] = {}) -> None:
        super().__init__()
        self.ops, self.attrs = ops, attrs

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        given, results = list(tensors), []
        for op in self.ops:
            inputs, given = given[: len(op.inputs)], given[len(op.inputs) :]
            for some in forms(op, inputs):
                results += as_list(runner.functional(op)(*some, **self.attrs.get(op.name, {})))
        # As bytes, because the C++ program's file format has no fp8.
        return [r.view(torch.uint8) if r.dtype == torch.float8_e4m3fn else r for r in results]


class WithRecipe(Calls):
    """And an op that a graph was found to be, by its recipe, of the last three tensors."""

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        recipe = "linear('e1(t,t) silu 0; multiply 1 2 -> 3', ('*m n',), 'n k')"
        return [*super().forward(*tensors[:-3]), *torch.ops.cute.by_recipe(recipe, list(tensors[-3:]))]


def dynamic(ops: Sequence[Op]) -> Any:
    """The first dim of what has rows."""
    return (tuple({0: Dim.DYNAMIC} if t.rows else None for op in ops for t in op.inputs.values()),)


@pytest.mark.some_ops
@pytest.mark.feature("torch.export: any number of rows, saved and loaded")
def test_export(any_op: Op, make_inputs: Callable[..., Any]) -> None:
    calls = Calls([any_op])
    program = torch.export.export(calls, tuple(make_inputs(any_op, (5, 3))), dynamic_shapes=dynamic([any_op]))
    raw = getattr(torch.ops.cute, any_op.name).default
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert targets.count(raw) == len(forms(any_op, []))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for rows in (2, 7):
        tensors = make_inputs(any_op, (rows, 3))
        torch.testing.assert_close(loaded(*tensors), calls(*tensors), rtol=0, atol=0, equal_nan=True)


def test_export_of_a_module() -> None:
    norm, x = cute_ops_torch.nn.RMSNorm(64), torch.randn(3, 64)
    program = torch.export.export(norm, (x,), dynamic_shapes=({0: Dim("m")},))
    assert [n.target for n in program.graph.nodes if n.op == "call_function"] == [torch.ops.cute.rmsnorm.default]
    torch.testing.assert_close(program.module()(torch.randn(7, 64).fill_(2)), norm(torch.full((7, 64), 2.0)))


# Torch compiles and loads a program for each kind of vector instructions, by a process that imports torch: minutes on a
# large machine, in every process that builds or loads a package. There is nothing to vectorize here.
LOAD = """
import sys, torch, cute_ops_torch, torch._inductor.cpu_vec_isa
torch._inductor.cpu_vec_isa.valid_vec_isa_list = list
model = torch._inductor.aoti_load_package(sys.argv[1])
torch.save([model(*tensors) for tensors in torch.load(sys.argv[2])], sys.argv[3])
"""


def has_cuda_headers() -> bool:
    from torch.utils.cpp_extension import include_paths

    try:
        return any(Path(folder, "cuda_runtime_api.h").exists() for folder in include_paths(device_type="cuda"))
    except OSError:  # no toolkit
        return False


def sharing_compiler(folder: Path) -> str:
    """A compiler that links the C++ library which torch has loaded.

    Where ``$CXX`` puts a copy of its own into each library, a package dies when it is loaded, in ``std::regex``,
    whatever model is in it.
    """
    source, library = folder / "shares.cpp", folder / "shares.so"
    source.write_text("#include <locale>\nstd::locale made() { return std::locale(); }\n")
    named = os.environ.get("CXX", "g++")
    for compiler in filter(shutil.which, (named, "g++", "c++")):
        made = subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=False)
        if made.returncode == 0 and b"libstdc++.so" in library.read_bytes():
            return compiler
    return named


@pytest.mark.drawn(0.35, among="packages")
@pytest.mark.slow
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.feature("AOTInductor: packaged, run by a fresh process, in C++ too")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.feature("GPU: AOTInductor, the same")]),
    ],
)
def test_package(
    device: str, make_inputs: Callable[..., Any], drawn: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """All ops in one package, or those that are drawn, since most of the time goes to a C++ compiler."""
    from torch._inductor import cpu_vec_isa  # late: it takes a second

    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    compiler = sharing_compiler(tmp_path)
    monkeypatch.setenv("CXX", compiler)  # for the example
    configs = {**QUICK, "cpp.cxx": (None, compiler)}
    if device == "cuda" and not has_cuda_headers():
        pytest.skip("AOTInductor needs the headers of the CUDA toolkit")
    # Of epilogues, one with a name, which a process that loads the package knows.
    with_name = by_call.op_of_call("add", ("n", "*m n"))
    ops = [*OPS, *(with_name if product.name == "linear_epilogue" else product.op for product in PRODUCTS)]
    ops = drawn(ops, 0.4)
    for op in ops:
        cute_ops_torch.register(op)
    attrs = {"qkv_rope_64": {"heads": 1}}  # of 64 columns, one head
    calls, package, given = WithRecipe(ops, attrs), tmp_path / "ops.pt2", tmp_path / "inputs.pt"
    inputs = [[t for op in ops for t in make_inputs(op, (m, 3), device=device)] for m in (5, 2, 9)]
    for m, each in zip((5, 2, 9), inputs, strict=True):
        each += [torch.randn(*shape, device=device) for shape in ((m, 8), (16, 8), (m, 16))]
    torch.save(inputs, given)  # before the export, which leaves marks on them
    rows = {0: Dim.DYNAMIC}
    shapes = ((*dynamic(ops)[0], rows, None, rows),)
    program = torch.export.export(calls, tuple(inputs[0]), dynamic_shapes=shapes)
    torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=configs)
    embeds = Path(sysconfig.get_config_var("LIBDIR"), f"libpython{sysconfig.get_config_var('LDVERSION')}.so").exists()
    if embeds:
        runpy.run_path(str(EXAMPLE / "build.py"))["build"](tmp_path / "run")
    else:
        warnings.warn("this Python has no shared library: nothing is run in C++", stacklevel=1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONFAULTHANDLER": "1"}
    for command in ([sys.executable, "-c", LOAD], *([[str(tmp_path / "run")]] if embeds else [])):
        made = tmp_path / "outputs.pt"
        done = subprocess.run(
            [*command, *map(str, (package, given, made))], capture_output=True, text=True, env=environment, timeout=600
        )
        assert done.returncode == 0, f"{command[0]} ended with {done.returncode}: {done.stderr}"
        for got, tensors in zip(torch.load(made, weights_only=False), inputs, strict=True):
            expected = calls(*tensors)
            for op in ops:
                count = len(forms(op, [])) * len(op.results)
                torch.testing.assert_close({op.name: got[:count]}, {op.name: expected[:count]}, rtol=0, atol=0)
                got, expected = got[count:], expected[count:]
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
