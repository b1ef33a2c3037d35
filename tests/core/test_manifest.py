"""Manifests: what a program calls, as text, and back to the very same kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from cute_ops import FLOATS, Array
from cute_ops.__main__ import app
from cute_ops.aot import build
from cute_ops.aot.hf_config import calls_of_model
from cute_ops.autotune import dispatch
from cute_ops.autotune.dispatch import choose
from cute_ops.calls import lookup, manifest
from cute_ops.declaration.binding import bind
from cute_ops.jit.layout import Memory, compact
from cute_ops.jit.target import Target, parse
from cute_ops.ops import OPS
from cute_ops.ops.gemm.by_call import op_of_call
from tests.ops import writing

SEED = int(os.environ.get("CUTE_OPS_SEED", "41"))

HERE = Path(__file__).parent
SM90 = parse("sm_90a")
LINES = [
    "rmsnorm x:bfloat16[4096,4096] weight:float32[4096] eps=1e-05",
    "rmsnorm x:float16[2,3,1000]/strides=6003,2001,1/align=2",
    "silu_mul gate:float32[7]/align=4 up:float32[7]",
    "rmsnorm x:float32[8,64] weight:float32[64] bias:float32[64] weight_offset=1.0 dynamic",
]


def recorded(path: Path, action: object, monkeypatch: pytest.MonkeyPatch) -> list[manifest.Call]:
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_OPS_RECORD", str(path))
        action()  # type: ignore[operator]
    return manifest.read(path)


@pytest.mark.parametrize("line", LINES)
def test_a_line_reads_back_as_itself(line: str) -> None:
    (call,) = manifest.parse(line)
    assert str(call) == line
    build.variant_of(call, SM90)


@pytest.mark.parametrize("memory", [{}, {"x": Memory((2001, 1), address=1026)}, {"x": Memory((4096, 1), address=48)}])
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_was_recorded_is_what_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: dict[str, Memory], dtype: str
) -> None:
    (rmsnorm,) = (op for op in OPS if op.name == "rmsnorm")
    arrays = {"x": Array((5, 1000), dtype), "weight": Array((1000,), "float32")}
    ran = []

    def program() -> None:
        for rows in (5, 5, 17):
            binding = bind(rmsnorm, arrays | {"x": Array((rows, 1000), dtype)}, {"eps": 1e-5})
            ran.append(choose(binding, memory, SM90).variant)

    (call,) = recorded(tmp_path / "m.txt", program, monkeypatch)
    assert {v.symbol for v in ran} == {build.variant_of(call, SM90).symbol}
    # The same line is other kernels elsewhere.
    assert build.variant_of(call, parse("sm_100a")).arch == "sm_100a"
    assert call.attrs == {"eps": 1e-5}, "only what differs from the declaration"


def test_a_line_holds_no_value_of_a_scalar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axpy = writing.axpy
    rows = Array((5, 8), "float32")

    def program() -> None:
        for alpha in (1.5, 2.5):
            choose(bind(axpy, {"x": rows, "y": rows}, {"alpha": alpha}), {}, SM90)

    (call,) = recorded(tmp_path / "m.txt", program, monkeypatch)
    assert str(call) == "tests.ops.writing:axpy x:float32[5,8] y:float32[5,8]"
    assert manifest.parse(f"{call} alpha=1.5\n{call} alpha=2.5") == [call]


@pytest.mark.parametrize("name", ["adamw", "sum_bwd", "scale"])
def test_what_ran_on_a_vector_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its number is a row's, of which there is one."""
    op, ran = lookup.find(name), []
    arrays = {n: Array(t.of({"m": (), "n": 7}), op.dtype_near(t, "float32")) for n, t in op.inputs.items()}

    def program() -> None:
        ran.append(choose(bind(op, arrays), {n: Memory(compact(a.shape)) for n, a in arrays.items()}, SM90).variant)

    (call,) = recorded(tmp_path / "m.txt", program, monkeypatch)
    assert build.variant_of(call, SM90) == ran[0]


