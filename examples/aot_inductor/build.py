"""Builds ``run.cpp``, which runs a packaged model from C++, against the installed torch and Python.

program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
torch._inductor.aoti_compile_and_package(program, package_path="out/model.pt2")
torch.save([[x], [x[:3]]], "out/inputs.pt")  # two calls

python examples/aot_inductor/build.py out/run
PYTHONPATH=... out/run out/model.pt2 out/inputs.pt out/outputs.pt  # where cute_ops_torch is not installed
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

HERE = Path(__file__).parent


def build(program: Path) -> None:
    torch_folder, python_folder = Path(torch.__file__).parent, sysconfig.get_config_var("LIBDIR")
    include = (torch_folder / "include", torch_folder / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    libraries = [torch_folder / "lib", python_folder]
    program.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            os.environ.get("CXX", "c++"), "-std=c++20", "-O0", *(f"-isystem{folder}" for folder in include),
            str(HERE / "run.cpp"), "-o", str(program), *(f"-L{folder}" for folder in libraries),
            *(f"-Wl,-rpath,{folder}" for folder in libraries), "-Wl,--no-as-needed",
            *(["-ltorch_cuda"] if torch.cuda.is_available() else []), "-ltorch", "-ltorch_cpu", "-lc10",
            f"-lpython{sysconfig.get_config_var('LDVERSION')}",
        ],
        check=True,
    )  # fmt: skip


if __name__ == "__main__":
    build(Path(sys.argv[1]))
