"""The commands for kernel authors, verify, inspect and bench, on our ops and on a user's file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from cute_ops import FLOATS, Accumulation, Array, Case, Op, Tensor, hardware, testing
from cute_ops.__main__ import app
from cute_ops.autotune.dispatch import foresee
from cute_ops.calls import lookup
from cute_ops.cli import author, calls
from cute_ops.declaration.binding import bind
from cute_ops.jit.target import parse
from cute_ops.tools import sass
from cute_ops.tools.verify import verify

ROOT = Path(__file__).parents[2]
SOFTCAP, FUSED = "examples/custom_op/softcap.py", "examples/custom_op/fused.py"
PRODUCT = str(ROOT / "tests/ops/product.py")


def invoke(*arguments: str, columns: int = 300) -> Result:
    """The command line in this process: to start one takes half a second, and its compiler another one."""
    return CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})


INVOKING = """
import json, sys
from typer.testing import CliRunner
from cute_ops.__main__ import app
for line in sys.stdin:
    result = CliRunner().invoke(app, json.loads(line))
    print(json.dumps({"code": result.exit_code, "output": result.output}), flush=True)
"""


@pytest.fixture(scope="module")
def verify_apart() -> Iterator[Callable[..., SimpleNamespace]]:
    """The command, in one other process for all tests: to import torch and JAX takes it five seconds."""
    command, environment = [sys.executable, "-c", INVOKING], {**os.environ, "COLUMNS": "160"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def verify_apart(*arguments: str) -> SimpleNamespace:
            print(json.dumps(["verify", *arguments]), file=asked, flush=True)
            return SimpleNamespace(**json.loads(answers.readline()))

        yield verify_apart


@pytest.mark.slow
@pytest.mark.parametrize(("file", "right"), [(SOFTCAP, "5 of 5 right, 4 calls"), (FUSED, "10 of 10 right, 8 calls")])
def test_a_file_of_ones_own_is_verified_in_every_framework(
    file: str, right: str, verify_apart: Callable[..., SimpleNamespace]
) -> None:
    result = verify_apart(file, "--dtype", "bfloat16", "--repeats", "2")
    assert result.code == 0, result.output
    assert "torch on " in result.output and "jax on " in result.output and right in result.output
    assert ("references, no kernel" in result.output) == ("torch on cpu" in result.output)


WRONG = """
from cute_ops import FLOATS, Case, Op, Tensor
def reference(xp, x):
    return x if xp.__name__ == "numpy" else x * 1.01
X = Tensor("*m n", "T")
wrong = Op("wrong", inputs={"x": X}, outputs={"out": X}, dtypes={"T": FLOATS}, reference=reference,
           kernel="tests.ops.copying:Copy", cases=(Case("small", {"m": (3,), "n": 8}),))
idle = Op("idle", inputs={"x": X}, outputs={"out": X}, dtypes={"T": FLOATS}, reference=reference,
          kernel="tests.ops.copying:Copy")
