"""What importing and calling must not bring in."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator

import pytest

import cute_ops_torch

FORBIDDEN = (
    "jax",
    "cutlass",
    "tvm_ffi",
    "triton",
    "transformers",
    "torch._inductor",
    "torch._dynamo",
    "torch.distributed.tensor",
    "array_api_compat",
)
PROGRAM = """
import sys, torch
before = set(sys.modules)
import cute_ops_torch
{then}
loaded = set(sys.modules) - before
print(sorted(n for n in loaded if n.startswith({forbidden!r})))
"""
FORK = """
import os, sys, tempfile, torch
for program in map(eval, sys.stdin):
    with tempfile.TemporaryFile("w+") as output:
        if not (child := os.fork()):
            sys.stdout = output
            exec(program, {})
            output.flush()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        output.seek(0)
        print(repr((status, output.read())), flush=True)
"""

Run = Callable[[str], str]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """``run(program)``: what a program prints. Each is a fork of one process that has imported torch and nothing of
    ours, since importing torch takes longer than the programs.
    """
    command, pipe = [sys.executable, "-c", FORK], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as fork:

        def run(program: str) -> str:
            assert fork.stdin and fork.stdout
            print(repr(program), file=fork.stdin, flush=True)
            status, output = literal_eval(fork.stdout.readline())
            assert status == 0, program
            return output.strip()

        yield run


def loaded(run: Run, then: str, forbidden: tuple[str, ...]) -> str:
    return run(PROGRAM.format(then=then, forbidden=forbidden))


@pytest.mark.slow
def test_import_brings_no_other_framework_and_no_compiler(run: Run) -> None:
    assert loaded(run, "", FORBIDDEN) == "[]"


@pytest.mark.slow
def test_the_check_itself_sees_an_import(run: Run) -> None:
    assert loaded(run, "import array_api_compat", FORBIDDEN) != "[]"


@pytest.mark.slow
def test_calls_and_gradients_on_the_cpu_need_no_compiler(run: Run) -> None:
    forbidden = tuple(n for n in FORBIDDEN if n != "array_api_compat")
    then = "x = torch.ones(2, 8, requires_grad=True); cute_ops_torch.rmsnorm(x).sum().backward()"
    assert loaded(run, then, forbidden) == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_ops_take_dtensors_whoever_is_imported_first(before: bool, run: Run) -> None:
    looks = "import importlib.util; importlib.util.find_spec('torch.distributed.tensor')"  # without importing it
    imports = [f"{looks}; import torch.distributed.tensor as t", "import cute_ops_torch"]
    program = f"""
import sys
{"; ".join(imports if before else reversed(imports))}
import torch
finder = [f for f in sys.meta_path if getattr(f, "theirs", "") == "torch.distributed.tensor"]
rules = torch._library.simple_registry.singleton.find("cute::rmsnorm").torch_dispatch_rules
print(bool(rules.find(t.DTensor)), finder)
"""
    assert run(program) == "True []"


@pytest.mark.slow
def test_products_are_there_once_a_program_reads_exported_graphs(run: Run) -> None:
    names = "qkv_rope_64", "group_norm_first", "group_norm_last", "linear_distillation_total", "expert_balance"
    looks = f"print([hasattr(torch.ops.cute, name) for name in {names}])"
    program = f"import torch, cute_ops_torch; {looks}; import torch.export.pt2_archive; {looks}"
    assert run(program).splitlines() == [str([there] * len(names)) for there in (False, True)]


def test_no_module_takes_the_name_of_a_function() -> None:
    """Importing a module sets its name in its package, in any order of imports."""
    modules = {module.name for module in pkgutil.iter_modules(cute_ops_torch.__path__)}
    assert modules & set(cute_ops_torch.__all__) == {"nn"}


@pytest.mark.slow
def test_import_does_not_search_all_modules(run: Run) -> None:
    """What ``torch.library.register_fake`` does at every call; it would still work, and take long."""
    assert run("import torch; del torch.library.register_fake; import cute_ops_torch; print('short')") == "short"


@pytest.mark.slow
def test_what_the_import_loads(run: Run, what_loads: Callable[[str, str, int], str]) -> None:
    """Rooms of ours, and nothing of others: what is added here is paid at every start."""
    program = what_loads("torch", "cute_ops_torch", 239)
    core = "autotune composite constants declaration env errors expressions files garbage hardware jit kernels mods ops"
    ours = "composite distributed functions host library registry"
    names = [f"cute_ops.{name}" for name in (*core.split(), "version")] + [
        f"cute_ops_torch.{name}" for name in ours.split()
    ]
    assert run(program) == f"{sorted(['fractions', *names])} True"


@pytest.mark.slow
def test_modules_that_are_imported_when_they_are_used(run: Run) -> None:
    mine = ("cute_ops_torch.optim", "cute_ops_torch.inductor", "cute_ops_torch.nn", "cute_ops_torch.huggingface")
    assert loaded(run, "", mine) == "[]"
    assert loaded(run, "cute_ops_torch.optim.AdamW", mine) == "['cute_ops_torch.optim']"
    assert "cute_ops_torch.inductor" in loaded(run, "cute_ops_torch.inductor.enable", mine)