@pytest.mark.parametrize("layout", ["n k", "k n"])
@pytest.mark.parametrize(("epilogue", "shapes"), [("bias", ("n",)), ("silu", (None,)), ("add", (None, "*m n"))])
def test_products_of_named_epilogues_are_found(epilogue: str, shapes: tuple[str | None, ...], layout: str) -> None:
    """With those of their gradients: other processes measure and build them."""
    op = op_of_call(epilogue, shapes, layout=layout)
    for each in (op, *op.steps, *([op.saving] if op.saving else [])):
        assert lookup.find(lookup.place(each) or "") is each
    assert lookup.place(op_of_call(lambda xp, acc: xp.tanh(acc) + 1.25, ())) is None


@pytest.mark.parametrize("fused", ["auto", "always"])
@pytest.mark.parametrize("name", ["linear_gelu_saving", "linear_gelu_epilogue", "linear_gelu_bwd", "linear_of_dacc_dx"])
def test_what_runs_beside_a_product_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fused: str
) -> None:
    """Forwards that save, epilogues alone and gradients; whichever was asked for, it is one kernel."""
    op = lookup.find(name)
    arrays = {n: Array(t.of({"m": (512,), "n": 64, "k": 64}), "bfloat16") for n, t in op.inputs.items()}
    attrs = {"fused": fused} if "fused" in op.attrs else {}
    variant = choose(bind(op, arrays), {}, SM90).variant
    (call,) = recorded(tmp_path / "m.txt", lambda: choose(bind(op, arrays, attrs), {}, SM90), monkeypatch)
    assert build.variant_of(call, SM90) == variant


def test_a_dynamic_kernel_is_recorded_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "STATIC_LIMIT", 0)
    monkeypatch.setattr(dispatch, "_static_seen", {})
    binding = bind(lookup.find("silu_mul"), dict.fromkeys(("gate", "up"), Array((4, 96), "float16")))
    (call,) = recorded(tmp_path / "m.txt", lambda: choose(binding, {}, SM90), monkeypatch)
    assert str(call).endswith(" dynamic") and build.variant_of(call, SM90).dims == {"n": None}


def test_planning_from_a_manifest_uses_up_no_static_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "STATIC_LIMIT", 2)
    monkeypatch.setattr(dispatch, "_static_seen", {})
    lines = "\n".join(f"silu_mul gate:float16[*,{n}] up:float16[*,{n}]" for n in range(8, 80, 8))
    assert {v.dims["n"] for v in build.variants_of(manifest.parse(lines), [SM90])} == set(range(8, 80, 8))