"""


@pytest.mark.slow
def test_what_is_wrong_is_shown_and_fails(tmp_path: Path, verify_apart: Callable[..., SimpleNamespace]) -> None:
    (tmp_path / "mine.py").write_text(WRONG)
    result = verify_apart(str(tmp_path / "mine.py"), "--framework", "jax", "--dtype", "float32")
    assert result.code == 1
    assert "BAD  wrong small float32 jax" in result.output and "exceeds" in result.output
    assert "0 of 1 right" in result.output
    idle = verify_apart(f"{tmp_path / 'mine.py'}:idle", "--framework", "jax")
    assert idle.code == 1 and "idle: no cases are declared, so nothing was checked" in idle.output


def test_a_wrong_gradient_is_shown() -> None:
    """A backward op and its reference that agree on -3 times the gradient."""
    op = lookup.find("silu_mul")
    assert op.grad is not None
    right = op.grad.reference
    grad = Op(**{**_arguments(op.grad), "reference": lambda xp, *given: tuple(-3 * d for d in right(xp, *given))})
    wrong = Op(**{**_arguments(op), "cases": op.cases[:1], "grad": grad})
    (verdict,) = verify([wrong], {})
    assert verdict.framework == "gradient"
    found = re.fullmatch(
        "silu_mul: the gradient of `gate` by silu_mul_bwd is (.*) along a random direction, "
        "where the reference changes by (.*)", verdict.problem,
    )  # fmt: skip
    assert found and float(found[1]) == pytest.approx(-3 * float(found[2]), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e8m0fnu", "uint32"])
def test_dtypes_that_none_of_our_ops_has(dtype: str, verify_apart: Callable[..., SimpleNamespace]) -> None:
    result = verify_apart("tests/ops/narrow.py", "--dtype", dtype)
    assert result.code == 0 and "2 of 2 right, 2 calls" in result.output, result.output
    case = Case("many", {"m": (1000,), "n": 2})
    drawn = testing.inputs(lookup.find(f"{ROOT}/tests/ops/narrow.py:copy_{dtype}"), case, dtype)["x"]
    assert drawn is not None and not np.isnan(drawn.astype(np.float64)).any() and len(np.unique(drawn)) > 5


@pytest.mark.slow
def test_an_output_whose_dtype_an_attribute_names(verify_apart: Callable[..., SimpleNamespace]) -> None:
    result = verify_apart("tests/ops/rounding.py")
    assert "14 of 14 right, 12 calls" in result.output, result.output


def test_integers_must_be_equal() -> None:
    op = lookup.find(f"{ROOT}/tests/ops/narrow.py:copy_uint32")
    arrays = testing.inputs(op, op.cases[0], "uint32")
    x = arrays["x"]
    assert x is not None
    testing.check(op, arrays, {}, (x,))
    with pytest.raises(AssertionError, match="error 1 exceeds 0 at"):
        testing.check(op, arrays, {}, (x + np.uint32(1),))


def added_in_steps(x: np.ndarray, w: np.ndarray, bias: np.ndarray, bits: int, step: int = 16) -> np.ndarray:
    """A product as tensor cores make it: sums of 16 terms, added to a number of so many bits, the others cut off."""
    sums = np.zeros((x.shape[0], w.shape[0]))
    for k in range(0, x.shape[1], step):
        mantissa, exponent = np.frexp(sums + x[:, k : k + step].astype(np.float64) @ w[:, k : k + step].T)
        sums = np.ldexp(np.trunc(mantissa * 2.0**bits) / 2.0**bits, exponent)
    return (sums + bias).astype(x.dtype)


def test_a_long_sum_may_lose_what_it_is_declared_to_be_kept_in() -> None:
    op = lookup.find(f"{PRODUCT}:product")
    out = op.outputs["out"]
    by_framework = Op(**{**_arguments(op), "outputs": {"out": out._replace(accumulates=None)}})
    in_22_bits = Op(**{**_arguments(op), "outputs": {"out": out._replace(accumulates=Accumulation(("k",), "float22"))}})
    arrays = testing.inputs(op, Case("long", {"b": (), "m": 32, "n": 48, "k": 4096}), "float32")
    x, w, bias = arrays.values()
    assert x is not None and w is not None and bias is not None
    whole, short = added_in_steps(x, w, bias, 24), added_in_steps(x, w, bias, 14)
    testing.check(op, arrays, {}, (whole,))
    testing.check(in_22_bits, arrays, {}, (short,))
    lacking = added_in_steps(x[:, 1:], w[:, 1:], bias, 24)
    for other, wrong in ((by_framework, whole), (op, short), (op, lacking), (in_22_bits, 1.1 * short)):
        with pytest.raises(AssertionError, match=r"product: output out: error .* exceeds"):
            testing.check(other, arrays, {}, (wrong,))


def test_cases_shrink_to_sizes_that_divide() -> None:
    half = Op(
        "half", inputs={"x": Tensor("*m n", "T")}, outputs={"out": Tensor("*m n/2", "T")}, dtypes={"T": FLOATS},
        reference=lambda xp, x: x[..., ::2], kernel="a:B", cases=(Case("llama", {"m": (2,), "n": 4096}),),
    )  # fmt: skip
    assert testing.small(half.cases[0], op=half).dims == {"m": (2,), "n": 64}
    runners = {"numpy": FakeGPU()}
    runners["numpy"].device = lambda: "cpu"  # type: ignore[method-assign]
    assert [v.problem for v in verify([half], runners, ("float32",))] == [""]


@pytest.mark.parametrize("product", ["kernels"], indirect=True)
def test_a_gradient_of_several_ops_is_verified(product: Any) -> None:
    cases = (Case("small", {"m": (3,), "k": 4, "n": 5}),)
    (verdict,) = verify([Op(**{**_arguments(product.op), "grad": product.op.grad, "cases": cases})], {})
    assert (verdict.framework, verdict.problem) == ("gradient", "")


def test_ops_narrowed_to_some_outputs_are_verified() -> None:
    op = lookup.find("rmsnorm_bwd")
    op = Op(**{**_arguments(op), "cases": op.cases[:1]})
    verdicts = list(verify([op], {"fake": FakeGPU()}, ["float32"], repeats=1))
    assert [v.op for v in verdicts] == [op.name, *(each.name for each in op.narrowed)] and len(verdicts) == 7
    assert not any(v.problem for v in verdicts)


class FakeGPU:
    """A runner whose kernel is what the test says; ``calls`` counts."""

    def __init__(self, spoil: Any = lambda out, call: None) -> None:
        self.spoil, self.calls = spoil, 0

    def device(self) -> str:
        return "cuda"

    def not_checked(self) -> str:
        return "holes go unseen"

    def run(self, op: Op, arrays: testing.Arrays, attrs: Mapping[str, Any]) -> tuple[np.ndarray | None, ...]:
        outputs = testing.run_reference(op, arrays, attrs)
        self.calls += 1
        self.spoil(outputs[0], self.calls)
        return outputs


class ShapeOf(FakeGPU):
    """A CPU that expects inputs whose last dim has this size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def device(self) -> str:
        return "cpu"

    def run(self, op: Op, arrays: testing.Arrays, attrs: Mapping[str, Any]) -> tuple[np.ndarray | None, ...]:
        x = arrays["x"]
        assert x is not None and x.shape[-1] == self.size
        return super().run(op, arrays, attrs)


