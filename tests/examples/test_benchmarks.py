"""The benchmark files on a machine without a GPU: every code path but CUDA graphs, and the statistics."""

from __future__ import annotations

import csv
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attention
import common
import decode
import decode_floor
import device_time
import distributed
import distributed_jax
import distributed_torch
import everything
import expressions
import fusion
import head_losses
import host_time
import in_pages
import jax_program
import linear
import linear_cross_entropy
import llama_floor
import llama_step
import machine_code
import masked_attention
import model_steps
import pictures
import plot
import prewarm
import pytest
import returns
import row_floor
import sample
import several_gpus
import startup
import summary
import tensor_cores
import torch
import tuning_gap
import tutorial
from problems import BY_NAME, Problem, by_importance, grid, smoke
from rich.console import Console

from cute_ops import Case, Op, testing
from cute_ops.autotune.tuner import Outcome
from cute_ops.autotune.winners import Winner
from cute_ops.declaration.binding import bind
from cute_ops.jit import target
from cute_ops.jit.compile_pool import worker
from cute_ops.tools import sass
from cute_ops_torch.library.tensors import bind_tensors


def test_spread() -> None:
    assert common.spread([3.0, 1.0, 9.0, 2.0, 4.0]) == (3.0, 1.0, 9.0)


def test_least_bytes() -> None:
    rows, n = 100, 64
    whole = rows * n
    assert Problem("rmsnorm", rows, n).bytes("fwd") == 2 * (2 * whole + n)
    assert Problem("rmsnorm", rows, n).bytes("bwd") == 2 * (3 * whole + 2 * n)
    assert Problem("rmsnorm", rows, n, weight="float32").bytes("fwd") == 2 * 2 * whole + 4 * n
    assert Problem("add_rmsnorm", rows, n).bytes("fwd") == 2 * (4 * whole + n)
    assert Problem("add_rmsnorm", rows, n).bytes("bwd") == 2 * (4 * whole + 2 * n)
    wide = Problem("add_rmsnorm", rows, n, residual="float32")
    assert wide.bytes("bwd") == (4 + 2 + 4 + 2 + 4) * whole + 2 * 2 * n  # dx and dresidual are two arrays
    assert Problem("silu_mul", rows, n).bytes("fwd") == 2 * 3 * whole
    assert Problem("silu_mul", rows, n).bytes("bwd") == 2 * 5 * whole
    blocks = Problem("quantize_fp8", rows, 3 * n, attrs=(("block", 128),))
    assert blocks.bytes("fwd") == (2 + 1) * 3 * whole + 4 * 2 * rows
    sizes = (("p", 300), ("s", 16), ("h", 2), ("d", 24), ("e", 8))
    assert Problem("append_kv", rows, n, sizes=sizes).bytes("fwd") == 2 * 2 * whole + 8 * rows
    rotated = Problem("append_kv", rows, n, sizes=(*sizes, ("r", 6)))
    assert rotated.bytes("fwd") == 2 * 2 * whole + 8 * rows + 2 * 4 * 6 * rows


def test_grid_has_no_problem_twice_and_all_bind() -> None:
    problems = grid(list(BY_NAME))
    assert {p.op for p in problems} == set(BY_NAME)
    assert len(set(problems)) == len(problems)
    assert all(p.bytes(d) > 0 for p in problems for d in p.directions)


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_training_step_smoke() -> None:
    rows = [llama_step.measure(name, 1, 33, 1, 2, small=True) for name in ("eager", "ours + AdamW")]
    assert abs(rows[0]["loss_first"] - rows[1]["loss_first"]) <= llama_step.TOLERANCE
    assert all(r["tokens_per_s_min"] <= r["tokens_per_s"] <= r["tokens_per_s_max"] for r in rows)


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_training_steps_in_turns(tmp_path: Path) -> None:
    sizes = ["--batch", "1", "--seqlen", "33", "--steps", "1", "--rounds", "2"]
    assert llama_step.main(["--cpu-smoke", "--out", str(tmp_path), "--contenders", "eager", *sizes]) == 0
    (row,) = common.read(tmp_path / "llama_step.csv")
    assert row["contender"] == "eager"
    assert float(row["tokens_per_s"]) > 0
    assert float(row["loss_first"]) > float(row["loss_last"])  # six steps on the same tokens


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_floor_of_a_training_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products are the step's own: they make the gradients that it left."""
    monkeypatch.setattr(llama_floor, "HOT_STEPS", 2)
    sizes = ["--batch", "1", "--seqlen", "33", "--steps", "1", "--rounds", "1"]
    assert llama_floor.main(["--cpu-smoke", "--out", str(tmp_path), *sizes, "--contenders"]) == 0
    rows = common.read(tmp_path / "llama_floor.csv")
    assert [row["contender"] for row in rows if row["part"] == "step"] == list(llama_floor.LOOPS)
    floor = llama_floor.Floor(1, 33, small=True)
    loops = [floor.loop(kind) for kind in llama_floor.LOOPS]
    assert len(loops[0].calls) == len(loops[1].calls) - 2 * 2 == 2 * 4 * 3 + 4 * 3
    weights = dict(floor.trainer.run.named_parameters())
    torch.testing.assert_close(floor.sum.bfloat16(), weights["lm_head.weight"].grad)
    for k in range(2):
        grads = [weights[f"model.layers.{k}.mlp.{each}_proj.weight"].grad for each in ("gate", "up")]
        torch.testing.assert_close(floor.out["gate_up dw", k], torch.cat([g for g in grads if g is not None]))


def test_floors_of_rows_move_as_many_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    row_floor.main(["--list", "--points", "group_norm", "dropout", "sum fwd", "scattered_rows"])
    found = re.findall(r"^(.*): (ours|bytes alone), (\d+) MB", capsys.readouterr().out, re.MULTILINE)
    for (name, ours, size), (_, alone, moved) in zip(found[::2], found[1::2], strict=True):
        assert (ours, alone) == ("ours", "bytes alone")
        assert int(moved) == pytest.approx(int(size), rel=0.02), name
    shares = {"ours": 0.8, "without DRAM": 0.9, "bytes alone": 0.95, "in order": 0.96}
    rows = [{"point": "rows", "kernel": kernel, "of_copy": str(share)} for kernel, share in shares.items()]
    line = row_floor.row_floors(rows).splitlines()[-1]
    assert line == "| rows | 0.800 | 0.900 | 0.950 | 0.89 | without DRAM | in order 0.96 |"


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_steps_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    turns = [model_steps.Turns(name, small=True, profile=3) for name in ("eager", "ours")]
    for name in ("T5", "DiT", "ViT-B/16 under autocast", "padded nn.TransformerEncoder"):
        rows = [[each.obey(line) for line in (name, "1", "")][-1] for each in turns]
        assert [row and row["status"] for row in rows] == ["ok", "ok"]
        losses = [row["loss_first"] for row in rows if row]
        assert losses[0] == pytest.approx(losses[1], abs=model_steps.TOLERANCE, rel=model_steps.ULP)
        assert f"{name}, ours: " in capsys.readouterr().err
    other = model_steps.Turns("Liger", small=True)
    assert [other.obey(line) for line in ("Mamba-2", "1")] == [None, None]
    assert "Error: " in (other.obey("") or {})["status"]


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_masked_attention_smoke(tmp_path: Path) -> None:
    assert masked_attention.main(["--cpu-smoke", "--out", str(tmp_path), "--shapes", "0", "--rounds", "1"]) == 0
    rows = common.read(tmp_path / "masked_attention.csv")
    calls = {
        (row["contender"], row["direction"]) for row in rows if row["status"] == "ok" and float(row["error"]) < 0.02
    }
    assert calls == {*itertools.product(masked_attention.CONTENDERS, masked_attention.DIRECTIONS)}