@pytest.mark.slow
def test_processes_record_into_one_file(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys
        from cute_ops import Array
        from cute_ops.calls import lookup
        from cute_ops.declaration.binding import bind
        from cute_ops.autotune.dispatch import choose
        from cute_ops.jit.target import parse
        for n in range(16, 16 * 41, 16):
            choose(bind(lookup.find("silu_mul"), dict.fromkeys(("gate", "up"), Array((3, n), "float32"))), {},
                 parse("sm_90a"))
    """)
    environment = {**os.environ, "CUTE_OPS_RECORD": str(tmp_path / "m.txt")}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(4)]
    assert not any(p.wait(600) for p in processes)
    assert len((tmp_path / "m.txt").read_text().splitlines()) == 160, "a line was torn"
    assert len(manifest.read(tmp_path / "m.txt")) == 40


@pytest.mark.slow
def test_every_op_of_a_gradient_is_found_by_its_place(tmp_path: Path) -> None:
    """Also where a module binds none of them, and narrowed to some outputs."""
    (tmp_path / "has_steps.py").write_text(
        textwrap.dedent("""
        from cute_ops import Op, Tensor
        ROWS, ROW = Tensor("*m n", "float32"), Tensor("n", "float32")
        def declare(name, inputs, outputs, **fields):
            fields |= {"reference": lambda xp, *a: a, "kernel": "a:B"}
            return Op(name, inputs=inputs, outputs=outputs, dtypes={}, **fields)
        mine = declare("mine", {"x": ROWS, "w": ROW}, {"out": ROWS}, grad=(
            declare("first", {"dout": ROWS}, {"dx": ROWS}), declare("second", {"w": ROW}, {"dw": ROW})))
        norm = declare("norm", {"x": ROWS, "w": ROW}, {"out": ROWS}, grad=declare(
            "norm_bwd", {"w": ROW, "dout": ROWS}, {"dx": ROWS, "dw": ROW._replace(skippable=True)}))
        """)
    )
    for name in ("mine", "mine.first", "mine.second", "norm", "norm.grad", "norm.norm_bwd_only_dx"):
        op = lookup.find(f"{tmp_path / 'has_steps.py'}:{name}")
        assert lookup.place(op) == f"has_steps:{name}"
    with pytest.raises(ValueError, match=r"has no op 'mine\.third'; it has mine, norm"):
        lookup.find(f"{tmp_path / 'has_steps.py'}:mine.third")
    assert lookup.place(lookup.find("rmsnorm_bwd_only_dx")) == "rmsnorm_bwd_only_dx"


@pytest.mark.slow
def test_an_op_of_ones_own_is_recorded_by_its_place(tmp_path: Path) -> None:
    """Also when it is declared in the script that runs."""
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        from cute_ops import Array, Op, Tensor
        from cute_ops.declaration.binding import bind
        from cute_ops.autotune.dispatch import choose
        from cute_ops.jit.target import parse
        X = {"x": Tensor("*m n", "float32")}
        mine_bwd = Op("mine_bwd", inputs={"dout": Tensor("*m n", "float32")}, outputs={"dx": Tensor("*m n", "float32")},
                      dtypes={}, reference=lambda xp, *a: a, kernel="tests.ops.copying:Copy")
        mine = Op("mine", inputs=X, outputs={"out": X["x"]}, dtypes={}, kernel="tests.ops.copying:Copy",
                  reference=lambda xp, *a: a, grad=mine_bwd)
        del mine_bwd
        if __name__ == "__main__":
            for op, name in ((mine, "x"), (mine.grad, "dout")):
                choose(bind(op, {name: Array((4, 64), "float32")}), {}, parse("sm_90a"))
        """)
    )
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "CUTE_OPS_RECORD": str(tmp_path / "m.txt"), "PYTHONPATH": path}
    subprocess.run([sys.executable, "mine.py"], cwd=tmp_path, env=environment, check=True)
    file = tmp_path / "mine.py"
    lines = [f"{file}:mine x:float32[4,64]", f"{file}:mine.grad dout:float32[4,64]"]
    assert (tmp_path / "m.txt").read_text().splitlines() == lines
    calls = manifest.read(tmp_path / "m.txt", files=True)
    assert [call.op.name for call in calls] == ["mine", "mine_bwd"]

    # A program that has it from a module, its own or none's file: by the module, which can be imported.
    _, condition, calling = file.read_text().partition("if __name__")
    (tmp_path / "uses.py").write_text(f"import multiprocessing\nfrom mine import *\n{condition}{calling}")
    for program in (["uses.py"], ["-c", (tmp_path / "uses.py").read_text()]):
        (tmp_path / "m.txt").unlink()
        subprocess.run([sys.executable, *program], cwd=tmp_path, env=environment, check=True)
        assert (tmp_path / "m.txt").read_text().splitlines() == [
            "mine:mine x:float32[4,64]",
            "mine:mine.grad dout:float32[4,64]",
        ]