def last_bit(out: np.ndarray, call: int) -> None:
    if call % 7 == 6:
        out.view(np.uint16)[..., 0] ^= 1


def test_a_race_shows_in_repeated_calls_and_a_hole_in_poison() -> None:
    op = lookup.find("silu_mul")
    op = Op(**{**_arguments(op), "cases": op.cases[:1]})

    def problems(**runners: FakeGPU) -> list[str]:
        return [v.problem for v in verify([op], runners, ("bfloat16",), repeats=10)]

    good = FakeGPU()
    assert problems(torch=good, jax=FakeGPU()) == ["", ""] and good.calls == 10
    (race,) = problems(torch=FakeGPU(last_bit))
    assert "differs from a repeated call" in race and race.endswith("a race?")
    (hole,) = problems(torch=FakeGPU(lambda out, call: out.reshape(-1).__setitem__(-1, np.nan)))
    assert "has NaN where the reference has none" in hole
    one_bit = FakeGPU(lambda out, call: last_bit(out, 6))
    assert "differs from torch on the same GPU" in problems(torch=FakeGPU(), jax=one_bit)[1]


def test_verify_says_once_what_it_leaves_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_ops.tools.verify.installed", lambda wanted: {"fake": FakeGPU()})
    result = invoke("verify", SOFTCAP, "--dtype", "float32", "--dim", "n=8", "--repeats", "2")
    assert result.output.count("fake: holes go unseen\n") == 1 and result.exit_code == 0, result.output


def _arguments(op: Op) -> dict[str, Any]:
    names = ("name", "inputs", "outputs", "dtypes", "reference", "kernel", "attrs", "static")
    return {name: getattr(op, name) for name in names}