def test_steps_of_a_process_that_ends_are_a_row(tmp_path: Path) -> None:
    """One may end before it is told to take steps, between two of them, and while it is waited for."""
    program = tmp_path / "ends.py"
    for lines in (0, 1, 3):
        program.write_text(f"import sys\nfor _, line in zip(range({lines}), sys.stdin): print('ready', flush=True)\n")
        others = [model_steps.Contender(name, [], str(program)) for name in ("eager", "ours")]
        model_steps.warm_up({"T5": others}, time.monotonic() + 60)
        rows = model_steps.measure("T5", others, 1, 3)
        assert [row["contender"] for row in rows] == ["eager", "ours"]
        assert {row["status"] for row in rows} == {"the process has ended"}
        for each in others:
            assert each.end() == ""


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_loss_of_a_linear_head_smoke(tmp_path: Path) -> None:
    names = [linear_cross_entropy.OURS, linear_cross_entropy.IN_BFLOAT16, "torch eager"]
    linear_cross_entropy.main(["--cpu-smoke", "--out", str(tmp_path), "--contenders", *names])
    rows = common.read(tmp_path / "linear_cross_entropy.csv")
    assert [(row["contender"], row["status"]) for row in rows] == [(name, "ok") for name in names]
    assert max(abs(float(rows[0]["loss"]) - float(row["loss"])) for row in rows) < 0.01
    errors = [float(r["relative_error"]) for r in common.read(tmp_path / "linear_cross_entropy_error.csv")]
    in_float32, in_bfloat16 = errors[:4], errors[4:]
    assert max(in_float32) < 1.1 * min(in_float32) < min(in_bfloat16[2:])


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_losses_of_preferences_on_a_linear_head_smoke(tmp_path: Path) -> None:
    head_losses.main(["--cpu-smoke", "--out", str(tmp_path), "--contenders", head_losses.OURS])
    rows = common.read(tmp_path / "head_losses.csv")
    assert [(row["kind"], row["status"]) for row in rows] == [(kind, "ok") for kind in head_losses.KINDS]


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_device_time_smoke(tmp_path: Path) -> None:
    names = ["torch eager", "ours (torch)", "XLA (jit)", "ours (JAX)"]
    ops = ["rmsnorm", "add_rmsnorm", "add_rmsnorm_fp8", "cross_entropy", "sum"]
    device_time.main(["--cpu-smoke", "--ops", *ops, "--contenders", *names, "--out", str(tmp_path)])
    rows = common.read(tmp_path / "device_time.csv")
    strided = {(r["contender"], r["status"]) for r in rows if r["layout"] == "strided"}
    assert ("ours (torch)", "ok") in strided
    assert ("ours (JAX)", "not available") in strided
    flat = [r for r in rows if r["layout"] == "flat"]
    assert len(flat) == (2 + 2 + 1 + 2 + 2) * len(names)
    views = [r for r in flat if r["status"] == "a view: nothing is written"]
    assert {(r["op"], r["direction"], r["contender"]) for r in views} >= {("sum", "bwd", "torch eager")}
    flat = [r for r in flat if r not in views]
    assert {r["status"] for r in flat} == {"ok"}
    assert all(float(r["us_min"]) <= float(r["us"]) <= float(r["us_max"]) for r in flat)