def test_a_manifest_that_cannot_be_written_costs_only_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    binding = bind(lookup.find("silu_mul"), dict.fromkeys(("gate", "up"), Array((4, 96), "float16")))
    with pytest.raises(FileNotFoundError):
        recorded(tmp_path / "no" / "m.txt", lambda: choose(binding, {}, SM90), monkeypatch)
    assert "cannot record into" in caplog.text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("nothing x:float32[4]", "m.txt, line 2: no op 'nothing'; there are rmsnorm"),
        ("rmsnorm x:bf16[4]", "unknown dtype 'bf16' (did you mean bfloat16?) in 'x:bf16[4]'"),
        ("rmsnorm x:float32[4] epsilon=1.0", "unknown attribute `epsilon` (did you mean eps?); it takes `eps`"),
        (
            "rmsnorm x=bfloat16",
            "'x=bfloat16': Expecting value: line 1 column 1 (char 0); values are JSON, like eps=1e-5",
        ),
        ("silu x:float32[4] cap=1.0", "unknown attribute `cap`; it takes none."),
        ("rmsnorm x:float32[4,0]", "an input or output has no element: such a call runs the reference, no kernel"),
        ("rmsnorm x", "'x' is neither an input, like x:bfloat16[*,4096], nor an attribute"),
        ("rmsnorm x:float32[4,8]/strides=8", "has 1 strides for 2 dims"),
        ("rmsnorm x:float32[4,8] weight:float32[9]", "argument `weight` has n=9, but n=8"),
        ("rmsnorm x:float32[4,8] epsilon=1", "unknown attribute `epsilon`"),
        ("nowhere.at.all:op x:float32[4]", "cannot import nowhere.at.all"),
        ("json:dumps x:float32[4]", "json has no op 'dumps'; it has none"),
        ("mine.py:op x:float32[4]", "it names the Python file mine.py, which would be executed: --allow-files"),
        ('"mine.py:op" x:float32[4]', "it names the Python file mine.py, which would be executed: --allow-files"),
        ('"rmsnorm x:float32[4]', "Unterminated string"),
        ("7:op x:float32[4]", "cannot import 7"),
        (".relative:op x:float32[4]", "cannot import .relative"),
        ("rmsnorm x:float32[4] eps=" + "[" * 100_000, "its JSON is nested too deeply"),
        ("rmsnorm x:float32[4] eps=" + "9" * 5000, "Exceeds the limit"),
        ("rmsnorm x:float32[" + "9" * 5000 + "]", "Exceeds the limit"),
    ],
)
def test_a_wrong_line_is_explained(tmp_path: Path, line: str, text: str) -> None:
    (tmp_path / "m.txt").write_text(f"# a comment\n{line}\n")
    with pytest.raises(ValueError) as caught:
        manifest.read(tmp_path / "m.txt")
    assert text in str(caught.value) and "m.txt, line 2: " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_does_not_run_is_explained(tmp_path: Path, text: str, problem: str) -> None:
    """A script that ends itself ended the command, with exit code 0 and nothing done."""
    path = tmp_path / "not_a_module.py"
    path.write_text(text)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"cannot import {path}: {problem}"):
            manifest.parse(f"{path}:op x:float32[4]", files=True)


def test_bytes_are_explained(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_bytes(b"rmsnorm \xff")
    with pytest.raises(ValueError, match=r"m\.txt is not UTF-8 text"):
        manifest.read(tmp_path / "m.txt")


def test_a_manifest_is_written_whole_and_keeps_its_rights(tmp_path: Path) -> None:
    path = tmp_path / "m.txt"
    path.write_text("rmsnorm x:float32[4]\nrmsnorm x:float32[4]\n")
    path.chmod(0o640)
    (tmp_path / "link").symlink_to("m.txt")
    assert manifest.tidy(tmp_path / "link") == 1 and (tmp_path / "link").is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640 and path.read_text() == f"{manifest.HEADER}rmsnorm x:float32[4]\n"
    before = path.read_text()
    code = (
        "import pathlib, resource, signal, sys; from cute_ops.calls import manifest\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
        "manifest.tidy(pathlib.Path(sys.argv[1]))"
    )
    full = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "File too large" in full.stderr and path.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "m.txt"]