@pytest.mark.slow
def test_inspect_shows_what_the_compiler_made(tmp_path: Path) -> None:
    arguments = ("inspect", str(ROOT / SOFTCAP), "--n", "256", "--arch", "sm_80,sm_100a", "-o", str(tmp_path))
    result = invoke(*arguments, columns=80)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith("SoftCap ")]
    assert len(rows) == 2 and all((row[1], row[3], row[4]) == ("128", "0", "0") for row in rows)
    assert all(row[7:] == ["1", "LDG", "of", "16"] for row in rows)
    (*lines, where) = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines) and str(tmp_path) in where
    assert {p.suffix for p in tmp_path.iterdir()} == {".ptx", ".sass", ".cubin"} and len(list(tmp_path.iterdir())) == 12
    assert "st.global.v4" in next(tmp_path.glob("cute_softcap_*.ptx")).read_text()


def test_kernels_are_called_by_their_classes() -> None:
    mangled = "kernel_cutlass_kernel_cute_opskernelsnormbwd_persistentNormBackward_object_at__tensorptrbf16"
    assert author.short(mangled) == "NormBackward" and author.short("kernel_cutlass_kernel_lower_object_at_") == "lower"


@pytest.mark.slow
def test_shared_memory_of_a_launch_is_known_without_a_gpu() -> None:
    op = lookup.find("rmsnorm_bwd")
    variant = foresee(bind(op, calls.example(op, "bfloat16", 4096, {"n": 4096})), {}, parse("sm_90a")).variant
    kernels = list(author._kernels(variant, None))
    assert kernels[0].threads == variant.config["threads"]
    # The ring of rows: stages of x and dout, shared by the CTAs of a cluster.
    ring = variant.config["stages"] * 2 * 4096 * 2 // variant.config["cluster"]
    assert kernels[0].dynamic is not None and ring <= kernels[0].dynamic < ring + 2048
    assert any(access.kind == "LDGSTS" and access.bytes == 16 for access in kernels[0].accesses)


def test_occupancy() -> None:
    assert hardware.occupancy("sm_90a", 256, 32, 0) == 8  # threads
    assert hardware.occupancy("sm_90a", 256, 128, 0) == 2  # registers
    assert hardware.occupancy("sm_90a", 128, 32, 100_000) == 2  # shared memory
    assert hardware.occupancy("sm_90a", 32, 16, 0) == 32  # CTAs
    assert hardware.occupancy("sm_89", 256, 32, 0) == 6
    assert hardware.occupancy("sm_80", 1024, 64, 0) == 1


def test_widths_of_accesses() -> None:
    code = (
        "LDG.E.128.CONSTANT R4\nLDG.E.U16 R2\n@P0 STG.E R1\nLDGSTS.E.BYPASS.LTC128B.128 [R1]\nUBLKCP [R2]\nSTG.E.64 R9"
    )
    found = {(a.kind, a.bytes): a.number for a in sass.accesses(code)}
    assert found == {
        ("LDG", 16): 1, ("LDG", 2): 1, ("STG", 4): 1, ("STG", 8): 1, ("LDGSTS", 16): 1, ("UBLKCP", 0): 1,
    }  # fmt: skip