def test_attention_is_measured_at_a_files_cases_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(attention.__file__).parent / "results" / "attention.csv"
    rows = [row for row in common.read(file) if row["direction"] == "backward"]
    named = {(*(int(row[n]) for n in attention.Shape._fields), row["form"]) for row in rows}
    seen: list[attention.Case] = []

    def measure(case: attention.Case, *_: Any) -> list[dict[str, Any]]:
        seen.append(case)
        return []

    arguments = ["--out", str(tmp_path), "--again", str(file), "--directions", "backward"]
    monkeypatch.setattr(attention, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    attention.main(arguments)
    assert {(*case.shape, case.form) for case in seen} == named
    monkeypatch.setattr(attention.config, "KEYS", tiles := dict(attention.config.KEYS))
    attention.main([*arguments, "--keys", "96"])
    assert {size: (96, warpgroups) for size, (_, warpgroups) in tiles.items()} == attention.config.KEYS
    assert len(seen) == 2 * len(named)


@pytest.mark.parametrize(
    "benchmark", [attention, decode, decode_floor, linear, llama_step, masked_attention, model_steps]
)
def test_figures_stay_where_there_is_no_gpu(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    figures = tmp_path / f"{benchmark.__name__}.csv"
    figures.write_text("figures\n")
    with pytest.raises(SystemExit):
        benchmark.main(["--out", str(tmp_path)])
    assert "no GPU here" in capsys.readouterr().err
    assert figures.read_text() == "figures\n"


@pytest.mark.parametrize(
    ("benchmark", "arguments", "text"),
    [
        (row_floor, ["--points", "no such op"], "no point is named no such op: --list prints all"),
        (linear, ["--shapes", "no such case"], "no case is named no such case: "),
        (expressions, ["--only", "no such op"], "no problem is named no such op, for example silu forward"),
    ],
)
def test_what_there_is_not_is_refused(
    benchmark: Any, arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit):
        benchmark.main(["--out", str(tmp_path), *arguments])
    assert text in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_decoding_is_measured(tmp_path: Path) -> None:
    decode.main(["--cpu-smoke", "--shapes", "0", "2", "5", "16", "--latent", "3", "--out", str(tmp_path)])
    rows = common.read(tmp_path / "decode.csv")
    known = ("ours", "ours, JAX", "ours, batch-invariant", "ours, no cache", "SDPA")
    ours = [row for row in rows if row["contender"] in known]
    assert len(ours) == 17
    assert {row["status"] for row in ours} == {"ok"}
    assert max(float(row["error"]) for row in ours) < 0.01


@pytest.mark.slow
def test_who_writes_no_cache_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each contender has caches of its own, which nobody else has written."""
    made = device_time.contenders.make
    idle = {"Liger": lambda k_cache, v_cache, *_: (k_cache, v_cache)}
    monkeypatch.setattr(device_time.contenders, "make", lambda name, *call: idle.get(name) or made(name, *call))
    names = ["torch eager", "ours (torch)", "Liger", "ours (JAX)"]
    device_time.main(["--cpu-smoke", "--ops", "append_kv", "--contenders", *names, "--out", str(tmp_path)])
    rows = [row for row in common.read(tmp_path / "device_time.csv") if row["op"] == "append_kv"]
    statuses = [row["status"].partition(":")[0] for row in rows]
    assert statuses == ["ok", "ok", "wrong", "not available"] * 4
    assert sum("r=" in row["layout"] for row in rows) == 2 * len(names)


@pytest.mark.slow
def test_wrong_and_failing_contenders_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel\nsecond line")

    made = device_time.contenders.make
    eager = made("torch eager", "rmsnorm")
    wrong = {"quack": lambda x, w: x, "Liger": fails, "torch.compile": lambda x, w: eager(x, w).float()}
    monkeypatch.setattr(device_time.contenders, "make", lambda name, op, attrs: wrong.get(name) or made(name, op))
    arguments = ["--cpu-smoke", "--ops", "rmsnorm", "--directions", "fwd", "--only", "bfloat16", "--out", str(tmp_path)]
    device_time.main([*arguments, "--contenders", *wrong, "torch eager"])
    status = {r["contender"]: r["status"] for r in common.read(tmp_path / "device_time.csv")}
    assert status["quack"].startswith("wrong: relative error")
    assert status["Liger"] == "failed: RuntimeError: no such kernel"
    assert status["torch.compile"] == "wrong: outputs are torch.float32"
    assert status["torch eager"] == "ok"


ONLY = (
    "F.rms_norm",
    "torch.ops.cute.rmsnorm",
    "cute_ops_torch.nn.RMSNorm",
    "in a graph: cute_ops_torch.rmsnorm",
    'cute_ops_torch.linear, fused="always"',
    "cute_ops_torch.attention",
    "F.scaled_dot_product_attention",
)


@pytest.mark.slow
def test_host_time_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "CHAINS", (1, 2))
    entries = host_time.torch_entries
    monkeypatch.setattr(
        host_time, "torch_entries",
        lambda *args: {k: v for k, v in entries(*args).items() if k in ONLY},
    )  # fmt: skip
    in_jax = host_time.jax_composites()
    monkeypatch.setattr(host_time, "jax_composites", lambda: {k: v for k, v in in_jax.items() if "qkv_rope" in k})
    host_time.main(["--cpu-smoke", "--out", str(tmp_path)])
    rows = {(r["call"], r["grad"]): r for r in common.read(tmp_path / "host_time.csv")}
    assert rows["torch.ops.cute.rmsnorm", "yes"]["status"] == "ok"
    assert rows['cute_ops_torch.linear, fused="always"', "yes"]["status"] == "ok"
    assert rows["in a graph: cute_ops_torch.rmsnorm", "no"]["status"] == "ok"
    assert rows["in a graph: cute_ops_torch.rmsnorm", "no"]["compile_ms"]
    assert rows["cute_ops_torch.attention", "yes"]["status"] == "ok"
    assert rows["F.scaled_dot_product_attention", "no"]["status"] == "ok"
    assert rows["F.rms_norm", "no"]["of_rms_norm"] == "1"
    for name in ("rmsnorm", "qkv_rope", "qkv_rope, its parts", "qkv_rope, by jax.numpy"):
        assert rows[f"cute_ops_jax.{name}", "no"]["status"] == "ok"


@pytest.mark.slow
def test_fusion_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: real(function, backend="eager"))
    fusion.main(["--cpu-smoke", "--out", str(tmp_path)])
    rows = common.read(tmp_path / "fusion.csv")
    assert len(rows) == len(fusion.GRAPHS) * len(fusion.CONTENDERS)
    assert {(r["contender"] in fusion.CONTENDERS[2:], r["status"]) for r in rows} == {
        (True, "ok"),
        (False, "not timed"),
    }


@pytest.mark.slow
def test_expressions_smoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is the same function in PyTorch and in JAX, and one graph to torch.compile."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: real(function, backend="eager"))
    names = ["ours (torch)", "torch.compile", "XLA (jit)"]
    expressions.main(["--cpu-smoke", "--only", "forward", "--contenders", *names[:1], "--out", str(tmp_path / "all")])
    every = common.read(tmp_path / "all" / "expressions.csv")[1:]
    assert [(row["op"], row["status"]) for row in every] == [(name, "ok") for name in expressions.NAMES]
    expressions.main(["--cpu-smoke", "--only", "dequ|row_log", "--contenders", *names, "--out", str(tmp_path)])
    rows = common.read(tmp_path / "expressions.csv")[1:]
    ops = ["dequantized"] * 6 + ["row_log_sum_exp"] * 6
    assert [(row["op"], row["contender"], row["status"]) for row in rows] == [
        (op, name, "ok") for op, name in zip(ops, names * 4, strict=True)
    ]


REFUSED = """
import ctypes, jax, torch, jax_program
from cute_ops.jit.loader import _Managed

def refuse(array):
    capsule = array.__dlpack__()
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    managed = _Managed.from_address(address(capsule, b"dltensor"))
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(ctypes.addressof(managed))
    raise RuntimeError("no event could be recorded")

jax.dlpack.from_dlpack = refuse
for _ in range(100):
    try:
        jax_program.to_jax(torch.zeros(8, 8))
    except RuntimeError as error:
        print(error)
    again = [torch.zeros(1) for _ in range(4)]
"""


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_a_tensor_that_xla_frees_and_refuses_is_freed_once() -> None:
    """As on a GPU whose context is lost. In a process of its own: freed twice, it would end the process."""
    folder = Path(jax_program.__file__).parent
    done = subprocess.run([sys.executable, "-c", REFUSED], cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "no event could be recorded\n" * 100), done.stderr


def test_figures_of_expressions() -> None:
    rows = row("silu", "fwd", 4096, {"ours (torch)": 64.0, "torch.compile": 64.0, "XLA (jit)": 128.0})
    rows += row("silu", "fwd", 4097, {"ours (torch)": 80.0, "torch.compile": 125.0})
    rows += row("silu", "bwd", 8, {"ours (torch)": 2.0}, 1e6)
    found = summary.points([{key: str(value) for key, value in each.items()} for each in rows])
    assert summary.of_expressions(found).splitlines()[2:] == [
        "| forward, 128 MB and more: part of the copy rate | 0.894 | 0.800 | 2 |",  # sqrt(1.0 * 0.8)
        "| forward: speed over torch.compile | 1.250 | 1.000 | 2 |",
        "| forward: speed over XLA (jit) | 2.000 | 2.000 | 1 |",
        "| backward, smaller: part of the copy rate | 0.125 | 0.125 | 1 |",
        "| points more than 3% behind the faster of them | 0 |  | 2 |",
    ]


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "cache"), [("torch", "cold"), ("jax", "bundle")])
def test_startup_smoke(scenario: str, cache: str, tmp_path: Path) -> None:
    """Each of its programs and of its ways to start one, once: a process takes seconds."""
    startup.main(["--runs", "1", "--scenarios", scenario, "--caches", cache, "--out", str(tmp_path)])
    rows = common.read(tmp_path / "startup.csv")
    assert {r["status"] for r in rows} == {"ok"}
    assert {r["phase"] for r in rows} == set(startup.PHASES)


@pytest.mark.slow
def test_pictures_and_tables(tmp_path: Path) -> None:
    """From made-up figures, which never leave this test's folder."""
    columns = (*device_time.COLUMNS, *common.environment())
    with (tmp_path / "device_time.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerow({"op": "copy", "contender": "copy", "status": "ok", "gb_s": 100, "gpu": "none"})
        shared = {"dtype": "bfloat16", "weight": "bfloat16", "residual": "bfloat16", "layout": "flat"}
        for op, direction, n in (("rmsnorm", "fwd", 64), ("rmsnorm", "bwd", 64), ("silu_mul", "fwd", 128)):
            for name in pictures.STYLES:
                row = {"op": op, "direction": direction, "rows": 8, "n": n, "contender": name, "bytes": 1 << 28}
                status = "failed: E: no" if name == "quack" else "ok"
                figures = {} if name == "quack" else {"us": 20, "gb_s": 90, "of_copy": 0.9}
                writer.writerow(shared | row | figures | {"status": status, "gpu": "none"})
    steps = "model,contender,ms,peak_gb,status,gpu,driver,versions,commit,date\n"
    steps += "m,torch.compile,30,2,ok,g,d,v,c,2026-01-02\nm,ours,20,1,ok,g,d,v,c,2026-01-01\n"
    (tmp_path / "model_steps.csv").write_text(steps)
    page, readme = tmp_path / "page.md", tmp_path / "README.md"
    for path in (page, readme):
        path.write_text(f"before\n{plot.BEGIN}\nold\n{plot.END}\nafter\n")
    plot.main([str(tmp_path), "--page", str(page), "--readme", str(readme)])
    drawn = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    assert {path.removesuffix(".svg") for path in drawn} == {"rates", "overview", "roofline", "model_steps"}
    assert all(b"<svg" in svg for svg in drawn.values())
    plot.main([str(tmp_path)])
    assert drawn == {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}, "not the same bytes again"
    for path, line in (
        (page, "| rmsnorm forward 8x64 | 90 | 90 | failed | 90 | 90 | 90 | 90 |"),
        (page, "| m | 30 (2) | 20 (1) | 1.50 x |"),
        (page, "patched and not. g, 2026-01-01 to 2026-01-02: "),
        (readme, "| ops bound by memory, forward: 2 points of 128 MB and more | 0.900 of a copy's GB/s |"),
    ):
        text = path.read_text()
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "old" not in text
        assert line in text


def test_figures_of_the_readme_say_what_they_are_of(tmp_path: Path) -> None:
    header = "framework,cache,phase,status,ms,date\n"
    starts = (
        "warm,import tvm_ffi,ok,38,2026-01-02",
        "warm,all to first result,ok,74,2026-01-02",
        "cold,import tvm_ffi,ok,9,",
    )
    rows = "\n".join(f"torch,{start}" for start in starts)
    (tmp_path / "startup.csv").write_text(header + rows)
    said = "74 ms in PyTorch, 38 of them TVM-FFI's import"
    assert plot.startup_lines(tmp_path) == [("import and first call with a warm cache", said, "2026-01-02")]
    lines = ["contender,direction,batch,seqlen,heads,kv_heads,headdim,form,status,tflops,date"]
    for name, form, tflops, day in (
        ("ours", "causal", 300, 1), ("cuDNN", "causal", 200, 1), ("FlashAttention 4", "causal", 400, 2),
        ("ours", "causal, softcap 30", 600, 3), ("FlexAttention", "causal, softcap 30", 200, 3), ("ours", "full", 9, 3),
    ):  # fmt: skip
        lines.append(f'{name},forward,1,2,3,4,5,"{form}",ok,{tflops},2026-01-0{day}')
    (tmp_path / "attention.csv").write_text("\n".join(lines))
    (_, plain, days), (more, capped, day) = plot.attention_lines(tmp_path)
    assert (plain, days) == ("0.750 x forward (1 shapes)", "2026-01-01 to 2026-01-03")
    assert "soft caps" in more and (capped, day) == ("3.000 x forward (1 shapes)", "2026-01-03")


def luminance(color: str) -> float:
    """Of the Web Content Accessibility Guidelines, 0 to 1."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(c * share for c, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_pictures_can_be_read_in_light_and_dark() -> None:
    """Text has 4.5 : 1 at least, bars and marks 3 : 1; nothing but text and lines follows the theme."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for text, ground in pictures.THEMES.values():
        assert contrast(text, ground) >= 4.5
        styles = (pictures.STYLES, pictures.STEPS, pictures.ATTENTION, pictures.CACHES, pictures.KINDS)
        marks = (color for each in styles for color, _ in each.values())
        colors = [pictures.OUR_COLOR, pictures.OTHER_COLOR, *marks]
        assert min(contrast(color, ground) for color in colors) >= 3
    for path in (common.ROOT / "benchmarks/results").glob("*.svg"):
        svg = path.read_text(encoding="utf-8")
        assert pictures.TEXT not in svg and "prefers-color-scheme:dark" in svg, path
        width = re.search(r'width="([\d.]+)pt"', svg)
        assert width and float(width[1]) <= 461, f"{path} is wider than a telephone shows in full"


def test_figures_of_several_gpus(tmp_path: Path) -> None:
    """From made-up figures. What failed has a line, and no figure; speeds are those over a case's first contender."""
    assert several_gpus.section(tmp_path) == several_gpus.NOT_MEASURED
    table = common.Table(tmp_path / "distributed.csv", distributed.COLUMNS)
    ok = {"gpus": 2, "ms_min": 90.0, "ms_max": 210.0, "peak_gb": 12.25, "status": "ok"}
    for phase, case, more in (
        ("fsdp", "FSDP2", {"apart": 0.00123}), ("products", "a loss", {"error": 0.0031}),
        ("jax", "tensor parallel", {"error": 0.01}),
    ):  # fmt: skip
        for contender, ms in (("torch", 200.0), ("ours", 100.0)):
            row = {"phase": phase, "case": case, "contender": contender, "ms": ms, "tokens_per_s": 1e6 / ms}
            table.add({**ok, **row, **more})
    table.add({"phase": "jax", "case": "explicit", "contender": "ours", "gpus": 2, "status": "failed: no"})
    table.add({"phase": "checks", "case": "a check", "contender": "ours", "gpus": 2, "status": "ok"})
    text = several_gpus.section(tmp_path)
    for line in (
        "| FSDP2 | ours | 100 (90 to 210) | 10,000 | 2.00 | 12 | 0.0012 |",
        "| a loss | torch | 200 (90 to 210) | 1.00 | 12 | 0.0031 |", "| explicit | ours | failed: no |  |  |  |  |",
        "1 of 1 checks of values passed with NCCL.",
    ):  # fmt: skip
        assert line in text.splitlines(), text


LOST = """
import json, os, signal, sys, time
_, how, rank, folder = sys.argv
print("at the first contender", flush=True)
if rank == "0":
    row = {"case": "FSDP2", "contender": "torch", "status": "ok", "ms": 1.0}
    open(folder + "/rows.jsonl", "a").write(json.dumps(row) + "\\n")
time.sleep(1)
if rank == "1" and how == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
while how != "ends" and (rank == "0" or how == "dies"):
    print("at the collective", flush=True)
    time.sleep(0.2)
time.sleep(60 if how == "hangs" else 0)
"""


@pytest.mark.slow
def test_a_phase_whose_rank_is_lost_costs_its_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that dies, one that hangs, and a phase after them that is measured."""
    hows = {"fsdp": "dies", "tensor_parallel": "hangs", "products": "ends"}

    def commands(name: str, setting: Any, folder: Path) -> list[list[str]]:
        return [[sys.executable, "-c", LOST, hows[name], str(rank), str(folder)] for rank in range(2)]

    monkeypatch.setattr(distributed, "commands", commands)
    for name in hows:
        monkeypatch.setitem(distributed.PHASES, name, distributed.Phase(distributed.Limits(15, 1)))
    arguments = ["--device", "cpu", "--out", str(tmp_path), "--phases"]
    assert distributed.main([*arguments, "fsdp", "tensor_parallel", "products"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "rank 0 was waiting after: at the collective; rank 1 was killed by SIGKILL after: at the first" in said, said
    assert "tensor_parallel: rank 1: silent for 4 s" in said and "products: ok" in said, said
    rows = [(r["phase"], r["case"], r["status"].partition(":")[0]) for r in common.read(tmp_path / "distributed.csv")]
    lost, measured = "all that is left", "FSDP2"
    assert rows == [
        ("fsdp", measured, "ok"), ("fsdp", lost, "failed"), ("tensor_parallel", measured, "ok"),
        ("tensor_parallel", lost, "failed"), ("products", measured, "ok"),
    ]  # fmt: skip
    hows["tensor_parallel"] = "ends"
    assert distributed.main([*arguments, "tensor_parallel"]) == 0  # the rows of other phases stay
    after = [(r["phase"], r["case"]) for r in common.read(tmp_path / "distributed.csv")]
    assert after == [
        ("fsdp", measured), ("fsdp", lost), ("products", measured), ("tensor_parallel", measured),
    ]  # fmt: skip


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_ops_on_several_gpus_smoke(tmp_path: Path) -> None:
    """On two ranks with gloo."""
    assert distributed.main(["--device", "cpu", "--out", str(tmp_path), "--rounds", "1", "--phases", "products"]) == 0
    rows = common.read(tmp_path / "distributed.csv")
    assert [(r["case"], r["contender"], r["status"]) for r in rows] == [
        (case.name, name, "ok") for case in distributed_torch.cases(small=True) for name in ("torch", "ours")
    ]
    assert max(float(r["error"]) for r in rows) < 1e-6


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_training_steps_on_a_mesh_smoke(tmp_path: Path) -> None:
    """In a process of its own: this one has started JAX with one device."""
    way = "tensor parallel, explicit axes"
    arguments = [distributed_jax.__file__, "cpu", "2", str(tmp_path), "--rounds", "1", "--ways", way]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [(r["case"], r["contender"], r["status"]) for r in rows] == [(way, n, "ok") for n in distributed_jax.OPS]
    assert max(r["error"] for r in rows) < 1e-5


def test_sample_draws_the_same_points_of_a_seed() -> None:
    """Whichever other kinds are drawn; another seed draws others."""
    every, rows = sample.draw(3, list(sample.DRAWN), 40), sample.draw(3, ["rows"], 40)
    others = [p._replace(seed=3) for p in sample.draw(4, ["rows"], 40)]
    assert [p for p in every if p.kind == "rows"] == rows != others
    for kind, problem, direction, _ in every:
        assert direction in problem.directions
        if kind == "products":
            assert sample.LEAST_WORK <= problem.flops("fwd") // 2 <= sample.MOST_WORK
        else:
            assert 0.99 * sample.ROW_BYTES[0] <= problem.bytes("fwd") <= 1.01 * sample.ROW_BYTES[1]


def test_sample_takes_what_was_behind_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [point for seed in (3, 8) for point in sample.draw(seed, ["products", "rows"], 12)]
    late = [points[i] for i in sorted(random.Random(5).sample(range(len(points)), 9))]
    rows = [
        {**dict.fromkeys(sample.COLUMNS, ""), **dict(zip(("seed", "kind", *device_time.KEY), point.key, strict=True)),
         "contender": name, "us": us}
        for point in points
        for name, us in ((sample.OURS, "10"), (sample.EAGER, "9.6" if point in late else "9.8"), (sample.XLA, "30"))
    ]  # fmt: skip
    assert sample.behind(rows, list(sample.DRAWN), 12) == late
    assert not sample.behind(rows, ["expressions"], 12)
    with (tmp_path / "earlier.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, sample.COLUMNS)
        table.writeheader()
        table.writerows(rows)
    arguments = ["--behind", str(tmp_path / "earlier.csv"), "--points", "12", "--seed"]
    assert sample.main([*arguments, "8", "--list"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [f"{p.kind}: {p.name}" for p in late if p.seed == 8]
    with pytest.raises(SystemExit):
        sample.main([*arguments, "9", "--list"])
    assert "there is no such point" in capsys.readouterr().err


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_sample_measures_and_names_what_is_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cpu-smoke", "--seed", "5", "--rounds", "1", "--without", "torch.compile", "--out", str(tmp_path)]
    assert sample.main([*arguments, "--points", "1"]) == 0
    first = [row for row in common.read(tmp_path / "sample.csv") if row["kind"]]
    # What is left of twice as many points, in two processes; then nothing.
    others = ["--points", "2", "--resume", "--workers", "2", "--again"]
    assert sample.main([*arguments, *others]) == 0
    rows = [row for row in common.read(tmp_path / "sample.csv") if row["kind"]]
    assert rows[: len(first)] == first
    assert {(row["kind"], *(row[c] for c in device_time.KEY)) for row in rows} == {
        (p.kind, *device_time.key(sample.shrunk(p).problem, p.direction)) for p in sample.draw(5, list(sample.DRAWN), 2)
    }
    assert {row["status"] for row in rows} <= {"ok", "not available"}
    assert all(row["seed"] == "5" for row in rows)
    assert not any(row["us_again"] for row in first)
    assert all(bool(row["us_again"]) == bool(row["us"]) for row in rows[len(first) :])
    assert all(float(row["tflops"]) > 0 for row in rows if row["kind"] == "products" and row["us"])
    assert {row["contender"] for row in rows if row["kind"] == "products"} >= {sample.QUACK, sample.XLA, sample.OURS}
    assert sample.main([*arguments, *others]) == 0
    assert [row for row in common.read(tmp_path / "sample.csv") if row["kind"]] == rows
    best = {"kind": "rows", "op": "softmax", "direction": "fwd", "status": "ok", "of_copy": "0.8", "reason": "of tiles"}
    points = [{**dict.fromkeys(sample.COLUMNS, ""), **best, "contender": c, "us": u, "us_again": v} for c, u, v in
              (("ours (torch)", "10", "9.9"), ("Liger", "9.5", "9.9"), ("torch eager", "30", ""))]  # fmt: skip
    assert "| rows | fwd | 0.950 | 0.95 | 1 |" in (text := sample.report(points))
    assert "| rows | fwd | 2.52% | 1 of 2 | 1.000 | 0 | 0 |" in text
    assert "| 10.0 | Liger | 9.5 | 0.95 | of tiles |" in text


@pytest.mark.slow
def test_sample_leaves_out_what_takes_too_long_to_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender is left out of its point with the reason, and ours takes its point along, which a later run has."""
    point = sample.shrunk(sample.draw(5, ["products"], 1)[0])

    def once(name: str, *_: Any) -> None:
        if name in slow:
            signal.setitimer(signal.ITIMER_REAL, 0.01)  # its time is up, on a busy machine before ours is late, too
            time.sleep(60)

    monkeypatch.setattr(prewarm, "once", once)
    bench = sample.Bench(torch.device("cpu"), sample.Drawn(tmp_path / "sample.csv", 5), 1, 1.0, Console())
    slow, names = {sample.EAGER}, (sample.OURS, sample.EAGER)
    ready = bench.prepare(point, names, 60.0, time.time() + 600)
    assert ready.names == [sample.OURS] and ready.left_out == {sample.EAGER: "failed: Late: not ready in 60 s"}
    for late in (sample.OURS, sample.EAGER):  # a point without a contender that had no time would flatter ours
        slow = {late}
        with pytest.raises(sample.Late):
            bench.prepare(point, names, 60.0, time.time() + 0.01)


def test_sample_gives_processes_as_many_kernels_to_compile() -> None:
    points = sample.draw(5, list(sample.DRAWN), 40)
    shared = sample.shares(points, 7)
    assert sorted(id(point) for share in shared for point in share) == sorted(map(id, points))
    loads = [sum(point.kernels for point in share) for share in shared]
    assert max(loads) - min(loads) <= 1 and max(point.kernels for point in points) == 11
    assert [point for point in points if point in shared[0]] == shared[0]


def test_a_lock_of_the_sampler_is_shared_taken_again_and_given_back(tmp_path: Path) -> None:
    mine, other, third = (prewarm.Turns(tmp_path / "gpu.lock") for _ in range(3))
    with mine(shared=True), other(shared=True):
        assert not third.free()
    with mine():
        with mine():
            assert not third.free()
        assert not third.free()
    assert third.free() and other.free()


@pytest.mark.parametrize(
    ("file", "make", "name"),
    [
        ("benchmarks/results/README.md", plot.page, "figures"),
        ("README.md", plot.figures, "figures"),
        ("README.md", plot.headline, "headline"),
        ("docs/distributed.md", several_gpus.section, "figures"),
        *((path.relative_to(common.ROOT).as_posix(), make, name) for path, make, name in in_pages.PAGES),
    ],
)
def test_committed_tables_are_of_the_committed_figures(file: str, make: Callable[[Path], str], name: str) -> None:
    path = common.ROOT / file
    text = plot.put(make(common.ROOT / "benchmarks/results"), path, plot.marks(name))
    pages = "--page benchmarks/results/README.md --readme README.md --distributed docs/distributed.md --guides"
    command = f"python benchmarks/plot.py benchmarks/results {pages}"
    assert path.read_text() == text, f"run {command}"
    for noted in re.findall(r"\[notes\]\(#(\w+)csv\)", text):
        assert f"\n### {noted}.csv\n" in text, f"{file} has no notes on {noted}.csv"


def row(op: str, direction: str, rows: int, us: dict[str, float | str], size: float = 256e6) -> list[dict[str, object]]:
    shared = {"op": op, "direction": direction, "rows": rows, "n": 64, "layout": "flat", "bytes": int(size)}
    shared |= {"dtype": "bfloat16", "weight": "bfloat16", "residual": "bfloat16", "gpu": "none", "commit": "abc"}
    return [
        shared | {"contender": who} | (
            {"status": value} if isinstance(value, str)
            else {"status": "ok", "us": value, "of_copy": size / value / 1e3 / 4000}
        )
        for who, value in us.items()
    ]  # fmt: skip


def test_summary(tmp_path: Path) -> None:
    """Of made-up figures: a copy of 4000 GB/s moves 256 MB in 64 us."""
    ours, jax, xla = "ours (torch)", "ours (JAX)", "XLA (jit)"
    rows = [
        *row("rmsnorm", "fwd", 4096, {ours: 999.0, "quack": 1.0}),  # measured again, below
        *row("rmsnorm", "fwd", 4096, {ours: 64.0, jax: 65.0, xla: 130.0, "quack": 62.5, "Liger": "not available"}),
        *row("rmsnorm", "bwd", 4096, {ours: 80.0, jax: 88.0, xla: 176.0, "quack": 77.0, "Liger": "failed: E: no"}),
        *row("softmax", "bwd", 4096, {ours: 64.0, "torch eager": 128.0, "quack": "wrong: relative error 1"}),
        *row("softmax", "fwd", 8, {ours: 2.0, "quack": 1.99, "torch eager": 4.0}, 1e6),
    ]
    with (tmp_path / "device_time.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, (*device_time.COLUMNS, *common.environment()))
        writer.writeheader()
        writer.writerow({"op": "copy", "contender": "copy", "status": "ok", "gb_s": 4000, "commit": "abc"})
        writer.writerows(rows)
    points = {p.name.rpartition(" bfloat16")[0]: p for p in summary.points(common.read(tmp_path / "device_time.csv"))}
    norm = points["rmsnorm forward 4096x64"]
    assert norm.best() == ("quack", 62.5)
    assert norm.ahead(xla) == pytest.approx(130 / 64)
    assert points["softmax backward 4096x64"].best() == ("torch eager", 128.0)
    assert summary.behind(points.values()) == [points["rmsnorm backward 4096x64"]]
    host = "call,grad,status,us,of_rms_norm\n"
    host += "the compiled function alone,no,ok,4.0,0.4\nin a graph: cute_ops_torch.rmsnorm,no,ok,4.75,0.5\n"
    host += "cute_ops_torch.rmsnorm,yes,ok,9.0,0.9\ncute_ops_torch.nn.RMSNorm,no,failed: E: no,,\n"
    (tmp_path / "host_time.csv").write_text(host)
    graphs = "graph,rows,n,contender,status,us,took\ng,8,64,ours,ok,2.0,\ng,8,64,fused by Inductor,ok,1.0,\n"
    graphs += "g,8,64,max-autotune's choice,ok,1.1,fused by Inductor\ng,8,64,torch's own,wrong,,\n"
    (tmp_path / "fusion.csv").write_text(graphs)
    steps = "model,ops,tokens_per_s,temporaries_gb,loss_last\nm,XLA,1000,3,2.5\nm,ours,1500,1,2.4\n"
    (tmp_path / "optax_decoder.csv").write_text(steps)
    target = tmp_path / "summary.md"
    summary.main([str(tmp_path), "--write", str(target)])
    text = target.read_text()
    for line in (
        "| points with ours | 60 | 4 | 4 |",
        "| forward, 128 MB and more: part of the copy rate | 0.95 | 1.000 | 1 |",
        "| backward, 128 MB and more: part of the copy rate | 0.90 | 0.894 | 2 |",  # sqrt(0.8 * 1.0)
        "| backward, 128 MB and more: points under 85% | none | 1 | 2 |",
        "| backward: speed over the best other contender | 1.25 | 1.387 | 2 |",  # sqrt(77 / 80 * 2)
        "| points more than 3% behind the best | none | 1 | 4 |",
        "| 64 rows and fewer: points behind the best | none | 1 | 1 |",
        "| speed over XLA | 1.6 | 2.114 | 2 |",  # sqrt(130 / 64 * 176 / 80)
        "| JAX, backward, 128 MB and more: speed over XLA | 1.8 | 2.000 | 1 |",
        "| JAX, 128 MB and more: time over PyTorch's | 1.03 | at most 1.100, 1 over | 2 |",
        "| rmsnorm backward 4096x64 bfloat16 | 80.00 | 80.0% | quack 77.00 | 0.963 |",
        "| rmsnorm backward 4096x64 bfloat16 | Liger | failed: E: no |",
        "| rmsnorm in a compiled graph, us an op beyond the compiled function | 1.0 | 0.75 |",
        "| `cute_ops_torch.rmsnorm`, with grad: of F.rms_norm | 0.97 | 0.90 |",
        "| g 8x64 | 2.0 | 1.0 | fused by Inductor | 1.1 | wrong |",
        "| m | ours | 1,500 | 1 | 2.4 | 1.500 |",
    ):
        assert line in text, line
    assert "not available" not in text


def test_summary_of_the_committed_figures() -> None:
    text = summary.summary(Path(__file__).parents[2] / "benchmarks/results")
    assert "points with ours" in text


def test_samples_end_where_the_median_has_settled() -> None:
    few = device_time.LEAST_ROUNDS
    assert not device_time.settled([100.0] * (few - 1))
    assert device_time.settled([100.0, 100.1, 99.9] * few)
    assert not device_time.settled([100.0, 110.0, 90.0] * few)


def test_samples_beside_another_process_are_taken_again() -> None:
    assert device_time.disturbed([46.0, 101.0, 102.0])
    assert not device_time.disturbed([100.0, 101.0, 180.0])


def test_important_problems_come_first() -> None:
    ordered = by_importance(grid(list(BY_NAME)))
    assert sorted(map(str, ordered)) == sorted(map(str, grid(list(BY_NAME))))
    firsts = [p.op in ("rmsnorm", "add_rmsnorm", "silu_mul") for p in ordered]
    assert firsts == sorted(firsts, reverse=True)
    later = [p.op for p in ordered if p.op not in ("rmsnorm", "add_rmsnorm", "silu_mul")]
    kinds = len(set(later))
    assert len(set(later[:kinds])) == kinds  # one of each, before any second one


@pytest.mark.slow
def test_a_contender_that_takes_the_gpu_down_ends_the_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, failing = device_time.contenders.make, []

    def fails(*tensors: torch.Tensor) -> torch.Tensor:
        failing.append(1)
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(device_time.contenders, "make", lambda who, *op: fails if who == "Liger" else made(who, *op))
    monkeypatch.setattr(device_time.Bench, "lost", lambda self: True)
    arguments = ["--cpu-smoke", "--ops", "silu_mul", "--directions", "fwd", "--out", str(tmp_path)]
    arguments += ["--contenders", "torch eager", "Liger", "--only"]
    file = tmp_path / "device_time.csv"
    assert device_time.main([*arguments, "bfloat16"]) == 3
    status = [(r["contender"], r["status"], r["layout"]) for r in common.read(file)[1:]]
    assert status == [("Liger", "failed: RuntimeError: illegal memory access", "flat")]
    # What was not reached comes before what was.
    assert device_time.main([*arguments, "", "--resume"]) == 3
    assert [r["layout"] for r in common.read(file)[2:]] == ["strided"]
    assert device_time.main([*arguments, "", "--resume"]) == 0
    assert [(r["contender"], r["status"], r["layout"]) for r in common.read(file)[3:]] == [
        ("torch eager", "ok", "flat"),
        ("torch eager", "ok", "strided"),
    ]
    assert len(failing) == 2


@pytest.mark.drawn(0.4, among="benchmarks")
@pytest.mark.slow
def test_compiling_ahead_goes_through_all_problems() -> None:
    """In a process of its own; a contender that fails is reported, not raised."""
    tasks = [(p, d) for p in smoke(["silu_mul"]) for d in p.directions]
    reports = list(prewarm.run(tasks, ["torch eager", "XLA (jit)", "quack"], 1, 200))
    assert {(r.task, r.contender) for r in reports if r.contender != "quack"} == {
        *((i, "torch eager") for i in range(4)),
        *((i, "XLA (jit)") for i in range(2)),  # not of slices
    }
    assert {r.problem for r in reports if r.contender != "quack"} == {""}


@pytest.mark.slow
def test_resume_measures_only_what_is_missing(tmp_path: Path) -> None:
    arguments = ["--cpu-smoke", "--ops", "silu_mul", "--contenders", "torch eager", "--out", str(tmp_path)]
    device_time.main([*arguments, "--directions", "fwd"])
    before = common.read(tmp_path / "device_time.csv")
    device_time.main([*arguments, "--resume"])
    after = common.read(tmp_path / "device_time.csv")
    assert after[: len(before)] == before
    added = [r["direction"] for r in after[len(before) :] if r["op"] != "copy"]
    assert added == ["bwd", "bwd"]


def python(program: str) -> everything.Command:
    return "-c", program, "{out}"


@pytest.mark.slow
def test_every_benchmark_has_a_limit_and_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that loses the GPU is started again, one that does not end is stopped, and the others still run."""
    count = "import pathlib, sys; p = pathlib.Path(sys.argv[1], 'starts'); p.open('a').write('x'); "
    dies = "import os, pathlib, sys; p = pathlib.Path(sys.argv[1], 'died'); "
    dies += "p.exists() or (p.touch(), os.kill(os.getpid(), 9))"
    phases = {
        "again": everything.Phase(60, (python(count + "sys.exit(3 if len(p.read_text()) < 3 else 0)"),)),
        "dies": everything.Phase(60, ((*python(dies), "--resume"),)),
        # Without site, so that it starts within the limit on a busy machine, too.
        "hangs": everything.Phase(
            4, (("-IS", *python("import time; print('here', flush=True); time.sleep(600)")), python(""))
        ),
        "fails": everything.Phase(60, (python("sys.exit(1)"),)),
        "works": everything.Phase(60, (python("print(0)"),)),
    }
    monkeypatch.setattr(everything, "LEAST", 1)
    said = {}
    (tmp_path / "logs").mkdir()
    for name, phase in phases.items():
        said[name] = everything.run(name, phase, tmp_path, time.monotonic() + 100)
    assert said == {"again": "ok", "dies": "ok", "hangs": "over its limit", "fails": "ended with 1", "works": "ok"}
    assert (tmp_path / "starts").read_text() == "xxx"
    assert (tmp_path / "logs" / "hangs.txt").read_text() == "here\n"
    assert (tmp_path / "logs" / "works.txt").read_text() == "0\n"
    assert everything.run("late", phases["works"], tmp_path, time.monotonic()) == "no time left"


@pytest.mark.parametrize("op", linear.OPS, ids=lambda op: op.name)
def test_products(op: Op, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "of_device", lambda: target.parse("sm_90a"))
    case = Case("small", {"m": (2, 40), "n": 64, "k": 72})
    tensors = linear.inputs(op, case, torch.device("cpu"))
    binding = bind_tensors(op, tensors, [*linear.attributes(op).values()])
    assert len(linear.plans(binding, tensors, None, {})) == 1
    found = linear.plans(binding, tensors, "x256", {"group": 4})
    assert len(found) == 8
    assert all("x256-" in name and plan.variant.config["group"] == 4 for name, plan in found.items())
    exact = testing.run_reference(op, dict(zip(op.inputs, tensors, strict=True)), {})[0]
    out = torch.full_like(exact, torch.nan)
    assert linear.difference(out, exact) == "wrong: relative error inf at (0, 0)"
    linear.matrix_product(op, *tensors, out)
    assert linear.difference(out, exact) == ""
    table = common.Table(tmp_path / "linear.csv", linear.COLUMNS)
    samples = {linear.CUBLAS: [2.0, 3.0, 4.0], "fast": [1.5, 1.5, 2.0]}
    status = {linear.CUBLAS: "ok", "fast": "ok", "slow": "wrong: relative error 1 at (3, 5)"}
    linear.write(op, case, binding, status, samples, table, Console())
    rows = common.read(tmp_path / "linear.csv")
    assert [(row["m"], row["us"], row["of_cublas"], row["status"][:5]) for row in rows] == [
        ("80", "3", "1", "ok"), ("80", "1.5", "2", "ok"), ("80", "", "", "wrong"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", linear.EPILOGUES)
def test_products_with_epilogues(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch is asked for beside them is the same."""
    monkeypatch.setattr(target, "of_device", lambda: target.parse("sm_90a"))
    op = linear.EPILOGUES[name].op
    case = linear.of_halves(op, Case("small", {"m": (2, 40), "n": 64, "k": 72}))
    tensors = linear.inputs(op, case, torch.device("cpu"))
    (label,) = linear.plans(bind_tensors(op, tensors, [*linear.attributes(op).values()]), tensors, None, {})
    assert label.startswith("pingpong-64x")
    (exact,) = testing.run_reference(op, dict(zip(op.inputs, tensors, strict=True)), linear.attributes(op))
    got = linear.contenders(op)[linear.CUBLAS](*tensors, None)
    assert linear.difference(got, exact) == ""


def test_kernels_of_tests_benchmarks_and_examples_have_names_of_their_own() -> None:
    """A compiling process serves many tests, and finds a module by its name where another test has put its folder."""
    paths = [
        path
        for folder in ("benchmarks", "examples", "tests/ops")
        for path in (common.ROOT / folder).rglob("*kernel*.py")
    ]
    names = [path.name for path in paths]
    assert len(names) >= 12 and sorted(names) == sorted({*names})


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("form", ["cooperative-128x256-cluster2x1", "pingpong-128x128-cluster1x2"])
def test_parts_of_products(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is switched off is gone from the machine code, the matrix instructions are those of the product."""
    monkeypatch.setattr(target, "of_device", lambda: target.parse("sm_90a"))
    op, case = linear.linear_dweight, Case("small", {"m": (512,), "n": 256, "k": 256})
    tensors = linear.inputs(op, case, torch.device("cpu"))
    plans = linear.plans(bind_tensors(op, tensors, [*linear.attributes(op).values()]), tensors, form, {})
    products, stores, waits = [], [], []
    for (label, config), plan in tensor_cores.plans(plans).items():
        assert (label in tensor_cores.PARTS, config) == (True, form)
        path = tmp_path / f"{plan.variant.symbol}.cubin"
        worker.compile(plan.variant, path)
        (kernel,) = sass.resources(path)
        assert (kernel.registers, kernel.stack, kernel.local) == (168, 0, 0)
        code = sass.sass(path)
        products.append(tuple(re.findall(r"HGMMA\S*", code)))
        assert code.count("WARPGROUP.DEPBAR") == 2
        stores.append("UTMASTG" in code)
        waits.append(code.count("SYNCS.ARRIVE"))
    assert len(set(products)) == 1 and stores == [True, False, False, False]
    assert waits[-1] < waits[-2] == waits[0]  # of the last nobody gives a slot back


@pytest.mark.drawn(0.5)
@pytest.mark.slow
@pytest.mark.parametrize("eight", [False, True])
def test_loads_of_caches_compute_nothing(eight: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "of_device", lambda: target.parse("sm_90a"))
    op, shape = decode_floor.decode_attention, decode.Shape(2, 64, 10, 1, 64, 16 if eight else 1, 2)
    q, k, v, *others = decode.Caches.of(shape, "cpu")
    caches = [x.to(torch.float8_e4m3fn) if eight else x for x in (k, v)]
    _, found = decode_floor.plan_of(op, (q, *caches, *others, None, None, None), {}, "loads")
    worker.compile(found.variant, tmp_path / "loads.cubin")
    code = sass.sass(tmp_path / "loads.cubin")
    assert ("HMMA" in code, "LDGSTS" in code) == (False, True)


@pytest.mark.slow
def test_readings_of_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_cores, "HOT_SECONDS", 0.3)
    table = common.Table(tmp_path / "tensor_cores.csv", tensor_cores.COLUMNS)
    row = {"op": "linear", "case": "small", "m": 1000, "n": 1000, "k": 1000, "numbers": "normal", "state": "hot"}
    readings = {
        (linear.CUBLAS, ""): tensor_cores.Reading([4.0, 5.0, 3.0], 700.0, 1500.0),
        ("resident", "a"): tensor_cores.Reading([2.0, 2.0, 3.0]),
    }
    tensor_cores.write(row, readings, table, Console())
    first, second = common.read(tmp_path / "tensor_cores.csv")
    assert (first["us"], first["tflops"], first["watts"], first["mhz"]) == ("4", "500", "700", "1500")
    assert (second["us_max"], second["of_cublas"], second["watts"]) == ("3", "2", "")
    driver = object.__new__(tensor_cores.Driver)
    monkeypatch.setattr(driver, "joules", count().__next__)
    monkeypatch.setattr(driver, "mhz", lambda: 1500.0)
    samplers = {(name, ""): lambda us=us: time.sleep(0.001) or us for name, us in (("a", 1.0), ("b", 2.0))}
    given = tensor_cores.both_orders(samplers, driver)
    assert {name: set(reading.us) for name, reading in given.items()} == {("a", ""): {1.0}, ("b", ""): {2.0}}
    assert all(reading.mhz == 1500.0 and reading.watts > 0 for reading in given.values())


def test_contenders_of_products_change_who_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs on a cooler card is faster, so nobody always does."""
    came: list[Any] = []
    monkeypatch.setattr(linear.time, "sleep", came.append)

    def sampler(label: str) -> Any:
        return lambda: came.append(label) or float(len(came))

    samplers = {label: sampler(label) for label in ("cuBLAS", "XLA", "ours")}
    found = linear.in_turns(samplers, linear.Turns(2, pause=0.5))
    assert came[::2] == [0.5] * 6  # before each
    assert came[1::2] == ["cuBLAS", "XLA", "ours", "ours", "XLA", "cuBLAS"]
    assert found == {"cuBLAS": [2.0, 12.0], "XLA": [4.0, 10.0], "ours": [6.0, 8.0]}
    programs = [SimpleNamespace(sample=sampler(label)) for label in ("XLA", "ours")]
    came.clear()
    assert jax_program.sample(programs, 2) == [[1.0, 4.0], [2.0, 3.0]]


def test_every_benchmark_takes_its_arguments() -> None:
    for phase in everything.PHASES.values():
        for command in phase.commands:
            program, *arguments = command
            options = [a for a in arguments if a.startswith("--")]
            text = Path(program).read_text()
            assert all(f'"{option}"' in text for option in options), command


@pytest.mark.slow
def test_first_calls_are_easy_to_follow() -> None:
    for call, walk in zip(returns.CALLS, returns.count(*returns.CALLS), strict=True):
        assert len(walk.returns) <= returns.MOST_RETURNS[call], call


def test_the_tutorials_kernels_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    found = dict(tutorial.kernels(tmp_path))
    assert [name for name in found if name.startswith("step")] == [
        "step 2", "step 3", "step 4", "step 5, forward", "step 5, gradient",
    ]  # fmt: skip
    for op in found.values():
        assert bind(op, tutorial.arrays(op)).dims["n"] == tutorial.N
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            tutorial.main([])


def test_what_tuning_found_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table is the winner that it was written from."""
    best = Winner(
        "sum sm_90a:132 n=8", {"form": "smem", "threads": 64}, {"form": "smem", "threads": 128}, {"rows": [4]}
    )
    outcome = Outcome("sum", best, [2.0], [1.0], 0.5, 1, {(("threads", 96),): "too many"})
    monkeypatch.setattr(tuning_gap.tuner, "bench", lambda: None)
    monkeypatch.setattr(tuning_gap.tuner, "tune", lambda *args, **options: (each for each in [outcome]))
    path = tmp_path / "tuning_gap.csv"
    tuning_gap.measure([], path, False, 1e9, target.parse("sm_90a:132"), Console())
    (row,) = common.read(path)
    found = tuning_gap.winner(row)
    assert (found.call, found.heuristic, found.config) == best[:3]
    assert (
        row["status"] == "tuned" and row["change"] == "threads 64 -> 128" and row["refused"] == "threads=96: too many"
    )


def test_machine_code_tells_what_has_changed() -> None:
    """Of a product and its second kernel, instructions are counted; one that was not recorded before is new."""
    code = ("f0", {"HGMMA.64x128x16.F32.BF16": 8, "UTMALDG.2D": 2, "IADD3": 4})
    before = machine_code.Kernel(code[1], 168, 0, code[0])
    after = before._replace(instructions={**code[1], "IADD3": 2, "STL": 1}, digest="f1", local=8)
    small = machine_code.Kernel({"LDG.E": 1}, 20, 0, "a")
    same = before._replace(digest="f2")
    now = {"equal": [before, small], "scheduled": [same], "spilled": [after], "new": [small]}
    old = {"equal": [before, small], "scheduled": [before], "spilled": [before]}
    (head, *lines), differing = machine_code.table(now, old)
    assert head.split()[:3] == ["HGMMA", "HMMA", "UTMA"] and differing == 2
    states = [line.split("  ")[-1] for line in lines]
    assert states == [
        "same code", "same code", "same counts", "all 14 -> 13: local 0 -> 8, -2 IADD3, +1 STL", "not there"
    ]  # fmt: skip
    assert lines[0].split()[1:4] == ["8", "0", "2"] and lines[3].split()[9] == "1"