def test_blanks_in_an_attribute_survive() -> None:
    call = manifest.Call("rmsnorm", {}, attrs={"mode": "a b"})
    assert json.loads(str(call).partition("mode=")[2]) == "a b" and len(str(call).split()) == 2


@pytest.mark.parametrize(
    "name", ["a b/c.py:op", "a#b.py:op", 'a"b.py:op', "a\tb.py:op", "a\u00a0\u2028b.py:op", "\udcff.py:op"]
)
def test_any_path_survives(name: str) -> None:
    line = str(manifest.Call(name, {}, attrs={"mode": "a#b"}))
    word, mode = line.partition("#")[0].split()
    assert line.isascii() and json.loads(word) == name and json.loads(mode.partition("=")[2]) == "a#b"


MINE = """
from cute_ops import Array, Op, Tensor
from cute_ops.declaration.binding import bind
from cute_ops.autotune.dispatch import choose
from cute_ops.jit.target import parse
X = {"x": Tensor("*m n", "float32")}
mine = Op("mine", inputs=X, outputs={"out": X["x"]}, dtypes={}, reference=lambda xp, *a: a,
          kernel="tests.ops.copying:Copy")
choose(bind(mine, {"x": Array((4, 64), "float32")}), {}, parse("sm_90a"))
open("runs", "a").write("x")
"""


@pytest.mark.slow
def test_record_reads_its_own_manifest_and_runs_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with blanks and a # in its name: `record` was done with an error at the very end."""
    where = tmp_path / "my first #1 program"
    where.mkdir()
    (where / "mine.py").write_text(MINE)
    (where / "m.txt").write_text("# by hand\nrmsnorm x:float32[*,8] # my model's")
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}

    line = [sys.executable, "-m", "cute_ops", "record", "-o", "m.txt", "--", sys.executable, "mine.py"]
    recorded = subprocess.run(line, cwd=where, env=environment, capture_output=True, text=True, check=False)
    assert recorded.returncode == 0 and "m.txt: 2 kinds of calls" in recorded.stdout, recorded.stdout
    assert "by hand" not in (where / "m.txt").read_text()
    assert (where / "runs").read_text() == "x"

    monkeypatch.chdir(where)
    for arguments in (("warm-up", "m.txt"), ("build", "m.txt", "-o", "bundle"), ("tune", "m.txt")):
        refused = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        assert refused.exit_code == 1 and "line 2: it names the Python file " in refused.stdout, refused.stdout
    assert (where / "runs").read_text() == "x"
    (call, _) = manifest.read(where / "m.txt", files=True)
    assert call.op.name == "mine" and (where / "runs").read_text() == "xx"
    planned = CliRunner().invoke(app, ["tune", "m.txt", "--allow-files"])
    assert "no search space is declared" in planned.stdout.replace("\n", " ") or "needs a GPU" in planned.stdout


LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


def test_manifests_know_what_modules_of_either_layout_call() -> None:
    """JAX's have weights [k, n]."""
    parts = ["linear_kn_add_rstd", "qkv_rope_64_kn", "linear_kn_acc", "gated_linear_kn", "scaled_rows"]
    assert [lookup.find(name).name for name in parts] == parts