@pytest.mark.slow
def test_bench_writes_a_table_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a GPU's figures made up."""

    class Measured(SimpleNamespace):
        def __iter__(self) -> Any:
            return iter((self.us, self.low, self.high, self.rate))

    def measure(op: Op, arrays: Any) -> Measured:
        if op.name.endswith("_bwd"):
            raise RuntimeError("no kernel for this")
        return Measured(us=10.0, low=9.0, high=12.0, rate=2000.0)

    fake = SimpleNamespace(available=lambda: True, copy_rate=lambda: 4000.0, measure=measure)
    monkeypatch.setattr(author, "import_module", lambda name: fake)
    author.bench("silu_mul", n=[128, 4096], out=tmp_path)
    text = capsys.readouterr().out
    assert "50%" in text and "RuntimeError: no kernel for this" in text and "a large copy: 4000 GB/s" in text
    lines = (tmp_path / "bench.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[1].startswith("silu_mul,349525,n=128,") and lines[1].endswith(",2000,4000")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    author.bench("examples/bring_a_kernel/row_sum.py", dtype="float32", n=[256], out=tmp_path / "matrix")
    matrix = (tmp_path / "matrix" / "bench.csv").read_text().splitlines()
    assert matrix[1].startswith("brought_row_sum,,n=256 m=1024,")
    author.bench(SOFTCAP, n=[256], out=tmp_path / "own")
    assert (tmp_path / "own" / "bench.csv").read_text().splitlines()[1].startswith("softcap,")
    capsys.readouterr()
    author.bench("examples/bring_a_kernel/planned_relu.py", n=[256], out=tmp_path / "counted")
    header, line = (tmp_path / "counted" / "bench.csv").read_text().splitlines()
    rows = (256 << 20) // (256 * 2 * 2)
    assert header.endswith(",copy_gb_s,tflops") and float(line.rpartition(",")[2]) == float(f"{rows * 256 / 10e6:.4g}")
    assert "TFLOPS" in capsys.readouterr().out
    with pytest.raises(typer.Exit):
        author.bench("silu_mul_bwd", n=[128], out=tmp_path / "none")
    assert "nothing was measured" in capsys.readouterr().out and not (tmp_path / "none").exists()
    fake.available = lambda: False
    with pytest.raises(typer.Exit):
        author.bench("silu_mul", out=tmp_path)


WIDE = """
from cute_ops import FLOATS, Op, Tensor
X = Tensor("*m d", "T")
wide = Op("wide", inputs={"x": X}, outputs={"out": X}, dtypes={"T": FLOATS}, reference=min,
          kernel="tests.ops.copying:Copy")
"""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("verify nothing", "no op 'nothing'; there are rmsnorm"),
        ("verify rmsnrm", "no op 'rmsnrm' (did you mean rmsnorm?); there are"),
        ("verify RMSNorm", "no op 'RMSNorm' (did you mean rmsnorm?); there are"),
        ("compile rmsnorm --arch h100", "unknown architecture 'h100' (did you mean sm_90a?); known"),
        ("compile rmsnorm --dtype fp16", "may be fp16 (did you mean float16?), but float32, float16, bfloat16"),
        ("compile rmsnorm --dim N=64", "rmsnorm: no dim N (did you mean n?), but n, m"),
        (f"inspect {SOFTCAP}:sofcap", "has no op 'sofcap' (did you mean softcap?); it has softcap_bwd, softcap"),
        ("inspect no/such/file.py", "cannot import no/such/file.py: there is no file "),
        ("inspect ./", "cannot import ./: write file.py, file.py:name, module or module:name"),
        ("tune nowhere.txt", "No module named 'nowhere', and no file nowhere.txt is here"),
        ("compile rmsnorm --arch sm_90", "for --arch: unknown architecture 'sm_90' (did you mean sm_90a?)"),
        ("verify rmsnorm --repeats 0", "greater than or equal to 1"),
        ("verify --sweep --round 12", "less than or equal to 11"),
        ("verify --sweep --fraction 2", "less than or equal to 1"),
        ("tune rmsnorm --least -1", "greater than or equal to 0"),
        ("inspect rmsnorm --without x", "rmsnorm has no optional input x"),
        ("compile rmsnorm --with biass", "rmsnorm has no optional input biass (did you mean bias?)"),
        ("inspect rmsnorm --dtype float8", "no input of rmsnorm, rmsnorm_bwd may be float8"),
        ("compile rmsnorm --dtype bf16", "may be bf16 (did you mean bfloat16?), but float32, float16, bfloat16"),
        ("verify rmsnorm --dtype float64", "no input of rmsnorm, rmsnorm_bwd may be float64"),
        ("tune rmsnorm --dtype float64", "no input of rmsnorm, rmsnorm_bwd may be float64"),
        ("inspect rope --n 64", "rope has no dim n but h, d, r"),
        ("tune rope --n 64", "rope has no dim n but h, d, r"),
        ("inspect rmsnorm --n 0", "greater than or equal to 1"),
        ("compile rmsnorm --rows 0", "greater than or equal to 1"),
        ("tune rmsnorm --n 0", "greater than or equal to 1"),
        ("inspect WIDE", "wide declares no case that says how large its dim d is"),
        ("inspect WIDE --n 64", "wide has no dim n but d, m: no case gives sizes that no --dim NAME=SIZE does"),
        ("inspect WIDE --dim n=64", "wide: no dim n, but d, m"),
        ("compile rope --dim heads=4", "rope: no dim heads, but h, d, r, m"),
        ("verify rmsnorm --dim n=0", "'n=0' is not NAME=SIZE, such as k=512"),
        ("tune rmsnorm --dim 64", "'64' is not NAME=SIZE, such as k=512"),
        ("inspect rope --dim r=96", "cute.rope: heads have d=128 elements, expected at least 2r=192"),
        ("verify rmsnorm --sweep --dim n=64", "a sweep takes every dtype and its own sizes, in PyTorch"),
    ],
)
def test_mistakes_are_explained(tmp_path: Path, arguments: str, text: str) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    words = [word.replace("WIDE", str(tmp_path / "wide.py")) for word in arguments.split()]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "2000"})
    assert result.exit_code == 2 and text in " ".join(result.output.replace("│", " ").split()), result.output