def test_a_mixture_is_planned_from_its_configuration() -> None:
    """With its experts' tokens and gates; gated MLPs only where layers have some that are no experts."""
    mixture = LLAMA | {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    routed = {"class_places", "scattered_rows", "gathered_sum", "swiglu"}
    backward = {"scattered_dots", "swiglu_bwd"}
    for train in (False, True):
        calls = calls_of_model(mixture, train=train)
        names = [call.name for call in calls]
        assert {*names} >= (routed | backward if train else routed)
        assert names.count("gathered_sum") == 1 + train
        assert not {*names} & {"silu_mul", "gated_linear_saving"}
        assert {build.variant_of(call, SM90).op for call in calls} >= routed
    sizes = [
        {call.inputs["up"].shape[-1] for call in calls_of_model(mixture | more) if call.name == "silu_mul"}
        for more in (
            {"mlp_only_layers": [0]}, {"first_k_dense_replace": 3, "n_shared_experts": 2}, {"decoder_sparse_step": 1},
            {"shared_expert_intermediate_size": 96},
        )
    ]  # fmt: skip
    assert sizes == [{14336}, {14336, 1024}, set(), {96}]
    assert "geglu" in {call.name for call in calls_of_model(mixture | {"hidden_act": "gelu"})}


@pytest.mark.slow
def test_a_model_is_planned_from_its_configuration() -> None:
    calls = calls_of_model(LLAMA, train=True)
    names = [op.name for op in OPS if op.name in ("rmsnorm", "add_rmsnorm", "silu_mul")]
    packed = {"swiglu", "swiglu_bwd", "swiglu_again"}
    frozen = {"rmsnorm_bwd_only_dx", "add_rmsnorm_bwd_only_dx_dresidual"}
    products = {
        "linear",
        "linear_dx",
        "linear_dweight",
        "gated_linear_saving",
        "gated_mlp_dgrad",
        "gated_mlp_dgrad_again",
        "linear_add_rstd",
        "scaled_rows",
    }
    gradients = {f"{name}_bwd" for name in names}
    assert {call.name for call in calls} == {*names, *gradients, *frozen, *packed, *products}
    assert all(build.variant_of(call, SM90).attrs.get("eps", 1e-5) == 1e-5 for call in calls)
    gradients = [call.inputs for call in calls if call.name == "add_rmsnorm_bwd"]
    assert ["dresidual_out" in inputs for inputs in gradients] == [True, False]
    gemma = calls_of_model({"text_config": LLAMA | {"model_type": "gemma3_text", "head_dim": 256}}, "float16")
    assert {(c.inputs["x"].shape[-1], c.attrs["weight_offset"]) for c in gemma if c.name == "rmsnorm"} == {
        (4096, 1.0), (256, 1.0),
    }  # fmt: skip
    # Kernels of products serve many sizes; elsewhere than on Hopper, and in float32, the framework multiplies.
    ops = [
        {variant.op for variant in build.variants_of(calls_of_model(LLAMA, dtype, train=True), [parse(arch)])}
        for dtype, arch in (("bfloat16", "sm_90a"), ("bfloat16", "sm_80"), ("float32", "sm_90a"))
    ]
    asked = {"linear_add_rstd", "scaled_rows"}  # programs ask whether these gain, which plans do not know
    assert [products & each for each in ops] == [products, asked, set()]
    assert 6 <= sum(v.op in products for v in build.variants_of(calls, [SM90])) <= 24
    activation = {"hidden_activation": "gelu_pytorch_tanh"}
    assert [c.name for c in calls_of_model(LLAMA | activation)][-1] == "gelu_mul"
    with pytest.raises(ValueError, match="it has no hidden_size"):
        calls_of_model({})
    with pytest.raises(ValueError, match="dtype 'float64' is not one of float32"):
        calls_of_model(LLAMA, "float64")
    with pytest.raises(ValueError, match=r"dtype 'bf16' is not one of .*bfloat16 \(did you mean bfloat16\?\)"):
        calls_of_model(LLAMA, "bf16")


@pytest.mark.parametrize("train", [False, True])
def test_attention_of_any_length_is_told_ahead(train: bool) -> None:
    """Of drawn windows and sizes of heads: kernels of blocks of one head and of two, as lengths have them."""
    print("seed", SEED)
    rng = np.random.default_rng((SEED, train))
    for size, window in zip((128, 256, *rng.choice((64, 96, 192), 2)), (64, *rng.integers(8, 700, 3)), strict=True):
        sizes = {"head_dim": int(size), "num_attention_heads": 8, "num_key_value_heads": 4}
        config = LLAMA | sizes | {"sliding_window": int(window), "rope_theta": 1e4}
        told = {v.symbol for v in build.variants_of(calls_of_model(config, "bfloat16", train=train), [SM90])}
        for length in (64, 4096, 8192, *(8 * rng.integers(1, 2000, 4)).tolist()):
            q, k = (Array((1, length, heads, int(size)), "bfloat16") for heads in (8, 4))
            for left in (-1, int(window) - 1):
                attrs = {"causal": True, "left": left}
                call = manifest.Call("attention", {"q": q, "k": k, "v": k}, {}, attrs)
                assert build.variant_of(call, SM90).symbol in told, (size, window, length, left)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("hidden_size", "4096", "its hidden_size is '4096', expected a whole number above 0"),
        ("intermediate_size", [64, 64], "its intermediate_size is [64, 64], expected a whole number above 0"),
        ("num_attention_heads", 0, "its num_attention_heads is 0, expected a whole number above 0"),
        ("vocab_size", True, "its vocab_size is True, expected a whole number above 0"),
        ("rms_norm_eps", "1e-6", "its rms_norm_eps is '1e-6', expected a number"),
        ("hidden_act", {"gate": "silu"}, "its hidden_act is a dict, expected a text"),
        ("torch_dtype", 16, "its torch_dtype is 16, expected a text"),
        ("text_config", [LLAMA], "its text_config is a list, expected an object"),
    ],
)
def test_a_configuration_with_a_field_of_another_type(field: str, value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        calls_of_model({**LLAMA, field: value}, train=True)
    assert calls_of_model({**LLAMA, "head_dim": None, "moe_intermediate_size": None})


def test_a_target_without_a_kernel_for_a_call_is_left_out() -> None:
    lines = [f"silu_mul_fp8 gate:bfloat16[*,{n}] up:bfloat16[*,{n}]" for n in (1024, 2048)]
    calls, told = manifest.parse("\n".join(lines)), list[str]()
    assert [v.arch for v in build.variants_of(calls, [parse("sm_80"), SM90], told.append)] == ["sm_90a"] * 2
    assert len(told) == 1 and "left out: cute.silu_mul_fp8: its kernels need SM 8.9 or newer" in told[0]
    assert told[0].endswith("(2 calls)")
    with pytest.raises(NotImplementedError, match="need SM"):
        build.variants_of(calls, [parse("sm_80")])


def test_targets() -> None:
    assert parse("sm_90a:114") == Target("sm_90a", 114) and str(parse("sm_80")) == "sm_80:108"
    for wrong in ("sm_90a:", "sm_90a:x", "sm_90a:0"):
        with pytest.raises(ValueError, match="is not a number of SMs"):
            parse(wrong)


def test_manifests_of_other_editors_are_read(tmp_path: Path) -> None:
    """With a mark of UTF-8 in front and two characters at the end of a line."""
    file = tmp_path / "calls.txt"
    file.write_bytes(b"\xef\xbb\xbfsilu x:float32[4]\r\nsilu x:float32[8]\r\n")
    assert list(map(str, manifest.read(file))) == ["silu x:float32[4]", "silu x:float32[8]"]
    assert manifest.tidy(file) == 2 and file.read_bytes().count(b"\r") == 0


@pytest.mark.parametrize("command", ["build FILE -o BUNDLE", "warm-up FILE", "tune FILE"])
def test_a_manifest_without_calls_is_a_mistake(tmp_path: Path, command: str) -> None:
    """It made an empty bundle; tuning said that no search space was declared."""
    (tmp_path / "empty.txt").write_text(manifest.HEADER)
    paths = {"FILE": str(tmp_path / "empty.txt"), "BUNDLE": str(tmp_path / "bundle")}
    words = [paths.get(word, word) for word in command.split()]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "empty.txt: no calls;" in result.stdout and not (tmp_path / "bundle").exists()