def test_a_misspelt_framework_is_explained() -> None:
    result = invoke("verify", "rmsnorm", "--framework", "pytorch")
    assert (
        result.exit_code == 1 and "no framework 'pytorch' (did you mean torch?); there are torch, jax" in result.output
    )


@pytest.mark.slow
def test_sizes_by_the_names_of_dims(tmp_path: Path, verify_apart: Callable[..., SimpleNamespace]) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    wide, product = lookup.find(f"{tmp_path / 'wide.py'}:wide"), lookup.find(f"{PRODUCT}:product")
    assert calls.sizes_of(wide, None, ["d=8", "m=3", "d=4"], [64]) == [{"d": 8, "m": 3}, {"d": 4, "m": 3}]
    assert calls.example(wide, "bfloat16", 5, {"d": 8}) == {"x": Array((5, 8), "bfloat16")}
    assert calls.example(wide, "bfloat16", 5, {"d": 8, "m": 3}) == {"x": Array((3, 8), "bfloat16")}
    (sizes,) = calls.sizes_of(product, [256], ["k=512"], [64])
    shapes = {n: a and a.shape for n, a in calls.example(product, "bfloat16", 7, sizes).items()}
    assert shapes == {"x": (7, 512, 512), "w": (7, 256, 512), "bias": (256,)}
    result = verify_apart(PRODUCT, "--dim", "k=130", "--dim", "k=1", "--dtype", "float32", "--framework", "jax")
    assert "4 of 4 right, 2 calls" in result.output, result.output
    names = [v.case for v in verify([product], {"numpy": ShapeOf(130)}, ("float32",), sizes={"k": [130]})]
    assert names == ["llama k=130"] * 2


@pytest.mark.slow
def test_the_optional_inputs_are_those_of_most_cases() -> None:
    """The README's example compiled a norm with a bias, which few models have."""
    absent = {
        name: [
            key for key, array in calls.example(lookup.find(name), "bfloat16", 8, {"n": 64}).items() if array is None
        ]
        for name in ("rmsnorm", "rmsnorm_bwd", "layernorm", "add_rmsnorm_bwd")
    }
    assert absent == {"rmsnorm": ["bias"], "rmsnorm_bwd": ["bias"], "layernorm": [], "add_rmsnorm_bwd": ["bias"]}
    asked = calls.example(lookup.find("rmsnorm"), "bfloat16", 8, {"n": 64}, with_=["bias"], without=["weight"])
    assert asked["bias"] is not None and asked["weight"] is None


@pytest.mark.slow
def test_help_teaches() -> None:
    for command in ("verify", "inspect", "bench", "record", "build", "warm-up", "manifest"):
        result = invoke(command, "--help")
        assert result.exit_code == 0 and "Example: python -m cute_ops" in result.stdout
    assert "the group cute_ops.bundles" in invoke("build", "--help").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["rmsnorm", "--sweep", "--dtype", "bfloat16"], "a sweep takes every dtype"),
        (["rmsnorm", "--fraction", "0.1"], "add --sweep"),
        ([], "which op?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_of_a_sweep_and_of_cases_do_not_mix(arguments: list[str], text: str) -> None:
    result = invoke("verify", *arguments)
    assert result.exit_code == 2 and text in result.output
